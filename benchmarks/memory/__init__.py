"""How much of the memory holds tokens, counted in the allocator."""
