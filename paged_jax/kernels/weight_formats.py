"""Formats of weight matrices: plain floats, and values of 4 to 8 bits with scales.

A quantised matrix ``[*out, in]`` is divided into groups of consecutive inputs. An element is::

    w[o, i] = number(values[o, i]) * scales[o, i // group_size] + mins[o, i // group_size]

The minima are optional. Scales and minima are floats, or have two levels: an int8 number for each
group, times a float32 factor for each section of 256 inputs, as in the types Q4_K and Q6_K of GGUF
files. The array is then int8: for each section, the numbers of its groups, followed by the four
bytes of the factor::

    section of 256 inputs, groups of 32        12 bytes
    groups 0 ... 7, factor                     | s0 | s1 | ... | s7 | factor (float32) |

An 8-bit value, int8 or float8_e4m3fn, is its own number. A value of 4 or 5 bits is an index into a
table of numbers in `CODES`. Such values are packed: `values` is uint8 ``[*out, in * bits / 8]``.
The low 4 bits of 32 inputs take 16 bytes: byte j holds those of input j in its low half and those
of input 16 + j in its high half, as in GGUF files::

    inputs 32 b ... 32 b + 31        16 bytes
    0  1  2 ... 15                   | 16:0 | 17:1 | 18:2 | ... | 31:15 |    (high:low)

With 5 bits per value, 4 bytes with the fifth bits follow: bit i of byte j belongs to input 4 i + j.

Some tools reorder the inputs before they form groups. Then ``order[j]`` is the input that column j
of the stored matrix belongs to: column j is multiplied by ``x[order[j]]``.

The functions accept arrays of NumPy and of JAX, and return arrays of the same kind.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from paged_jax.formatting import short_repr
from paged_jax.kernels.weight_packing import (
    PACKED_INPUTS,
    SECTION_INPUTS,
    count_columns,
    count_groups,
    join_levels,
    pack,
    scale_floats,
    split_levels,
    unpack,
)

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The numbers of NF4 are quantiles of the normal distribution (QLoRA, arXiv 2305.14314, appendix E).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
# The numbers of llama.cpp for IQ4_NL and IQ4_XS.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)

# Maps each code of packed values to the numbers that its 16 or 32 values stand for.
CODES: Mapping[str, np.ndarray] = {
    "int4": np.arange(-8, 8, dtype=np.float32),
    "uint4": np.arange(16, dtype=np.float32),
    # This is FP4 of the OCP MX formats.
    "e2m1": np.array([*_E2M1, *(-x for x in _E2M1)], np.float32),
    "nf4": np.array(_NF4, np.float32),  # of bitsandbytes
    "fp4": np.array([*_FP4, *(-x for x in _FP4)], np.float32),  # of bitsandbytes
    "iq4": np.array(_IQ4, np.float32),
    "int5": np.arange(-16, 16, dtype=np.float32),
    "uint5": np.arange(32, dtype=np.float32),
}

# Codes whose numbers, or twice these numbers, are small integers. A matmul can multiply these
# integers by inputs that are rounded to int8.
INT8_CODES = ("int8", "int4", "uint4", "e2m1", "int5", "uint5")
# Codes of 8-bit values. Weights with these codes have scales.
BYTE_CODES = ("int8", "float8_e4m3fn")
FLOAT_CODES = ("float32", "bfloat16", "float16")

# Maps codes to factors. The numbers of a code times its factor are integers in the range of int8.
_INTEGER_FACTORS = {
    "int4": 1, "uint4": 1, "e2m1": 2, "iq4": 1, "int5": 1, "uint5": 1, "int8": 1,
}  # fmt: skip
# Codes whose numbers are consecutive integers.
_CONSECUTIVE = ("int4", "uint4", "int5", "uint5")


class Layout(Protocol):
    """Order of the elements of a matrix in memory, which a backend chooses for its kernels.

    It permutes the elements of the values, scales and minima. Shapes and dtypes stay the same, so
    only `WeightFormat.layout` tells a prepared matrix from a plain one. Instances are hashable, and
    equal if they permute in the same way. The methods accept arrays of NumPy and of JAX.
    """

    def prepare(self, array: Any) -> Any:
        """Permute the values, scales or minima ``[*out, columns]`` of one or more matrices."""
        ...

    def unprepare(self, array: Any) -> Any:
        """Undo `prepare`."""
        ...

    def take_rows(self, array: jax.Array, rows: jax.Array) -> jax.Array:
        """Gather rows of a prepared array ``[N, columns]``, each in its plain order.

        `rows` are indices of rows, i32 of any shape. The result is ``[*rows.shape, columns]``.
        """
        ...


@dataclass(frozen=True)
class WeightFormat:
    """Format of a weight matrix.

    Attributes:
      code: code of the values, a name in `FLOAT_CODES`, `BYTE_CODES` or `CODES`.
      group_size: number of inputs that share a scale, a divisor of the number of inputs; None if
        all inputs of a row share a scale.
      scale_dtype: dtype of the scales: a float dtype, or int8 for scales of two levels, which need
        a group size that divides 64; None for plain floats, which have no scales.
      min_dtype: dtype of the minima, like `scale_dtype`; None for no minima.
      has_order: whether the inputs are reordered.
      layout: order of the elements in memory; None for the plain order.
    """

    code: str
    group_size: int | None = None
    scale_dtype: str | None = None
    min_dtype: str | None = None
    has_order: bool = False
    layout: Layout | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether the matrix has scales."""
        return self.code not in FLOAT_CODES

    @property
    def is_packed(self) -> bool:
        """Whether values have fewer than 8 bits, so that several of them share bytes."""
        return self.code in CODES

    @property
    def value_dtype(self) -> np.dtype:
        """Dtype of the array of values."""
        return jnp.dtype("uint8" if self.is_packed else self.code)

    @property
    def plain(self) -> "WeightFormat":
        """The same format in the plain layout."""
        return replace(self, layout=None)

    @property
    def has_sections(self) -> bool:
        """Whether scales or minima have two levels."""
        return "int8" in (self.scale_dtype, self.min_dtype)

    @property
    def unit(self) -> int:
        """Smallest number of inputs that consists of whole groups, packed blocks and sections.

        If the inputs are divided over devices, each device must get a multiple of it.
        """
        packed = PACKED_INPUTS if self.is_packed else 1
        return math.lcm(self.group_size or 1, packed, SECTION_INPUTS if self.has_sections else 1)

    @property
    def widened(self) -> "WeightFormat":
        """The same format without values of 5 bits and without scales of two levels.

        It represents every matrix of the format exactly. Values of 5 bits become int8, and scales
        of two levels become float32.
        """

        def widen(dtype: str | None) -> str | None:
            return "float32" if dtype == "int8" else dtype

        code = "int8" if self.is_packed and num_bits(self.code) != 4 else self.code
        scale_dtype, min_dtype = widen(self.scale_dtype), widen(self.min_dtype)
        return replace(self, code=code, scale_dtype=scale_dtype, min_dtype=min_dtype)

    @property
    def is_compact(self) -> bool:
        """Whether the format has values of 5 bits or scales of two levels, see `widened`."""
        return self != self.widened

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return the shape and dtype of each array of a matrix. Keys are fields of `WeightArrays`.

        Args:
          shape: shape of the matrix, ``[*out, in]``; of any rank if the format is not quantised.
        """
        if not self.is_quantised:
            return {"values": (shape, self.value_dtype)}
        *rows, num_inputs = shape
        columns = num_inputs * num_bits(self.code) // 8 if self.is_packed else num_inputs
        arrays = {"values": ((*rows, columns), self.value_dtype)}
        groups = num_inputs // (self.group_size or num_inputs)
        for name, dtype in (("scales", self.scale_dtype), ("mins", self.min_dtype)):
            if dtype is not None:
                columns = count_columns(groups, num_inputs, jnp.dtype(dtype))
                arrays[name] = (*rows, columns), jnp.dtype(dtype)
        if self.has_order:
            arrays["order"] = (num_inputs,), np.dtype(np.int32)
        return arrays

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of a matrix of shape ``[*out, in]``."""
        arrays = self.shapes(shape).values()
        return sum(math.prod(array_shape) * dtype.itemsize for array_shape, dtype in arrays)


