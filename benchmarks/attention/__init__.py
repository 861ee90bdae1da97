"""Benchmarks of attention over a paged pool, compared with other kernels on the same device."""
