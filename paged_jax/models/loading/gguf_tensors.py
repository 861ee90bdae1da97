"""Tensors of GGUF files under their Hugging Face names.

`paged_jax.models.codecs.gguf_types` describes the types of their values.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.kernels.weight_packing import split_levels
from paged_jax.models.codecs.gguf_types import GGUF_TYPES, GgufType
from paged_jax.models.config import ModelConfig
from paged_jax.models.errors import WeightsError
from paged_jax.models.gguf_config import ROPE_TENSORS
from paged_jax.models.gguf_file import GgufFile, TensorEntry
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.loading.stored_tensors import QuantisedTensor, is_finite, read_elements
from paged_jax.models.loading.tensor_map import layer_shapes, outer_names, standard_name
from paged_jax.models.tensor_mapping import Shape, name_bias

# Usual GGUF names of the parameters outside of the layers. `Part.gguf_names` has those of layers.
_OUTER: Mapping[str, str] = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "embed_tokens_per_layer": "per_layer_token_embd.weight",
    "per_layer_model_proj": "per_layer_model_proj.weight",
    "per_layer_norm": "per_layer_proj_norm.weight",
}
# Tensor with the gates and the up projections of all experts, and the tensors with one of them.
_FUSED, *_HALVES = "ffn_gate_up_exps.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)")
# Files of 2023 have a tensor for each expert.
_EXPERT_NAME = re.compile(r"(\w+)\.(\d+)\.(weight|bias)")


@dataclasses.dataclass(frozen=True, eq=False)
class GgufTensor(QuantisedTensor):
    """A tensor of a GGUF file, or the slice of a tensor at one index of its first dimension.

    Attributes:
      row_bytes: number of bytes of a row. A tensor with one dimension is a single row.
      row_order: index in the file of each row of the Hugging Face tensor; None for the same order.
      input_order: i32 ``[in]``, input of the Hugging Face tensor that each column in the file
        belongs to; None for the same order.
      undo: function that restores values which llama.cpp changes; None for unchanged values.
    """

    row_bytes: int
    row_order: np.ndarray | None = None
    input_order: np.ndarray | None = None
    undo: Callable[[np.ndarray], np.ndarray] | None = None

    @classmethod
    def of(
        cls,
        entry: TensorEntry,
        *,
        shape: Shape | None = None,
        row_order: np.ndarray | None = None,
        input_order: np.ndarray | None = None,
        undo: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> "GgufTensor":
        """Create a tensor from its entry in a file's header.

        Args:
          entry: the entry.
          shape: shape of the Hugging Face tensor. llama.cpp may store floats without dimensions of
            size 1, and vectors with several dimensions. If shapes differ in another way, the tensor
            keeps the shape in the file.
          row_order: see the class.
          input_order: see the class.
          undo: see the class.

        Raises:
          WeightsError: the type is not supported, or the number of rows or inputs is wrong.
        """
        if (kind := GGUF_TYPES.get(entry.type)) is None:
            raise WeightsError(
                f"{entry.path}: the type of tensor {entry.name} must be one of "
                f"{', '.join(GGUF_TYPES)}, got {entry.type}."
            )
        if not kind.is_float and len(entry.shape) == 1:
            raise WeightsError(
                f"{entry.path}: tensor {entry.name} has one dimension, so its type must be F32, "
                f"F16 or BF16, got {entry.type}."
            )
        stored_shape = entry.shape
        if kind.is_float and shape is not None and _is_reshaped(stored_shape, shape):
            stored_shape = shape
        for order, size in (row_order, stored_shape[0]), (input_order, stored_shape[-1]):
            if order is not None and len(order) != size:
                raise WeightsError(
                    f"{entry.path}: tensor {entry.name} must have {len(order)} rows or inputs, "
                    f"which llama.cpp reorders, got shape {list(entry.shape)}."
                )
        return cls(
            entry.path,
            entry.name,
            stored_shape,
            entry.type,
            entry.num_bytes // math.prod(stored_shape[:-1]),
            row_order,
            input_order,
            undo,
            offset=entry.offset,
        )

    @property
    def type(self) -> GgufType:
        """Type of the tensor's values."""
        return GGUF_TYPES[self.dtype]

    @property
    def format(self) -> WeightFormat:
        """Format of the arrays that `read_arrays` returns, given by the type of the tensor."""
        return dataclasses.replace(self.type.format, has_order=self._has_order)

    @property
    def _has_order(self) -> bool:
        return self.input_order is not None and not self.type.is_float

    def part(self, index: int) -> "GgufTensor":
        """Return the slice at `index` of the first dimension, such as the matrix of an expert."""
        num_bytes = math.prod(self.shape[1:-1]) * self.row_bytes
        return dataclasses.replace(
            self,
            name=f"{self.name}[{index}]",
            shape=self.shape[1:],
            offset=self.offset + index * num_bytes,
        )

    def half(self, index: int) -> "GgufTensor":
        """Return the first or the second half of the rows of a matrix. `index` is 0 or 1."""
        num_rows, *row_shape = self.shape
        return dataclasses.replace(
            self,
            name=f"{self.name}[half {index}]",
            shape=(num_rows // 2, *row_shape),
            offset=self.offset + index * (num_rows // 2) * self.row_bytes,
        )

    def read_arrays(self, rows: slice) -> WeightArrays:
        """Read rows of a matrix in its `format`, see `StoredTensor.read_arrays`."""
        if self.type.is_float:
            return WeightArrays(self.read((rows,), jnp.dtype(self.format.code)))
        arrays = self.type.decode(self._read_file_rows(rows), self.shape[-1])
        scales = (x for x in (arrays.scales, arrays.mins) if x is not None)
        floats = (split_levels(x, self.shape[-1])[1] if x.dtype == np.int8 else x for x in scales)
        if not all(map(is_finite, floats)):
            raise WeightsError(
                f"load_weights: the scales of {self.name} must be finite, got infinity or NaN."
            )
        return arrays._replace(order=self.input_order) if self._has_order else arrays

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, *columns = index or (slice(None),)
        if len(self.shape) == 1:
            data = self.type.decode(self._read_bytes(0, 1), self.shape[0])
            values = data.values[0][self._file_rows(rows)]
        elif self.type.is_float:
            values = self.type.decode(self._read_file_rows(rows), self.shape[-1]).values
            values = values.reshape(len(values), *self.shape[1:])
            if self.input_order is not None:
                values = values[..., np.argsort(self.input_order)]
        else:
            values = self._dequantise(rows)
        if self.undo is not None:
            values = self.undo(values.astype(np.float32))
        return values[(slice(None), *columns)]

    def _read_file_rows(self, rows: slice) -> np.ndarray:
        """Read the bytes of the given rows, uint8 ``[rows, row_bytes]``."""
        row_indices = self._file_rows(rows)
        first = int(row_indices.min())
        data = self._read_bytes(first, int(row_indices.max()) + 1)
        return data if self.row_order is None else data[row_indices - first]

    def _file_rows(self, rows: slice) -> np.ndarray:
        """Return the index in the file of each of the given rows of the Hugging Face tensor."""
        row_indices = np.arange(*rows.indices(self.shape[0]))
        return row_indices if self.row_order is None else self.row_order[row_indices]

    def _read_bytes(self, start: int, stop: int) -> np.ndarray:
        """Read consecutive rows of the tensor in the file, uint8 ``[stop - start, row_bytes]``."""
        count = (stop - start) * self.row_bytes
        data = read_elements(self, start * self.row_bytes, np.dtype(np.uint8), count)
        return data.reshape(stop - start, self.row_bytes)


def _is_reshaped(shape: Shape, expected: Shape) -> bool:
    """Return whether shapes differ only in dimensions of size 1, or a vector is expected."""
    if math.prod(shape) != math.prod(expected):
        return False
    is_vector = len(expected) == 1
    return is_vector or [n for n in shape if n > 1] == [n for n in expected if n > 1]


class _Name(NamedTuple):
    """Hugging Face name of a tensor in a GGUF file.

    Attributes:
      name: the name, without the prefix of a layer. A * stands for the number of an expert.
      parameter: key of the parameter, or of a piece of it, as in `Family.tensor_names`.
      shape: shape of the Hugging Face tensor; None if it is not known.
    """

    name: str
    parameter: str
    shape: Shape | None = None


def find_gguf_tensors(file: GgufFile, config: ModelConfig) -> dict[str, GgufTensor]:
    """Return the tensors of a GGUF file by their Hugging Face names, see `tensor_map`.

    A tensor that has no Hugging Face name keeps its name. Tensors of draft layers, and those that
    layers do not use if they read the keys and values of another layer, are left out.

    Raises:
      WeightsError: the type of a tensor is not supported, its number of rows is wrong, or two
        tensors get the same name.
    """
    tensors: dict[str, GgufTensor] = {}
    for entry, name, tensor in _Namer(config, file).name_all():
        if standard_name(config, name) is None:
            continue
        if name in tensors:
            raise WeightsError(
                f"{entry.path}: only one tensor must correspond to {name}, got "
                f"{tensors[name].name} and {tensor.name}."
            )
        tensors[name] = tensor
    return tensors


class _Namer:
    """Names the tensors of a file.

    Args:
      config: configuration of the model.
      file: the file.
    """

    def __init__(self, config: ModelConfig, file: GgufFile):
        family = config.family
        self._config, self._file = config, file
        self._layout = (family and family.gguf) or GgufLayout("")
        self._family_names = {} if family is None else family.tensor_names
        outer = {**_OUTER, **self._layout.tensor_names}
        names = outer_names(config)
        self._outer = {outer[key]: _Name(names[key], key) for key in _OUTER}
        self._layers = {spec: self._name_layer(spec) for spec in {*config.layers}}

    def name_all(self) -> Iterator[tuple[TensorEntry, str, GgufTensor]]:
        """Yield each tensor of the file with its entry and name, and each expert separately."""
        architecture = self._layout.architecture
        num_drafts = self._file.metadata.get(f"{architecture}.nextn_predict_layers", 0)
        num_layers = len(self._config.layers)
        for entry in self._file.tensors.values():
            if entry.name in ROPE_TENSORS:  # `gguf_config` reads them
                continue
            match = _LAYER_NAME.fullmatch(entry.name)
            layer = -1 if match is None else int(match[1])
            if match is None or layer >= num_layers:
                if not num_layers <= layer < num_layers + num_drafts:
                    yield entry, *self._name_outer(entry)
                continue
            for name, tensor in self._name_in_layer(entry, layer, match[2]):
                yield entry, name, tensor

    def _name_outer(self, entry: TensorEntry) -> tuple[str, GgufTensor]:
        if (name := self._outer.get(entry.name)) is None:
            return entry.name, GgufTensor.of(entry)
        return name.name, GgufTensor.of(entry, undo=self._find_change(name.parameter))

    def _name_in_layer(
        self, entry: TensorEntry, layer: int, kind: str
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Yield a tensor of a layer, or all experts in it, with its name.

        `kind` is the name of the tensor in the file, without the prefix of the layer.
        """
        spec, prefix = self._config.layers[layer], f"model.layers.{layer}."
        names = self._layers[spec]
        is_fused = kind == _FUSED and all(half in names for half in _HALVES)
        if is_fused and len(entry.shape) == 3:
            tensor = GgufTensor.of(entry)
            for expert in range(tensor.shape[0]):
                for index, half in enumerate(_HALVES):
                    name = names[half].name.replace("*", str(expert))
                    yield prefix + name, tensor.part(expert).half(index)
            return
        expert = _EXPERT_NAME.fullmatch(kind)
        name = names.get(f"{expert[1]}_exps.{expert[3]}" if expert else kind)
        if name is None:
            yield entry.name, GgufTensor.of(entry)
            return
        tensor = self._create(entry, name, spec)
        if expert:
            yield prefix + name.name.replace("*", expert[2]), tensor
        elif "*" not in name.name:
            yield prefix + name.name, tensor
        else:
            for index in range(tensor.shape[0]):
                yield prefix + name.name.replace("*", str(index)), tensor.part(index)

    def _create(self, entry: TensorEntry, name: _Name, spec: LayerSpec) -> GgufTensor:
        rows, inputs = (
            order(spec) if (order := orders.get(name.parameter)) else None
            for orders in (self._layout.row_orders, self._layout.input_orders)
        )
        undo = self._find_change(name.parameter)
        return GgufTensor.of(entry, shape=name.shape, row_order=rows, input_order=inputs, undo=undo)

    def _find_change(self, parameter: str) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return the function that undoes llama.cpp's change of the values of a parameter."""
        if parameter == "mixer_decay":
            return lambda rates: np.log(-rates)  # the file has -exp(A_log)
        # The norm of a mixer's output has no offset.
        if parameter.endswith("norm") and parameter != "mixer_norm":
            if offset := self._config.norm.offset:
                return lambda weights: weights - np.float32(offset)
        return None

    def _name_layer(self, spec: LayerSpec) -> dict[str, _Name]:
        """Return the names of a layer's tensors by their GGUF names without the layer."""
        names: dict[str, str] = {}
        in_file: dict[str, str] = {}
        for part in spec.walk():
            pieces = part.name_pieces({**part.tensor_names, **self._family_names})
            in_file |= part.gguf_names
            names |= {key: name for key in part.gguf_names if (name := _find_piece(pieces, key))}
        layout_names = {
            key: kind for key, kind in self._layout.tensor_names.items() if key not in _OUTER
        }
        names |= {key: name for key in layout_names if (name := self._family_names.get(key))}
        shapes, layer_names = layer_shapes(self._config, spec), dict[str, _Name]()
        for key, kind in {**in_file, **layout_names}.items():
            if (name := names.get(key)) is None:
                continue
            layer_names[kind] = _Name(name, key, shapes.get(name))
            if kind.endswith(".weight") and name.endswith(".weight"):
                bias = name_bias(name)
                layer_names[name_bias(kind)] = _Name(bias, key, shapes.get(bias))
        return layer_names


def _find_piece(names: Mapping[str, str], key: str) -> str | None:
    """Return the name of a piece, which may be given for all pieces of its parameter."""
    parameter, _, piece = key.partition(".")
    return names.get(key) or names.get(f"{parameter}.*", "").replace("*", piece) or None
