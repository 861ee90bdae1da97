"""Conversion of tiles of quantised weights to floats in the registers of a kernel.

A compiled kernel converts four bytes of a weight at a time, in PTX. The bytes are four 8-bit
values, or eight packed 4-bit values. If values are packed, the low halves and the high halves of
the bytes are converted separately. An interpreted kernel uses `jnp`.

The compiled conversion of 4-bit values takes two steps. The first step gives numbers that the dtype
of the matmul represents exactly:

- ``int4`` and ``uint4``: a bfloat16 number with the high byte ``0x43``, and the 4 bits as the low
  byte, is 128 plus the bits. Then 136 is subtracted. In float16, the high byte ``0x64`` gives 1024
  plus the bits.
- ``e2m1``: the same, but the low byte is 64 plus twice the number. The instruction ``prmt`` looks
  up this byte in a table of 16 bytes.
- ``nf4``, ``fp4`` and ``iq4``: ``prmt`` looks up the low byte and the high byte of the number.

The second step multiplies the number by the scale and adds the minimum. Both are rounded to the
dtype of the matmul. 8-bit values are multiplied by the scale and added to the minimum in float32,
and the result is rounded to the dtype of the matmul.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.kernels.triton.pallas import plgpu, run_ptx
from paged_jax.kernels.weight_formats import CODES, WeightFormat
from paged_jax.kernels.weight_packing import PACKED_BYTES, PACKED_INPUTS

# For matmuls of these dtypes, the kernel uses tensor cores.
DTYPES = ("bfloat16", "float16")

# Group sizes must be a multiple of this number, because a tensor core instruction multiplies 16
# inputs.
SMALLEST_GROUP = 16


class TileFormat(NamedTuple):
    """Format of a weight, and dtype and step size of the matmul that reads it.

    Attributes:
      weight: format of the weight. Its `has_order` is ignored: the caller reorders the inputs of
        `x`.
      num_inputs: number of inputs of the weight.
      dtype: dtype of the matmul, one of `DTYPES`.
      step: number of inputs in a loop step, a power of two of at least 32.
      interpret: whether the kernel is interpreted.
    """

    weight: WeightFormat
    num_inputs: int
    dtype: Any
    step: int
    interpret: bool

    @property
    def halves(self) -> tuple[int, ...]:
        """Indices of the values in a byte: ``(0, 1)`` for 4-bit values, ``(0,)`` for 8-bit values.

        The kernel multiplies the values of each index in a separate matmul.
        """
        return (0, 1) if self.weight.is_packed else (0,)

    @property
    def columns(self) -> int:
        """Number of bytes of each row of the weight that a loop step reads."""
        return self.step // len(self.halves)

    @property
    def group(self) -> int:
        """Number of consecutive inputs that the kernel treats as a group with a scale.

        It is the largest power of two that divides the group size, and at most `step`.
        """
        size = self.weight.group_size or self.num_inputs
        return min(size & -size, self.step)

    @property
    def has_scale_per_half(self) -> bool:
        """Whether the two 4-bit values of a byte have different scales."""
        return self.weight.is_packed and self.group < PACKED_INPUTS

    @property
    def is_prefetched(self) -> bool:
        """Whether the kernel loads the scales one loop step ahead.

        It does so if Triton cannot load them asynchronously: because a loop step needs fewer than
        four consecutive bytes of a row of scales, or because the rows are not aligned.
        """
        itemsize = jnp.dtype(self.weight.scale_dtype).itemsize
        row_bytes = self.num_inputs // (self.weight.group_size or self.num_inputs) * itemsize
        step_bytes = self.step // self.group * itemsize
        return step_bytes < 4 or row_bytes % min(step_bytes, 16) != 0

    def inputs_of_columns(self, half: int) -> jax.Array:
        """Return the index of the input that each column is multiplied by, i32 ``[columns]``.

        A column is a byte of each row of the weight. `half` is 0 for the low halves of packed bytes
        or for 8-bit values, 1 for the high halves. Indices start at 0 in each loop step.
        """
        columns = jnp.arange(self.columns, dtype=jnp.int32)
        if not self.weight.is_packed:
            return columns
        # Compute the indices with divisions, because Triton then recognises runs of 16 consecutive
        # inputs and uses wide loads.
        size = jnp.full_like(columns, PACKED_BYTES)
        block, position = lax.div(columns, size), lax.rem(columns, size)
        return block * PACKED_INPUTS + half * PACKED_BYTES + position


def refusal(format: WeightFormat, num_inputs: int, dtype: Any) -> str | None:
    """Return why tiles of a format cannot be converted to a dtype, or None if they can."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"the dtype of the matmul must be {' or '.join(DTYPES)}, got {jnp.dtype(dtype)}"
    if format.is_compact:
        scales = "of two levels" if format.has_sections else "of one level"
        return (
            "only kernels for CPUs support values of 5 bits and scales of two levels, got "
            f"{format.code} with scales {scales}"
        )
    size = format.group_size or num_inputs
    if size % SMALLEST_GROUP:
        return f"groups must have a multiple of {SMALLEST_GROUP} inputs, got {size}"
    return None


