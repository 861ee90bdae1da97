"""Saving of a model as a Hugging Face folder with safetensors files."""

import itertools
import json
import os
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from paged_jax.models.loading.parameters import config_dict, named_arrays
from paged_jax.models.loading.safetensors_files import INDEX_FILE, SINGLE_FILE
from paged_jax.models.loading.save_quantised import QuantisedWriter
from paged_jax.models.loading.tensor_map import map_parameter, name_in_file
from paged_jax.models.matrix_formats import is_matrix, matrix_name
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.tensor_mapping import TensorMapping


def save_weights(model: PagedModel, folder: str | Path, *, max_file_bytes: int = 5 * 10**9) -> None:
    """Write a model as a folder with ``config.json`` and safetensors files.

    transformers can load the folder. Quantised matrices are written in the formats of
    compressed-tensors, see `save_quantised`.

    Args:
      model: a `Decoder`, with stacked or separate layers.
      folder: folder to write. It is created if necessary. Weight files that are already in it are
        removed after the new files are written.
      max_file_bytes: maximum size of a file in bytes. The weights of larger models are split into
        several files.

    Raises:
      SaveError: compressed-tensors cannot represent a quantised matrix.
      ValueError: transformers cannot represent this config, see `LlamaConfig.to_dict`.
    """
    folder, config = Path(folder), config_dict(model)
    parameters = named_arrays(model)
    writer = QuantisedWriter(model.matrix_formats, parameters)

    def tensors(name: str, mappings: list[TensorMapping]) -> dict[str, np.ndarray]:
        if is_matrix(name) and model.matrix_formats[name].is_quantised:
            return writer.tensors(name, mappings, model.float_dtype)
        return {mappings[0].tensor: _to_tensor(parameters[name], mappings)}

    items = [
        (name, list(mappings))
        for name in parameters
        if matrix_name(name) not in parameters or matrix_name(name) == name
        for _, mappings in itertools.groupby(
            map_parameter(model.config, name), lambda mapping: mapping.tensor
        )
    ]
    # Build every tensor once before anything is written, so that an error does not leave an
    # incomplete folder.
    sizes = [sum(x.nbytes for x in tensors(*item).values()) for item in items]
    floats = {
        mappings[0].tensor.removesuffix(".weight")
        for name, mappings in items
        if is_matrix(name) and not model.matrix_formats[name].is_quantised
    }
    config |= writer.config(floats)
    folder.mkdir(parents=True, exist_ok=True)
    files = _split_into_files(items, sizes, max_file_bytes)
    weight_map = {}
    for number, content in enumerate(files, 1):
        is_single = len(files) == 1
        file = SINGLE_FILE if is_single else f"model-{number:05}-of-{len(files):05}.safetensors"
        written = {
            name_in_file(model.config, tensor): x
            for item in content
            for tensor, x in tensors(*item).items()
        }
        weight_map |= dict.fromkeys(written, file)
        partial = folder / (file + ".partial")
        # Write to a temporary name, and rename the file when it is complete. So an interrupted save
        # leaves no incomplete file.
        save_file(written, partial, metadata={"format": "pt"})  # required by transformers
        # safetensors creates files that only their owner can read. Give them the usual mode of new
        # files.
        partial.chmod(0o666 & ~_umask())
        os.replace(partial, folder / file)
    names = set(weight_map.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.add(INDEX_FILE)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for stale in folder.glob("model*.safetensors*"):
        if stale.name not in names:
            stale.unlink()


def _to_tensor(parameter: jax.Array, mappings: list[TensorMapping]) -> np.ndarray:
    """Return the Hugging Face tensor that a parameter contains.

    The result is a view of the parameter if the parameter is on the CPU and the layout allows it.
    """
    rows = [
        mapping.to_rows(np.asarray(parameter)[mapping.box])
        for mapping in sorted(mappings, key=lambda mapping: mapping.first_row)
    ]
    # safetensors writes the memory of an array as it is, so transposed views must be copied.
    return np.asarray(rows[0], order="C") if len(rows) == 1 else np.concatenate(rows)


def _split_into_files(
    items: list[tuple[str, list[TensorMapping]]], sizes: list[int], max_bytes: int
) -> list[list[tuple[str, list[TensorMapping]]]]:
    """Divide tensors over files of at most `max_bytes`.

    A tensor that is larger than `max_bytes` gets a file of its own. `items` describes each tensor
    by the name of its parameter and its mappings. `sizes` are the sizes of the tensors in bytes.
    """
    files: list[list[tuple[str, list[TensorMapping]]]] = [[]]
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if files[-1] and total + size > max_bytes:
            files.append([])
            total = 0
        files[-1].append(item)
        total += size
    return files


def _umask() -> int:
    mask = os.umask(0)  # the umask can only be read by setting it
    os.umask(mask)
    return mask
