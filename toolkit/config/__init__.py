"""What a run is: Strategy, TrainConfig, RunConfig, tables of values, flags."""
