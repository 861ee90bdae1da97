"""Attention that reads keys and values through a block table, where they lie in the pool."""

from paged_jax.kernels.attention import (
    BACKENDS,
    paged_attention,
    paged_prefill_attention,
)

__all__ = ["BACKENDS", "paged_attention", "paged_prefill_attention"]
