"""Benchmark of the fraction of memory that holds tokens, counted in the allocator."""
