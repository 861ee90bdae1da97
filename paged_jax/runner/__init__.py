"""Device part of the engine: the state on the device, and the programs that update it."""
