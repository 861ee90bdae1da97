"""Tensors in safetensors files, and their formats of floating-point numbers.

`StoredTensor` reads plain floats. A quantised format, such as `Mxfp4Tensor`, combines several
tensors of the files (values and scales) into one that is read as floats. To add a format, write
such a subclass and let `combine_quantised` find its tensors.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from paged_jax.models.loading.parameters import WeightsError

# Dtype of the model for each dtype of a file. Models do not compute in float64.
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
_EXPONENT_BITS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}

# MXFP4: two E2M1 numbers of 4 bits per byte, and one E8M0 scale of 8 bits per block.
MXFP4_BLOCK = 32  # numbers per scale
MXFP4_BLOCK_BYTES = MXFP4_BLOCK // 2
_MXFP4_SUFFIXES = "_blocks", "_scales"
_E8M0_BIAS, _E8M0_NAN = 127, 0xFF
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_E2M1_PAIRS = np.stack([_E2M1[np.arange(256) & 0xF], _E2M1[np.arange(256) >> 4]], axis=1)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
      path: the file.
      name: name of the tensor in the file.
      shape: shape of the tensor.
      dtype: dtype, by its name in safetensors, or the name of a quantised format.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_floating(self) -> bool:
        """Whether the tensor can be read as floating-point numbers."""
        return self.dtype in FLOAT_DTYPES

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Read a part of the tensor as finite floats.

        Args:
          index: slices of the first dimensions.
          dtype: floating-point dtype of the result.

        Raises:
          WeightsError: the file cannot be read, or a number is not finite in `dtype`.
        """
        with np.errstate(over="ignore"):  # infinity is reported below
            values = self._read(index).astype(dtype, copy=False)
        if not _is_finite(values):
            raise WeightsError(f"load_weights: {self.name} is not finite as {dtype.name}.")
        return values

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        try:
            # The file is opened for each read. Pages that an open file has mapped count as memory
            # in use, and would add up to a second copy of the weights.
            with safe_open(self.path, "numpy") as file:
                return file.get_slice(self.name)[index]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"load_weights: cannot read {self.name}: {error}.") from None


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """Matrices in MXFP4, the format of the experts of gpt-oss, see `expand_mxfp4`.

    The files have two tensors: uint8 blocks ``[..., out, in / 32, 16]`` and uint8 scales
    ``[..., out, in / 32]``. The combined tensor has the shape ``[..., in, out]``. `read` can slice
    only the dimensions before the last two.

    Attributes:
      scales: the tensor of scales. The other attributes describe the blocks.
    """

    scales: StoredTensor

    @classmethod
    def combine(cls, blocks: StoredTensor, scales: StoredTensor) -> "Mxfp4Tensor":
        """Return one tensor for blocks and scales.

        Raises:
          WeightsError: dtypes or shapes do not fit together.
        """
        expected = (*scales.shape, MXFP4_BLOCK_BYTES)
        if blocks.shape != expected or {blocks.dtype, scales.dtype} != {"U8"}:
            raise WeightsError(
                f"load_weights: {blocks.name} must be uint8 {list(expected)} and {scales.name} "
                f"uint8 {list(scales.shape)}, one scale per block, got {blocks.dtype} "
                f"{list(blocks.shape)} and {scales.dtype}."
            )
        *experts, num_outputs, num_blocks = scales.shape
        shape = (*experts, num_blocks * MXFP4_BLOCK, num_outputs)
        return cls(blocks.path, blocks.name, shape, "MXFP4", scales)

    @property
    def is_floating(self) -> bool:
        """Whether the tensor can be read as floating-point numbers: always."""
        return True

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        return expand_mxfp4(super()._read(index), self.scales._read(index)).swapaxes(-1, -2)


def expand_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Convert MXFP4 to float32, exactly.

    See the OCP Microscaling Formats (MX) Specification 1.0, sections 5.2, 5.3.3 and 5.4.1::

        byte     s e e m | s e e m     two E2M1 numbers, the first in the low bits
        scale    e e e e e e e e       E8M0: 2 ** (e - 127), or NaN if all bits are set

    A number is its E2M1 value (0, 0.5, 1, 1.5, 2, 3, 4, 6 or the negative) times the scale of its
    block. All finite results are exact in bfloat16.

    Args:
      blocks: uint8 ``[..., num_blocks, 16]``.
      scales: uint8 ``[..., num_blocks]``.

    Returns:
      float32 ``[..., 32 * num_blocks]``.

    Example:
      >>> blocks, scales = np.array([[0x72, *[0] * 15]], np.uint8), np.array([128], np.uint8)
      >>> expand_mxfp4(blocks, scales)[:3].tolist()
      [2.0, 12.0, 0.0]
    """
    exponents = np.minimum(scales, _E8M0_NAN - 1).astype(np.int32) - _E8M0_BIAS
    factors = np.ldexp(np.float32(1), exponents)
    factors = np.where(scales == _E8M0_NAN, np.float32(np.nan), factors)
    with np.errstate(over="ignore"):  # `StoredTensor.read` reports infinity
        numbers = _E2M1_PAIRS[blocks].reshape(*scales.shape, MXFP4_BLOCK) * factors[..., None]
    return numbers.reshape(*scales.shape[:-1], -1)


def combine_quantised(
    tensors: dict[str, StoredTensor], *, has_mxfp4: bool
) -> dict[str, StoredTensor]:
    """Return the tensors by name, with the tensors of a quantised format combined into one.

    Args:
      tensors: tensors of the files by name.
      has_mxfp4: whether the family stores experts in MXFP4.
    """
    combined = dict(tensors)
    if has_mxfp4:
        blocks, scales = _MXFP4_SUFFIXES
        for name in tensors:
            base = name.removesuffix(blocks)
            if base != name and base + scales in tensors:
                combined[base] = Mxfp4Tensor.combine(
                    combined.pop(name), combined.pop(base + scales)
                )
    return combined


def find_dtype(tensors: Iterable[StoredTensor]) -> str | None:
    """Return the dtype of the first floating-point tensor, as transformers does, or None."""
    return next((FLOAT_DTYPES[x.dtype] for x in tensors if x.dtype in FLOAT_DTYPES), None)


def _is_finite(values: np.ndarray) -> bool:
    # Compare bits, because NumPy has no fast isfinite for bfloat16.
    bits = values.view(f"u{values.itemsize}")
    mask = bits.dtype.type(_EXPONENT_BITS[values.dtype.name])
    return not ((bits & mask) == mask).any()
