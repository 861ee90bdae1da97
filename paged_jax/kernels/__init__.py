"""Attention that reads keys and values through a block table, where they lie in the pool.

And what puts them there: writes of new tokens, and copies of blocks. Beside them, products with the
weights of experts.
"""

from paged_jax.kernels.attention import paged_attention, paged_prefill_attention
from paged_jax.kernels.backend import Pools
from paged_jax.kernels.cascade import cascade_attention, num_shared_blocks
from paged_jax.kernels.cpu import load_cpu_kernels
from paged_jax.kernels.dispatch import (
    BACKENDS,
    backend_for,
    check_backend_runs_on,
    choose_backend,
)
from paged_jax.kernels.grouped import grouped_linear
from paged_jax.kernels.layout import padded_head_dim
from paged_jax.kernels.merge import merge_attention
from paged_jax.kernels.quantisation import quantise
from paged_jax.kernels.ragged import ragged_paged_attention
from paged_jax.kernels.writing import copy_blocks, paged_rope_write, paged_write, write_kv_pages

__all__ = [
    "BACKENDS",
    "Pools",
    "backend_for",
    "cascade_attention",
    "check_backend_runs_on",
    "choose_backend",
    "copy_blocks",
    "grouped_linear",
    "load_cpu_kernels",
    "merge_attention",
    "num_shared_blocks",
    "padded_head_dim",
    "paged_attention",
    "paged_prefill_attention",
    "paged_rope_write",
    "paged_write",
    "quantise",
    "ragged_paged_attention",
    "write_kv_pages",
]
