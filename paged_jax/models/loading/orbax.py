"""Orbax checkpoints of a model: ``config.json`` beside the arrays in ``weights/``.

The layout on disk is that of the model that was saved. Either layout, layers stacked or one by
one, is loaded from either.
"""

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import NamedSharding, PartitionSpec

from paged_jax.models.config import LlamaConfig
from paged_jax.models.loading.parameters import (
    Model,
    ModelClass,
    Sharding,
    WeightsError,
    build,
    named_parameters,
    parameter_layout,
    resolve_dtype,
    resolve_sharding,
)
from paged_jax.models.weight import SCALE, quantise

_WEIGHTS = "weights"


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder was written by `save_checkpoint`."""
    return (Path(folder) / _WEIGHTS).is_dir()


def save_checkpoint(model: Any, path: str | Path) -> None:
    """Write an Orbax checkpoint, each device its part of the weights.

    Args:
      model: a `Llama`.
      path: the folder to write, made if need be.

    Raises:
      FileExistsError: the path holds a checkpoint. It is never replaced: were the save to fail
        half-way, neither would be left.
    """
    path = Path(path).resolve()
    if is_checkpoint(path):
        raise FileExistsError(f"save_checkpoint: path must not hold a checkpoint, got {path}.")
    config = replace(model.config, dtype=model.norm[...].dtype.name)
    config_json = json.dumps(config.to_dict(), indent=2) + "\n"
    path.mkdir(parents=True, exist_ok=True)
    ocp.save(str(path / _WEIGHTS), dict(named_parameters(model)))
    (path / "config.json").write_text(config_json, encoding="utf-8")


def load_checkpoint(
    model_class: ModelClass[Model],
    path: str | Path,
    config: LlamaConfig,
    *,
    dtype: Any = "auto",
    scan_layers: bool = False,
    sharding: Sharding = None,
) -> Model:
    """Load a checkpoint of `save_checkpoint`, each parameter right where it belongs.

    Where the checkpoint has the other layout of layers, memory for one more parameter of all
    layers is needed.

    Args:
      model_class: class of the model to make, such as `Llama`.
      path: the folder of the checkpoint.
      config: the content of its ``config.json``.
      dtype: float32, bfloat16, float16 or int8; ``"auto"`` is that of the checkpoint, and int8
        cannot become floats again.
      scan_layers: stack the layers, see `Llama`.
      sharding: one for all parameters, or a function of a parameter's name and shape.

    Raises:
      ValueError: floats are asked for, and the weights are int8.
      WeightsError: the arrays are damaged, or not those that the config describes.
    """
    path = Path(path).resolve()
    stored = _stored_shapes(path)
    own_dtype = "int8" if any(name.endswith(SCALE) for name in stored) else config.dtype
    dtype = resolve_dtype(
        "load_checkpoint", own_dtype if dtype in ("auto", None) else dtype, config
    )
    if own_dtype == "int8" and dtype != jnp.int8:
        raise ValueError(
            f"load_checkpoint: dtype must be 'auto' or 'int8' where weights are int8, got {dtype}."
        )
    # Floats are restored before they are rounded to int8.
    stored_dtype = jnp.float32 if dtype == jnp.int8 and own_dtype != "int8" else dtype
    is_stacked = "layers.input_norm" in stored
    layout = functools.partial(parameter_layout, model_class, config)
    expected = layout(dtype=own_dtype, scan_layers=is_stacked)
    _check_shapes(stored, {name: x.shape for name, x in expected.items()})

    def targets(dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_placed(sharding, name, x.shape))
            for name, x in layout(dtype=dtype, scan_layers=scan_layers).items()
        }

    if is_stacked != scan_layers:
        parts = _convert(path, stored, targets(stored_dtype), config.num_hidden_layers)
    elif stored_dtype != dtype:
        parts = _restore_layer_by_layer(path, stored, targets(stored_dtype))
    else:
        parts = _restore(path, stored, targets(dtype)).items()
    if stored_dtype != dtype:
        parts = _round(parts, targets(dtype))
    arrays = dict(parts)
    return build(
        model_class,
        config,
        lambda name, _: arrays.pop(name),
        dtype=dtype,
        scan_layers=scan_layers,
    )


def _placed(sharding: Sharding, name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    # Without one, Orbax would go by the devices of the machine that saved.
    return resolve_sharding(sharding, name, shape) or jnp.zeros(()).sharding


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if not is_checkpoint(path):
        raise WeightsError(f"{path}: no checkpoint there.")
    try:
        metadata = ocp.metadata(str(path / _WEIGHTS)).metadata
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from None
    if not isinstance(metadata, Mapping):
        raise WeightsError(f"{path}: the checkpoint is damaged: it lists no arrays.")
    return {name: tuple(leaf.shape) for name, leaf in metadata.items()}


def _check_shapes(
    stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for name in sorted(expected.keys() | stored.keys()):
        if stored.get(name) != expected.get(name):
            raise WeightsError(
                f"load_checkpoint: {name} must have shape {_describe(expected.get(name))}, "
                f"got {_describe(stored.get(name))}."
            )


def _describe(shape: tuple[int, ...] | None) -> str:
    return "none (no such parameter)" if shape is None else str(list(shape))


def _restore(
    path: Path, stored: Mapping[str, Any], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Restore some of the arrays, and read nothing of the others."""
    abstract = {name: targets.get(name, ocp.PLACEHOLDER) for name in stored}
    try:
        restored = ocp.load(str(path / _WEIGHTS), abstract)
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from None
    return {name: restored[name] for name in targets}


