"""MXFP4: E2M1 values with a power of two as the scale of 32 values.

compressed-tensors and MLX store matrices, gpt-oss the matrices of all experts::

    compressed-tensors   weight_packed U8 [out, in / 2]            weight_scale U8 [out, in / 32]
    MLX                  weight U32 [out, in / 8]                  scales U8 [out, in / 32]
    gpt-oss              ..._blocks U8 [experts, out, in / 32, 16]   ..._scales U8 [..., in / 32]

A byte or word holds neighbouring inputs, the first in the lowest bits. The format is that of the
OCP Microscaling Formats (MX) Specification 1.0, sections 5.2, 5.3.3 and 5.4.1::

    byte     s e e m | s e e m     two E2M1 numbers, the first in the low bits
    scale    e e e e e e e e       E8M0: 2 ** (e - 127), or NaN if all bits are set

A weight is the E2M1 number (0, 0.5, 1, 1.5, 2, 3, 4, 6 or a negative of them) times the scale of
its block of 32 numbers. bfloat16 represents all finite weights exactly.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_jax.kernels.weight_formats import CODES, WeightArrays, WeightFormat
from paged_jax.kernels.weight_packing import unpack
from paged_jax.models.codecs.bit_fields import (
    look_up,
    low_nibbles_first,
    pack_pairs,
    pack_words,
    powers_of_two,
)
from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.config_entries import KV_CACHE_KEYS, Entries
from paged_jax.models.codecs.module_matrix import (
    CombinedMatrix,
    EncodedModule,
    ModuleFormat,
    ModuleMatrix,
    StoredRows,
    matrix_shape,
)
from paged_jax.models.codecs.module_names import Quantisation, all_modules, exclude
from paged_jax.models.errors import WeightsError

MXFP4_BLOCK = 32  # numbers per scale
MXFP4_BLOCK_BYTES = MXFP4_BLOCK // 2
_E8M0_BIAS = 127
_MXFP4 = WeightFormat("e2m1", MXFP4_BLOCK, "bfloat16")


@dataclass(frozen=True)
class Mxfp4Format(ModuleFormat):
    """Settings of MXFP4 matrices of compressed-tensors.

    Attributes:
      group_size: number of inputs that share a scale; None for all.
    """

    group_size: int | None = MXFP4_BLOCK

    name = "mxfp4"
    required = (".weight_packed", ".weight_scale")
    value_dtype, values_per_item = "U8", 2
    scale_dtypes = ("U8", "F8_E8M0")

    @property
    def matrix(self) -> "type[Mxfp4Matrix]":
        """Class of the matrices."""
        return Mxfp4Matrix

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices usually have."""
        return WeightFormat("e2m1", self.group_size, "bfloat16")

    @classmethod
    def encode(cls, name: str, arrays: WeightArrays, format: WeightFormat) -> EncodedModule | None:
        """Convert a matrix to tensors, if all scales are powers of two."""
        if (format.code, format.group_size, format.min_dtype) != ("e2m1", MXFP4_BLOCK, None):
            return None
        fractions, exponents = np.frexp(arrays.scales.astype(np.float32))
        stored = exponents - 1 + _E8M0_BIAS
        if not (fractions == 0.5).all() or stored.min() < 0 or stored.max() > 254:
            return None
        values, scales = cls.required
        pairs = pack_words(unpack(arrays.values), 4).view(np.uint8)
        return EncodedModule(cls(), {values: pairs, scales: stored.astype(np.uint8)})