# int8 with one scale per row.
INT8 = WeightFormat("int8", None, "float32")


class WeightArrays(NamedTuple):
    """The arrays that store a matrix ``[*out, in]``.

    Attributes:
      values: floats or 8-bit values ``[*out, in]``; or packed values, uint8
        ``[*out, in * bits / 8]``.
      scales: floats ``[*out, in / group_size]``, or int8 ``[*out, columns]`` for scales of two
        levels; None for plain floats.
      mins: minima, stored like scales; None for no minima.
      order: i32 ``[in]``, the input that each column belongs to; None for the original order.
    """

    values: Any
    scales: Any = None
    mins: Any = None
    order: Any = None

    def map_rows(self, function: Callable[[Any], Any]) -> "WeightArrays":
        """Apply a function to the arrays with a row for each output: all except `order`."""
        rows = jax.tree.map(function, self._replace(order=None))
        return rows._replace(order=self.order)

    def merge_outputs(self, axis: int = 0) -> "WeightArrays":
        """Merge all dimensions from `axis` on, except the last, into one output dimension."""
        return self.map_rows(lambda x: x.reshape(*x.shape[:axis], -1, x.shape[-1]))


@short_repr
class Stack(NamedTuple):
    """The stacked weights of all layers, for kernels that read a layer of them in place.

    Attributes:
      arrays: the arrays of a `Weight`, each with an additional first dimension ``L``.
      layer: i32 ``[]``, index of the layer to read.
    """

    arrays: WeightArrays
    layer: jax.Array | int


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A weight matrix in any format, or the weight matrices of all experts.

    Attributes:
      values: ``[*out, in]`` floating point, int8 or float8_e4m3fn; or packed values, uint8
        ``[*out, in * bits / 8]``.
      scales: floating point ``[*out, groups]``, or int8 for scales of two levels; None if `values`
        are the elements themselves.
      mins: minima, stored like scales, or None.
      order: i32 ``[in]``, the input that each column belongs to, or None.
      stack: the stacked weights of all layers, if the arrays above are one layer of them; else
        None.
      code: code of the values, see `WeightFormat` (static). None if it is the dtype of `values`.
      dtype: float dtype of the model (static). Matmuls by a quantised weight round `x` to it.
      layout: order of the elements of all arrays except `order`, see `Layout` (static).
      int8_inputs: whether matmuls round their inputs to int8, see `xla.linear.round_to_int8`
        (static). It makes no difference if the code is not in `INT8_CODES`.
    """

    values: jax.Array
    scales: jax.Array | None = None
    mins: jax.Array | None = None
    order: jax.Array | None = None
    stack: Stack | None = None
    code: str | None = field(default=None, metadata={"static": True})
    dtype: Any = field(default=jnp.dtype(jnp.float32), metadata={"static": True})
    layout: Layout | None = field(default=None, metadata={"static": True})
    int8_inputs: bool = field(default=False, metadata={"static": True})

    @classmethod
    def of_format(
        cls,
        arrays: WeightArrays,
        format: WeightFormat,
        dtype: DTypeLike = jnp.float32,
        stack: Stack | None = None,
        *,
        int8_inputs: bool = False,
    ) -> "Weight":
        """Create the weight that `arrays` store in a format, for a model of a float dtype."""
        code, dtype = format.code if format.is_packed else None, jnp.dtype(dtype)
        options: Any = {"code": code, "dtype": dtype, "layout": format.layout}
        return cls(*arrays, stack=stack, int8_inputs=int8_inputs, **options)

    @property
    def rounds_inputs(self) -> bool:
        """Whether matmuls round their inputs to int8: `int8_inputs`, if the code allows it."""
        return self.int8_inputs and self.format.code in INT8_CODES

    @property
    def arrays(self) -> WeightArrays:
        """The arrays that store the matrix."""
        return WeightArrays(self.values, self.scales, self.mins, self.order)

    @property
    def format(self) -> WeightFormat:
        """Format of the matrix."""
        code = self.code or jnp.dtype(self.values.dtype).name
        if self.scales is None:
            return WeightFormat(code)
        inputs = self.shape[-1]
        groups = count_groups(self.scales, inputs)
        return WeightFormat(
            code,
            None if groups == 1 else inputs // groups,
            jnp.dtype(self.scales.dtype).name,
            None if self.mins is None else jnp.dtype(self.mins.dtype).name,
            self.order is not None,
            self.layout,
        )

    @property
    def plain(self) -> "Weight":
        """The matrix in the plain layout. Unless it already is, the result has no `stack`."""
        if self.layout is None:
            return self
        arrays = self.arrays.map_rows(self.layout.unprepare)
        return Weight(*arrays, code=self.code, dtype=self.dtype, int8_inputs=self.int8_inputs)

    @property
    def floats(self) -> Any:
        """The elements of the matrix, ``[*out, in]``; float32 if it is quantised.

        Gradients do not flow through a quantised matrix.
        """
        if self.scales is None:
            return self.values
        return dequantise(lax.stop_gradient(self.plain.arrays), self.format.code)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, ``[*out, in]``."""
        *out, columns = self.values.shape
        return *out, count_inputs(columns, self.code)


