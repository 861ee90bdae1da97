"""Other people's frameworks that take their samples from the engine, each behind an extra."""
