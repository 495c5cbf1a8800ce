"""Strategy, TrainConfig, RunConfig, tables of values, flags."""
