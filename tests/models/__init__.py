"""Tests of paged_jax.models."""
