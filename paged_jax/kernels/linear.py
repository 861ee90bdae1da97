# pyright: strict, reportUnknownMemberType=false
"""Matmuls with the weights of a model, and sums over rows.

On GPUs and TPUs, `linear` and `sum_rows` are plain JAX, with one exception. On NVIDIA GPUs, a
kernel converts quantised weights in registers, unless XLA can fuse the conversion into its matmul.
For a few rows of activations, CPUs have C++ kernels, which read the weights in place. With these
kernels, the result of a row does not depend on the other rows. `grouped_linear` has kernels for
CPUs, NVIDIA GPUs and TPUs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.formatting import short_repr
from paged_jax.kernels.backend import Interpret, spread
from paged_jax.kernels.derivatives import differentiable_once
from paged_jax.kernels.op import Op, OpCall, is_exact
from paged_jax.kernels.op_args import GroupedLinearArgs, LinearArgs
from paged_jax.kernels.weight_formats import Stack, Weight
from paged_jax.kernels.xla import linear as plain

__all__ = [
    "LayerWeights",
    "Matrix",
    "Stack",
    "Weight",
    "grouped_linear",
    "linear",
    "linear_gradients",
    "sum_rows",
]

# `sum_rows` uses the kernel for CPUs for at most this number of tokens. For more tokens, XLA is
# faster.
_MAX_DECODE_TOKENS = 64

# Dtypes of grouped weights.
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@short_repr
class LayerWeights(NamedTuple):
    """The weights of all layers, for a scan over layers with weights in different formats.

    Attributes:
      weights: the weight of each layer. They have the same shape, but different formats.
      layer: i32 ``[]``, index of the layer to multiply by.
    """

    weights: tuple[Weight, ...]
    layer: jax.Array | int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight of a layer."""
        return self.weights[0].shape

    def apply(self, function: Callable[[jax.Array, Weight], jax.Array], x: jax.Array) -> jax.Array:
        """Return ``function(x, weight)`` for the weight of `layer`. Other layers are not read."""

        def branch(weight: Weight) -> Callable[[jax.Array], jax.Array]:
            def run(x: jax.Array) -> jax.Array:
                return function(x, weight)

            return run

        return cast(jax.Array, lax.switch(self.layer, list(map(branch, self.weights)), x))


# A weight, or the weights of all layers with the index of a layer.
Matrix = Weight | LayerWeights


def linear(x: jax.Array, w: jax.Array | Matrix, *, backend: str | None = None) -> jax.Array:
    """Multiply the last dimension of `x` by a weight: ``x @ w.T``.

    Args:
      x: floating point ``[..., in]``; may be rounded to the dtype of the weight.
      w: float32, bfloat16 or float16 ``[*out, in]``; or a `Weight`, which may be quantised; or
        `LayerWeights`.
      backend: name of the backend for attention, see `paged_attention`. None and ``"cpu"`` use the
        C++ kernels if the program is lowered for a CPU that has them. None and ``"triton"`` use the
        kernel for quantised weights on NVIDIA GPUs.

    Returns:
      float32 ``[..., *out]``, accumulated in float32.
    """
    if isinstance(w, LayerWeights):
        return w.apply(functools.partial(linear, backend=backend), x)
    w = w if isinstance(w, Weight) else Weight(w)
    return LINEAR(LinearArgs(x, w), backend=backend)


