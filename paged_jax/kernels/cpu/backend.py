"""The kernels of the backends ``"cpu"`` and ``"cpu_exact"``."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.backend import Backend, Kernel, spread
from paged_jax.kernels.cpu import attention, linear, recurrent
from paged_jax.kernels.native import library
from paged_jax.kernels.native.kernels import NativeKernel, matmul_kernel


def _attention(run: Callable[..., Any]) -> Kernel:
    return Kernel(run, attention.refusal, unavailable=attention.unavailable)


# XLA does the writes and the copies of blocks.
_COMMON = {
    "linear": Kernel(spread(linear.linear), is_differentiable=True, runs_anywhere=True),
    "grouped_linear": Kernel(spread(linear.grouped_linear), spread(linear.grouped_linear_refusal)),
    "sum_rows": Kernel(linear.sum_rows, is_differentiable=True, runs_anywhere=True),
    "advance_rows": Kernel(recurrent.advance_rows, recurrent.refusal),
}

CPU = Backend(
    {
        "decode": _attention(attention.attend),
        "prefill": _attention(attention.attend),
        "ragged": _attention(attention.attend_ragged),
        **_COMMON,
    },
    platform="cpu",
)


def _exact_unavailable(
    codes: Collection[str], dtype: DTypeLike, pool_dtype: DTypeLike
) -> str | None:
    """Compile the kernels for a model; return why they cannot be used, or None if they can."""
    kernels = [NativeKernel("linear", jnp.dtype(jnp.float32))]
    kernels += [matmul_kernel(code, dtype) for code in codes]
    kernels += [NativeKernel(op, jnp.dtype(pool_dtype)) for op in ("decode", "prefill")]
    reasons = (library.load(kernel).reason for kernel in kernels)
    return next((reason for reason in reasons if reason is not None), None)


# Each row has the same bits in any program and batch: a prompt gives the same results as its tokens
# one after the other, and all sums over rows are those of the kernel. If a kernel cannot be
# compiled, the results are those of XLA, which depend on shapes, so callers check `unavailable_for`
# first.
_attend_exactly = _attention(functools.partial(attention.attend, is_exact=True))
CPU_EXACT = Backend(
    {
        "decode": _attend_exactly,
        "prefill": _attend_exactly,
        **_COMMON,
    },
    platform="cpu",
    is_exact=True,
    unavailable_for=_exact_unavailable,
)