def num_bits(code: str) -> int:
    """Return the number of bits of the packed values of a code in `CODES`."""
    return len(CODES[code]).bit_length() - 1


def count_inputs(columns: int, code: str | None) -> int:
    """Return the number of inputs of a matrix, given the number of columns of its `values`."""
    return columns * 8 // num_bits(code) if code is not None and code in CODES else columns


def numbers(values: Any, code: str) -> Any:
    """Return the numbers that stored values stand for, float32 ``[..., in]``, see `CODES`."""
    if code not in CODES:
        return values.astype(np.float32)
    table, unpacked = CODES[code], unpack(values, num_bits(code))
    if code in _CONSECUTIVE:
        return unpacked.astype(np.float32) + table[0]
    return values.__array_namespace__().asarray(table)[unpacked]


def dequantise(arrays: WeightArrays, code: str) -> Any:
    """Convert a matrix to float32 ``[*out, in]``, with the inputs in their original order.

    Example:
      >>> values = np.array([[2, -4, 1, 3]], np.int8)
      >>> scales = np.array([[0.5, 2]], np.float32)  # groups of two inputs
      >>> dequantise(WeightArrays(values, scales), "int8").tolist()
      [[1.0, -2.0, 2.0, 6.0]]
    """
    w = numbers(arrays.values, code)
    if arrays.scales is not None:
        scales = scale_floats(arrays.scales, w.shape[-1])
        groups = w.reshape(*scales.shape, -1) * scales[..., None]
        if arrays.mins is not None:
            groups = groups + scale_floats(arrays.mins, w.shape[-1])[..., None]
        w = groups.reshape(w.shape)
    if arrays.order is not None:
        w = w[..., w.__array_namespace__().argsort(arrays.order)]
    return w


