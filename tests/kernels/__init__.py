"""Tests of paged_jax.kernels: values in interpretation, lowering, and real compilation."""
