"""Tests of paged_jax.cache."""