def common_format(formats: Iterable[WeightFormat], num_inputs: int) -> WeightFormat | None:
    """Return the smallest format that represents matrices of all given formats exactly.

    Matrices that are fused into one parameter, such as the matrices of queries, keys and values,
    need a common format. The result is None if there is no such format.

    Args:
      formats: formats of matrices with the same number of inputs.
      num_inputs: the number of inputs.

    Example:
      >>> int4 = WeightFormat("int4", 32, "float16")
      >>> int8 = WeightFormat("int8", 16, "float32")
      >>> common_format([int4, int8], 64) == int8  # int4 values fit int8, groups of 32 fit 16
      True
    """
    first, *remaining = dict.fromkeys(formats)
    if not remaining:
        return first
    distinct = (first, *remaining)
    codes = {format.code for format in distinct}
    if len(codes) > 1 and not codes <= set(_INTEGER_FACTORS):
        return None
    if any(format.has_order for format in distinct) and not all(
        format.has_order for format in distinct
    ):
        return None
    group_size = math.gcd(*(format.group_size or num_inputs for format in distinct))
    code = first.code if len(codes) == 1 else _common_code(codes, group_size)
    scales = {format.scale_dtype for format in distinct}
    mins = {format.min_dtype for format in distinct} - {None}
    return WeightFormat(
        code,
        None if group_size == num_inputs else group_size,
        scales.pop() if len(scales) == 1 else "float32",
        None if not mins else mins.pop() if len(mins) == 1 else "float32",
        first.has_order,
    )


