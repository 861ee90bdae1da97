"""Attention, cache writes and block copies on NVIDIA GPUs: Pallas through the Triton backend.

JAX has announced the end of that backend since 0.11. Nothing outside of this package knows of it.
"""

import jax.numpy as jnp

from paged_jax.kernels.backend import Problem
from paged_jax.kernels.quantisation import QUANTISED
from paged_jax.kernels.triton import tiles, tuning
from paged_jax.kernels.triton import write as _write
from paged_jax.kernels.triton.decode import decode
from paged_jax.kernels.triton.prefill import prefill
from paged_jax.kernels.triton.write import copy_blocks, write

__all__ = ["copy_blocks", "decode", "prefill", "refusal", "write"]


def refusal(problem: Problem) -> str | None:
    """Why these kernels cannot do what is asked, or None if they can."""
    attends = problem.op in ("decode", "prefill")
    return _pool_refusal(problem, "reads" if attends else "writes") or (
        tiles.refusal(problem) if attends else _write.refusal(problem)
    )


def _pool_refusal(problem: Problem, verb: str) -> str | None:
    pool_dtype = jnp.dtype(problem.pool_dtype)
    if pool_dtype not in QUANTISED:
        if pool_dtype.name in tiles.FLOATING:
            return None
        known = ", ".join(tiles.FLOATING)
        return f"its pools are {known}, int8 or float8_e4m3fn, not {pool_dtype}"
    if problem["D"] % 2 or problem.lanes % 2:
        return f"it {verb} bytes in pairs, and the head dimension is odd, {problem['D']}"
    if pool_dtype == jnp.float8_e4m3fn and tuning.device().compute_capability < (8, 9):
        return "it converts float8_e4m3fn on GPUs of compute capability 8.9 and later only"
    return None
