"""Loading and saving of Orbax checkpoints of a model.

A checkpoint is a folder with ``config.json`` and the arrays in ``weights/``. If matrices are
quantised, ``formats.json`` contains their formats. The arrays are stored as in the saved model,
with stacked or with separate layers. A checkpoint with stacked layers can be loaded into a model
with separate layers, and vice versa.

Orbax is imported by the functions that use it, because its import takes 0.2 s.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from paged_jax.kernels.platforms import weight_store
from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.models.codecs.dtype_formats import DTYPE_FORMATS, change_format, float_type
from paged_jax.models.config import ModelConfig
from paged_jax.models.errors import WeightsError
from paged_jax.models.loading.formats import find_devices
from paged_jax.models.loading.parameters import (
    Model,
    ModelSpec,
    config_dict,
    named_arrays,
    resolve_dtype,
)
from paged_jax.models.matrices import Sharding
from paged_jax.models.matrix_formats import (
    SUFFIXES,
    MatrixFormats,
    is_matrix,
    is_stacked,
    matrix_name,
)
from paged_jax.models.model_folder import read_json
from paged_jax.monitoring import loading_bar

_WEIGHTS, _FORMATS = "weights", "formats.json"
# Number of bytes that are restored in one call. A call has an overhead of some milliseconds.
_PART_BYTES = 1 << 28

Shape = tuple[int, ...]
# Shape, dtype and placement of each array to restore, by name.
Targets = Mapping[str, jax.ShapeDtypeStruct]


def is_checkpoint(folder: str | Path) -> bool:
    """Return whether a folder was written by `save_checkpoint`."""
    return (Path(folder) / _WEIGHTS).is_dir()


def save_checkpoint(model: Any, path: str | Path) -> None:
    """Write a model as an Orbax checkpoint. Each device writes its part of the weights.

    Args:
      model: a `Decoder`.
      path: folder to write. It is created if necessary.

    Raises:
      FileExistsError: the folder already holds a checkpoint. A checkpoint is never overwritten,
        because an interrupted save would destroy the old one without completing the new one.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    path = Path(path).resolve()
    if is_checkpoint(path):
        raise FileExistsError(
            f"save_checkpoint: path must not contain a checkpoint already, got {path}. Use another "
            "path."
        )
    config, formats = config_dict(model), model.formats
    path.mkdir(parents=True, exist_ok=True)
    ocp.save(str(path / _WEIGHTS), named_arrays(model))
    if formats.is_quantised:
        (path / _FORMATS).write_text(json.dumps(formats.to_dict(), indent=2) + "\n", "utf-8")
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(
    model_class: Callable[..., Model],
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: DTypeLike = "auto",
    scan_layers: bool = False,
    sharding: Sharding = None,
    dequantise: bool = False,
    formats: MatrixFormats | None = None,
    show_progress: bool | None = None,
) -> Model:
    """Load a checkpoint written by `save_checkpoint`, directly to the devices.

    If layers must be stacked or separated, this needs additional memory for one parameter (such as
    ``qkv_proj``) of all layers.

    `path` is the folder of the checkpoint. For the other arguments, see `load_weights`. With
    ``dtype="auto"``, weights have the dtype of the checkpoint. Matrices that are quantised in the
    checkpoint keep their format, unless `dtype` is a quantised format or `dequantise` is True.

    Raises:
      WeightsError: the checkpoint is damaged, or its arrays do not fit the config.
    """
    path = Path(path).resolve()
    stored, saved_formats = _stored_shapes(path), _read_formats(path, config)
    dtype = resolve_dtype("load_checkpoint", dtype, config)
    floats = float_type(dtype, config.dtype)
    was_stacked = any(map(is_stacked, stored))
    saved = ModelSpec(model_class, config, config.dtype, was_stacked, formats=saved_formats)
    _check_shapes(stored, {name: x.shape for name, x in saved.parameters().items()})

    if formats is None:
        options: Any = {"dtype": dtype, "dequantise": dequantise}
        devices = find_devices(config, sharding)
        options |= {"platform": next(iter(devices)).platform, "num_devices": len(devices)}
        formats = find_saved_formats(path, config, **options)
    spec = ModelSpec(model_class, config, floats, scan_layers, sharding, formats)
    # If the format of a matrix changes, it is first restored in the saved format, and then
    # converted. Matrices can only be stacked if they have the same format in all layers. If the
    # conversion changes which matrices can be stacked, keep the layers separate until it is done.
    restored_formats = saved_formats.with_floats(floats)
    stacks = scan_layers and restored_formats.differing == formats.differing
    changed = dataclasses.replace(spec, scan_layers=stacks)
    targets = _targets(dataclasses.replace(changed, formats=restored_formats))
    final_targets = _targets(changed)
    targets = {
        name: target
        if name in final_targets and final_targets[name].shape == target.shape
        else _whole(target)
        for name, target in targets.items()
    }
    if was_stacked != stacks:
        arrays = _convert(path, stored, targets, config.num_hidden_layers)
    else:
        arrays = _restore_in_parts(path, stored, targets)
    with loading_bar(_num_bytes(targets), is_shown=show_progress) as advance:
        counted = _counted(arrays, advance)
        by_name = dict(_change_formats(counted, restored_formats, formats, final_targets))

    def find(name: str, shape: Shape, _: Any) -> jax.Array:
        if name in by_name:
            return by_name.pop(name)
        layers = [f"layers.{i}.{name.removeprefix('layers.')}" for i in range(shape[0])]
        return _join([by_name.pop(layer) for layer in layers], spec.sharding_of(name, shape))

    return spec.build(find)


