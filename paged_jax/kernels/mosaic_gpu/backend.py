"""The kernels of the backend ``"mosaic_gpu"``."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from paged_jax.kernels import gpu_defaults
from paged_jax.kernels.backend import Backend, Interpret, Kernel
from paged_jax.kernels.mosaic_gpu import (
    flash_decode,
    flash_prefill,
    launch,
    pool_updates,
    rope_update,
)
from paged_jax.kernels.op_args import RaggedArgs, RaggedOptions
from paged_jax.kernels.problem import ATTENTION, Problem
from paged_jax.kernels.ragged_chunks import attend_in_parts


def refusal(problem: Problem, interpret: Interpret = False) -> str | None:
    """Return why the kernels do not support `problem`, or None if they do.

    With `interpret`, they run in JAX's GPU simulator.
    """
    if (reason := launch.refusal(interpret)) is not None:
        return reason
    if problem.op == "rope_write":
        return rope_update.refusal(problem)
    if problem.op not in ATTENTION:
        return pool_updates.refusal(problem)
    if problem.op != "decode":
        reason = flash_prefill.refusal(problem, interpret)
        if problem.op == "prefill" or reason is not None:
            return reason
    return flash_decode.refusal(problem)


def attend_ragged(
    args: RaggedArgs, options: RaggedOptions, interpret: Interpret = False
) -> tuple[jax.Array, jax.Array]:
    """Run single queries in the decode kernel, and longer chunks in the prefill kernel."""
    decode = functools.partial(flash_decode.decode, interpret=interpret)
    attend_to_chunks = functools.partial(flash_prefill.attend_to_chunks, interpret=interpret)
    return attend_in_parts(decode, attend_to_chunks, args, options)


def _missing_ops() -> tuple[str, ...]:
    """Return the ops that the kernels do not support on this GPU."""
    return () if flash_prefill.gpu_refusal() is None else ("prefill", "ragged")


def _on_pools(run: Callable[..., Any]) -> Kernel:
    return Kernel(run, refusal, can_interpret=True)


MOSAIC_GPU = Backend(
    {
        "decode": _on_pools(flash_decode.decode),
        "prefill": _on_pools(flash_prefill.prefill),
        "ragged": _on_pools(attend_ragged),
        "write": _on_pools(pool_updates.write),
        "rope_write": _on_pools(rope_update.rope_write),
        "copy_blocks": _on_pools(pool_updates.copy_blocks),
    },
    platform="cuda",
    missing_ops=_missing_ops,
    preference=functools.partial(gpu_defaults.preference, "mosaic_gpu"),
)
