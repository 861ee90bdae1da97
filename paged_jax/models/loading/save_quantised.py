"""Writing of quantised matrices: the tensors of a model's parameters, and the config of the folder.

Matrices are written in the formats of compressed-tensors, see `compressed_tensors.py`. Compact
formats are widened first. Embeddings and the output head are written as floats, because vLLM cannot
read them in a quantised format. The experts of gpt-oss are written as in the original checkpoints
of gpt-oss, see `mxfp4.py`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paged_jax.kernels.weight_formats import (
    WeightArrays,
    WeightFormat,
    convert,
    dequantise,
)
from paged_jax.models.codecs.compressed_tensors import CompressedTensorsCodec
from paged_jax.models.codecs.module_matrix import SAVE_ADVICE, EncodedModule, ModuleFormat
from paged_jax.models.codecs.mxfp4 import Mxfp4Codec, Mxfp4ExpertsFormat
from paged_jax.models.errors import SaveError
from paged_jax.models.matrix_formats import SUFFIXES, MatrixFormats
from paged_jax.models.tensor_mapping import TensorMapping

_COMPRESSED = CompressedTensorsCodec()


class QuantisedWriter:
    """Converter of a model's quantised matrices to tensors and config entries of files.

    Args:
      formats: storage format of each matrix.
      parameters: all parameters of the model by name.

    Raises:
      SaveError: a matrix cannot be written. The message names it and says what to do.
    """

    def __init__(self, formats: MatrixFormats, parameters: Mapping[str, Any]):
        self._formats = formats
        self._parameters = parameters
        self._modules: dict[str, ModuleFormat] = {}
        self._floats: set[str] = set()
        for format in formats.all_formats:
            if format.is_quantised:
                _COMPRESSED.check(format)

    def tensors(
        self, name: str, mappings: list[TensorMapping], dtype: np.dtype
    ) -> dict[str, np.ndarray]:
        """Return the tensors to write for one Hugging Face tensor of a quantised matrix, by name.

        Args:
          name: name of the matrix.
          mappings: mappings of the matrix to the Hugging Face tensor.
          dtype: float dtype of the embeddings and the output head in the files.
        """
        format, tensor = self._formats[name], mappings[0].tensor
        parameters = (self._parameters.get(name + suffix) for suffix in ("", *SUFFIXES))
        host_arrays = (
            None if parameter is None else np.asarray(parameter) for parameter in parameters
        )
        module = tensor.removesuffix(".weight")
        if mappings[0].axes is not None:
            arrays = WeightArrays(
                *(x if x is None else expert_rows(x, mappings) for x in host_arrays)
            )
            return self._keep(tensor, _encode_experts(tensor, arrays, format))
        arrays = WeightArrays(*(x if x is None else rows_of(x, mappings) for x in host_arrays))
        arrays, format = convert(arrays, format, format.widened), format.widened
        if name in ("embed_tokens", "lm_head"):
            self._floats.add(module)
            return {tensor: dequantise(arrays, format.code).astype(dtype)}
        return self._keep(module, _COMPRESSED.encode(module, arrays, format))

    def _keep(self, module: str, encoded: EncodedModule) -> dict[str, np.ndarray]:
        """Keep a module's format for `config`, and return its tensors by name."""
        self._modules[module] = encoded.format
        return {module + end: array for end, array in encoded.tensors.items()}

    def config(self, floats: Iterable[str]) -> dict[str, Any]:
        """Return the entries of ``config.json`` for the tensors converted so far.

        Args:
          floats: names of the modules that are not quantised.
        """
        if not self._modules:
            return {}
        ignored = {*floats, *self._floats}
        compressed = {
            name: format
            for name, format in self._modules.items()
            if not isinstance(format, Mxfp4ExpertsFormat)
        }
        if not compressed:
            return {"quantization_config": Mxfp4Codec().write_config(ignored)}
        if len(compressed) < len(self._modules):
            kinds = {_COMPRESSED.name_of(format) for format in compressed.values()}
            raise SaveError(
                "save_weights: if the experts have the format mxfp4, other matrices must not be "
                f"quantised, got {', '.join(sorted(kinds))}. {SAVE_ADVICE}"
            )
        return {"quantization_config": _COMPRESSED.write_config(compressed, ignored)}


def _encode_experts(tensor: str, arrays: WeightArrays, format: WeightFormat) -> EncodedModule:
    """Return the tensors for blocks and scales of MXFP4 experts, as gpt-oss stores them."""
    if (encoded := Mxfp4ExpertsFormat.encode(tensor, arrays, format)) is None:
        raise SaveError(
            f"save_weights: {tensor} must have the format mxfp4 or not be quantised, because "
            f"this family stores all experts in one tensor, got {format.code}. {SAVE_ADVICE}"
        )
    return encoded


def expert_rows(array: np.ndarray, mappings: list[TensorMapping]) -> np.ndarray:
    """Return the rows of a Hugging Face tensor that contains all X experts, ``[X, out, columns]``.

    The arguments are as in `rows_of`, but `mappings` contains a single mapping, and its field
    `axes` must not be None.
    """
    (mapping,) = mappings
    assert mapping.axes is not None
    split, (*row_axes, in_axis) = mapping.split_shape or mapping.shape, mapping.axes
    out_axes = [axis for axis in range(len(split)) if axis != in_axis]
    order = np.argsort([out_axes.index(axis) for axis in row_axes]).tolist()
    box = array[mapping.box[:-1]].reshape(*(split[axis] for axis in row_axes), array.shape[-1])
    box = box.transpose(*order, len(row_axes))
    return np.ascontiguousarray(box).reshape(split[0], -1, array.shape[-1])


def rows_of(array: np.ndarray, mappings: list[TensorMapping]) -> np.ndarray:
    """Select the rows of a parameter's array that belong to one Hugging Face tensor.

    Args:
      array: array of the parameter (values, scales or minima), with any number of columns.
      mappings: the parameter's mappings to this tensor. Their field `axes` must be None.
    """
    parts = []
    for mapping in sorted(mappings, key=lambda mapping: mapping.first_row):
        columns = array.shape[-1]
        narrow = dataclasses.replace(
            mapping,
            shape=(mapping.shape[0], columns),
            box_shape=(*mapping.box_shape[:-1], columns),
        )
        parts.append(narrow.to_rows(array[mapping.box[:-1]]))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
