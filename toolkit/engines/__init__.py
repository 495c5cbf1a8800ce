"""One file an engine, all with the same functions (`job.Engine`). The only place that knows upstream's spellings."""
