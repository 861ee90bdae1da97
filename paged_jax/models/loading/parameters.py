"""Names, shapes and dtypes of a model's parameters, and construction from loaded arrays.

The functions that load weights take the model class as an argument. They cannot import `Decoder`,
because `Decoder.from_pretrained` imports them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from paged_jax.models.codecs.dtype_formats import DTYPE_FORMATS, float_type, name_of
from paged_jax.models.config import ModelConfig
from paged_jax.models.matrices import Sharding
from paged_jax.models.matrix_formats import MatrixFormats, is_stacked
from paged_jax.models.matrix_modules import only_shapes
from paged_jax.models.paged_model import PagedModel

# Values of the option `dtype`: dtypes and quantised formats of weights.
DTYPES = ("float32", "bfloat16", "float16", *DTYPE_FORMATS)

Model = TypeVar("Model", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class ModelSpec(Generic[Model]):
    """Description of a model to load: the arguments of its class, and its placement.

    Attributes:
      model_class: class of the model, or another callable with the arguments of `Decoder`.
      config: configuration of the model.
      dtype: dtype of the weights.
      scan_layers: whether the layers are stacked, see `Decoder`.
      sharding: placement of the parameters.
      formats: storage format of each matrix; None for the formats that `dtype` implies.
    """

    model_class: Callable[..., Model]
    config: ModelConfig
    dtype: DTypeLike
    scan_layers: bool
    sharding: Sharding = None
    formats: MatrixFormats | None = None

    def parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and dtype of every parameter by name, without allocating them."""
        return {
            _name(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            for path, variable in nnx.to_flat_state(nnx.state(self._abstract_model()))
        }

    def separate_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that parameters would have with separate layers, by name."""
        shapes = {}
        for name, parameter in self.parameters().items():
            if is_stacked(name):
                kind, (num_layers, *shape) = name.removeprefix("layers."), parameter.shape
                shapes |= {f"layers.{i}.{kind}": tuple(shape) for i in range(num_layers)}
            else:
                shapes[name] = parameter.shape
        return shapes

    def sharding_of(self, name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding | None:
        """Return the sharding of a parameter; None for the default device."""
        return self.sharding(name, shape) if callable(self.sharding) else self.sharding

    def build(self, make: Callable[[str, tuple[int, ...], np.dtype], jax.Array]) -> Model:
        """Build the model from the parameters that ``make(name, shape, dtype)`` returns.

        No random initial weights are created. For a quantised matrix, `make` is called first for
        its values, then for its scales.
        """
        config = dataclasses.replace(
            self.config, dtype=float_type(self.dtype, self.config.dtype).name
        )
        graphdef, state = nnx.split(dataclasses.replace(self, config=config)._abstract_model())
        parameters = [
            (path, variable.replace(make(_name(path), variable.shape, variable.dtype)))
            for path, variable in nnx.to_flat_state(state)
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(parameters))

    def _abstract_model(self) -> Model:
        return _abstract_model(
            self.model_class, self.config, self.dtype, self.scan_layers, self.formats
        )


# Loading needs the same model several times, and tracing it takes 0.1 s.
@functools.lru_cache(maxsize=8)
def _abstract_model(
    model_class: Callable[..., Model],
    config: ModelConfig,
    dtype: DTypeLike,
    scan_layers: bool,
    formats: MatrixFormats | None,
) -> Model:
    """Return a model with `jax.ShapeDtypeStruct` as parameters. Callers must not modify it."""
    options = {} if formats is None else {"formats": formats}
    with only_shapes():
        return nnx.eval_shape(
            lambda: model_class(
                config, dtype=dtype, scan_layers=scan_layers, rngs=nnx.Rngs(0), **options
            )
        )


def named_arrays(params: Any) -> dict[str, Any]:
    """Return the arrays in a tree by their dotted paths, such as ``"layers.0.qkv_proj"``.

    Args:
      params: an `nnx.Module`, an `nnx.State`, or any tree of arrays. Of a module, only variables of
        type `nnx.Param` are used.

    Returns:
      The leaves of the tree by path, in the order of `jax.tree.leaves`.
    """
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    if isinstance(params, nnx.State):
        params = nnx.to_pure_dict(params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def resolve_dtype(function: str, dtype: DTypeLike | None, config: ModelConfig) -> str:
    """Convert the option `dtype` to one of the names in `DTYPES`.

    ``"auto"`` and None become ``config.dtype``.

    Raises:
      ValueError: `dtype` is not supported for weights.
    """
    try:
        resolved = name_of(config.dtype if dtype is None or dtype == "auto" else dtype)
    except TypeError:
        resolved = None
    if resolved not in DTYPES:
        raise ValueError(
            f"{function}: dtype must be 'auto' or one of {', '.join(DTYPES)}, got {dtype!r}."
        )
    return resolved


def config_dict(model: PagedModel) -> dict[str, Any]:
    """Return the content of ``config.json`` for a model, with its floating-point dtype."""
    return dataclasses.replace(model.config, dtype=model.float_dtype.name).to_dict()


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)
