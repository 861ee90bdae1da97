"""The parameters of a model by name, and a model made from them. Knows no model class.

A loader is given the class: anything that is called as `Llama` is, with a config and a layout.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.models.config import LlamaConfig
from paged_jax.models.weight import float_type

_DTYPES = ("float32", "bfloat16", "float16", "int8")

# Where a parameter goes: one placement for all (None: the default device), or one by its name
# ("layers.0.qkv_proj", or "layers.qkv_proj" when the layers are stacked) and its shape.
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None

Model = TypeVar("Model", bound=nnx.Module, covariant=True)


class ModelClass(Protocol[Model]):
    """A class of models with one config and two layouts of layers, such as `Llama`."""

    def __call__(
        self, config: LlamaConfig, *, dtype: Any, scan_layers: bool, rngs: nnx.Rngs
    ) -> Model:
        """Make a model with initial weights."""
        ...


class WeightsError(ValueError):
    """The files do not hold the weights of this model."""


def build(
    model_class: ModelClass[Model],
    config: LlamaConfig,
    make: Callable[[str, tuple[int, ...]], jax.Array],
    *,
    dtype: Any,
    scan_layers: bool,
) -> Model:
    """Build a model whose parameters come from ``make(name, shape)``, and initialise none."""
    config = dataclasses.replace(config, dtype=float_type(dtype, config).name)
    graphdef, state = nnx.split(_abstract(model_class, config, scan_layers, dtype))
    parameters = [
        (path, variable.replace(make(_name(path), variable.shape)))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(parameters))


def parameter_shapes(
    model_class: ModelClass, config: LlamaConfig, *, scan_layers: bool
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a model of floats, such as ``"layers.0.qkv_proj"``."""
    layout = parameter_layout(model_class, config, dtype=config.dtype, scan_layers=scan_layers)
    return {name: x.shape for name, x in layout.items()}


def parameter_layout(
    model_class: ModelClass, config: LlamaConfig, *, dtype: Any, scan_layers: bool, **options: Any
) -> dict[str, jax.ShapeDtypeStruct]:
    """Name, shape and type of every parameter of a model with weights of a type.

    Args:
      model_class: class of the model.
      config: its configuration.
      dtype: type of the weights.
      scan_layers: whether layers are stacked.
      options: what else it is made with, such as the `part` of one of several devices.
    """
    state = nnx.state(_abstract(model_class, config, scan_layers, dtype, **options))
    return {
        _name(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for path, variable in nnx.to_flat_state(state)
    }


def named_parameters(model: nnx.Module) -> Iterator[tuple[str, jax.Array]]:
    """Name and array of every parameter."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield _name(path), variable[...]


def resolve_dtype(function: str, dtype: Any, config: LlamaConfig) -> np.dtype:
    """Return the dtype that ``"auto"`` or a dtype of weights stands for.

    Args:
      function: the name that an error begins with.
      dtype: ``"auto"`` or None is that of the config.
      config: configuration of the model.

    Raises:
      ValueError: not a dtype of weights that this library computes with.
    """
    try:
        resolved = jnp.dtype(config.dtype if dtype is None or dtype == "auto" else dtype)
    except TypeError:
        resolved = None
    if resolved is None or resolved.name not in _DTYPES:
        raise ValueError(
            f"{function}: dtype must be 'auto' or one of {', '.join(_DTYPES)}, got {dtype!r}."
        )
    return resolved


def resolve_sharding(
    sharding: Sharding, name: str, shape: tuple[int, ...]
) -> jax.sharding.Sharding | None:
    """Return where one parameter goes; None is the default device."""
    return sharding(name, shape) if callable(sharding) else sharding


def _abstract(
    model_class: ModelClass[Model],
    config: LlamaConfig,
    scan_layers: bool,
    dtype: Any,
    **options: Any,
) -> Model:
    make = functools.partial(model_class, config, dtype=dtype, scan_layers=scan_layers, **options)
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)
