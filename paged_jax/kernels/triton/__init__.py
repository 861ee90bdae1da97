"""Backend ``"triton"`` for NVIDIA GPUs: Pallas kernels, compiled through Triton.

JAX deprecated Pallas' Triton backend in 0.11. If JAX does not have it, this backend supports no
problem, and other backends run the ops.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from paged_jax.kernels import gpu_device
from paged_jax.kernels.backend import (
    ATTENTION,
    Interpret,
    Problem,
    StateStep,
)
from paged_jax.kernels.gpu_device import GpuBackend
from paged_jax.kernels.kv_split import MAX_SEQUENCES
from paged_jax.kernels.triton import linear, pallas, tiles
from paged_jax.kernels.triton import recurrent as _recurrent
from paged_jax.kernels.triton import write as _write
from paged_jax.kernels.triton.decode import decode
from paged_jax.kernels.triton.prefill import attend_to_chunks, prefill
from paged_jax.kernels.triton.write import copy_blocks, rope_write, write
from paged_jax.kernels.weight_formats import Weight

__all__ = ["Triton", "copy_blocks", "decode", "prefill", "refusal", "rope_write", "write"]


@dataclass(frozen=True)
class Triton(GpuBackend):
    """The backend ``"triton"``."""

    name: ClassVar = "triton"
    kernels: ClassVar = {
        "decode": decode,
        "prefill": prefill,
        "attend_to_chunks": attend_to_chunks,
        "write": write,
        "rope_write": rope_write,
        "copy_blocks": copy_blocks,
    }

    def refusal(self, problem: Problem) -> str | None:
        """Return why the kernels do not support `problem`, or None if they do."""
        return refusal(problem, self.interpret)

    def grouped_linear_refusal(self, x: jax.Array, w: Weight, sizes: jax.Array) -> str | None:
        """Return why the kernel does not support these arrays, or None if it does."""
        del sizes
        return linear.grouped_refusal(x, w)

    def grouped_linear(self, x: jax.Array, w: Weight, sizes: jax.Array) -> jax.Array:
        """Multiply rows by the weights of their groups, in one launch."""
        return linear.grouped_linear(x, w, sizes, interpret=self.interpret)

    def quantised_linear_refusal(self, x: jax.Array, w: Weight) -> str | None:
        """Return why the kernel does not support these arrays, or None if it does."""
        return linear.quantised_refusal(x, w)

    def quantised_linear(self, x: jax.Array, w: Weight) -> jax.Array:
        """Multiply the last dimension of `x` by a quantised weight, in one launch."""
        return linear.quantised_linear(x, w, interpret=self.interpret)

    def advance_rows_refusal(self, step: StateStep) -> str | None:
        """Return why the kernels do not support these recurrent states, or None if they do."""
        return _recurrent.refusal(step, self.interpret)

    def advance_rows(self, step: StateStep) -> tuple[jax.Array, jax.Array]:
        """Advance recurrent states by a token, in one launch."""
        return _recurrent.advance_rows(step, self.interpret)


def refusal(problem: Problem, interpret: Interpret = False) -> str | None:
    """Return why these kernels do not support `problem`, or None if they do.

    The interpreter needs no GPU, so the GPU is not checked if `interpret` is set.
    """
    if (why_not := pallas.refusal() or (None if interpret else _gpu_refusal(problem))) is not None:
        return why_not
    if problem.op == "ragged" and problem["B"] > MAX_SEQUENCES:
        return f"a ragged batch must have at most {MAX_SEQUENCES} sequences, got {problem['B']}"
    attends = problem.op in ATTENTION
    return _pool_refusal(problem, "reads" if attends else "writes") or (
        tiles.refusal(problem) if attends else _write.refusal(problem)
    )


def _pool_refusal(problem: Problem, verb: str) -> str | None:
    supported = *tiles.FLOATING, *pallas.SPLIT_WORDS
    if (why_not := problem.pool_dtype_refusal(*supported)) is not None:
        return why_not
    is_odd = problem["D"] % 2 or problem.lanes % 2 or problem.value_dim % 2
    if jnp.dtype(problem.pool_dtype).name in pallas.SPLIT_WORDS and is_odd:
        return (
            f"it {verb} bytes in pairs, so keys and values must have an even number of elements, "
            f"got {problem['D']} and {problem.value_dim}"
        )
    return None


def _gpu_refusal(problem: Problem) -> str | None:
    if (why_not := pallas.gpu_refusal()) is not None:
        return why_not
    is_fp8 = jnp.dtype(problem.pool_dtype) == jnp.float8_e4m3fn
    if is_fp8 and gpu_device.device().compute_capability < (8, 9):
        return "it converts float8_e4m3fn on GPUs of compute capability 8.9 and later only"
    return None