def linear_gradients(
    x: jax.Array, w: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `linear` in float32, for callers that sum them over parts of `x`.

    JAX returns the gradient of a bfloat16 weight in bfloat16, so a sum over parts of `x` would be
    rounded for each part.

    Args:
      x: floating point ``[R, in]``.
      w: float32, bfloat16 or float16 ``[out, in]``.
      cotangent: float32 ``[R, out]``, the gradient with respect to the result.

    Returns:
      The gradients with respect to `x` and `w`, float32 ``[R, in]`` and ``[out, in]``.
    """
    return plain.linear_gradients(x, w, cotangent)


def sum_rows(x: jax.Array, *, rows_per_token: int = 1, backend: str | None = None) -> jax.Array:
    """Sum float32 ``[..., N]`` over the last dimension, to ``[..., 1]``.

    XLA's order of summation depends on the shape. The kernel for CPUs has a fixed order. It is used
    for up to 64 tokens, so that decode steps give the same sums in batches of any size.

    Args:
      x: float32 ``[..., N]``.
      rows_per_token: number of rows of `x` that belong to one token.
      backend: an exact backend, see `is_exact`, is used for any number of tokens. Others make no
        difference.
    """
    if is_exact(backend):
        return SUM_ROWS(x, backend=backend)
    num_tokens = math.prod(x.shape[:-1]) // rows_per_token
    is_decode = 0 < num_tokens <= _MAX_DECODE_TOKENS
    return SUM_ROWS(x) if is_decode else plain.sum_rows(x)


def grouped_linear(
    x: jax.Array,
    w: jax.Array | Matrix,
    group_sizes: jax.Array,
    *,
    backend: str | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Multiply rows, sorted by group, by the weights of their groups (mixture of experts).

    The forward pass does not read the weights of groups without rows. The kernels for CPUs (C++),
    NVIDIA GPUs (Triton) and TPUs (JAX's megablox) read the weights in place. Without a kernel, XLA
    copies the weights of each group before it multiplies by them. With the kernel for CPUs, the
    result of a row does not depend on the other rows.

    `jax.grad` can differentiate this op once, with respect to `x` and to a `w` that is not
    quantised. The gradients with respect to the arrays of a quantised weight are 0.

    Args:
      x: floating point ``[R, in]``, at least one row; rounded to the dtype of the weights. The
        first ``group_sizes[0]`` rows belong to group 0, the next ``group_sizes[1]`` to group 1, and
        so on. The rows after the last group belong to no group.
      w: float32, bfloat16 or float16 ``[X, *out, in]``; or a `Weight` of this shape, which may be
        quantised or a slice of stacked layers; or `LayerWeights`.
      group_sizes: i32 ``[X]``, number of rows in each group; the sum is at most R.
      backend: ``"cpu"``, ``"triton"`` or ``"mosaic_tpu"``. None uses the best backend for the
        platform. All other names use XLA (static).
      interpret: whether to run the Pallas kernel of `backend` in the interpreter, on any platform
        (static).

    Returns:
      float32 ``[R, *out]``, accumulated in float32; 0 in rows of no group.

    Raises:
      ValueError: shapes do not match, the dtype of the weights is not supported, or `interpret` is
        set and `backend` is not written in Pallas.

    Example:
      >>> w = jnp.arange(3.0)[:, None, None] * jnp.ones((3, 2, 4))
      >>> grouped_linear(jnp.ones((5, 4)), w, jnp.array([1, 0, 3])).tolist()  # groups 0, 2, none
      [[0.0, 0.0], [8.0, 8.0], [8.0, 8.0], [8.0, 8.0], [0.0, 0.0]]
    """
    if isinstance(w, LayerWeights):
        options: Any = {"backend": backend, "interpret": interpret}
        return w.apply(lambda x, weight: grouped_linear(x, weight, group_sizes, **options), x)
    w = w if isinstance(w, Weight) else Weight(w)
    if len(w.shape) < 3 or x.ndim != 2 or x.shape[1] != w.shape[-1] or not x.size:
        raise ValueError(
            "grouped_linear: x must be [R, in] with R > 0 and w [X, *out, in], got "
            f"{x.shape} and {w.shape}."
        )
    if group_sizes.shape != w.shape[:1]:
        raise ValueError(
            f"grouped_linear: group_sizes must have shape {w.shape[:1]}, got {group_sizes.shape}."
        )
    if w.scales is None and w.values.dtype not in _DTYPES:
        raise ValueError(
            "grouped_linear: w must be float32, bfloat16 or float16, or a Weight with scales, got "
            f"{w.values.dtype}."
        )
    sizes = group_sizes.astype(jnp.int32)
    args = GroupedLinearArgs(x, _merge_outputs(w), sizes)
    y = GROUPED_LINEAR(args, backend=backend, interpret=interpret)
    return y.reshape(x.shape[0], *w.shape[1:-1])


def _merge_outputs(w: Weight) -> Weight:
    """Merge the output dimensions of each group: ``[X, *out, in]`` to ``[X, out, in]``."""
    stack = lax.stop_gradient(w.stack)
    if stack is not None:
        stack = Stack(stack.arrays.merge_outputs(2), jnp.asarray(stack.layer, jnp.int32))
    return dataclasses.replace(w, **w.arrays.merge_outputs(1)._asdict(), stack=stack)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_groups(call: OpCall, args: GroupedLinearArgs) -> jax.Array:
    return call.run(args)


def _forward(call: OpCall, args: GroupedLinearArgs) -> tuple[jax.Array, Any]:
    x, w = differentiable_once("grouped_linear", args[:2])
    residuals = args._replace(x=x, w=dataclasses.replace(w, stack=None))
    return _multiply_groups(call, args._replace(x=x, w=w)), residuals


def _backward(
    call: OpCall, residuals: GroupedLinearArgs, cotangent: jax.Array
) -> tuple[GroupedLinearArgs]:
    del call
    (x, w, sizes), cotangent = differentiable_once("grouped_linear", (residuals, cotangent))
    x_bar, values_bar = plain.grouped_gradients(x, w, sizes, cotangent)
    no_arrays = {name: None for name in ("scales", "mins", "order", "stack")}
    w_bar = dataclasses.replace(w, values=values_bar, **no_arrays)
    return (GroupedLinearArgs(x_bar, w_bar, None),)  # type: ignore[arg-type]


_multiply_groups.defvjp(_forward, _backward)

LINEAR = Op("linear", spread(plain.linear), is_optional=True)
SUM_ROWS = Op("sum_rows", plain.sum_rows, is_optional=True)
GROUPED_LINEAR = Op(
    "grouped_linear", spread(plain.grouped_linear), gradient=_multiply_groups, is_optional=True
)
