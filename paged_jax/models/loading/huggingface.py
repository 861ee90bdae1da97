"""Hugging Face folders of safetensors to parameters of a model, and back."""

import dataclasses
import functools
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from paged_jax.models.config import LlamaConfig
from paged_jax.models.folder_kind import find_adapters
from paged_jax.models.loading.foreign_names import check_counts, check_names
from paged_jax.models.loading.int8 import read_quantised
from paged_jax.models.loading.parameters import (
    Model,
    ModelClass,
    Sharding,
    WeightsError,
    build,
    named_parameters,
    parameter_layout,
    parameter_shapes,
    resolve_dtype,
    resolve_sharding,
)
from paged_jax.models.loading.piece import Piece
from paged_jax.models.loading.stored import INDEX, SINGLE, Stored, find_tensors
from paged_jax.models.loading.tensor_map import HEAD, find_pieces, pieces
from paged_jax.models.loading.tied_head import untie_if_different
from paged_jax.models.weight import SCALE

_READ_ELEMENTS = 1 << 22  # 8 or 16 MB: small beside a model, and yet worth opening a file for
_ROTARY_BUFFERS = tuple(
    f"rotary_emb.{name}" for name in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")
)


def load_weights(
    model_class: ModelClass[Model],
    folder: str | Path,
    config: LlamaConfig,
    *,
    dtype: Any = "auto",
    scan_layers: bool = False,
    sharding: Sharding = None,
) -> Model:
    """Load a model from a folder with ``model.safetensors``, whole or in shards.

    Each device receives only its part of each parameter, read from the file directly. Besides the
    weights themselves, memory for one parameter is needed, on the host.

    Args:
      model_class: class of the model to make, such as `Llama`.
      folder: folder of the safetensors.
      config: configuration of the model, which they must fit. If it ties the head and the files
        contain a different head, the model is loaded untied, with a warning.
      dtype: float32, bfloat16, float16 or int8; ``"auto"`` is ``config.dtype``.
      scan_layers: stack the layers, see `Llama`.
      sharding: one for all parameters, or a function of a parameter's name and shape.

    Raises:
      WeightsError: no safetensors, a damaged file, a tensor missing, left over, of the wrong
        shape, not floating point, or not finite.
    """
    dtype = resolve_dtype("load_weights", dtype, config)
    stored = find_tensors(Path(folder), config)
    if adapters := find_adapters(os.listdir(folder)):
        warnings.warn(
            f"{folder}: {adapters[0]} is an adapter, which is not applied. Merge it into the model "
            "(peft: merge_and_unload), or remove it.",
            stacklevel=2,
        )
    check_names(stored)
    check_counts(
        {name: x.shape for name, x in stored.items()}, config.num_hidden_layers, config.num_experts
    )
    config = untie_if_different(config, stored)
    shapes = parameter_shapes(model_class, config, scan_layers=scan_layers)
    layout = parameter_layout(model_class, config, dtype=dtype, scan_layers=scan_layers)
    parts = {name: find_pieces(config, name, stored) for name in shapes}
    _check_tensors(stored, [piece for some in parts.values() for piece in some], config)

    def make(name: str, shape: tuple[int, ...]) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            matrix = name.removesuffix(SCALE)
            if matrix + SCALE not in layout:
                return _read(stored, parts[name], shape, index, layout[name].dtype)
            floats = functools.partial(_read, stored, parts[matrix], shapes[matrix])
            part = np.broadcast_to(np.int8(0), shape)[index].shape
            out = _aligned_empty(part, layout[name].dtype)
            return read_quantised(
                lambda box: floats(box, np.dtype(np.float32)), shapes[matrix], index, out
            )

        placement = resolve_sharding(sharding, name, shape)
        if placement is None:
            return jax.device_put(read((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, placement, read)

    return build(model_class, config, make, dtype=dtype, scan_layers=scan_layers)


def save_weights(model: Any, folder: str | Path, *, max_file_bytes: int = 5 * 10**9) -> None:
    """Write a Hugging Face folder: ``config.json`` and safetensors, which transformers loads.

    Args:
      model: a `Llama`, its layers stacked or not.
      folder: the folder, made if need be; weights in it are replaced once the new ones are written.
      max_file_bytes: weights of more bytes than this are written as several files.

    Raises:
      ValueError: weights are int8, or transformers has no family that computes this config, see
        `LlamaConfig.to_dict`.
    """
    folder = Path(folder)
    config = dataclasses.replace(model.config, dtype=model.norm[...].dtype.name)
    config_json = json.dumps(config.to_dict(), indent=2) + "\n"
    parameters = dict(named_parameters(model))
    if any(name.endswith(SCALE) for name in parameters):
        raise ValueError(
            "save_weights: weights must be floating point, got int8. Use save_checkpoint, or save "
            "the model that they were made from."
        )
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shard(
        [
            (name, list(parts))
            for name in parameters
            for _, parts in itertools.groupby(pieces(config, name), lambda piece: piece.tensor)
        ],
        max_file_bytes // jnp.dtype(config.dtype).itemsize,
    )
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= {parts[0].tensor: file for _, parts in shard}
        # Renamed when whole, so that an interrupted save leaves no half of a file behind.
        save_file(
            {parts[0].tensor: _cut(parameters[name], parts) for name, parts in shard},
            folder / (file + ".partial"),
            metadata={"format": "pt"},  # transformers refuses files without it
        )
        # The library makes its files private; these get the mode of any other new file.
        (folder / (file + ".partial")).chmod(0o666 & ~_umask())
        os.replace(folder / (file + ".partial"), folder / file)
    written = set(weight_map.values())
    if len(shards) > 1:
        total = sum(parameter.nbytes for parameter in parameters.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        written.add(INDEX)
    (folder / "config.json").write_text(config_json, encoding="utf-8")
    for stale in folder.glob("model*.safetensors*"):
        if stale.name not in written:
            stale.unlink()


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it without setting it
    os.umask(mask)
    return mask


def _check_tensors(stored: Mapping[str, Stored], parts: list[Piece], config: LlamaConfig) -> None:
    expected = {piece.tensor: piece for piece in parts}
    missing = [tensor for tensor in expected if tensor not in stored]
    if missing:
        advice = (
            " The model was saved without its head: use the checkpoint that has it, or set "
            "tie_word_embeddings to true in config.json if the embeddings are the head."
        )
        rest = advice if missing == [HEAD] else ""
        raise WeightsError(f"load_weights: {_enumerate(missing)} missing.{rest}")
    left_over = [
        tensor for tensor in stored if tensor not in expected and not _is_redundant(tensor, config)
    ]
    if left_over:
        raise WeightsError(
            f"load_weights: {_enumerate(left_over)} left over: the config has no place for it."
        )
    for tensor, piece in expected.items():
        if stored[tensor].shape != piece.shape:
            raise WeightsError(
                f"load_weights: {tensor} must have shape {list(piece.shape)}, "
                f"got {list(stored[tensor].shape)}."
            )
        if not stored[tensor].is_floating:
            raise WeightsError(
                f"load_weights: {tensor} must be floating point and not quantised, "
                f"got {stored[tensor].dtype}."
            )


def _is_redundant(tensor: str, config: LlamaConfig) -> bool:
    # Older transformers stored the rotary frequencies, and some tools store a tied head. Such a
    # head equals the embeddings, or `untie_if_different` has changed the config.
    return tensor.endswith(_ROTARY_BUFFERS) or (config.tie_word_embeddings and tensor == HEAD)


def _enumerate(tensors: list[str]) -> str:
    others = f" and {len(tensors) - 1} others are" if len(tensors) > 1 else " is"
    return tensors[0] + others


def _read(
    stored: Mapping[str, Stored],
    parts: list[Piece],
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """Read the part of a parameter that one device holds."""
    starts, stops, _ = zip(*(s.indices(n) for s, n in zip(index, shape, strict=True)), strict=True)
    part = _aligned_empty(tuple(np.subtract(stops, starts)), dtype)
    for piece in parts:
        low, high = tuple(map(max, starts, piece.offset)), tuple(map(min, stops, piece.end))
        if all(a < b for a, b in zip(low, high, strict=True)):
            _read_piece(stored, piece, low, high, part[_box(low, high, starts)])
    return part


def _read_piece(
    stored: Mapping[str, Stored],
    piece: Piece,
    low: tuple[int, ...],
    high: tuple[int, ...],
    out: np.ndarray,
) -> None:
    """Fill ``out`` with the box from ``low`` to ``high`` (in the parameter) of one tensor."""
    tensor = stored[piece.tensor]
    box = _box(low, high, piece.offset)
    if piece.axes is not None:
        _read_transposed(tensor, piece, box, out)
        return
    columns = box[piece.num_row_axes :]
    rows = piece.rows[box[: piece.num_row_axes]]
    # Rows in the order of the file, so that those of a head are one read, however they lie in it.
    places = np.argsort(rows, axis=None)
    rows_in_file = rows.ravel()[places]
    most = _READ_ELEMENTS // math.prod(out.shape[piece.num_row_axes :])
    for start, stop in _runs(rows_in_file, most):
        first, last = rows_in_file[[start, stop - 1]].tolist()
        values = tensor.read((slice(first, last + 1), *columns), out.dtype)
        out[np.unravel_index(places[start:stop], rows.shape)] = values


def _read_transposed(tensor: Stored, piece: Piece, box: tuple[slice, ...], out: np.ndarray) -> None:
    """Fill ``out`` with a box of a tensor that lies transposed, one index of the first axis a time:
    an expert."""
    assert piece.axes is not None and piece.axes[0] == 0
    lead = len(piece.extent) - len(piece.axes)
    one = dataclasses.replace(
        piece,
        shape=(1, *piece.shape[1:]),
        split=(1, *(piece.split or piece.shape)[1:]),
        extent=(1, *piece.extent[lead + 1 :]),
    )
    for place, index in enumerate(range(box[lead].start, box[lead].stop)):
        values = tensor.read((slice(index, index + 1),), out.dtype)
        out[(0,) * lead + (place,)] = one.to_parameter(values)[0][box[lead + 1 :]]


def _runs(rows: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """First and last index, the latter exclusive, of runs of consecutive rows, none above `most`
    long."""
    gaps = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    for begin, end in itertools.pairwise([0, *gaps, len(rows)]):
        for start in range(begin, end, max(1, most)):
            yield start, min(start + max(1, most), end)


def _box(low: tuple[int, ...], high: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    # XLA's CPU backend takes over memory that is aligned to 64 bytes, and copies any other.
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _cut(parameter: jax.Array, parts: list[Piece]) -> np.ndarray:
    """A tensor as Hugging Face shapes it, of its parts; on CPU a view where it lies in one."""
    rows = [
        piece.to_rows(np.asarray(parameter)[piece.box])
        for piece in sorted(parts, key=lambda piece: piece.first_row)
    ]
    # A file gets memory as it lies: what is transposed must be copied.
    return np.ascontiguousarray(rows[0]) if len(rows) == 1 else np.concatenate(rows)


def _shard(
    tensors: list[tuple[str, list[Piece]]], max_elements: int
) -> list[list[tuple[str, list[Piece]]]]:
    """Tensors, each as its parameter and its parts there, in the files that they go to."""
    shards: list[list[tuple[str, list[Piece]]]] = [[]]
    size = 0
    for name, parts in tensors:
        elements = math.prod(parts[0].shape)
        if shards[-1] and size + elements > max_elements:
            shards.append([])
            size = 0
        shards[-1].append((name, parts))
        size += elements
    return shards
