"""One file or folder an engine, each a subclass of `base.Engine`. The only place that knows upstream's names."""
