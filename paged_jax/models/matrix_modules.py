"""Weight matrices as parameters of a module."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.models.codecs.dtype_formats import quantise
from paged_jax.models.matrix_formats import SUFFIXES, MatrixFormats

# Whether a model is created only to find the shapes of its parameters, see `only_shapes`.
_HAS_ONLY_SHAPES = contextvars.ContextVar("_HAS_ONLY_SHAPES", default=False)


@contextlib.contextmanager
def only_shapes() -> Iterator[None]:
    """Return a context in which `random_matrix` and `add_matrix` create matrices of zeros.

    In `jax.eval_shape` of a model, this saves the time to trace the random numbers and the
    quantisation of all matrices.
    """
    token = _HAS_ONLY_SHAPES.set(True)
    try:
        yield
    finally:
        _HAS_ONLY_SHAPES.reset(token)


def random_matrix(rngs: nnx.Rngs, shape: Any, dtype: DTypeLike, deviation: float) -> jax.Array:
    """Return initial values from a normal distribution; zeros in an `only_shapes` context."""
    if _HAS_ONLY_SHAPES.get():
        return jnp.zeros(shape, dtype)
    return nnx.initializers.normal(deviation)(rngs.params(), shape, dtype)


def add_matrix(module: nnx.Module, name: str, w: jax.Array, format: WeightFormat) -> None:
    """Convert `w` to a format, and add its arrays to a module as parameters."""
    if not format.is_quantised:
        setattr(module, name, nnx.Param(w.astype(jnp.dtype(format.code))))
        return
    if _HAS_ONLY_SHAPES.get():
        shapes = format.shapes(w.shape)
        arrays = WeightArrays(**{field: jnp.zeros(*shapes[field]) for field in shapes})
    else:
        arrays = quantise(w.astype(jnp.float32), format)
    for suffix, array in zip(("", *SUFFIXES), arrays, strict=True):
        if array is not None:
            setattr(module, name + suffix, nnx.Param(array))


class SeparateMatrices(nnx.Module):
    """Matrices of one layer that cannot be stacked, because their formats differ by layer.

    The stack of layers has an attribute with such a module for each layer. The attribute's name is
    the index of the layer, so parameters are named as in separate layers: ``"layers.3.down_proj"``.

    Args:
      formats: storage format of each matrix of the layer.
    """

    def __init__(self, formats: MatrixFormats):
        self.formats = formats


def separate_matrices(stack: nnx.Module, formats: MatrixFormats, num_layers: int) -> None:
    """Replace stacked float matrices by `SeparateMatrices` if their formats differ by layer.

    Args:
      stack: module with the stacked parameters of all layers. It is changed in place.
      formats: storage format of each matrix of the model.
      num_layers: number of layers.
    """
    if not (kinds := formats.differing):
        return
    for layer in range(num_layers):
        matrices = SeparateMatrices(formats.of_layer(layer))
        for kind in kinds:
            add_matrix(matrices, kind, getattr(stack, kind)[layer], matrices.formats[kind])
        setattr(stack, str(layer), matrices)
    for kind in kinds:
        delattr(stack, kind)
