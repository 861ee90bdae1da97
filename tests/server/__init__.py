"""Tests of paged_jax.server."""
