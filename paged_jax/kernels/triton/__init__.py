"""Attention, cache writes and block copies on NVIDIA GPUs: Pallas through the Triton backend.

JAX has announced the end of that backend since 0.11. Nothing outside of this package knows of it.
"""

from paged_jax.kernels.interface import Problem
from paged_jax.kernels.triton import tiles
from paged_jax.kernels.triton import write as _write
from paged_jax.kernels.triton.decode import decode
from paged_jax.kernels.triton.prefill import prefill
from paged_jax.kernels.triton.write import copy_blocks, write

__all__ = ["copy_blocks", "decode", "prefill", "refusal", "write"]


def refusal(problem: Problem) -> str | None:
    """Why these kernels cannot do what is asked, or None if they can."""
    if problem.op in ("decode", "prefill"):
        return tiles.refusal(problem)
    return _write.refusal(problem)
