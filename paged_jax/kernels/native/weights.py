"""Weights that the C++ kernels read: which formats they support, and in which layout."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.native import library
from paged_jax.kernels.native.kernels import NativeKernel, list_kernels, matmul_kernel
from paged_jax.kernels.native.layouts import InterleavedRows
from paged_jax.kernels.weight_formats import Layout, WeightFormat, num_bits
from paged_jax.kernels.weight_packing import PACKED_INPUTS, SECTION_INPUTS

# The group size of 4-bit values must be a multiple of this number of inputs, because the
# kernels process two pairs of inputs at a time (`source/codes.h`).
_PACKED_GROUP = 4


def are_available() -> bool:
    """Return whether this machine has the C++ kernels, or a compiler for them."""
    return library.load(NativeKernel("linear", jnp.dtype(jnp.float32))).target is not None


def format_refusal(format: WeightFormat, num_inputs: int) -> str | None:
    """Return why the kernels do not support weights of a quantised format, or None if they do."""
    size = format.group_size or num_inputs
    if format.is_packed:
        bits = num_bits(format.code)
        unit = _PACKED_GROUP if bits == 4 else PACKED_INPUTS
        if size % unit:
            return f"groups of {bits}-bit values must have a multiple of {unit} inputs"
    if format.has_sections and (64 % size or num_inputs % SECTION_INPUTS):
        return "scales of two levels need groups of at most 64 inputs, and sections of 256"
    return None


class NativeWeights:
    """Weights for the C++ kernels, see `WeightStore`."""

    def stored_format(self, format: WeightFormat, num_devices: int) -> WeightFormat:
        """Keep every format that the kernels read. Programs for several devices do not use them."""
        return format if num_devices == 1 and are_available() else format.widened

    def layouts(
        self, matrices: Sequence[tuple[WeightFormat, tuple[int, ...]]], dtype: DTypeLike
    ) -> list[Layout | None]:
        """Choose the layout of each matrix of a model, see `WeightStore.layouts`."""
        # `_layout` waits for the kernel of each format, so start to compile all of them.
        codes = dict.fromkeys(format.code for format, _ in matrices)
        library.load_soon(list_kernels(codes, dtype))
        return [_layout(format, shape, dtype) for format, shape in matrices]


def _layout(format: WeightFormat, shape: tuple[int, ...], dtype: DTypeLike) -> Layout | None:
    """Return the layout that the kernels read fastest: interleaved rows if they support them.

    Each group of inputs must consist of whole units of 16 or 32 inputs (`source/units.h`).
    """
    layout, (*rows, num_inputs) = InterleavedRows(), shape
    is_supported = (
        math.prod(shape) > 0
        and format.is_quantised
        and math.prod(rows) % layout.num_rows == 0
        and (format.group_size or num_inputs) % (PACKED_INPUTS if format.is_packed else 16) == 0
        and format_refusal(format, num_inputs) is None
        and library.load(matmul_kernel(format.code, dtype)).target is not None
    )
    return layout if is_supported else None