def _restore_layer_by_layer(
    path: Path, stored: Mapping[str, Any], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, jax.Array]]:
    for _, names in itertools.groupby(sorted(targets), lambda name: name.rpartition(".")[0]):
        yield from _restore(path, stored, {name: targets[name] for name in names}).items()


def _round(
    parts: Iterable[tuple[str, jax.Array]], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, jax.Array]]:
    """Arrays of float32 as arrays of the types of the targets, some of them in int8."""
    for name, floats in parts:
        if (scale := targets.get(name + SCALE)) is None:
            yield name, floats.astype(targets[name].dtype)
        else:
            places = targets[name].sharding, scale.sharding
            values, scales = jax.jit(quantise, out_shardings=places)(floats)
            yield from ((name, values), (name + SCALE, scales))
        del floats  # before the next are read


def _damaged(path: Path, error: Exception) -> WeightsError:
    reason = str(error).splitlines()[0][:200]
    return WeightsError(f"{path}: the checkpoint is damaged or incomplete: {reason}")


def _convert(
    path: Path,
    stored: Mapping[str, Any],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    num_layers: int,
) -> Iterator[tuple[str, jax.Array]]:
    """Restore the other layout of layers, one kind of parameter after the other."""
    outside = {name: target for name, target in targets.items() if name in stored}
    yield from _restore(path, stored, outside).items()
    for kind in sorted({name.split(".")[-1] for name in targets.keys() - outside.keys()}):
        stack, layers = f"layers.{kind}", [f"layers.{i}.{kind}" for i in range(num_layers)]
        if stack in stored:
            whole = _restore(path, stored, {stack: _stacked(targets[layers[0]], num_layers)})
            shardings = tuple(targets[name].sharding for name in layers)
            parts = jax.jit(tuple, out_shardings=shardings)(whole.pop(stack))
            yield from zip(layers, parts, strict=True)
        else:
            parts = _restore(path, stored, dict.fromkeys(layers, _unstacked(targets[stack])))
            join = jax.jit(lambda *parts: jnp.stack(parts), out_shardings=targets[stack].sharding)
            yield stack, join(*(parts.pop(name) for name in layers))


def _stacked(layer: jax.ShapeDtypeStruct, num_layers: int) -> jax.ShapeDtypeStruct:
    sharding = layer.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((num_layers, *layer.shape), layer.dtype, sharding=sharding)


def _unstacked(stack: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = stack.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)
