"""Types of tensors in GGUF files: their bytes, and their decoders.

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
4 bits of byte i are value i, the high 4 bits value i + 16. F32, F16 and BF16 have no blocks.

To add a type, add its decoder to `GGUF_TYPES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.kernels.weight_packing import join_levels, pack

_E8M0_NAN = 0xFF

# Each function `_decode_*` decodes the blocks of one type. It takes the bytes of the blocks, uint8
# ``[rows, blocks, block_bytes]``, and returns the values, scales and possibly minima of
# `WeightArrays`. The first dimension of each result is `rows`.
_Arrays = tuple[np.ndarray, ...]


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """Return the float16 number that begins at byte `offset`, which is even, of each block."""
    return blocks.view("<f2")[..., offset // 2, None]


def _nibbles(data: np.ndarray) -> np.ndarray:
    """Split bytes ``[..., n]`` into their low and high 4 bits, uint8 ``[..., 2, n]``."""
    return np.stack([data & 15, data >> 4], axis=-2)


def _decode_q8_0(blocks: np.ndarray) -> _Arrays:
    return blocks[..., 2:].view(np.int8), _half(blocks, 0)


def _decode_q4_0(blocks: np.ndarray) -> _Arrays:
    return blocks[..., 2:], _half(blocks, 0)


def _decode_q4_1(blocks: np.ndarray) -> _Arrays:
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


def _decode_q5_0(blocks: np.ndarray) -> _Arrays:
    return _packed_fives(blocks[..., 6:], blocks[..., 2:6]), _half(blocks, 0)


def _decode_q5_1(blocks: np.ndarray) -> _Arrays:
    values = _packed_fives(blocks[..., 8:], blocks[..., 4:8])
    return values, _half(blocks, 0), _half(blocks, 2)


def _k_scales(blocks: np.ndarray) -> _Arrays:
    """Decode the scales and minima of the 8 groups in each block of Q4_K or Q5_K.

    They are numbers of 6 bits, which are stored in 12 bytes::

        bytes 0 to 3     bits 0 to 5: scales of groups 0 to 3
                         bits 6 and 7: two high bits of the scales of groups 4 to 7
        bytes 4 to 7     bits 0 to 5: minima of groups 0 to 3
                         bits 6 and 7: two high bits of the minima of groups 4 to 7
        bytes 8 to 11    bits 0 to 3: four low bits of the scales of groups 4 to 7
                         bits 4 to 7: four low bits of the minima of groups 4 to 7
    """
    scales, mins, high_bits = (blocks[..., 4 + i : 8 + i] for i in (0, 4, 8))
    scales = np.concatenate([scales & 63, high_bits & 15 | scales >> 6 << 4], axis=-1)
    mins = np.concatenate([mins & 63, high_bits >> 4 | mins >> 6 << 4], axis=-1)
    return _two_levels(scales, _half(blocks, 0)), _two_levels(mins, -_half(blocks, 2))


def _two_levels(codes: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Append the 4 bytes of a block's float32 factor to the codes of its groups.

    Args:
      codes: the code of each group, from -128 to 127, ``[..., groups]``.
      factors: the factor of each block, ``[..., 1]``. The scale (or minimum) of a group is its
        code times the factor.

    Returns:
      int8 ``[..., groups + 4]``.
    """
    return join_levels(codes.astype(np.int8, copy=False), factors.astype(np.float32))


def _decode_q4_k(blocks: np.ndarray) -> _Arrays:
    # In the file, two groups share 32 bytes: one is in the low bits, the other in the high bits.
    # `pack` puts each group into 16 bytes of its own.
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return pack(values), *_k_scales(blocks)


def _decode_q5_k(blocks: np.ndarray) -> _Arrays:
    values = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32))
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = values.reshape(*blocks.shape[:-1], 8, 32) | high << 4
    return pack(values, 5), *_k_scales(blocks)


def _decode_q6_k(blocks: np.ndarray) -> _Arrays:
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


def _decode_q2_k(blocks: np.ndarray) -> _Arrays:
    values = _quarters(blocks[..., 16:80].reshape(*blocks.shape[:-1], 2, 32))
    scales, mins = (blocks[..., :16] >> bit & 15 for bit in (0, 4))
    scales, mins = _two_levels(scales, _half(blocks, 80)), _two_levels(mins, -_half(blocks, 82))
    return pack(values), scales, mins


