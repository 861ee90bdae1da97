"""The kernels of the backend ``"triton"``."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.kernels import gpu_defaults, gpu_device
from paged_jax.kernels.backend import Backend, Interpret, Kernel, spread
from paged_jax.kernels.kv_split import MAX_SEQUENCES
from paged_jax.kernels.op_args import RaggedArgs, RaggedOptions
from paged_jax.kernels.problem import ATTENTION, Problem
from paged_jax.kernels.ragged_chunks import attend_in_parts
from paged_jax.kernels.triton import linear, pallas, recurrent, tiles, write
from paged_jax.kernels.triton.decode import decode
from paged_jax.kernels.triton.prefill import attend_to_chunks, prefill


def refusal(problem: Problem, interpret: Interpret = False) -> str | None:
    """Return why these kernels do not support `problem`, or None if they do.

    The interpreter needs no GPU, so the GPU is not checked if `interpret` is set.
    """
    if (reason := pallas.refusal() or (None if interpret else _gpu_refusal(problem))) is not None:
        return reason
    if problem.op == "ragged" and problem["B"] > MAX_SEQUENCES:
        return f"a ragged batch must have at most {MAX_SEQUENCES} sequences, got {problem['B']}"
    attends = problem.op in ATTENTION
    return _pool_refusal(problem, "reads" if attends else "writes") or (
        tiles.refusal(problem) if attends else write.refusal(problem)
    )


def _pool_refusal(problem: Problem, verb: str) -> str | None:
    supported = *tiles.FLOATING, *pallas.SPLIT_WORDS
    if (reason := problem.pool_dtype_refusal(*supported)) is not None:
        return reason
    is_odd = problem["D"] % 2 or problem.lanes % 2 or problem.value_dim % 2
    if jnp.dtype(problem.pool_dtype).name in pallas.SPLIT_WORDS and is_odd:
        return (
            f"it {verb} bytes in pairs, so keys and values must have an even number of elements, "
            f"got {problem['D']} and {problem.value_dim}"
        )
    return None


def _gpu_refusal(problem: Problem) -> str | None:
    if (reason := pallas.gpu_refusal()) is not None:
        return reason
    is_fp8 = jnp.dtype(problem.pool_dtype) == jnp.float8_e4m3fn
    if is_fp8 and gpu_device.device().compute_capability < (8, 9):
        return "it converts float8_e4m3fn on GPUs of compute capability 8.9 and later only"
    return None


def attend_ragged(
    args: RaggedArgs, options: RaggedOptions, interpret: Interpret = False
) -> tuple[jax.Array, jax.Array]:
    """Run single queries in the decode kernel, and longer chunks in the prefill kernel."""
    single = functools.partial(decode, interpret=interpret)
    longer = functools.partial(attend_to_chunks, interpret=interpret)
    return attend_in_parts(single, longer, args, options)


def _on_pools(run: Callable[..., Any]) -> Kernel:
    return Kernel(run, refusal, can_interpret=True)


def _matmul(
    run: Callable[..., Any], refusal: Callable[..., str | None], *, is_differentiable: bool = False
) -> Kernel:
    return Kernel(
        spread(run), spread(refusal), can_interpret=True, is_differentiable=is_differentiable
    )


TRITON = Backend(
    {
        "decode": _on_pools(decode),
        "prefill": _on_pools(prefill),
        "ragged": _on_pools(attend_ragged),
        "write": _on_pools(write.write),
        "rope_write": _on_pools(write.rope_write),
        "copy_blocks": _on_pools(write.copy_blocks),
        "linear": _matmul(
            linear.quantised_linear, linear.quantised_refusal, is_differentiable=True
        ),
        "grouped_linear": _matmul(linear.grouped_linear, linear.grouped_refusal),
        "advance_rows": Kernel(recurrent.advance_rows, recurrent.refusal, can_interpret=True),
    },
    platform="cuda",
    preference=functools.partial(gpu_defaults.preference, "triton"),
)
