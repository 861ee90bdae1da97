"""Tests of paged_jax: folders mirror the package, and `support` contains shared code."""
