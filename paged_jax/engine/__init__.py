"""Engine for continuous batching: schedule, run, postprocess."""
