"""Device side of the engine: the state, and the compiled programs that change it."""
