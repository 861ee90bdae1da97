"""Weight matrices of a model: floating point or quantised parameters, and embedding lookup.

A quantised matrix is several parameters: values, such as ``qkv_proj``, scales ``qkv_proj_scale``,
and possibly ``qkv_proj_min`` and ``qkv_proj_order``, see `paged_jax.kernels.weight_formats`. An
int8 matrix that was made by `quantise` has one float32 scale per row. The largest value of a row is
127, so the rounding error is at most half a scale. Only weights are quantised, activations are not.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from paged_jax.kernels.linear import Stack, Weight
from paged_jax.kernels.weight_formats import (
    CODES,
    WeightArrays,
    WeightFormat,
    as_bits,
    dequantise,
    from_bits,
    pack,
)
from paged_jax.models.matrix_formats import DTYPE_FORMATS

# Suffixes of the parameters with the scales, minima and order of a matrix, see `WeightArrays`.
SUFFIXES = SCALE, MIN, ORDER = "_scale", "_min", "_order"

# Elements in a row of a TPU vector register.
_TPU_LANES = 128

Array = TypeVar("Array", np.ndarray, jax.Array)

# Whether models are created only for their shapes, see `only_shapes`.
_HAS_ONLY_SHAPES = contextvars.ContextVar("_HAS_ONLY_SHAPES", default=False)

# Placement of parameters: one sharding for all, or a function of the name ("layers.0.qkv_proj", or
# "layers.qkv_proj" if the layers are stacked) and the shape. None is the default device.
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None


def matrix_name(name: str) -> str:
    """Return the name of the matrix that has a parameter: the name without one of `SUFFIXES`.

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


def quantise(w: Array, format: WeightFormat = DTYPE_FORMATS["int8"]) -> WeightArrays:
    """Round a matrix to a quantised format.

    The largest number of a group becomes the largest value of the format. With minima, the smallest
    number of a group is its minimum. The inputs keep their order.

    Args:
      w: float32 ``[..., in]``, an array of NumPy or JAX.
      format: the format; by default int8 with one scale per row.

    Returns:
      Arrays of the same library.

    Example:
      >>> values, scales, *_ = quantise(np.array([[1.0, -2.54], [0.0, 0.0]], np.float32))
      >>> values.tolist(), f"{scales[0, 0]:.3f}"
      ([[50, -127], [0, 0]], '0.020')
    """
    xp = w.__array_namespace__()
    num_inputs = w.shape[-1]
    groups = w.reshape(*w.shape[:-1], -1, format.group_size or num_inputs)
    mins = None
    if format.min_dtype is not None:
        mins = groups.min(-1, keepdims=True).astype(jnp.dtype(format.min_dtype))
        groups = groups - mins.astype(np.float32)
    # Multiply by reciprocals, as XLA does for a division, so that NumPy and JAX give equal bits.
    # The lower bound of the scales keeps the reciprocal finite.
    largest = xp.abs(groups).max(-1, keepdims=True)
    dtype = jnp.dtype(format.scale_dtype)
    scales = largest * np.float32(1 / _largest_number(format.code))
    scales = xp.maximum(scales, jnp.finfo(dtype).tiny).astype(dtype)
    numbers = groups * (1 / scales.astype(np.float32))
    values = _nearest_values(numbers, format.code).reshape(w.shape)
    return WeightArrays(
        pack(values) if format.is_packed else values,
        scales[..., 0],
        None if mins is None else mins[..., 0],
        xp.arange(num_inputs, dtype=np.int32) if format.has_order else None,
    )


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


def _largest_number(code: str) -> float:
    if code in CODES:
        return float(CODES[code].max())
    return 127 if code == "int8" else float(jnp.finfo(code).max)


def _nearest_values(numbers: Array, code: str) -> Array:
    """Return the values, not packed, with the nearest numbers of a code."""
    xp = numbers.__array_namespace__()
    if code == "int8":
        return xp.clip(xp.rint(numbers), -127, 127).astype(np.int8)
    if code not in CODES:
        largest = _largest_number(code)
        return xp.clip(numbers, -largest, largest).astype(jnp.dtype(code))
    order = np.argsort(CODES[code], kind="stable").astype(np.uint8)
    ascending = CODES[code][order]
    middles = (ascending[1:] + ascending[:-1]) / 2
    return xp.asarray(order)[xp.searchsorted(xp.asarray(middles), numbers)]


@contextlib.contextmanager
def only_shapes() -> Iterator[None]:
    """Return a context for `jax.eval_shape` of a model, in which `add_matrix` quantises nothing.

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
        arrays = _quantise(w.astype(jnp.float32), format)
    for suffix, array in zip(("", *SUFFIXES), arrays, strict=True):
        if array is not None:
            setattr(module, name + suffix, nnx.Param(array))


# Traced once per shape.
_quantise = jax.jit(quantise, static_argnames="format")


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
