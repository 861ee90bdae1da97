"""``x @ w.T`` for weights stored ``[out, in]``, in the form that each platform runs fastest.

On GPU and TPU one product serves all. On CPU, few rows are the work of a kernel of our own,
`paged_jax.kernels.cpu`. Where it cannot be had, XLA's choices for few rows cost up to ten times as
much as need be; the forms below were measured on 2 cores with AVX-512 (jax 0.10.2), for weights of
3072 x 576 and 576 x 1536, as GB/s of weights read:

    rows    float32: plain, in halves    bfloat16: plain, multiply and sum
    1            31      29                    1.5    16
    2..4         15      24                    16
    16           10      15                    10
    64            4.7     5.5                   4.1
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels import cpu
from paged_jax.models.weight import Stack, Weight

# Where two products of half the weight are faster than one of all of it. Beyond these rows packing
# the weight is a small part of the work. Beyond this many inputs the batched product of XLA's CPU
# library reads outside of its buffers and may crash the process (jax 0.10.2: from 2048 inputs and
# 24 rows, or 4096 and 2; none up to 32 rows below). A test stresses the corners of what is used.
_HALVES_MAX_ROWS = 16
_HALVES_MAX_INPUTS = 1536


def linear(x: jax.Array, w: jax.Array | Weight, *, backend: str | None = None) -> jax.Array:
    """Apply a weight to the last dimension of ``x``.

    Args:
      x: floating point ``[..., in]``.
      w: ``[*out, in]``, float32, bfloat16 or float16, or a `Weight`, which may be int8; ``x`` may
        be rounded to the type of the floats.
      backend: the backend of attention, see `paged_attention`: None or ``"cpu"`` take the kernels
        of `paged_jax.kernels.cpu` on a CPU that has them, for few rows, or for any number where
        XLA would make a copy of the weights first.

    Returns:
      float32 ``[..., *out]``, accumulated in float32.
    """
    if not isinstance(w, Weight):
        w = Weight(w)
    matrix = _with_rows(w.values, w.scales)
    plain = _product_of_floats if w.scales is None else _product_of_int8(w.dtype)
    if backend in (None, "cpu") and cpu.takes(math.prod(x.shape[:-1]), w.values, w.stack):
        y = cpu.linear(plain, x, matrix, _in_stack(w))
    else:
        y = plain(x, *matrix)
    return y.reshape(*x.shape[:-1], *w.values.shape[:-1])


def _with_rows(values: jax.Array, scales: jax.Array | None) -> tuple[jax.Array, ...]:
    """Numbers ``[out, in]``, and the scales ``[out]`` of int8 ones. Nothing is moved."""
    matrix = values.reshape(-1, values.shape[-1])
    return (matrix,) if scales is None else (matrix, scales.reshape(-1))


def _in_stack(w: Weight) -> tuple[jax.Array, ...]:
    """What the kernel reads: numbers ``[L, out, in]``, a layer, and perhaps scales ``[L, out]``."""
    stack = w.stack or Stack(w.values[None], None if w.scales is None else w.scales[None], 0)
    L, num_inputs = stack.values.shape[0], stack.values.shape[-1]
    operands = stack.values.reshape(L, -1, num_inputs), jnp.asarray(stack.layer, jnp.int32)
    return operands if stack.scales is None else (*operands, stack.scales.reshape(L, -1))


def _product_of_floats(x: jax.Array, w: jax.Array) -> jax.Array:
    rows = math.prod(x.shape[:-1])
    if rows == 1 and w.dtype != jnp.float32:
        return lax.platform_dependent(x, w, cpu=_multiply_sum, default=_product)
    if w.dtype == jnp.float32 and 1 < rows <= _HALVES_MAX_ROWS and _has_halves(w):
        return lax.platform_dependent(x, w, cpu=_product_in_halves, default=_product)
    return _product(x, w)


@functools.cache  # a function for each type, so that programs are not compiled twice
def _product_of_int8(dtype: Any) -> Callable[..., jax.Array]:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        # Every int8 number is one of `dtype`, and becomes it on its way into the product.
        return _product(x, w.astype(dtype))

    def on_cpu(x: jax.Array, w: jax.Array) -> jax.Array:
        is_one_row = math.prod(x.shape[:-1]) == 1
        return _multiply_sum(x, w) if is_one_row else _product(x, w.astype(jnp.float32))

    def scaled(x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
        out = lax.platform_dependent(x, w, cpu=on_cpu, default=product)
        return out * scales.reshape((1,) * (out.ndim - 1) + (-1,))

    return scaled


def _has_halves(w: jax.Array) -> bool:
    return w.shape[0] % 2 == 0 and w.shape[1] <= _HALVES_MAX_INPUTS


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    # HIGHEST keeps float32 from being computed as TF32 or in bfloat16 passes on accelerators.
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return lax.dot_general(
        x.astype(w.dtype),
        w,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _product_in_halves(x: jax.Array, w: jax.Array) -> jax.Array:
    """The output's two halves as a batch of two products, the weight on the left."""
    rows = x.astype(w.dtype).reshape(-1, x.shape[-1])
    halves = w.reshape(2, w.shape[0] // 2, w.shape[1])
    rows = jnp.broadcast_to(rows[None], (2, *rows.shape))
    out = lax.dot_general(halves, rows, (((2,), (2,)), ((0,), (0,))))  # [2, out / 2, rows]
    return out.transpose(2, 0, 1).reshape(*x.shape[:-1], w.shape[0])


def _multiply_sum(x: jax.Array, w: jax.Array) -> jax.Array:
    """One row. As a product, XLA's CPU backend would convert all of the weight to float32."""
    row = x.astype(jnp.float32).reshape(1, -1)
    out = jnp.sum(w.astype(jnp.float32) * row, axis=-1)
    return out.reshape(*x.shape[:-1], w.shape[0])
