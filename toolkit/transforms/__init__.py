"""What is done to a model between reading its weights and `prepare`, in a run and in the trace of a forecast."""
