"""Load and save the weights of a model as a Hugging Face folder of safetensors."""

import dataclasses
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from paged_jax.models.config import LlamaConfig
from paged_jax.models.gguf_file import GgufFile, is_gguf
from paged_jax.models.loading.gguf_names import find_gguf_tensors
from paged_jax.models.loading.parameters import (
    Model,
    ModelSpec,
    WeightsError,
    config_text,
    named_arrays,
    resolve_dtype,
)
from paged_jax.models.loading.safetensors_files import (
    INDEX_FILE,
    SINGLE_FILE,
    check_counts,
    check_names,
    find_tensors,
)
from paged_jax.models.loading.stored_tensors import StoredTensor
from paged_jax.models.loading.tensor_map import (
    EMBEDDINGS,
    HEAD,
    TensorMapping,
    map_parameter,
    map_to_available,
)
from paged_jax.models.matrices import SCALE, Sharding, quantise
from paged_jax.models.model_folder import find_adapters
from paged_jax.models.paged_model import PagedModel

# Elements per read: 8 or 16 MB. This is little memory compared with a model, but so much that
# opening the file for each read costs little.
_READ_ELEMENTS = 1 << 22
_COMPARED_ROWS = 4096
_ROTARY_BUFFERS = tuple(
    f"rotary_emb.{name}" for name in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")
)

Index = tuple[slice, ...]