class WeightTile(NamedTuple):
    """A tile of a weight: some of its outputs. Methods load and convert one loop step at a time.

    Attributes:
      refs: refs of the values, scales and minima (or None). Float8 and packed values are uint8.
      place: indices of the weight in the refs, such as the expert.
      outputs: i32 ``[N]``, the outputs, all in range.
      format: format of the tile.
    """

    refs: tuple[Any, Any, Any]
    place: tuple[jax.Array, ...]
    outputs: jax.Array
    format: TileFormat

    def load_values(self, step: jax.Array) -> tuple[jax.Array, ...]:
        """Load the values of a loop step, ``[N, columns]``.

        For codes with tables, compiled kernels instead return an int16 array per table. Each int16
        contains two entries of the table: for the low half of a byte, and for the high half.
        """
        format = self.format
        columns = step * format.columns + jnp.arange(format.columns, dtype=jnp.int32)
        row_size = format.num_inputs // len(format.halves)
        mask = (columns < row_size)[None] if row_size % format.columns else None
        values = self._load(self.refs[0], columns, mask)
        tables = [] if format.interpret else _tables(format.weight.code, format.dtype)
        # A look-up gives the table entries of both halves of each byte.
        return tuple(run_ptx(_look_up(table), [values], jnp.int16, pack=4) for table in tables) or (
            values,
        )

    def load_scales(self, step: jax.Array) -> tuple[jax.Array | None, ...]:
        """Load the scales and the minima of a loop step, ``[N, groups]``.

        Returns ``(scales, minima)``; the minima are None if the weight has none. If the halves of a
        byte have different scales, the tuple has four elements: the scales and minima of the low
        halves, then of the high halves.
        """
        halves = range(2 if self.format.has_scale_per_half else 1)
        return tuple(
            None if ref is None else self._load_groups(ref, step, half)
            for half in halves
            for ref in self.refs[1:]
        )

    def _load_groups(self, ref: Any, step: jax.Array, half: int) -> jax.Array:
        format = self.format
        size = format.weight.group_size or format.num_inputs
        width = PACKED_INPUTS if format.has_scale_per_half else format.group
        count = format.step // width
        if count == 1:
            # Load the scales as a 1-dimensional array, one for each output. If they were loaded as
            # an array with one column, Triton would repeat the load for each element.
            group = lax.div(step * format.step, jnp.int32(size))
            if format.num_inputs % format.step or format.is_prefetched:
                group = jnp.minimum(group, ref.shape[-1] - 1)
            return plgpu.load(ref.at[(*self.place, self.outputs, group)])[:, None]
        index = jnp.arange(count, dtype=jnp.int32)
        inputs = step * format.step + index * width + half * PACKED_BYTES
        if size == width:
            # Do not divide here, because Triton would then not see that the groups are consecutive.
            groups = step * count + index
        else:
            groups = lax.div(inputs, jnp.full_like(inputs, size))
        is_past_end = format.num_inputs % format.step or format.is_prefetched
        mask = (inputs < format.num_inputs)[None] if is_past_end else None
        return self._load(ref, groups, mask)

    def _load(self, ref: Any, columns: jax.Array, mask: jax.Array | None) -> jax.Array:
        place = (*self.place, self.outputs[:, None], columns[None])
        other = None if mask is None else jnp.zeros((), ref.dtype)
        if mask is not None:
            mask = jnp.broadcast_to(mask, (self.outputs.size, columns.size))
        return plgpu.load(ref.at[place], mask=mask, other=other)

    def convert(
        self, values: tuple[jax.Array, ...], scales: tuple[jax.Array | None, ...], half: int
    ) -> jax.Array:
        """Convert the low or the high halves of the bytes to floats ``[N, columns]``.

        The floats have the dtype of the matmul.

        Args:
          values: result of `load_values`.
          scales: result of `load_scales`.
          half: 0 for the low halves of packed values or for 8-bit values, 1 for the high halves.
        """
        first = 2 * half if len(scales) > 2 else 0
        scale, low = scales[first], scales[first + 1]
        assert scale is not None
        scale = scale.astype(jnp.float32)
        low = None if low is None else low.astype(jnp.float32)
        convert = _interpreted if self.format.interpret else _compiled
        return convert(values, scale, low, half, self.format)


