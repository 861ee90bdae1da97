"""Tests of paged_jax.sampling."""
