"""Tests of paged_jax.scheduler."""
