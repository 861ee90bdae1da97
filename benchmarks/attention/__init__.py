"""Attention over a paged pool, beside other kernels on the same device."""