def _decode_q3_k(blocks: np.ndarray) -> _Arrays:
    lead = blocks.shape[:-1]
    low = _quarters(blocks[..., 32:96].reshape(*lead, 2, 32)).reshape(*lead, 8, 32)
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    # Bytes 96 to 103 contain the low 4 bits of the scales: of groups 0 to 7 in the low nibbles, of
    # groups 8 to 15 in the high nibbles. Bytes 104 to 107 contain the two high bits: of groups 0 to
    # 3 in bits 0 and 1 of each byte, of groups 4 to 7 in bits 2 and 3, and so on.
    scales, high_bits = (x.reshape(*lead, 16) for x in (
        _nibbles(blocks[..., 96:104]), _quarters(blocks[..., 104:108])
    ))  # fmt: skip
    # int4 stores n as n + 8, so the number u - 4 is stored as u + 4.
    values = pack(low + (high << 2) + np.uint8(4))
    return values, _two_levels(_signed(scales, high_bits), _half(blocks, 108))


def _signed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Join the low 4 and the high 2 bits of scales, and subtract 32: int8 from -32 to 31."""
    return (low | high << 4).view(np.int8) - np.int8(32)


def _decode_iq4_nl(blocks: np.ndarray) -> _Arrays:
    return blocks[..., 2:], _half(blocks, 0)


def _decode_iq4_xs(blocks: np.ndarray) -> _Arrays:
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1)
    high = blocks.view("<u2")[..., 1, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = _signed(low.reshape(*blocks.shape[:-1], 8), high.astype(np.uint8))
    return blocks[..., 8:], _two_levels(scales, _half(blocks, 0))


def _decode_mxfp4(blocks: np.ndarray) -> _Arrays:
    exponents = blocks[..., :1].astype(np.int32) - 127
    scales = np.ldexp(np.float32(1), exponents)
    scales = np.where(blocks[..., :1] == _E8M0_NAN, np.float32(np.nan), scales)
    return blocks[..., 1:], scales.astype(jnp.bfloat16)


@dataclass(frozen=True)
class GgufType:
    """Type of a tensor in a GGUF file.

    Attributes:
      format: format of the decoded rows.
      block_size: number of values in a block.
      decode_blocks: function that decodes blocks, uint8 ``[rows, blocks, block_bytes]``; None for
        floats.
    """

    format: WeightFormat
    block_size: int = 1
    decode_blocks: Callable[[np.ndarray], _Arrays] | None = None

    @property
    def is_float(self) -> bool:
        """Whether the values are plain floats, without blocks and scales."""
        return self.decode_blocks is None

    def decode(self, data: np.ndarray, num_inputs: int) -> WeightArrays:
        """Decode rows, given as uint8 ``[rows, row_bytes]``. Scales may be infinite or NaN."""
        if self.decode_blocks is None:
            return WeightArrays(data.view(jnp.dtype(self.format.code)))
        num_blocks = num_inputs // self.block_size
        blocks = data.reshape(len(data), num_blocks, data.shape[1] // num_blocks)
        with np.errstate(invalid="ignore", over="ignore"):  # the caller checks the scales
            arrays = self.decode_blocks(blocks)
        return WeightArrays(*(x.reshape(len(data), prod(x.shape[1:])) for x in arrays))


GGUF_TYPES: Mapping[str, GgufType] = {
    "F32": GgufType(WeightFormat("float32")),
    "F16": GgufType(WeightFormat("float16")),
    "BF16": GgufType(WeightFormat("bfloat16")),
    "Q8_0": GgufType(WeightFormat("int8", 32, "float16"), 32, _decode_q8_0),
    "Q4_0": GgufType(WeightFormat("int4", 32, "float16"), 32, _decode_q4_0),
    "Q4_1": GgufType(WeightFormat("uint4", 32, "float16", "float16"), 32, _decode_q4_1),
    "Q5_0": GgufType(WeightFormat("int5", 32, "float16"), 32, _decode_q5_0),
    "Q5_1": GgufType(WeightFormat("uint5", 32, "float16", "float16"), 32, _decode_q5_1),
    "Q4_K": GgufType(WeightFormat("uint4", 32, "int8", "int8"), 256, _decode_q4_k),
    "Q5_K": GgufType(WeightFormat("uint5", 32, "int8", "int8"), 256, _decode_q5_k),
    "Q6_K": GgufType(WeightFormat("int8", 16, "int8"), 256, _decode_q6_k),
    "Q2_K": GgufType(WeightFormat("uint4", 16, "int8", "int8"), 256, _decode_q2_k),
    "Q3_K": GgufType(WeightFormat("int4", 16, "int8"), 256, _decode_q3_k),
    "IQ4_NL": GgufType(WeightFormat("iq4", 32, "float16"), 32, _decode_iq4_nl),
    "IQ4_XS": GgufType(WeightFormat("iq4", 32, "int8"), 256, _decode_iq4_xs),
    # The scales of MXFP4 are powers of two, which bfloat16 represents exactly.
    "MXFP4": GgufType(WeightFormat("e2m1", 32, "bfloat16"), 32, _decode_mxfp4),
}
"""Each supported type of GGUF, by its name in the package gguf."""