class Mxfp4Matrix(ModuleMatrix):
    """MXFP4 matrix of compressed-tensors or MLX."""

    settings: Mxfp4Format

    def find_shape(self) -> tuple[int, int]:
        """Return the shape of the matrix."""
        num_outputs, items = matrix_shape(self.parts[self.settings.required[0]])
        return num_outputs, items * self.settings.values_per_item

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        (values, scale), (num_outputs, num_inputs) = self.settings.required, self.shape
        num_items = num_inputs // self.settings.values_per_item
        self.check_part(values, (self.settings.value_dtype,), (num_outputs, num_items))
        groups = self.check_groups(self.settings.group_size)
        self.check_part(scale, self.settings.scale_dtypes, (num_outputs, groups))

    @property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows."""
        return self.settings.planned

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        values, scales = (self.parts[end].read_raw((rows,)) for end in self.settings.required)
        return StoredRows(values.view(np.uint8), powers_of_two(scales), is_paired=True)


@dataclass(frozen=True)
class MlxMxfp4Format(Mxfp4Format):
    """Settings of MXFP4 matrices of MLX."""

    name = "mlx-mxfp4"
    required = (".weight", ".scales")
    has_embeddings = True
    value_dtype, values_per_item = "U32", 8
    scale_dtypes = ("U8",)


@dataclass(frozen=True)
class Mxfp4ExpertsFormat(ModuleFormat):
    """MXFP4 matrices of experts, as gpt-oss stores them."""

    name = "mxfp4-experts"
    required = ("_blocks", "_scales")
    result = ""

    @property
    def matrix(self) -> "type[Mxfp4Experts]":
        """Class of the matrices."""
        return Mxfp4Experts

    @property
    def planned(self) -> WeightFormat:
        """Format of the matrices."""
        return _MXFP4

    def selects(self, module: str) -> bool:
        """Return whether a module of this name is quantised: only experts are."""
        return ".experts." in module and super().selects(module)

    @classmethod
    def encode(cls, name: str, arrays: WeightArrays, format: WeightFormat) -> EncodedModule | None:
        """Convert matrices ``[experts, out, in]`` to tensors, if all scales are powers of two."""
        *lead, _ = arrays.values.shape
        flat = WeightArrays(*(x if x is None else x.reshape(-1, x.shape[-1]) for x in arrays))
        if (encoded := Mxfp4Format.encode(name, flat, format)) is None:
            return None
        pairs, scales = encoded.tensors.values()
        scales = scales.reshape(*lead, -1)
        pairs = pairs.reshape(*scales.shape, MXFP4_BLOCK_BYTES)
        return EncodedModule(cls(), dict(zip(cls.required, (pairs, scales), strict=True)))


class Mxfp4Experts(CombinedMatrix):
    """Matrices of experts in MXFP4, as gpt-oss stores them. See `expand_mxfp4`.

    As in an unquantised checkpoint of gpt-oss, `shape` and the result of `read` are
    ``[..., in, out]``. `read` cannot slice the last two dimensions. `read_arrays` returns matrices
    ``[..., out, in]``.
    """

    def find_shape(self) -> tuple[int, ...]:
        """Return the shape of the matrices."""
        *experts, num_outputs, num_blocks = self.parts["_scales"].shape or (0, 0)
        return *experts, num_blocks * MXFP4_BLOCK, num_outputs

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        scales = self.parts["_scales"].shape
        if len(scales) < 2:
            raise WeightsError(
                f"load_weights: {self.parts['_scales'].name} must have at least two dimensions, "
                f"[..., outputs, blocks], got shape {[*scales]}."
            )
        self.check_part("_blocks", ("U8",), (*scales, MXFP4_BLOCK_BYTES))
        self.check_part("_scales", ("U8",), scales)

    @property
    def format(self) -> WeightFormat:
        """Format of `read_arrays`."""
        return _MXFP4

    def read_arrays(self, rows: slice) -> WeightArrays:
        """Read some of the matrices ``[..., out, in]``, see `StoredTensor.read_arrays`."""
        blocks, scales = (self.parts[end].read_raw((rows,)) for end in self.settings.required)
        if (scales == 0xFF).any():
            raise WeightsError(
                f"load_weights: {self.parts['_scales'].name} must be finite, got NaN."
            )
        pairs = blocks.reshape(*scales.shape[:-1], -1)
        return WeightArrays(pack_pairs(pairs), powers_of_two(scales))

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        blocks, scales = (self.parts[end].read_raw(index) for end in self.settings.required)
        return expand_mxfp4(blocks, scales).swapaxes(-1, -2)


class Mxfp4Codec(Codec):
    """MXFP4 of gpt-oss. Only families with such experts support it."""

    methods = ("mxfp4",)
    formats = (Mxfp4ExpertsFormat,)

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format."""
        if config.method != "mxfp4":
            return None
        excluded = exclude(config, config.names("modules_to_not_convert"))
        config.finish(("dequantize", *KV_CACHE_KEYS))
        return Quantisation(config.where, (*excluded, all_modules(Mxfp4ExpertsFormat())))

    def write_config(self, floats: Iterable[str]) -> dict[str, Any]:
        """Return the entry ``quantization_config`` of a checkpoint with experts in MXFP4.

        Args:
          floats: names of the modules that are not quantised.
        """
        return {"quant_method": "mxfp4", "modules_to_not_convert": sorted(floats)}


def expand_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Convert numbers in MXFP4 to float32, without rounding.

    Args:
      blocks: uint8 ``[..., num_blocks, 16]``, pairs of E2M1 numbers.
      scales: uint8 ``[..., num_blocks]``, E8M0 scale of each block.

    Returns:
      float32 ``[..., 32 * num_blocks]``.

    Example:
      >>> blocks, scales = np.array([[0x72, *[0] * 15]], np.uint8), np.array([128], np.uint8)
      >>> expand_mxfp4(blocks, scales)[:3].tolist()
      [2.0, 12.0, 0.0]
    """
    with np.errstate(over="ignore"):  # `StoredTensor.read` reports infinity
        weights = look_up(CODES["e2m1"], low_nibbles_first(blocks))
        weights *= powers_of_two(scales).astype(np.float32)[..., None]
    return weights.reshape(*scales.shape[:-1], -1)
