"""Random weights in every format, and their elements in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.linear import Weight
from paged_jax.kernels.weight_formats import (
    Layout,
    WeightArrays,
    WeightFormat,
    num_bits,
    numbers,
)
from paged_jax.kernels.weight_packing import pack, store_scales

# Formats with the sizes of groups, dtypes of scales, minima and orders that files have.
FORMATS = {
    "int8 of a row": WeightFormat("int8", None, "float32"),
    "fp8 of a row": WeightFormat("float8_e4m3fn", None, "bfloat16"),
    "fp8 in groups": WeightFormat("float8_e4m3fn", 32, "float32"),
    "q8_0": WeightFormat("int8", 32, "float16"),
    "q6_k": WeightFormat("int8", 16, "int8"),
    "q2_k": WeightFormat("uint4", 16, "int8", "int8"),
    "iq4_nl": WeightFormat("iq4", 32, "float16"),
    "mlx with 8 bits": WeightFormat("int8", 32, "float16", "float16"),
    "q5_0": WeightFormat("int5", 32, "float16"),
    "q5_1": WeightFormat("uint5", 32, "float16", "float16"),
    "q4_0": WeightFormat("int4", 32, "float16"),
    "q4_1": WeightFormat("uint4", 32, "float16", "float16"),
    "q4_k": WeightFormat("uint4", 32, "int8", "int8"),
    "awq": WeightFormat("int4", 64, "float16", "float32"),
    "gptq": WeightFormat("int4", 64, "float16", "float32", has_order=True),
    "int4 of a row": WeightFormat("int4", None, "bfloat16"),
    "int8 with an order": WeightFormat("int8", None, "float32", has_order=True),
    "mxfp4": WeightFormat("e2m1", 32, "bfloat16"),
    "nvfp4": WeightFormat("e2m1", 16, "float32"),
    "nf4": WeightFormat("nf4", 64, "float32"),
}


def random_arrays(
    format: WeightFormat, shape: tuple[int, ...], rng: np.random.Generator
) -> WeightArrays:
    """Return random NumPy arrays of a format for a matrix of a shape ``[*out, in]``."""
    groups = (*shape[:-1], shape[-1] // (format.group_size or shape[-1]))
    scale, low = rng.uniform(0.5, 2, groups), rng.normal(size=groups)
    if format.is_packed:
        bits = num_bits(format.code)
        values = pack(rng.integers(0, 1 << bits, shape).astype(np.uint8), bits)
    else:
        values = rng.integers(-100, 100, shape).astype(np.float32).astype(format.value_dtype)
        scale = scale / 16
    return WeightArrays(
        values,
        store_scales(scale, format.scale_dtype, shape[-1]),
        store_scales(low, format.min_dtype, shape[-1]),
        rng.permutation(shape[-1]).astype(np.int32) if format.has_order else None,
    )


def make_weight(
    arrays: WeightArrays,
    format: WeightFormat,
    dtype: str = "float32",
    *,
    layout: Layout | None = None,
) -> Weight:
    """Return the `Weight` of NumPy arrays in the plain layout, prepared for `layout`."""
    if layout is not None:
        arrays = arrays.map_rows(layout.prepare)
    return Weight.of_format(
        jax.tree.map(jnp.asarray, arrays), dataclasses.replace(format, layout=layout), dtype
    )


def weight_shapes(
    format: WeightFormat, shape: tuple[int, ...], dtype: str, sharding: Any = None
) -> Weight:
    """Return a `Weight` of a shape ``[*out, in]``, with `jax.ShapeDtypeStruct` for arrays."""
    arrays: Any = {
        name: jax.ShapeDtypeStruct(*each, sharding=sharding)
        for name, each in format.shapes(shape).items()
    }
    return Weight.of_format(WeightArrays(**arrays), format, dtype)


def elements(arrays: WeightArrays, format: WeightFormat) -> np.ndarray:
    """Return the elements of a matrix in float64, one group after the other."""
    columns = numbers(np.asarray(arrays.values), format.code).astype(np.float64)
    scales = _exact_scales(arrays.scales, columns.shape[-1])
    mins = None if arrays.mins is None else _exact_scales(arrays.mins, columns.shape[-1])
    size = columns.shape[-1] // scales.shape[-1]
    for group in range(scales.shape[-1]):
        part = columns[..., group * size : (group + 1) * size]
        part *= scales[..., group, None]
        if mins is not None:
            part += mins[..., group, None]
    if arrays.order is None:
        return columns
    w = np.empty_like(columns)
    w[..., np.asarray(arrays.order)] = columns
    return w


def _exact_scales(scales: Any, num_inputs: int) -> np.ndarray:
    """Return scales or minima in float64, ``[*out, groups]``."""
    scales = np.asarray(scales)
    if scales.dtype != np.int8:
        return scales.astype(np.float64)
    sections = scales.reshape(*scales.shape[:-1], num_inputs // 256, -1)
    factors = np.ascontiguousarray(sections[..., -4:]).view(np.float32).astype(np.float64)
    return (sections[..., :-4] * factors).reshape(*scales.shape[:-1], -1)
