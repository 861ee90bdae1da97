"""Tensors of GGUF files under their Hugging Face names, and decoders for their formats.

Tensors of most types consist of blocks of 32 or 256 values, which also contain the scales. The
table lists the bytes of a block and the formula of a weight. ``d`` and ``m`` are float16, and all
numbers are little-endian. ``u`` is an unsigned value of 2 to 6 bits, ``q`` is an int8 value, and
``sc`` and ``mn`` are scales and minima of groups of 16 or 32 values:

    Q8_0   d, 32 x int8                                          q * d
    Q4_0   d, 16 bytes                                           (u - 8) * d
    Q4_1   d, m, 16 bytes                                        u * d + m
    Q5_0   d, 32 high bits, 16 bytes                             (u - 16) * d
    Q5_1   d, m, 32 high bits, 16 bytes                          u * d + m
    Q4_K   d, m, 12 bytes of sc and mn, 128 bytes                u * (d * sc) - m * mn
    Q5_K   d, m, 12 bytes of sc and mn, 32 bytes, 128 bytes      u * (d * sc) - m * mn
    Q6_K   128 bytes, 64 bytes, 16 x int8 sc, d                  (u - 32) * (d * sc)
    Q2_K   16 bytes of sc and mn, 64 bytes, d, m                 u * (d * sc) - m * mn
    Q3_K   32 bytes of high bits, 64 bytes, 12 bytes of sc, d    (u - 4) * (d * sc)
    IQ4_NL d, 16 bytes                                           iq4[u] * d
    IQ4_XS d, 6 bytes of sc, 128 bytes                           iq4[u] * (d * sc)
    MXFP4  e, 16 bytes                                           e2m1[u] * 2 ** (e - 127)

In types with 16 bytes, and in IQ4_XS, each 16 bytes hold 32 values, as in `weight_formats`: the low
4 bits of byte i are value i, the high 4 bits value i + 16.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.kernels.weight_packing import join_levels, pack, split_levels
from paged_jax.models.config import ModelConfig
from paged_jax.models.gguf_config import ROPE_TENSORS
from paged_jax.models.gguf_file import GgufFile, TensorEntry
from paged_jax.models.loading.parameters import WeightsError
from paged_jax.models.loading.stored_tensors import QuantisedTensor, is_finite, read_elements
from paged_jax.models.loading.tensor_map import EMBEDDINGS, HEAD

_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
FORMATS: Mapping[str, WeightFormat] = {
    "F32": WeightFormat("float32"),
    "F16": WeightFormat("float16"),
    "BF16": WeightFormat("bfloat16"),
    "Q8_0": WeightFormat("int8", 32, "float16"),
    "Q4_0": WeightFormat("int4", 32, "float16"),
    "Q4_1": WeightFormat("uint4", 32, "float16", "float16"),
    "Q5_0": WeightFormat("int5", 32, "float16"),
    "Q5_1": WeightFormat("uint5", 32, "float16", "float16"),
    "Q4_K": WeightFormat("uint4", 32, "int8", "int8"),
    "Q5_K": WeightFormat("uint5", 32, "int8", "int8"),
    "Q6_K": WeightFormat("int8", 16, "int8"),
    "Q2_K": WeightFormat("uint4", 16, "int8", "int8"),
    "Q3_K": WeightFormat("int4", 16, "int8"),
    "IQ4_NL": WeightFormat("iq4", 32, "float16"),
    "IQ4_XS": WeightFormat("iq4", 32, "int8"),
    # The scales of MXFP4 are powers of two, which bfloat16 represents exactly.
    "MXFP4": WeightFormat("e2m1", 32, "bfloat16"),
}
"""Format of each supported type of GGUF."""

_E8M0_NAN = 0xFF

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
        if entry.type not in FORMATS:
            raise WeightsError(
                f"{entry.path}: the type of tensor {entry.name} must be one of "
                f"{', '.join(FORMATS)}, got {entry.type}."
            )
        num_rows = math.prod(entry.shape[:-1])
        if entry.type not in _FLOATS and len(entry.shape) == 1:
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
    def format(self) -> WeightFormat:
        """Format of the arrays that `read_arrays` returns, given by the type of the tensor."""
        return FORMATS[self.dtype]

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
        if self.dtype in _FLOATS:
            return WeightArrays(self.read((rows,), jnp.dtype(self.format.code)))
        data = self._read_file_rows(rows)
        block, read = _READERS[self.dtype]
        num_blocks = self.shape[-1] // block
        with np.errstate(invalid="ignore", over="ignore"):  # reported below
            arrays = read(data.reshape(len(data), num_blocks, self.row_bytes // num_blocks))
        values, *scales = (x.reshape(len(data), math.prod(x.shape[1:])) for x in arrays)
        floats = (split_levels(x, self.shape[-1])[1] if x.dtype == np.int8 else x for x in scales)
        if not all(map(is_finite, floats)):
            raise WeightsError(
                f"load_weights: the scales of {self.name} must be finite, got infinity or NaN."
            )
        return WeightArrays(values, *scales)

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, *columns = index or (slice(None),)
        if len(self.shape) == 1:
            values = _as_floats(self._read_bytes(0, 1), self.dtype)[0]
            values = values[self._file_rows(rows)]
        elif self.dtype in _FLOATS:
            values = _as_floats(self._read_file_rows(rows), self.dtype)
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


def _as_floats(data: np.ndarray, kind: str) -> np.ndarray:
    floats = data.view(_FLOATS[kind])
    return floats.view(jnp.bfloat16) if kind == "BF16" else floats


# Each function `_read_*` decodes the blocks of one type. It takes the bytes of the blocks, uint8
# ``[rows, blocks, block_bytes]``, and returns the values, scales and possibly minima of
# `WeightArrays`. The first dimension of each result is `rows`.
_Arrays = tuple[np.ndarray, ...]


def _half(blocks: np.ndarray, place: int) -> np.ndarray:
    """Return the float16 number that begins at byte `place`, which is even, of each block."""
    return blocks.view("<f2")[..., place // 2, None]


def _nibbles(data: np.ndarray) -> np.ndarray:
    """Split bytes ``[..., n]`` into their low and high 4 bits, uint8 ``[..., 2, n]``."""
    return np.stack([data & 15, data >> 4], axis=-2)


def _read_q8_0(blocks: np.ndarray) -> _Arrays:
    return blocks[..., 2:].view(np.int8), _half(blocks, 0)


def _read_q4_0(blocks: np.ndarray) -> _Arrays:
    return blocks[..., 2:], _half(blocks, 0)


def _read_q4_1(blocks: np.ndarray) -> _Arrays:
    return blocks[..., 4:], _half(blocks, 0), _half(blocks, 2)


def _packed_fives(low: np.ndarray, fifth: np.ndarray) -> np.ndarray:
    """Return values of 5 bits in the order of `weight_formats`, uint8 ``[..., 20]``.

    Args:
      low: the low 4 bits of each block, uint8 ``[..., 16]``, which are already in this order.
      fifth: the fifth bits of each block, uint8 ``[..., 4]``. Bit i belongs to value i.
    """
    bits = np.ascontiguousarray(fifth).view("<u4")
    # Write the index i of a value as 16 half + 4 word + byte. Its fifth bit, bit i of `bits`, must
    # become bit 4 half + word of the result's byte number `byte`. So first transpose the 4 x 4 bits
    # (word, byte) of each half: within blocks of 2 x 2 bits, and then the blocks.
    for shift, mask in ((3, 0x0A0A0A0A), (6, 0x00CC00CC)):
        swapped = (bits ^ bits >> shift) & mask
        bits = bits ^ swapped ^ swapped << shift
    # Each half now consists of 4 nibbles, one for each byte of the result. Spread them to 4 bytes.
    spread = [half & 0xFF | (half & 0xFF00) << 8 for half in (bits & 0xFFFF, bits >> 16)]
    lower, upper = ((x | x << 4) & 0x0F0F0F0F for x in spread)
    return np.concatenate([low, (lower | upper << 4).astype("<u4").view(np.uint8)], axis=-1)


def _read_q5_0(blocks: np.ndarray) -> _Arrays:
    return _packed_fives(blocks[..., 6:], blocks[..., 2:6]), _half(blocks, 0)


def _read_q5_1(blocks: np.ndarray) -> _Arrays:
    values = _packed_fives(blocks[..., 8:], blocks[..., 4:8])
    return values, _half(blocks, 0), _half(blocks, 2)


def _read_k_scales(blocks: np.ndarray) -> _Arrays:
    """Decode the scales and minima of the 8 groups in each block of Q4_K or Q5_K.

    They are numbers of 6 bits, which are stored in 12 bytes::

        bytes 0 to 3     bits 0 to 5: scales of groups 0 to 3
                         bits 6 and 7: two high bits of the scales of groups 4 to 7
        bytes 4 to 7     bits 0 to 5: minima of groups 0 to 3
                         bits 6 and 7: two high bits of the minima of groups 4 to 7
        bytes 8 to 11    bits 0 to 3: four low bits of the scales of groups 4 to 7
                         bits 4 to 7: four low bits of the minima of groups 4 to 7
    """
    scales, mins, rest = (blocks[..., 4 + i : 8 + i] for i in (0, 4, 8))
    scales = np.concatenate([scales & 63, rest & 15 | scales >> 6 << 4], axis=-1)
    mins = np.concatenate([mins & 63, rest >> 4 | mins >> 6 << 4], axis=-1)
    return _two_levels(scales, _half(blocks, 0)), _two_levels(mins, -_half(blocks, 2))


def _two_levels(numbers: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Append the 4 bytes of a block's float32 factor to the numbers of its groups.

    Args:
      numbers: a number for each group, from -128 to 127, ``[..., groups]``.
      factors: the factor of each block, ``[..., 1]``. The scale (or minimum) of a group is its
        number times the factor.

    Returns:
      int8 ``[..., groups + 4]``.
    """
    return join_levels(numbers.astype(np.int8, copy=False), factors.astype(np.float32))


