"""Engine for continuous batching: each step schedules, runs and postprocesses requests."""
