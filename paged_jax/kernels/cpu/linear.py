"""Matmuls and sums over rows on CPUs: `native/source/linear.cc` and `quantised_linear.cc`."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.kernels.native.kernels import FLOATS, NativeKernel, matmul_kernel
from paged_jax.kernels.native.library import Arrays, Attributes, PlainFunction, call
from paged_jax.kernels.native.weights import format_refusal
from paged_jax.kernels.weight_formats import CODES, Weight, WeightArrays
from paged_jax.kernels.xla.linear import grouped_linear as plain_grouped_linear
from paged_jax.kernels.xla.linear import linear as plain_linear
from paged_jax.kernels.xla.linear import sum_rows as plain_sum_rows

_INT8 = jnp.dtype(jnp.int8)


def _kernel_of(w: Weight) -> NativeKernel:
    """Return the kernel that multiplies by a quantised weight, and may round inputs to int8."""
    kernel = matmul_kernel(w.format.code, w.dtype)
    return kernel._replace(dtype=_INT8) if w.rounds_inputs else kernel


def linear(x: jax.Array, w: Weight) -> jax.Array:
    """Multiply the last dimension of `x` by a weight; see `paged_jax.kernels.linear.linear`.

    The result of a row does not depend on the number of rows. Rows of zeros, such as padding, take
    no time, and give zeros for any weight.
    """
    if not _has_kernel_for(math.prod(x.shape[:-1]), w):
        return plain_linear(x, w)
    stacked, plain = _stacked_arrays(w).merge_outputs(1), plain_linear
    matmul, x, operands = _find_matmul(x, w, stacked, _one_group(x), plain)
    matrix = dataclasses.replace(w, **w.arrays.merge_outputs()._asdict(), stack=None)
    return _multiply(matmul, x, matrix, operands).reshape(*x.shape[:-1], *w.values.shape[:-1])


def _find_matmul(
    x: jax.Array,
    w: Weight,
    stacked: WeightArrays,
    sizes: jax.Array,
    plain: PlainFunction,
) -> tuple["_Matmul", jax.Array, Arrays]:
    """Choose the kernel for a matmul, and prepare its operands.

    `stacked` has the arrays of the weights of all layers. `sizes`, i32 ``[X]``, is the number of
    rows of each group.

    Returns:
      The matmul; the inputs `x` in float32, rounded for the kernel; and the other operands of the
      kernel (`source/linear.cc` or `source/quantised_linear.cc`).
    """
    layer = jnp.asarray(w.stack.layer if w.stack else 0, jnp.int32)
    if w.scales is None:
        matmul = _Matmul(NativeKernel("linear", w.values.dtype), plain)
        return matmul, x.astype(jnp.float32), (stacked.values, sizes, layer)
    kernel = _kernel_of(w)
    flags = {
        "has_mins": w.mins is not None,
        "has_order": w.order is not None,
        "is_interleaved": w.layout is not None,
    }
    attributes = tuple((name, np.int32(flag)) for name, flag in flags.items())
    matmul = _Matmul(kernel, plain, attributes)
    table = jnp.asarray(CODES.get(w.format.code, np.zeros(16)), jnp.float32)
    operands = stacked.values, stacked.scales, table, layer, stacked.mins, stacked.order, sizes
    return matmul, _round_inputs(x, w, kernel), tuple(y for y in operands if y is not None)


def _one_group(x: jax.Array) -> jax.Array:
    return jnp.array([math.prod(x.shape[:-1])], jnp.int32)


def _stacked_arrays(w: Weight) -> WeightArrays:
    return w.stack.arrays if w.stack else jax.tree.map(lambda x: x[None], w.arrays)


def _has_kernel_for(num_rows: int, w: Weight) -> bool:
    dtype = w.values.dtype
    if w.values.size == 0 or num_rows == 0:
        return False
    if w.scales is not None:
        return _quantised_refusal(w) is None
    return dtype in FLOATS


def _quantised_refusal(w: Weight) -> str | None:
    """Return why the kernels do not support a quantised weight, or None if they do."""
    return format_refusal(w.format, w.shape[-1])


def _round_inputs(x: jax.Array, w: Weight, kernel: NativeKernel) -> jax.Array:
    """Return inputs as float32. Round them to the dtype of the model, unless the kernel does so."""
    if w.dtype == jnp.float32 or kernel.dtype != jnp.float32:
        return x.astype(jnp.float32)
    # Round with `reduce_precision`, because XLA may remove a cast to a smaller dtype and back.
    limits = jnp.finfo(w.dtype)
    return lax.reduce_precision(x.astype(jnp.float32), limits.nexp, limits.nmant)


def sum_rows(x: jax.Array) -> jax.Array:
    """Sum float32 ``[..., N]`` over the last dimension, as a matmul with ones.

    The order of summation does not depend on the other dimensions. The matmul has a single output,
    so a single thread computes it for all rows. The op is differentiable.
    """
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    matmul = _Matmul(NativeKernel("linear", ones.dtype), _plain_sum_rows)
    operands = ones[None], _one_group(x), jnp.int32(0)
    return _multiply(matmul, x, Weight(ones), operands)


def _plain_sum_rows(x: jax.Array, ones: Weight) -> jax.Array:
    del ones
    return plain_sum_rows(x)


class _Matmul(NamedTuple):
    """A matmul kernel, and an equivalent function in plain JAX. Instances are hashable.

    Attributes:
      kernel: the kernel.
      plain: the equivalent function of `x` and a `Weight`.
      attributes: static parameters of the kernel.
    """

    kernel: NativeKernel
    plain: PlainFunction
    attributes: Attributes = ()


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply(matmul: _Matmul, x: jax.Array, w: Weight, operands: Arrays) -> jax.Array:
    """Multiply ``[..., in]`` by a weight with the kernel ``matmul.kernel``; return float32.

    The operands of the kernel are `x` and `operands`. The function ``matmul.plain`` of `x` and `w`
    replaces the kernel if it is unavailable, and JAX differentiates this function.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return _multiply_rows(matmul, rows, w, operands).reshape(*x.shape[:-1], w.values.shape[0])


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _multiply_rows(matmul: _Matmul, rows: jax.Array, w: Weight, operands: Arrays) -> jax.Array:
    kernel, plain, attributes = matmul
    inputs = rows.astype(kernel.input_dtype)
    [out] = call(kernel, (inputs, *operands), plain, (rows, w), attributes=attributes)
    return out


@_multiply.defjvp
def _multiply_jvp(matmul, primals, tangents):
    _, tangent = jax.jvp(matmul.plain, primals[:2], tangents[:2])
    return _multiply(matmul, *primals), tangent


def grouped_linear(x: jax.Array, w: Weight, sizes: jax.Array) -> jax.Array:
    """Multiply rows by the weights of their groups, see `paged_jax.kernels.grouped_linear`.

    The result of a row does not depend on the other rows.
    """
    stacked, plain = _stacked_arrays(w), plain_grouped_linear
    matmul, x, operands = _find_matmul(x, w, stacked, sizes, plain)
    args, kernel = (x, dataclasses.replace(w, stack=None), sizes), matmul.kernel
    operands = x.astype(kernel.input_dtype), *operands
    [out] = call(kernel, operands, matmul.plain, args, attributes=matmul.attributes)
    return out


def grouped_linear_refusal(x: jax.Array, w: Weight, sizes: jax.Array) -> str | None:
    """Return why the kernels do not support these arrays, or None if they do."""
    del x, sizes
    return None if w.scales is None else _quantised_refusal(w)