def as_bytes(values: jax.Array) -> jax.Array:
    """Bitcast float8 or packed values to uint8, which the kernel reads; return int8 unchanged.

    XLA makes no copy for this.
    """
    return lax.bitcast_convert_type(values, jnp.uint8) if values.dtype != jnp.int8 else values


def _spread(groups: jax.Array, format: TileFormat) -> jax.Array:
    """Repeat each group's scale or minimum for its columns: ``[N, groups]`` to ``[N, columns]``."""
    N, count = groups.shape
    if count == 1:
        return jnp.broadcast_to(groups, (N, format.columns))
    repeated = jnp.broadcast_to(groups[:, :, None], (N, count, format.columns // count))
    return repeated.reshape(N, format.columns)


def _interpreted(
    loaded: tuple[jax.Array, ...],
    scale: jax.Array,
    low: jax.Array | None,
    half: int,
    format: TileFormat,
) -> jax.Array:
    [values], code = loaded, format.weight.code
    if code in CODES:
        bits = lax.shift_right_logical(values, jnp.uint8(4 * half)) & jnp.uint8(15)
        w = jnp.zeros(values.shape, jnp.float32)
        for index, value in enumerate(CODES[code].tolist()):
            w = jnp.where(bits == index, value, w)
    elif code == "int8":
        w = values.astype(jnp.float32)
    else:
        w = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)
    w = w * _spread(scale, format)
    if low is not None:
        w = w + _spread(low, format)
    return w.astype(format.dtype)


class _Half(NamedTuple):
    """A 16-bit float dtype in PTX. A register holds two numbers of the dtype.

    Attributes:
      name: type suffix of PTX instructions that process two numbers of the dtype at a time.
      base: a number with a low byte of zero. Writing a small integer n to this byte gives the
        number ``base + n``.
    """

    name: str
    base: int

    def pair(self, value: float) -> str:
        """Return a PTX constant with two copies of a number that the dtype represents exactly."""
        bits = int(np.asarray(value, _DTYPE_OF[self.name]).view(np.uint16))
        return f"0x{bits:04X}{bits:04X}"

    @property
    def prefix(self) -> str:
        """PTX constant with four copies of the high byte of `base`."""
        return f"0x{self.pair(self.base)[2:4] * 4}"


_DTYPE_OF = {"bf16x2": jnp.bfloat16, "f16x2": jnp.float16}
_HALVES = {"bfloat16": _Half("bf16x2", 128), "float16": _Half("f16x2", 1024)}

# The PTX writes integers to the low byte of `_Half.base`. This byte cannot hold negative integers,
# so each code has an offset that is first added, and later subtracted together with the base. int4
# is stored with the offset already added. uint4 uses the PTX of int4, see `_compiled`. The values
# of e2m1 are multiples of 0.5, so they are doubled to get integers.
_OFFSETS = {"int4": 8, "uint4": 8, "e2m1": 64}


def _registers(table: list[int]) -> list[str]:
    """Return 16 bytes as four PTX constants. The first byte is in the lowest bits."""
    return [f"0x{int.from_bytes(bytes(table[i : i + 4]), 'little'):08X}" for i in (0, 4, 8, 12)]


def _look_up(table: list[int]) -> str:
    """Return PTX that looks up each half of four bytes in a table of 16 bytes.

    There are two results of four bytes. The first result has the entries for the low half of byte
    0, its high half, the low half of byte 1, and its high half. The second result has the entries
    for bytes 2 and 3.

    A `prmt` instruction looks up four halves in 8 bytes of the table. The lower three bits of a
    half choose the byte. If the fourth bit is set, the result is the highest bit of this byte,
    repeated eight times, instead of the byte.
    """
    a, b, c, d = _registers(table)
    parts = ["{ .reg .b32 t, u, m;"]
    for word in (0, 1):
        parts.append(f"shr.u32 t, $2, {16 * word}; prmt.b32 u, {a}, {b}, t;")
        if max(table) < 128:
            # Each of the two `prmt` instructions reads half of the table, and returns 0 for entries
            # in the other half.
            parts.append(
                f"xor.b32 t, t, 0x88888888; prmt.b32 t, {c}, {d}, t; or.b32 ${word}, u, t;"
            )
            continue
        parts.append(
            "prmt.b32 m, 0x7F7F7F7F, 0x7F7F7F7F, t; shl.b32 u, m, 1; or.b32 m, m, u;"
            f" and.b32 t, t, 0x77777777; prmt.b32 u, {a}, {b}, t; prmt.b32 t, {c}, {d}, t;"
            f" lop3.b32 ${word}, u, t, m, 0xE4;"
        )
    return " ".join([*parts, "}"])


def _tables(code: str, dtype: Any) -> list[list[int]]:
    """Return the tables of a code for `_look_up`, with 16 entries of one byte each.

    Codes whose numbers take two bytes have two tables, one of low bytes and one of high bytes. The
    list is empty for codes that need no tables: integers and 8-bit codes.
    """
    if code == "e2m1":
        return [(_OFFSETS[code] + 2 * CODES[code]).astype(int).tolist()]
    if code in ("nf4", "fp4", "iq4"):
        bits = CODES[code].astype(jnp.dtype(dtype)).view(np.uint16)
        return [(bits & 255).tolist(), (bits >> 8).tolist()]
    return []


def _looked_up_code(num_tables: int, half: int, kind: _Half, has_min: bool) -> str:
    """Return PTX that converts the low or high halves of two bytes, given `_look_up`'s results.

    `half` is 0 for the low halves, 1 for the high halves.
    """
    fma, offset = f"fma.rn.{kind.name}", kind.pair(-kind.base - _OFFSETS["e2m1"])
    lines = [
        f"{{ .reg .b32 t, one, zero; mov.b32 one, {kind.pair(1)}; mov.b32 zero, {kind.pair(-0.0)};"
    ]
    if num_tables == 1:
        lines.append(f"prmt.b32 t, $1, {kind.prefix}, {'0x4341' if half else '0x4240'};")
        lines.append(f"{{ .reg .b32 c; mov.b32 c, {offset}; {fma} t, t, one, c; }}")
    else:
        lines.append(f"prmt.b32 t, $1, $2, {'0x7351' if half else '0x6240'};")
    scale = 1 + num_tables
    lines.append(f"{fma} $0, t, ${scale}, {f'${scale + 1}' if has_min else 'zero'}; }}")
    return " ".join(lines)


def _integer_code(code: str, half: int, kind: _Half, has_min: bool) -> str:
    """Return PTX that converts the 4-bit integers in the low or high halves of four bytes.

    `half` is 0 for the low halves, 1 for the high halves.
    """
    shift = "shr.u32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F;" if half else "and.b32 t, $2, 0x0F0F0F0F;"
    lines = [
        "{ .reg .b32 t, a, b, one, zero, c;",
        f"mov.b32 one, {kind.pair(1)}; mov.b32 zero, {kind.pair(-0.0)};",
        f"mov.b32 c, {kind.pair(-kind.base - _OFFSETS[code])}; {shift}",
    ]
    for i, (pair, select) in enumerate((("a", "0x4140"), ("b", "0x4342"))):
        low = f"${5 + i}" if has_min else "zero"
        lines.append(
            f"prmt.b32 {pair}, t, {kind.prefix}, {select};"
            f" fma.rn.{kind.name} {pair}, {pair}, one, c;"
            f" fma.rn.{kind.name} ${i}, {pair}, ${3 + i}, {low};"
        )
    return " ".join([*lines, "}"])


def _byte_code(code: str, kind: _Half, has_min: bool) -> str:
    """Return PTX that converts four 8-bit values, in float32."""
    lines = ["{ .reg .b32 t, u; .reg .b16 h<4>; .reg .f32 f<4>;"]
    if code == "int8":
        # 0x4B000000 is 2**23 in float32. If a byte is put into its low bits, the number is 2**23
        # plus the byte. Flipping the sign bit of an int8 adds 128 to it.
        lines.append("xor.b32 t, $2, 0x80808080;")
        for i in range(4):
            lines.append(f"prmt.b32 u, t, 0x4B000000, 0x744{i}; mov.b32 f{i}, u;")
            lines.append(f"sub.rn.f32 f{i}, f{i}, 0f4B000080;")
    else:
        lines.append("mov.b32 {h0, h1}, $2;")
        lines.append("cvt.rn.f16x2.e4m3x2 t, h0; cvt.rn.f16x2.e4m3x2 u, h1;")
        lines.append("mov.b32 {h0, h1}, t; mov.b32 {h2, h3}, u;")
        lines += [f"cvt.f32.f16 f{i}, h{i};" for i in range(4)]
    for i in range(4):
        scale, low = f"${3 + i}", f"${7 + i}"
        product = f"fma.rn.f32 f{i}, f{i}, {scale}, {low};"
        lines.append(product if has_min else f"mul.rn.f32 f{i}, f{i}, {scale};")
    lines += [f"cvt.rn.{kind.name}.f32 ${i}, f{2 * i + 1}, f{2 * i};" for i in (0, 1)]
    return " ".join([*lines, "}"])


def _compiled(
    values: tuple[jax.Array, ...],
    scale: jax.Array,
    low: jax.Array | None,
    half: int,
    format: TileFormat,
) -> jax.Array:
    code, dtype = format.weight.code, jnp.dtype(format.dtype)
    kind = _HALVES[dtype.name]
    if code == "uint4":  # For this code, the PTX returns the value minus 8.
        low = scale * 8 if low is None else low + scale * 8
    if code == "e2m1":  # For this code, the PTX returns twice the value.
        scale = scale * 0.5
    operands = [scale] if low is None else [scale, low]
    if code in CODES:
        operands = [operand.astype(dtype) for operand in operands]
    arrays = [*values, *(_spread(operand, format) for operand in operands)]
    has_min = low is not None
    if code not in CODES:
        return run_ptx(_byte_code(code, kind, has_min), arrays, dtype, pack=4)
    if _tables(code, dtype):
        ptx = _looked_up_code(len(values), half, kind, has_min)
        return run_ptx(ptx, arrays, dtype, pack=2)
    return run_ptx(_integer_code(code, half, kind, has_min), arrays, dtype, pack=4)
