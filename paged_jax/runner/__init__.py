"""The device's side of the engine: the state, and the programs that change it."""