def _common_code(codes: set[str], group_size: int) -> str:
    """Return the smallest code that can store the `_integers` of all given codes.

    Packed codes require a `group_size` that is a multiple of `PACKED_INPUTS`.
    """
    if group_size % PACKED_INPUTS == 0:  # kernels for values of 5 bits require this
        if codes <= {"uint4", "uint5"}:
            return "uint5"
        if not codes & {"int8", "iq4", "uint5"}:
            return "int5"
    return "int8"


def _integers(values: Any, code: str) -> Any:
    """Return the numbers of stored values times the factor of their code, int8 ``[..., in]``."""
    if code not in CODES:
        return values
    table = (CODES[code] * _INTEGER_FACTORS[code]).astype(np.int8)
    unpacked = unpack(values, num_bits(code))
    if code in _CONSECUTIVE:
        return unpacked.view(np.int8) + table[0]
    return values.__array_namespace__().asarray(table)[unpacked]


def convert(arrays: WeightArrays, source: WeightFormat, target: WeightFormat) -> WeightArrays:
    """Convert a matrix exactly from format `source` to `target`.

    `target` must represent every matrix of format `source`, like the results of `common_format` and
    `WeightFormat.widened`.
    """
    values, scales, mins, order = arrays
    if source == target:
        return arrays
    inputs, divisor = count_inputs(values.shape[-1], source.code), 1
    if source.code != target.code:
        divisor = _INTEGER_FACTORS[source.code]
        values = _integers(values, source.code)
        if target.is_packed:
            lowest = np.int8(CODES[target.code][0])
            values = pack((values - lowest).view(np.uint8), num_bits(target.code))
    num_groups = inputs // (target.group_size or inputs)
    if target.min_dtype is not None:
        if mins is None:
            shapes = target.shapes((*scales.shape[:-1], inputs))
            mins = scales.__array_namespace__().zeros(*shapes["mins"])
        else:
            mins = _convert_scales(mins, inputs, num_groups, target.min_dtype)
    scales = _convert_scales(scales, inputs, num_groups, target.scale_dtype, divisor)
    return WeightArrays(values, scales, mins, order)


def _convert_scales(
    scales: Any, num_inputs: int, num_groups: int, dtype: Any, divisor: int = 1
) -> Any:
    """Divide scales or minima, repeat them for smaller groups, and convert them to `dtype`."""
    xp, repeats = scales.__array_namespace__(), num_groups // count_groups(scales, num_inputs)
    if dtype == "int8":
        first_level, factors = split_levels(scales, num_inputs)
        return join_levels(xp.repeat(first_level, repeats, axis=-1), factors / divisor)
    floats = scale_floats(scales, num_inputs) / divisor
    return xp.repeat(floats, repeats, axis=-1).astype(jnp.dtype(dtype))


def divide_groups(format: WeightFormat, num_inputs: int, parts: int) -> WeightFormat:
    """Return the format with groups small enough that no group crosses a boundary of parts.

    The `num_inputs` inputs are divided into `parts` parts of equal size.
    """
    size = math.gcd(format.group_size or num_inputs, num_inputs // parts)
    return replace(format, group_size=size)
