"""Tensors of GGUF files under their Hugging Face names.

`paged_jax.models.codecs.gguf_types` describes the types of their values.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.kernels.weight_packing import split_levels
from paged_jax.models.codecs.gguf_types import GGUF_TYPES, GgufType
from paged_jax.models.config import ModelConfig
from paged_jax.models.errors import WeightsError
from paged_jax.models.gguf_config import ROPE_TENSORS
from paged_jax.models.gguf_file import GgufFile, TensorEntry
from paged_jax.models.loading.stored_tensors import QuantisedTensor, is_finite, read_elements
from paged_jax.models.loading.tensor_map import EMBEDDINGS, HEAD

_MODEL = {
    "token_embd.weight": EMBEDDINGS,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
# For each tensor of a layer, its name in GGUF and in Hugging Face checkpoints, without the prefixes
# ``blk.N.`` and ``model.layers.N.`` and without ``.weight`` or ``.bias``.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    # In GGUF, one tensor holds the matrices of all experts. In Hugging Face checkpoints, each
    # expert has its own tensor, and the expert's index replaces the *.
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Entries that replace entries of `_LAYER` with other Hugging Face names, by `model_type`.
_OTHER: Mapping[str, Mapping[str, str]] = {
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    },
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt_oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
}
# Names of the attention sinks in GGUF and in Hugging Face checkpoints. They are not in the tables
# above, because their suffixes differ.
_SINKS = "attn_sinks.weight", "self_attn.sinks"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")
# Families for which llama.cpp reorders the rows of the query and key projections in GGUF files.
_REORDERED = ("llama", "mixtral")


@dataclasses.dataclass(frozen=True, eq=False)
class GgufTensor(QuantisedTensor):
    """A tensor of a GGUF file, or the slice of a tensor at one index of its first dimension.

    Attributes:
      row_bytes: number of bytes of a row. A tensor with one dimension is a single row.
      num_rotated_heads: number of heads, if llama.cpp has reordered the rows of each head for its
        rotary embedding, see `_file_rows`; 0 otherwise.
      is_one_added: whether 1 was added to the values in the file (norm weights of Gemma).
    """

    row_bytes: int
    num_rotated_heads: int = 0
    is_one_added: bool = False

    @classmethod
    def of(
        cls, entry: TensorEntry, *, num_rotated_heads: int = 0, is_one_added: bool = False
    ) -> "GgufTensor":
        """Create a tensor from its entry in a file's header.

        For the other arguments, see the class.

        Raises:
          WeightsError: the type is not supported.
        """
        if (kind := GGUF_TYPES.get(entry.type)) is None:
            raise WeightsError(
                f"{entry.path}: the type of tensor {entry.name} must be one of "
                f"{', '.join(GGUF_TYPES)}, got {entry.type}."
            )
        num_rows = math.prod(entry.shape[:-1])
        if not kind.is_float and len(entry.shape) == 1:
            raise WeightsError(
                f"{entry.path}: tensor {entry.name} has one dimension, so its type must be F32, "
                f"F16 or BF16, got {entry.type}."
            )
        if num_rotated_heads and entry.shape[0] % (2 * num_rotated_heads):
            raise WeightsError(
                f"{entry.path}: tensor {entry.name} must have an even number of rows for each of "
                f"its {num_rotated_heads} heads, got shape {list(entry.shape)}."
            )
        return cls(
            entry.path,
            entry.name,
            entry.shape,
            entry.type,
            entry.num_bytes // num_rows,
            num_rotated_heads,
            is_one_added,
            offset=entry.offset,
        )

    @property
    def type(self) -> GgufType:
        """Type of the tensor's values."""
        return GGUF_TYPES[self.dtype]

    @property
    def format(self) -> WeightFormat:
        """Format of the arrays that `read_arrays` returns, given by the type of the tensor."""
        return self.type.format

    def part(self, index: int) -> "GgufTensor":
        """Return the slice at `index` of the first dimension, such as the matrix of an expert."""
        num_bytes = math.prod(self.shape[1:-1]) * self.row_bytes
        return dataclasses.replace(
            self,
            name=f"{self.name}[{index}]",
            shape=self.shape[1:],
            offset=self.offset + index * num_bytes,
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
        return arrays

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, *columns = index or (slice(None),)
        if len(self.shape) == 1:
            data = self.type.decode(self._read_bytes(0, 1), self.shape[0])
            values = data.values[0][self._file_rows(rows)]
        elif self.type.is_float:
            values = self.type.decode(self._read_file_rows(rows), self.shape[-1]).values
        else:
            values = self._dequantise(rows)
        if self.is_one_added:
            values = values.astype(np.float32) - 1
        return values[(slice(None), *columns)]

    def _read_file_rows(self, rows: slice) -> np.ndarray:
        """Read the bytes of the given rows, uint8 ``[rows, row_bytes]``."""
        places = self._file_rows(rows)
        first = int(places.min())
        data = self._read_bytes(first, int(places.max()) + 1)
        return data[places - first] if self.num_rotated_heads else data

    def _file_rows(self, rows: slice) -> np.ndarray:
        """Return the index in the file of each of the given rows of the Hugging Face tensor.

        The two differ because llama.cpp rotates pairs of neighbouring elements, (0, 1), (2, 3) and
        so on. Hugging Face models rotate pairs at a distance of half of the head. So row i of the
        first half of a head is row 2 i of this head in the file, and row i of the second half is
        row 2 i + 1.
        """
        places = np.arange(*rows.indices(self.shape[0]))
        if not self.num_rotated_heads:
            return places
        head_dim = self.shape[0] // self.num_rotated_heads
        head, row = np.divmod(places, head_dim)
        half, pair = np.divmod(row, head_dim // 2)
        return head * head_dim + 2 * pair + half

    def _read_bytes(self, start: int, stop: int) -> np.ndarray:
        """Read consecutive rows of the tensor in the file, uint8 ``[stop - start, row_bytes]``."""
        count = (stop - start) * self.row_bytes
        data = read_elements(self, start * self.row_bytes, np.dtype(np.uint8), count)
        return data.reshape(stop - start, self.row_bytes)


def find_gguf_tensors(file: GgufFile, config: ModelConfig) -> dict[str, GgufTensor]:
    """Return the tensors of a GGUF file by their Hugging Face names, see `tensor_map`.

    A tensor that has no Hugging Face name keeps its name.

    Raises:
      WeightsError: the type of a tensor is not supported, or two tensors get the same name.
    """
    tensors: dict[str, GgufTensor] = {}
    for entry in file.tensors.values():
        if entry.name in ROPE_TENSORS:  # `gguf_config` reads them
            continue
        for name, tensor in _name(entry, config):
            if name in tensors:
                raise WeightsError(
                    f"{entry.path}: only one tensor must correspond to {name}, got "
                    f"{tensors[name].name} and {tensor.name}."
                )
            tensors[name] = tensor
    return tensors


def _name(entry: TensorEntry, config: ModelConfig) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the Hugging Face name of a tensor, and the tensor. Yield each expert separately."""
    match = _LAYER_NAME.fullmatch(entry.name)
    names = {**_LAYER, **_OTHER.get(config.model_type, {})}
    is_norm = entry.name.endswith("norm.weight")
    if match is None or match[2] not in (*names, "attn_sinks"):
        is_one_added = is_norm and config.norm.offset == 1
        name = _MODEL.get(entry.name, entry.name)
        yield name, GgufTensor.of(entry, is_one_added=is_one_added)
        return
    layer, kind, expert, suffix = match.groups()
    prefix = f"model.layers.{layer}."
    if f"{kind}.{suffix}" == _SINKS[0]:
        yield prefix + _SINKS[1], GgufTensor.of(entry)
        return
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    is_reordered = config.model_type in _REORDERED
    tensor = GgufTensor.of(
        entry,
        num_rotated_heads=heads.get(kind, 0) if is_reordered else 0,
        is_one_added=is_norm and config.norm.offset == 1,
    )
    # Older files have a tensor for each expert.
    name = names[f"{kind}_exps" if expert else kind]
    if expert:
        yield f"{prefix}{name.replace('*', expert)}.{suffix}", tensor
    elif "*" not in name:
        yield f"{prefix}{name}.{suffix}", tensor
    else:
        for index in range(tensor.shape[0]):
            yield f"{prefix}{name.replace('*', str(index))}.{suffix}", tensor.part(index)