def load_weights(
    model_class: Callable[..., Model],
    folder: str | Path,
    config: LlamaConfig,
    *,
    dtype: DTypeLike = "auto",
    scan_layers: bool = False,
    sharding: Sharding = None,
) -> Model:
    """Load a model from a folder with ``model.safetensors``, whole or in shards, or from GGUF.

    Each device reads only its part of each parameter from the files. Apart from the weights
    themselves, the host needs memory for a single parameter.

    Args:
      model_class: class of the model, such as `Llama`.
      folder: folder of the safetensors, or a GGUF file.
      config: configuration of the model. If it ties the head to the embeddings but the files
        contain a different head, the model is loaded untied, with a warning.
      dtype: float32, bfloat16, float16 or int8; ``"auto"`` is ``config.dtype``.
      scan_layers: whether to stack the layers, see `Llama`.
      sharding: one sharding for all parameters, or a function of a parameter's name and shape.

    Raises:
      WeightsError: the folder has no safetensors, a file is damaged, or a tensor is missing,
        unexpected, of the wrong shape, not floating point, or not finite.
    """
    dtype = resolve_dtype("load_weights", dtype, config)
    if is_gguf(folder):
        stored: Mapping[str, StoredTensor] = find_gguf_tensors(GgufFile.open(folder), config)
    else:
        stored = find_tensors(Path(folder), config)
    if Path(folder).is_dir() and (adapters := find_adapters(os.listdir(folder))):
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
    spec = ModelSpec(model_class, config, dtype, scan_layers, sharding)
    parameters = spec.parameters()
    mappings = {
        name: map_to_available(config, name, stored)
        for name in parameters
        if not name.endswith(SCALE)
    }
    _check_tensors(stored, [each for some in mappings.values() for each in some], config)

    def make(name: str, shape: tuple[int, ...]) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            matrix = name.removesuffix(SCALE)
            if matrix + SCALE in parameters:
                matrix_shape = parameters[matrix].shape
                out = _aligned_empty(_shape_of(shape, index), parameters[name].dtype)
                return _read_int8(stored, mappings[matrix], matrix_shape, index, out)
            return _read_box(stored, mappings[name], shape, index, parameters[name].dtype)

        placement = spec.sharding_of(name, shape)
        if placement is None:
            return jax.device_put(read((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, placement, read)

    return spec.build(make)


def save_weights(model: PagedModel, folder: str | Path, *, max_file_bytes: int = 5 * 10**9) -> None:
    """Write a Hugging Face folder (``config.json`` and safetensors), which transformers can load.

    Args:
      model: a `Llama`, with stacked layers or not.
      folder: folder to write. It is created if necessary. Old weights in it are removed after the
        new ones are written.
      max_file_bytes: maximum bytes per file. Larger models are split into several files.

    Raises:
      ValueError: the weights are int8, or no family of transformers has this config, see
        `LlamaConfig.to_dict`.
    """
    folder = Path(folder)
    config_json = config_text(model)
    parameters = named_arrays(model)
    if any(name.endswith(SCALE) for name in parameters):
        raise ValueError(
            "save_weights: weights must be floating point, got int8. Use save_checkpoint, or save "
            "the model that they were made from."
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = _split_into_files(
        [
            (name, list(mappings))
            for name in parameters
            for _, mappings in itertools.groupby(
                map_parameter(model.config, name), lambda mapping: mapping.tensor
            )
        ],
        max_file_bytes // model.float_dtype.itemsize,
    )
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        is_single = len(files) == 1
        file = SINGLE_FILE if is_single else f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= {mappings[0].tensor: file for _, mappings in tensors}
        partial = folder / (file + ".partial")
        # The file is renamed when it is complete, so that an interrupted save leaves no incomplete
        # file behind.
        save_file(
            {
                mappings[0].tensor: _to_tensor(parameters[name], mappings)
                for name, mappings in tensors
            },
            partial,
            metadata={"format": "pt"},  # required by transformers
        )
        # safetensors creates files that only their owner can read. Give them the usual mode of new
        # files.
        partial.chmod(0o666 & ~_umask())
        os.replace(partial, folder / file)
    written = set(weight_map.values())
    if len(files) > 1:
        total = sum(parameter.nbytes for parameter in parameters.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        written.add(INDEX_FILE)
    (folder / "config.json").write_text(config_json, encoding="utf-8")
    for stale in folder.glob("model*.safetensors*"):
        if stale.name not in written:
            stale.unlink()


def untie_if_different(config: LlamaConfig, stored: Mapping[str, StoredTensor]) -> LlamaConfig:
    """Return the config, untied if the files contain a head that differs from the embeddings.

    transformers does the same: a tensor in the file is never dropped because of the config.

    Args:
      config: configuration of the model.
      stored: tensors of the files, see `find_tensors`.
    """
    if not config.tie_word_embeddings or HEAD not in stored or EMBEDDINGS not in stored:
        return config
    if _are_equal(stored[HEAD], stored[EMBEDDINGS]):
        return config
    warnings.warn(
        f"{stored[HEAD].path}: {HEAD} differs from the embeddings although config.json has "
        "tie_word_embeddings: true. The model is loaded untied. Set tie_word_embeddings to false.",
        stacklevel=2,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    if first.shape != second.shape or not (first.is_floating and second.is_floating):
        return False
    num_rows = first.shape[0]
    for start in range(0, num_rows, _COMPARED_ROWS):
        rows = (slice(start, min(start + _COMPARED_ROWS, num_rows)),)
        left, right = (x.read(rows, np.dtype(np.float32)) for x in (first, second))
        if not np.array_equal(left, right):
            return False
    return True


def _check_tensors(
    stored: Mapping[str, StoredTensor], mappings: list[TensorMapping], config: LlamaConfig
) -> None:
    expected = {mapping.tensor: mapping for mapping in mappings}
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
    for tensor, mapping in expected.items():
        if stored[tensor].shape != mapping.shape:
            raise WeightsError(
                f"load_weights: {tensor} must have shape {list(mapping.shape)}, "
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


def _read_int8(
    stored: Mapping[str, StoredTensor],
    mappings: list[TensorMapping],
    shape: tuple[int, ...],
    index: Index,
    out: np.ndarray,
) -> np.ndarray:
    """Quantise a matrix of the given shape while reading it, some rows at a time.

    `index` selects a part of the int8 matrix, or of its scales, which have a single column. Whole
    rows are read even if the device holds only some columns, because the largest number of the row
    determines its scale.
    """
    *rows, columns = index
    start, stop, _ = rows[0].indices(shape[0])
    step = max(1, _READ_ELEMENTS // math.prod(shape[1:]))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        box = (slice(first, last), *rows[1:], slice(None))
        values, scales = quantise(_read_box(stored, mappings, shape, box, np.dtype(np.float32)))
        part = values[..., columns] if out.dtype == np.int8 else scales
        out[first - start : last - start] = part
    return out


def _read_box(
    stored: Mapping[str, StoredTensor],
    mappings: list[TensorMapping],
    shape: tuple[int, ...],
    index: Index,
    dtype: np.dtype,
) -> np.ndarray:
    """Read the part of a parameter of the given shape that `index` selects."""
    starts, stops, _ = zip(*(s.indices(n) for s, n in zip(index, shape, strict=True)), strict=True)
    out = _aligned_empty(tuple(np.subtract(stops, starts)), dtype)
    for mapping in mappings:
        low = tuple(map(max, starts, mapping.box_start))
        high = tuple(map(min, stops, mapping.box_end))
        if all(a < b for a, b in zip(low, high, strict=True)):
            part = out[_slices(low, high, starts)]
            _read_tensor(
                stored[mapping.tensor], mapping, _slices(low, high, mapping.box_start), part
            )
    return out


def _read_tensor(
    tensor: StoredTensor, mapping: TensorMapping, part: Index, out: np.ndarray
) -> None:
    """Fill `out` with the part of the mapping's box that `part` selects."""
    if mapping.axes is not None:
        _read_transposed(tensor, mapping, part, out)
        return
    columns = part[mapping.num_row_axes :]
    rows = mapping.rows[part[: mapping.num_row_axes]]
    # Sort by row in the file, so that consecutive rows become one read despite `row_order`.
    places = np.argsort(rows, axis=None)
    rows_in_file = rows.ravel()[places]
    max_rows = max(1, _READ_ELEMENTS // math.prod(out.shape[mapping.num_row_axes :]))
    for start, stop in _consecutive_runs(rows_in_file, max_rows):
        first, last = rows_in_file[[start, stop - 1]].tolist()
        values = tensor.read((slice(first, last + 1), *columns), out.dtype)
        out[np.unravel_index(places[start:stop], rows.shape)] = values


def _read_transposed(
    tensor: StoredTensor, mapping: TensorMapping, part: Index, out: np.ndarray
) -> None:
    """Fill `out` from a transposed tensor, one index of its first axis (an expert) at a time."""
    assert mapping.axes is not None and mapping.axes[0] == 0
    lead = len(mapping.box_shape) - len(mapping.axes)
    one = dataclasses.replace(
        mapping,
        shape=(1, *mapping.shape[1:]),
        split_shape=(1, *(mapping.split_shape or mapping.shape)[1:]),
        box_shape=(1, *mapping.box_shape[lead + 1 :]),
    )
    for place, index in enumerate(range(part[lead].start, part[lead].stop)):
        values = tensor.read((slice(index, index + 1),), out.dtype)
        out[(0,) * lead + (place,)] = one.to_box(values)[0][part[lead + 1 :]]


def _consecutive_runs(rows: np.ndarray, max_rows: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of runs of consecutive numbers, with at most `max_rows` each."""
    gaps = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    for begin, end in itertools.pairwise([0, *gaps, len(rows)]):
        for start in range(begin, end, max_rows):
            yield start, min(start + max_rows, end)


def _slices(low: tuple[int, ...], high: tuple[int, ...], origin: tuple[int, ...]) -> Index:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _shape_of(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return np.broadcast_to(np.int8(0), shape)[index].shape


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    # XLA's CPU backend uses memory that is aligned to 64 bytes without copying it.
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _to_tensor(parameter: jax.Array, mappings: list[TensorMapping]) -> np.ndarray:
    """Return a tensor in the shape of Hugging Face; on CPU a view of the parameter if possible."""
    rows = [
        mapping.to_rows(np.asarray(parameter)[mapping.box])
        for mapping in sorted(mappings, key=lambda mapping: mapping.first_row)
    ]
    # safetensors writes raw memory, so transposed arrays must be copied.
    return np.ascontiguousarray(rows[0]) if len(rows) == 1 else np.concatenate(rows)


def _split_into_files(
    tensors: list[tuple[str, list[TensorMapping]]], max_elements: int
) -> list[list[tuple[str, list[TensorMapping]]]]:
    """Distribute tensors over files. Each tensor is its parameter's name and its mappings."""
    files: list[list[tuple[str, list[TensorMapping]]]] = [[]]
    size = 0
    for name, mappings in tensors:
        num_elements = math.prod(mappings[0].shape)
        if files[-1] and size + num_elements > max_elements:
            files.append([])
            size = 0
        files[-1].append((name, mappings))
        size += num_elements
    return files


def _umask() -> int:
    mask = os.umask(0)  # the umask can only be read by setting it
    os.umask(mask)
    return mask