def _read_q4_k(blocks: np.ndarray) -> _Arrays:
    # In the file, two groups share 32 bytes: one is in the low bits, the other in the high bits.
    # `pack` puts each group into 16 bytes of its own.
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return pack(values), *_read_k_scales(blocks)


def _read_q5_k(blocks: np.ndarray) -> _Arrays:
    values = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32))
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = values.reshape(*blocks.shape[:-1], 8, 32) | high << 4
    return pack(values, 5), *_read_k_scales(blocks)


def _read_q6_k(blocks: np.ndarray) -> _Arrays:
    # Each half of a block consists of 4 x 32 values. Their low 4 bits are in 64 bytes, and their
    # high 2 bits in 32 bytes.
    lead = blocks.shape[:-1]
    low = _nibbles(blocks[..., :128].reshape(*lead, 2, 64)).reshape(*lead, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[..., 128:192].reshape(*lead, 2, 1, 32) >> shifts & 3
    values = (low | high << 4).view(np.int8) - np.int8(32)
    return values, _two_levels(blocks[..., 192:208].view(np.int8), _half(blocks, 208))


def _quarters(data: np.ndarray) -> np.ndarray:
    """Split bytes ``[..., n]`` into values of 2 bits, the lowest first, uint8 ``[..., 4, n]``."""
    return data[..., None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3


def _read_q2_k(blocks: np.ndarray) -> _Arrays:
    values = _quarters(blocks[..., 16:80].reshape(*blocks.shape[:-1], 2, 32))
    scales, mins = (blocks[..., :16] >> bit & 15 for bit in (0, 4))
    scales, mins = _two_levels(scales, _half(blocks, 80)), _two_levels(mins, -_half(blocks, 82))
    return pack(values), scales, mins


def _read_q3_k(blocks: np.ndarray) -> _Arrays:
    lead = blocks.shape[:-1]
    low = _quarters(blocks[..., 32:96].reshape(*lead, 2, 32)).reshape(*lead, 8, 32)
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    # Bytes 96 to 103 contain the low 4 bits of the scales: of groups 0 to 7 in the low nibbles, of
    # groups 8 to 15 in the high nibbles. Bytes 104 to 107 contain the two high bits: of groups 0 to
    # 3 in bits 0 and 1 of each byte, of groups 4 to 7 in bits 2 and 3, and so on.
    scales, rest = (x.reshape(*lead, 16) for x in (
        _nibbles(blocks[..., 96:104]), _quarters(blocks[..., 104:108])
    ))  # fmt: skip
    # int4 stores n as n + 8, so the number u - 4 is stored as u + 4.
    values = pack(low + (high << 2) + np.uint8(4))
    return values, _two_levels(_signed(scales, rest), _half(blocks, 108))


def _signed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Join the low 4 and the high 2 bits of scales, and subtract 32: int8 from -32 to 31."""
    return (low | high << 4).view(np.int8) - np.int8(32)


def _read_iq4_nl(blocks: np.ndarray) -> _Arrays:
    return blocks[..., 2:], _half(blocks, 0)


def _read_iq4_xs(blocks: np.ndarray) -> _Arrays:
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1)
    high = blocks.view("<u2")[..., 1, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = _signed(low.reshape(*blocks.shape[:-1], 8), high.astype(np.uint8))
    return blocks[..., 8:], _two_levels(scales, _half(blocks, 0))


def _read_mxfp4(blocks: np.ndarray) -> _Arrays:
    exponents = blocks[..., :1].astype(np.int32) - 127
    scales = np.ldexp(np.float32(1), exponents)
    scales = np.where(blocks[..., :1] == _E8M0_NAN, np.float32(np.nan), scales)
    return blocks[..., 1:], scales.astype(jnp.bfloat16)


# For each quantised type, the number of values in a block, and the function that decodes blocks.
_READERS: Mapping[str, tuple[int, Callable[[np.ndarray], _Arrays]]] = {
    "Q8_0": (32, _read_q8_0),
    "Q4_0": (32, _read_q4_0),
    "Q4_1": (32, _read_q4_1),
    "Q5_0": (32, _read_q5_0),
    "Q5_1": (32, _read_q5_1),
    "Q4_K": (256, _read_q4_k),
    "Q5_K": (256, _read_q5_k),
    "Q6_K": (256, _read_q6_k),
    "Q2_K": (256, _read_q2_k),
    "Q3_K": (256, _read_q3_k),
    "IQ4_NL": (32, _read_iq4_nl),
    "IQ4_XS": (256, _read_iq4_xs),
    "MXFP4": (32, _read_mxfp4),
}


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