def _num_bytes(targets: Targets) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in targets.values())


def _counted(
    arrays: Iterable[tuple[str, jax.Array]], advance: Callable[[int], None]
) -> Iterator[tuple[str, jax.Array]]:
    """Yield `arrays` unchanged, and call `advance` with the size of each array in bytes."""
    for name, array in arrays:
        advance(array.nbytes)
        yield name, array


def find_saved_formats(
    path: str | Path,
    config: ModelConfig,
    *,
    platform: str,
    num_devices: int,
    dtype: DTypeLike = "auto",
    dequantise: bool = False,
) -> MatrixFormats:
    """Return the formats that `load_checkpoint` would choose for the matrices of a checkpoint.

    `num_devices` is the number of devices over which the model will be divided, and `platform` is
    their platform. The other arguments are as in `load_checkpoint`.
    """
    dtype = resolve_dtype("load_checkpoint", dtype, config)
    if dtype in DTYPE_FORMATS:
        return MatrixFormats.of_dtype(dtype, config)
    if dequantise:
        return MatrixFormats(WeightFormat(dtype))
    formats = _read_formats(Path(path), config).with_floats(dtype)
    store = weight_store(platform)
    if all(
        store.stored_format(saved_format, num_devices) == saved_format
        for saved_format in formats.all_formats
    ):
        return formats
    return MatrixFormats.create(
        {
            name: store.stored_format(formats[name], num_devices)
            for name in _stored_shapes(Path(path))
            if is_matrix(name)
        }
    )


def _read_formats(path: Path, config: ModelConfig) -> MatrixFormats:
    """Return the formats of the matrices in a checkpoint."""
    if not (path / _FORMATS).exists():
        return MatrixFormats(WeightFormat(config.dtype))
    try:
        return MatrixFormats.from_dict(read_json(path / _FORMATS))
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise _damaged(path, error) from None


def _targets(spec: ModelSpec) -> Targets:
    # Without a sharding, Orbax would look for the devices of the machine that saved the checkpoint.
    default = jnp.zeros(()).sharding
    return {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=spec.sharding_of(name, x.shape) or default
        )
        for name, x in spec.parameters().items()
    }


