"""The plain form, which XLA compiles for every platform: attention by tiles, writes by scatters."""

from paged_jax.kernels.xla.attention import decode, prefill, refusal
from paged_jax.kernels.xla.writing import copy_blocks, write

__all__ = ["copy_blocks", "decode", "prefill", "refusal", "write"]
