"""Tests of paged_jax: folders mirror the package, and `support` holds what they share."""
