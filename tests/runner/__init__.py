"""Tests of paged_jax.runner."""
