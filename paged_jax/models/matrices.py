"""Weight matrices of a model: floating point or quantised parameters, and embedding lookup.

A quantised matrix is several parameters: values, such as ``qkv_proj``, scales ``qkv_proj_scale``,
and possibly ``qkv_proj_min`` and ``qkv_proj_order``, see `paged_jax.kernels.weight_formats`. An
int8 matrix that was made by `quantise` has one float32 scale per row. The largest value of a row is
127, so the rounding error is at most half a scale. Only weights are quantised, activations are not.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from paged_jax.kernels.linear import Stack, Weight
from paged_jax.kernels.weight_formats import (
    WeightArrays,
    WeightFormat,
    as_bits,
    dequantise,
    from_bits,
)
from paged_jax.models.quantise import quantise

# Suffixes of the parameters with the scales, minima and order of a matrix, see `WeightArrays`.
SUFFIXES = SCALE, MIN, ORDER = "_scale", "_min", "_order"

# Elements in a row of a TPU vector register.
_TPU_LANES = 128


# Whether models are created only for their shapes, see `only_shapes`.
_HAS_ONLY_SHAPES = contextvars.ContextVar("_HAS_ONLY_SHAPES", default=False)

# Placement of parameters: one sharding for all, or a function of the name ("layers.0.qkv_proj", or
# "layers.qkv_proj" if the layers are stacked) and the shape. None is the default device.
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None


def matrix_name(name: str) -> str:
    """Return the name of a parameter's matrix: the parameter's name without a suffix.

    Example:
      >>> [matrix_name(name) for name in ("layers.0.o_proj", "layers.0.o_proj_scale", "norm")]
      ['layers.0.o_proj', 'layers.0.o_proj', 'norm']
    """
    suffix = next((each for each in SUFFIXES if name.endswith(each)), "")
    return name.removesuffix(suffix)


def is_stacked(name: str) -> bool:
    """Return whether a parameter is a stack of all layers, ``"layers.o_proj"``."""
    scope, _, kind = name.partition(".")
    return scope == "layers" and "." not in kind


def change_format(
    arrays: WeightArrays, source: WeightFormat, target: WeightFormat, *, is_stacked: bool = False
) -> WeightArrays:
    """Convert a matrix to another format: dequantise it, and quantise it again.

    Args:
      arrays: the arrays of the matrix.
      source: their format.
      target: the format to convert to.
      is_stacked: whether the arrays have a first dimension for layers.
    """

    def change(arrays: WeightArrays) -> WeightArrays:
        w = dequantise(arrays, source.code)
        if target.is_quantised:
            return quantise(w, target)
        return WeightArrays(w.astype(jnp.dtype(target.code)))

    return jax.vmap(change)(arrays) if is_stacked else change(arrays)


@contextlib.contextmanager
def only_shapes() -> Iterator[None]:
    """Return a context for `jax.eval_shape` of a model. In it, `add_matrix` does not quantise.

    Tracing the conversion of all matrices takes longer than the rest of the model.
    """
    token = _HAS_ONLY_SHAPES.set(True)
    try:
        yield
    finally:
        _HAS_ONLY_SHAPES.reset(token)


def add_matrix(module: nnx.Module, name: str, w: jax.Array, format: WeightFormat) -> None:
    """Add a matrix to a module: the parameter `name`, and the other arrays of its format.

    Args:
      module: the module.
      name: name of the parameter.
      w: floating point ``[..., in]``.
      format: format of the matrix.
    """
    if not format.is_quantised:
        setattr(module, name, nnx.Param(w.astype(jnp.dtype(format.code))))
        return
    if _HAS_ONLY_SHAPES.get():
        shapes = format.shapes(w.shape)
        arrays = WeightArrays(**{each: jnp.zeros(*shapes[each]) for each in shapes})
    else:
        arrays = quantise(w.astype(jnp.float32), format)
    for suffix, array in zip(("", *SUFFIXES), arrays, strict=True):
        if array is not None:
            setattr(module, name + suffix, nnx.Param(array))


def get_matrix(
    module: nnx.Module,
    name: str,
    format: WeightFormat,
    dtype: DTypeLike,
    stack: nnx.Module | None = None,
    layer: jax.Array | int | None = None,
) -> Weight:
    """Return a matrix of a module, with the other arrays of its format.

    Args:
      module: the module.
      name: name of the parameter.
      format: format of the matrix.
      dtype: dtype of the floating-point parameters of the model.
      stack: stacked modules that contain `module` as a slice, or None.
      layer: index of `module` in the stack, i32 ``[]``.
    """
    whole = None
    if stack is not None and layer is not None:
        # Gradients flow through the slice only.
        whole = Stack(lax.stop_gradient(_parameters(stack, name)), layer)
    code = format.code if format.is_packed else None
    return Weight(*_parameters(module, name), stack=whole, code=code, dtype=jnp.dtype(dtype))


def _parameters(module: nnx.Module, name: str) -> WeightArrays:
    parameters = (getattr(module, name + suffix, None) for suffix in ("", *SUFFIXES))
    return WeightArrays(*(None if each is None else each[...] for each in parameters))


def look_up(table: Weight, token_ids: jax.Array) -> jax.Array:
    """Return the embeddings float32 ``[N, E]`` of token ids i32 ``[N]`` from a table ``[V, E]``.

    The compiled program does not copy the table, and converts only the rows that it looks up. A
    table may get no gradient, so training must use `look_up_differentiably`.
    """
    return _find_rows(table, lambda array: _look_up_rows(array, token_ids))


def look_up_differentiably(table: Weight, token_ids: jax.Array) -> jax.Array:
    """Return embeddings as `look_up`, for token ids of any shape and with gradients."""
    return _find_rows(table, lambda array: array[token_ids])


def _find_rows(table: Weight, take: Callable[[jax.Array], jax.Array]) -> jax.Array:
    arrays = jax.tree.map(take, table.arrays._replace(order=None))
    return dequantise(arrays._replace(order=table.order), table.format.code)


def _look_up_rows(array: jax.Array, token_ids: jax.Array) -> jax.Array:
    dtype = array.dtype
    if dtype == jnp.bfloat16:
        forms = {"cpu": _take_bits, "tpu": _take_from_lanes, "default": _take}
        return lax.platform_dependent(array, token_ids, **forms)
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        return lax.platform_dependent(array, token_ids, cpu=_take_bits, default=_take)
    return _take(array, token_ids)


def _take(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    return table[token_ids]


def _take_bits(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Take rows of a bfloat16, float16 or float8 table on CPU.

    For a plain gather, XLA's CPU backend converts the whole table to float32, and the output head
    of a tied model then reads that copy. A gather of integers avoids this, but has no gradient. On
    TPU, the integer gather would copy the table instead.
    """
    return from_bits(as_bits(table)[token_ids], table.dtype)


def _take_from_lanes(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Take rows of a bfloat16 table on TPU.

    If E is not a multiple of 128, XLA stores the table with V along the lanes, which needs less
    padding, and copies the whole table for a gather (gpt-oss 20B on 16 v5e chips: 74 MB, jax 0.10.2
    to 0.12.0). Instead, this reads for each token the 128 rows that share its registers, unless
    that is more than the whole table. A layout constraint on the slice prevents the copy. A
    constraint on the table does not.
    """
    (V, E), (N,) = table.shape, token_ids.shape
    if E % _TPU_LANES == 0 or N * _TPU_LANES > V:
        return _take(table, token_ids)

    def take(token_id: jax.Array) -> jax.Array:
        start = jnp.minimum(token_id // _TPU_LANES * _TPU_LANES, V - _TPU_LANES)
        rows = lax.dynamic_slice_in_dim(table, start, _TPU_LANES)
        rows = with_layout_constraint(rows, Layout(major_to_minor=(1, 0))).astype(jnp.float32)
        is_row = jnp.arange(_TPU_LANES, dtype=jnp.int32) == token_id - start
        return jnp.sum(jnp.where(is_row[:, None], rows, 0), axis=0).astype(table.dtype)

    return lax.map(take, token_ids)
