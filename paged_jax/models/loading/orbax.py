"""Load and save Orbax checkpoints of a model: ``config.json`` and the arrays in ``weights/``.

The arrays have the layout of the saved model: stacked layers or separate layers. A checkpoint of
either layout can be loaded into either layout.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from paged_jax.models.config import LlamaConfig
from paged_jax.models.loading.parameters import (
    Model,
    ModelSpec,
    WeightsError,
    config_text,
    named_arrays,
    resolve_dtype,
)
from paged_jax.models.matrices import SCALE, Sharding, quantise
from paged_jax.models.paged_model import PagedModel

_WEIGHTS = "weights"

Shape = tuple[int, ...]
# Arrays to restore, by name: shape, dtype and placement.
Targets = Mapping[str, jax.ShapeDtypeStruct]


def is_checkpoint(folder: str | Path) -> bool:
    """Return whether a folder was written by `save_checkpoint`."""
    return (Path(folder) / _WEIGHTS).is_dir()


def save_checkpoint(model: PagedModel, path: str | Path) -> None:
    """Write an Orbax checkpoint. Each device writes its part of the weights.

    Args:
      model: a `Llama`.
      path: folder to write. It is created if necessary.

    Raises:
      FileExistsError: the folder already holds a checkpoint. It is never replaced, because a save
        that fails half-way would leave neither the old nor the new checkpoint.
    """
    path = Path(path).resolve()
    if is_checkpoint(path):
        raise FileExistsError(f"save_checkpoint: path must not hold a checkpoint, got {path}.")
    config_json = config_text(model)
    path.mkdir(parents=True, exist_ok=True)
    ocp.save(str(path / _WEIGHTS), named_arrays(model))
    (path / "config.json").write_text(config_json, encoding="utf-8")


def load_checkpoint(
    model_class: Callable[..., Model],
    path: str | Path,
    config: LlamaConfig,
    *,
    dtype: DTypeLike = "auto",
    scan_layers: bool = False,
    sharding: Sharding = None,
) -> Model:
    """Load a checkpoint of `save_checkpoint`, each parameter directly to its devices.

    Converting between stacked and separate layers needs additional memory for a single parameter,
    such as ``qkv_proj``, of all layers.

    Args:
      model_class: class of the model, such as `Llama`.
      path: folder of the checkpoint.
      config: content of its ``config.json``.
      dtype: float32, bfloat16, float16 or int8; ``"auto"`` is the dtype of the checkpoint. Weights
        saved as int8 can only be loaded as int8.
      scan_layers: whether to stack the layers, see `Llama`.
      sharding: see `load_weights`.

    Raises:
      ValueError: a floating-point dtype is requested, but the weights are int8.
      WeightsError: the arrays are damaged, or do not fit the config.
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
    is_stacked = "layers.input_norm" in stored
    saved = ModelSpec(model_class, config, own_dtype, is_stacked).parameters()
    _check_shapes(stored, {name: x.shape for name, x in saved.items()})

    # Floats are restored as float32 before they are rounded to int8.
    must_quantise = dtype == jnp.int8 and own_dtype != "int8"
    spec = ModelSpec(model_class, config, dtype, scan_layers, sharding)
    floats = dataclasses.replace(spec, dtype=jnp.float32) if must_quantise else spec
    if is_stacked != scan_layers:
        arrays = _convert(path, stored, _targets(floats), config.num_hidden_layers)
    elif must_quantise:
        arrays = _restore_layer_by_layer(path, stored, _targets(floats))
    else:
        arrays = _restore(path, stored, _targets(spec)).items()
    if must_quantise:
        arrays = _quantise(arrays, _targets(spec))
    by_name = dict(arrays)
    return spec.build(lambda name, _: by_name.pop(name))


def _targets(spec: ModelSpec) -> Targets:
    # Without a sharding, Orbax would look for the devices of the machine that saved the checkpoint.
    default = jnp.zeros(()).sharding
    return {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=spec.sharding_of(name, x.shape) or default
        )
        for name, x in spec.parameters().items()
    }


def _stored_shapes(path: Path) -> dict[str, Shape]:
    if not is_checkpoint(path):
        raise WeightsError(f"{path}: no checkpoint there.")
    try:
        metadata = ocp.metadata(str(path / _WEIGHTS)).metadata
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from None
    if not isinstance(metadata, Mapping):
        raise WeightsError(f"{path}: the checkpoint is damaged: it lists no arrays.")
    return {name: tuple(leaf.shape) for name, leaf in metadata.items()}


def _check_shapes(stored: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    for name in sorted(expected.keys() | stored.keys()):
        if stored.get(name) != expected.get(name):
            raise WeightsError(
                f"load_checkpoint: {name} must have shape {_describe(expected.get(name))}, "
                f"got {_describe(stored.get(name))}."
            )


def _describe(shape: Shape | None) -> str:
    return "none (no such parameter)" if shape is None else str(list(shape))


def _restore(path: Path, stored: Mapping[str, Shape], targets: Targets) -> dict[str, jax.Array]:
    """Restore some of the stored arrays. The others are not read."""
    abstract = {name: targets.get(name, ocp.PLACEHOLDER) for name in stored}
    try:
        restored = ocp.load(str(path / _WEIGHTS), abstract)
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from None
    return {name: restored[name] for name in targets}


def _restore_layer_by_layer(
    path: Path, stored: Mapping[str, Shape], targets: Targets
) -> Iterator[tuple[str, jax.Array]]:
    for _, names in itertools.groupby(sorted(targets), lambda name: name.rpartition(".")[0]):
        yield from _restore(path, stored, {name: targets[name] for name in names}).items()


def _quantise(
    arrays: Iterable[tuple[str, jax.Array]], targets: Targets
) -> Iterator[tuple[str, jax.Array]]:
    """Convert float32 arrays to the dtypes of the targets. Matrices become int8 with scales."""
    for name, floats in arrays:
        if (scale := targets.get(name + SCALE)) is None:
            yield name, floats.astype(targets[name].dtype)
        else:
            shardings = targets[name].sharding, scale.sharding
            values, scales = jax.jit(quantise, out_shardings=shardings)(floats)
            yield from ((name, values), (name + SCALE, scales))
        del floats  # free the memory before the next array is read


def _damaged(path: Path, error: Exception) -> WeightsError:
    reason = str(error).splitlines()[0][:200]
    return WeightsError(f"{path}: the checkpoint is damaged or incomplete: {reason}")


def _convert(
    path: Path, stored: Mapping[str, Shape], targets: Targets, num_layers: int
) -> Iterator[tuple[str, jax.Array]]:
    """Restore parameters of layers that were saved in the other layout (stacked or separate).

    One kind of parameter, such as ``qkv_proj``, is converted after the other, to save memory.
    """
    outside = {name: target for name, target in targets.items() if name in stored}
    yield from _restore(path, stored, outside).items()
    for kind in sorted({name.split(".")[-1] for name in targets.keys() - outside.keys()}):
        stack, layers = f"layers.{kind}", [f"layers.{i}.{kind}" for i in range(num_layers)]
        if stack in stored:
            whole = _restore(path, stored, {stack: _stacked(targets[layers[0]], num_layers)})
            shardings = tuple(targets[name].sharding for name in layers)
            split = jax.jit(tuple, out_shardings=shardings)(whole.pop(stack))
            yield from zip(layers, split, strict=True)
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