def _whole(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the target, replicated on all devices if its sharding does not divide its shape.

    For example, scales of two levels may not be divisible. They are converted to another format
    after they are restored, and only the result is divided over the devices.
    """
    sharding = target.sharding
    try:
        if sharding is not None:
            sharding.shard_shape(target.shape)
    except ValueError:
        assert isinstance(sharding, NamedSharding)
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=replicated)
    return target


def _stored_shapes(path: Path) -> dict[str, Shape]:
    import orbax.checkpoint.experimental.v1 as ocp

    if not is_checkpoint(path):
        raise WeightsError(f"{path}: no checkpoint there.")
    try:
        metadata = ocp.metadata(str(path / _WEIGHTS)).metadata
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from None
    if not isinstance(metadata, Mapping):
        raise WeightsError(
            f"{path}: the checkpoint is damaged, because its metadata lists no arrays."
        )
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
    """Restore the arrays in `targets` from a checkpoint, without reading the other arrays."""
    import orbax.checkpoint.experimental.v1 as ocp

    abstract = {name: targets.get(name, ocp.PLACEHOLDER) for name in stored}
    try:
        restored = ocp.load(str(path / _WEIGHTS), abstract)
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from None
    return {name: restored[name] for name in targets}


def _restore_in_parts(
    path: Path, stored: Mapping[str, Shape], targets: Targets
) -> Iterator[tuple[str, jax.Array]]:
    """Restore arrays in several calls of about `_PART_BYTES`, for a progress bar.

    The arrays are yielded in the order of their names, so the values and scales of a matrix follow
    each other.
    """
    part: dict[str, jax.ShapeDtypeStruct] = {}
    for name in sorted(targets):
        part[name] = targets[name]
        if _num_bytes(part) >= _PART_BYTES:
            yield from _restore(path, stored, part).items()
            part = {}
    if part:
        yield from _restore(path, stored, part).items()


def _change_formats(
    arrays: Iterable[tuple[str, jax.Array]],
    source: MatrixFormats,
    target: MatrixFormats,
    targets: Targets,
) -> Iterator[tuple[str, jax.Array]]:
    """Convert matrices to another format, see `change_format`.

    Args:
      arrays: names and arrays of all parameters. The arrays of a matrix should follow each other,
        because they stay in memory until the matrix is complete.
      source: formats of the given matrices.
      target: formats of the resulting matrices.
      targets: shape, dtype and placement of the resulting arrays.
    """
    parts: dict[str, dict[str, jax.Array]] = {}
    for name, array in arrays:
        matrix = matrix_name(name)
        if not is_matrix(matrix) or source[matrix] == target[matrix]:
            yield name, array
            continue
        matrix_arrays = parts.setdefault(matrix, {})
        matrix_arrays[name.removeprefix(matrix)] = array
        if len(matrix_arrays) < len(source[matrix].shapes((1, 32))):
            continue
        del array
        names = [matrix + suffix for suffix in ("", *SUFFIXES) if matrix + suffix in targets]
        shardings = tuple(targets[name].sharding for name in names)
        change = _changer(source[matrix], target[matrix], is_stacked(matrix), shardings)
        stored_arrays = parts.pop(matrix)
        results = change(WeightArrays(*(stored_arrays.get(suffix) for suffix in ("", *SUFFIXES))))
        del stored_arrays, matrix_arrays
        yield from zip(names, results, strict=True)


@functools.lru_cache(maxsize=16)
def _changer(
    source: WeightFormat,
    target: WeightFormat,
    is_stacked: bool,
    shardings: tuple[jax.sharding.Sharding, ...],
) -> Callable[[WeightArrays], list[jax.Array]]:
    def change(arrays: WeightArrays) -> list[jax.Array]:
        return jax.tree.leaves(change_format(arrays, source, target, is_stacked=is_stacked))

    return jax.jit(change, out_shardings=list(shardings))


def _damaged(path: Path, error: Exception) -> WeightsError:
    reason = str(error).splitlines()[0][:200]
    return WeightsError(f"{path}: the checkpoint is damaged or incomplete: {reason}")


def _convert(
    path: Path, stored: Mapping[str, Shape], targets: Targets, num_layers: int
) -> Iterator[tuple[str, jax.Array]]:
    """Restore a checkpoint, and convert stacked layers to separate layers or vice versa.

    To save memory, only one parameter (such as ``qkv_proj`` of all layers) is converted at a time.
    """
    outer_targets = {name: target for name, target in targets.items() if name in stored}
    yield from _restore(path, stored, outer_targets).items()
    for kind in sorted({name.split(".")[-1] for name in targets.keys() - outer_targets.keys()}):
        stack, layers = f"layers.{kind}", [f"layers.{i}.{kind}" for i in range(num_layers)]
        if stack in stored:
            stacked = _restore(path, stored, {stack: _stacked(targets[layers[0]], num_layers)})
            shardings = tuple(targets[name].sharding for name in layers)
            split = jax.jit(tuple, out_shardings=shardings)(stacked.pop(stack))
            yield from zip(layers, split, strict=True)
        else:
            layer_arrays = _restore(path, stored, dict.fromkeys(layers, _unstacked(targets[stack])))
            yield stack, _join([layer_arrays.pop(name) for name in layers], targets[stack].sharding)


def _join(layers: list[jax.Array], sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Stack a parameter of all layers to one array with the given sharding."""
    return jax.jit(lambda *layers: jnp.stack(layers), out_shardings=sharding)(*layers)


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
