"""Measurements of paged_jax, each beside a peer in the same run: ``python -m benchmarks.NAME``."""
