"""Access to the weight matrices of a model in a forward pass, and embedding lookup."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from paged_jax.kernels.linear import LayerWeights, Matrix, Stack, Weight, linear
from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat, dequantise
from paged_jax.kernels.weight_packing import as_bits, from_bits, take_interleaved_rows
from paged_jax.models.matrix_formats import (
    SUFFIXES,
)

if TYPE_CHECKING:
    from flax import nnx

# Number of lanes of a TPU vector register: each of its rows has this number of elements.
_TPU_LANES = 128

# Placement of parameters on devices: one sharding for all parameters, or a function of a
# parameter's name and shape. The name is "layers.0.qkv_proj", or "layers.qkv_proj" if the layers
# are stacked. None is the default device.
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None


def get_matrix(
    module: "nnx.Module",
    name: str,
    format: WeightFormat,
    dtype: DTypeLike,
    stack: "nnx.Module | None" = None,
    layer: jax.Array | int | None = None,
) -> Weight:
    """Return a matrix of a module as a `Weight`, with all arrays of its format.

    Args:
      module: module that has the matrix.
      name: name of the matrix in the module.
      format: storage format of the matrix.
      dtype: dtype of the floating-point parameters of the model.
      stack: stacked parameters that contain `module` as a slice, in a scan over layers; or None.
      layer: index of `module` in the stack, i32 ``[]``; None without a stack.
    """
    whole = None
    if stack is not None and layer is not None:
        # `module` is a slice of the stack. Gradients must flow through the slice, not the stack.
        whole = Stack(lax.stop_gradient(_parameters(stack, name)), layer)
    code = format.code if format.is_packed else None
    return Weight(
        *_parameters(module, name),
        stack=whole,
        code=code,
        dtype=jnp.dtype(dtype),
        is_interleaved=format.is_interleaved,
    )


def _parameters(module: "nnx.Module", name: str) -> WeightArrays:
    parameters = (getattr(module, name + suffix, None) for suffix in ("", *SUFFIXES))
    return WeightArrays(*(None if each is None else each[...] for each in parameters))


@dataclass(frozen=True)
class LayerParameters:
    """Access to the parameters of a layer by name, during a forward pass.

    Attributes:
      layer: module of the layer, with the attributes `formats` and `float_dtype`.
      stack: stacked parameters that contain `layer` as a slice, in a scan over layers; or None.
      index: index of the layer in the model; i32 ``[]`` in a scan over layers.
      backend: backend of the matrix multiplications, see `linear`.
    """

    layer: Any
    stack: "nnx.Module | None"
    index: jax.Array | int
    backend: str | None

    def vector(self, name: str) -> jax.Array:
        """Return a parameter that is not a matrix."""
        return getattr(self.layer, name)[...]

    def optional(self, name: str) -> jax.Array | None:
        """Return a parameter that is not a matrix; None if the layer does not have it."""
        return self.vector(name) if hasattr(self.layer, name) else None

    def matrix(self, name: str) -> Matrix:
        """Return a matrix of the layer.

        In a scan over layers, a matrix that is not stacked is returned as a `LayerWeights`, which
        holds the matrices of all layers and the index of this layer.
        """
        layer, dtype = self.layer, self.layer.float_dtype
        if hasattr(layer, name):
            return get_matrix(layer, name, layer.formats[name], dtype, self.stack, self.index)
        numbers = sorted((key for key in vars(layer) if key.isdecimal()), key=int)
        own = (getattr(layer, key) for key in numbers)
        weights = (get_matrix(each, name, each.formats[name], dtype) for each in own)
        return LayerWeights(tuple(weights), self.index)

    def linear(self, x: jax.Array, name: str) -> jax.Array:
        """Multiply the last dimension of `x` by the matrix with this name, see `linear`."""
        return linear(x, self.matrix(name), backend=self.backend)


def look_up(table: Weight, token_ids: jax.Array) -> jax.Array:
    """Look up embeddings float32 ``[N, E]`` of token ids i32 ``[N]`` in a table ``[V, E]``.

    The compiled program does not copy the table, and converts only the selected rows. For some
    dtypes no gradient flows to the table, so training must use `look_up_differentiably`.
    """
    return _find_rows(table, token_ids, _look_up_rows)


def look_up_differentiably(table: Weight, token_ids: jax.Array) -> jax.Array:
    """Look up embeddings like `look_up`, but with gradients and for ids of any shape."""
    return _find_rows(table, token_ids, _take)


def _find_rows(
    table: Weight, token_ids: jax.Array, take: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    take = take_interleaved_rows if table.is_interleaved else take
    rows = table.arrays.map_rows(lambda array: take(array, token_ids))
    return dequantise(rows, table.format.code)


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

    For a plain gather, XLA's CPU backend converts the whole table to float32. If embeddings are
    tied, the output head then reads this converted copy. Gathering the bits as integers avoids
    this, but has no gradient. On TPUs, a gather of integers would copy the table.
    """
    return from_bits(as_bits(table)[token_ids], table.dtype)


def _take_from_lanes(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Gather rows of a bfloat16 table ``[V, E]`` on TPU, without a copy of the table.

    If E is not a multiple of 128, XLA stores the table with V along the lanes, because this layout
    needs less padding. A gather then copies the whole table (gpt-oss 20B on 16 v5e chips: 74 MB,
    jax 0.10.2 to 0.12.0). Instead, read an aligned block of 128 rows for each token, and select a
    row of each block. If these blocks together are larger than the table, gather the rows anyway. A
    layout constraint on the block prevents the copy, but a constraint on the table does not.
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
