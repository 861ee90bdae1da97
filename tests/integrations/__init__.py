"""Tests of paged_jax.integrations."""
