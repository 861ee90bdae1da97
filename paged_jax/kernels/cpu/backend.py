"""The kernels of the backends ``"cpu"``, ``"cpu_exact"`` and ``"cpu_int8"``."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.backend import Backend, Kernel, spread
from paged_jax.kernels.cpu import attention, linear, recurrent
from paged_jax.kernels.native import library
from paged_jax.kernels.native.kernels import NativeKernel, kernel_code, matmul_kernel
from paged_jax.kernels.weight_formats import Weight


def _attention(run: Callable[..., Any]) -> Kernel:
    return Kernel(run, attention.refusal, unavailable=attention.unavailable)


def _matmuls(find_kernel: Callable[[Weight], NativeKernel]) -> dict[str, Kernel]:
    """Return the kernels of matmuls. `find_kernel` returns the kernel for a quantised weight."""
    run, grouped = (
        spread(functools.partial(function, find_kernel=find_kernel))
        for function in (linear.linear, linear.grouped_linear)
    )
    return {
        "linear": Kernel(run, is_differentiable=True, runs_anywhere=True),
        "grouped_linear": Kernel(grouped, spread(linear.grouped_linear_refusal)),
    }


# XLA does the writes and the copies of blocks.
_COMMON = {
    "sum_rows": Kernel(linear.sum_rows, is_differentiable=True, runs_anywhere=True),
    "advance_rows": Kernel(recurrent.advance_rows, recurrent.refusal),
}

CPU = Backend(
    {
        "decode": _attention(attention.attend),
        "prefill": _attention(attention.attend),
        "ragged": _attention(attention.attend_ragged),
        **_matmuls(linear.quantised_kernel),
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
    reasons = (library.load(each).why_not for each in kernels)
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
        **_matmuls(linear.quantised_kernel),
        **_COMMON,
    },
    platform="cpu",
    is_exact=True,
    unavailable_for=_exact_unavailable,
)


def _int8_unavailable(
    codes: Collection[str], dtype: DTypeLike = "", pool_dtype: DTypeLike = ""
) -> str | None:
    """Compile the int8 kernels for weights with these codes; return why they cannot be used.

    The result is a phrase, such as "on a processor without AVX512-VNNI". It is None if at least one
    of the codes has an int8 kernel, and all of these kernels can be used.
    """
    del dtype, pool_dtype
    if "avx512_vnni" not in library.processor():
        return "on a processor without AVX512-VNNI"
    if not (rounded := [each for each in codes if each in linear.INT8_CODES]):
        return f"for a model without matrices in {', '.join(linear.INT8_CODES)}"
    names = {kernel_code(each) for each in rounded}
    kernels = (NativeKernel("quantised_linear", linear.INT8, name) for name in sorted(names))
    reasons = (library.load(kernel).why_not for kernel in kernels)
    return next((f"without C++ kernels ({each})" for each in reasons if each is not None), None)


# Matmuls round inputs to int8 if the code of the weights is in `INT8_CODES`. Other ops are the same
# as in `CPU`, except for attention, which this backend does not implement.
CPU_INT8 = Backend(
    {**_matmuls(linear.int8_kernel), **_COMMON},
    platform="cpu",
    unavailable_for=_int8_unavailable,
)
