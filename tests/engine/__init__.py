"""Tests of paged_jax.engine."""
