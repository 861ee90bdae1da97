"""Backend for CPUs: C++ kernels that are compiled on the machine that runs them.

XLA's CPU backend has no matmul that takes rows by index, so it copies K and V of each tile out of
the pool. If it multiplies few rows by bfloat16 weights, it reads the weights at a third of the
memory's speed. The kernels in `source/` read both the pool and the weights in place. They run on
XLA's own threads, through its foreign function interface (FFI).

Each call of a kernel (`library.call`) has an equivalent function in plain JAX. The function
replaces the kernel if the kernel cannot be compiled, on other platforms, in exported programs, and
in programs that XLA partitions over devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from paged_jax.kernels.backend import (
    AttentionArgs,
    ConvolutionStep,
    DeltaStep,
    Options,
    Pages,
    Pools,
    Problem,
    RaggedArgs,
    RaggedOptions,
    RopeWriteArgs,
    StateStep,
    state_shape,
)
from paged_jax.kernels.cpu import library
from paged_jax.kernels.cpu.kernels import (
    ELEMENTS,
    FLOATS,
    STATE_DTYPES,
    FloatOp,
    Kernel,
    attention_attributes,
    kernel_code,
    list_kernels,
    matmul_kernel,
)
from paged_jax.kernels.cpu.layouts import InterleavedRows
from paged_jax.kernels.cpu.library import Arrays, Attributes, PlainFunction, call, load
from paged_jax.kernels.dispatch import general_backend
from paged_jax.kernels.exact import round_to
from paged_jax.kernels.norm_rope import rope_then_write
from paged_jax.kernels.ragged_chunks import attend_in_parts
from paged_jax.kernels.weight_formats import (
    CODES,
    Layout,
    Weight,
    WeightArrays,
    WeightFormat,
    num_bits,
)
from paged_jax.kernels.weight_packing import PACKED_INPUTS, SECTION_INPUTS

# Maximum number of elements of a value. The attention kernels have arrays of this size on the stack
# (MAX_U in `source/decode.cc`).
_MAX_VALUE_DIM = 512

# Maximum number of elements of a key in the delta rule. Its kernels have arrays of this size on the
# stack (MAX_D in `source/state_rows.h`).
_MAX_KEY_DIM = 1024

_INT8 = jnp.dtype(jnp.int8)

# The group size of 4-bit values must be a multiple of this number of inputs, because the
# kernels process two pairs of inputs at a time (`source/codes.h`).
_PACKED_GROUP = 4

# The numbers of these codes, or twice these numbers, are small integers. The kernels multiply these
# integers by the int8 inputs.
_INT8_CODES = ("int8", "int4", "uint4", "e2m1", "int5", "uint5")

# When inputs are rounded to int8, at most this number of consecutive inputs share a scale
# (`source/panels.h`).
_INT8_SEGMENT = 64


def _attention_refusal(problem: Problem) -> str | None:
    """Return why the kernels do not support the attention `problem`, or None if they do."""
    if problem.value_dim > _MAX_VALUE_DIM:
        return f"values must have at most {_MAX_VALUE_DIM} elements, got {problem.value_dim}"
    return problem.pool_dtype_refusal(*(dtype.name for dtype in ELEMENTS))


def _attention_op(problem: Problem) -> Literal["decode", "prefill"]:
    """Return the kernel for an attention op. Ragged batches use the kernel of a decode."""
    return "prefill" if problem.op == "prefill" else "decode"


@functools.partial(jax.jit, static_argnames=("options", "is_exact"))
def _attend(
    args: AttentionArgs, options: Options, is_exact: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Run a decode by `source/decode.cc`, or a prefill by `source/prefill.cc`.

    If `is_exact` is set, a prefill gives the bits of a decode.
    """
    pools, sinks = args.pools, args.sinks
    is_interleaved = isinstance(pools, Pages)
    keys = pools.kv if isinstance(pools, Pages) else pools.k
    values = keys if isinstance(pools, Pages) or pools.v is None else pools.v
    operands = [args.q.astype(jnp.float32), keys, values, args.block_tables, args.context_lens]
    operands.append(jnp.asarray(args.layer, jnp.int32))
    if pools.k_scale is not None:
        operands += [pools.k_scale, pools.k_scale if pools.v_scale is None else pools.v_scale]
    if sinks is not None:
        operands.append(sinks.astype(jnp.float32))
    if args.query_lens is not None:
        operands.append(args.query_lens)
    attributes = attention_attributes(
        options,
        pools.is_quantised,
        sinks is not None,
        is_interleaved,
        pools.shares_values,
        has_bfloat16_queries=args.q.dtype == jnp.bfloat16,
    )
    if is_exact and args.op == "prefill":
        attributes["is_exact"] = np.int32(1)
    out, lse = call(
        Kernel(args.op, pools.dtype),
        tuple(operands),
        general_backend().attend,
        (args._replace(q=operands[0]),),
        attributes=tuple(attributes.items()),
        options=dataclasses.replace(options, value_scale=1.0),
    )
    out = out * options.value_scale
    # XLA might remove a cast to bfloat16 and back in one program, and not in another.
    out = round_to(out, args.q.dtype) if is_exact else out
    return out.astype(args.q.dtype), lse


def _quantised_kernel(w: Weight) -> Kernel:
    """Return the kernel that multiplies by a quantised weight."""
    return matmul_kernel(w.format.code, w.dtype)


def _int8_kernel(w: Weight) -> Kernel:
    """Return the kernel that rounds inputs to int8 and multiplies them by a quantised weight.

    If the code of the weight is not in `_INT8_CODES`, return the result of `_quantised_kernel`.
    """
    kernel = _quantised_kernel(w)
    return kernel._replace(dtype=_INT8) if w.format.code in _INT8_CODES else kernel


def _linear(
    x: jax.Array, w: Weight, find_kernel: Callable[[Weight], Kernel] = _quantised_kernel
) -> jax.Array:
    """Multiply the last dimension of `x` by a weight; see `paged_jax.kernels.linear.linear`.

    The result of a row does not depend on the number of rows. Rows of zeros, such as padding, take
    no time, and give zeros for any weight. `find_kernel` returns the kernel for a quantised weight.
    """
    if not _has_kernel_for(math.prod(x.shape[:-1]), w):
        return general_backend().linear(x, w)
    stacked, plain = _stacked_arrays(w).merge_outputs(1), general_backend().linear
    matmul, x, operands = _find_matmul(x, w, stacked, _one_group(x), plain, find_kernel)
    matrix = dataclasses.replace(w, **w.arrays.merge_outputs()._asdict(), stack=None)
    return _multiply(matmul, x, matrix, operands).reshape(*x.shape[:-1], *w.values.shape[:-1])


def _find_matmul(
    x: jax.Array,
    w: Weight,
    stacked: WeightArrays,
    sizes: jax.Array,
    plain: PlainFunction,
    find_kernel: Callable[[Weight], Kernel],
) -> tuple["_Matmul", jax.Array, Arrays]:
    """Choose the kernel for a matmul, and prepare its operands.

    `stacked` has the arrays of the weights of all layers. `sizes`, i32 ``[X]``, is the number of
    rows of each group.

    Returns:
      The matmul; the inputs `x` in float32, rounded for the kernel; and the other operands of the
      kernel (`source/linear.cc` or `source/quantised_linear.cc`).
    """
    layer = jnp.asarray(w.stack.layer if w.stack else 0, jnp.int32)
    if w.scales is None:
        matmul = _Matmul(Kernel("linear", w.values.dtype), plain)
        return matmul, x.astype(jnp.float32), (stacked.values, sizes, layer)
    kernel = find_kernel(w)
    flags = {
        "has_mins": w.mins is not None,
        "has_order": w.order is not None,
        "is_interleaved": w.layout is not None,
    }
    attributes = tuple((name, np.int32(flag)) for name, flag in flags.items())
    matmul = _Matmul(kernel, _plain_int8 if kernel.dtype == _INT8 else plain, attributes)
    table = jnp.asarray(CODES.get(w.format.code, np.zeros(16)), jnp.float32)
    operands = stacked.values, stacked.scales, table, layer, stacked.mins, stacked.order, sizes
    return matmul, _round_inputs(x, w, kernel), tuple(y for y in operands if y is not None)


def _one_group(x: jax.Array) -> jax.Array:
    return jnp.array([math.prod(x.shape[:-1])], jnp.int32)


def _stacked_arrays(w: Weight) -> WeightArrays:
    return w.stack.arrays if w.stack else jax.tree.map(lambda x: x[None], w.arrays)


def _has_kernel_for(num_rows: int, w: Weight) -> bool:
    dtype = w.values.dtype
    if w.values.size == 0 or num_rows == 0:
        return False
    if w.scales is not None:
        return _quantised_refusal(w) is None
    return dtype in FLOATS


def _quantised_refusal(w: Weight) -> str | None:
    """Return why the kernels do not support a quantised weight, or None if they do."""
    return _format_refusal(w.format, w.shape[-1])


def _format_refusal(format: WeightFormat, num_inputs: int) -> str | None:
    size = format.group_size or num_inputs
    if format.is_packed:
        bits = num_bits(format.code)
        unit = _PACKED_GROUP if bits == 4 else PACKED_INPUTS
        if size % unit:
            return f"groups of {bits}-bit values must have a multiple of {unit} inputs"
    if format.has_sections and (64 % size or num_inputs % SECTION_INPUTS):
        return "scales of two levels need groups of at most 64 inputs, and sections of 256"
    return None


def _layouts(
    matrices: Sequence[tuple[WeightFormat, tuple[int, ...]]], dtype: DTypeLike
) -> list[Layout | None]:
    """Choose the layout of each matrix of a model, see `WeightStore.layouts`."""
    # `_layout` waits for the kernel of each format, so start to compile all of them.
    library.load_soon(list_kernels(dict.fromkeys(format.code for format, _ in matrices), dtype))
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
        and _format_refusal(format, num_inputs) is None
        and load(matmul_kernel(format.code, dtype)).target is not None
    )
    return layout if is_supported else None


def _round_inputs(x: jax.Array, w: Weight, kernel: Kernel) -> jax.Array:
    """Return inputs as float32. Round them to the dtype of the model, unless the kernel does so."""
    if w.dtype == jnp.float32 or kernel.dtype != jnp.float32:
        return x.astype(jnp.float32)
    # Round with `reduce_precision`, because XLA may remove a cast to a smaller dtype and back.
    limits = jnp.finfo(w.dtype)
    return lax.reduce_precision(x.astype(jnp.float32), limits.nexp, limits.nmant)


def _plain_int8(x: jax.Array, w: Weight, *sizes: jax.Array) -> jax.Array:
    plain = general_backend().grouped_linear if sizes else general_backend().linear
    return plain(*_round_to_int8(x, w), *sizes)


def _round_to_int8(x: jax.Array, w: Weight) -> tuple[jax.Array, Weight]:
    """Round the inputs of a matmul to int8 as the kernels do (`source/panels.h`).

    Each segment of a group of inputs has a scale. It is chosen so that the largest magnitude in the
    segment becomes 127. Derivatives ignore the rounding.

    Returns:
      The rounded inputs in float32, reordered by ``w.order``; and the weight to multiply them by,
      without an order.
    """
    x = (x if w.order is None else x[..., w.order]).astype(jnp.float32)
    size = w.format.group_size or x.shape[-1]
    groups = x.reshape(*x.shape[:-1], -1, size)
    segment = size if w.format.is_packed and size % PACKED_INPUTS else _INT8_SEGMENT
    padding = [(0, 0)] * (groups.ndim - 1) + [(0, -size % segment)]
    segments = jnp.pad(groups, padding).reshape(*groups.shape[:-1], -1, segment)
    peak = jnp.max(jnp.abs(segments), axis=-1, keepdims=True)
    numbers = jnp.round(segments * jnp.where(peak < 1e-30, 0, 127 / peak))
    rounded = (numbers * (peak / 127)).reshape(*groups.shape[:-1], -1)[..., :size].reshape(x.shape)
    exact = dataclasses.replace(w, order=None, stack=None, dtype=jnp.dtype(jnp.float32))
    return x + lax.stop_gradient(rounded - x), exact


def _copies_weights(dtype: DTypeLike, *, has_experts: bool) -> bool:
    """Implement `paged_jax.kernels.linear.copies_weights` for this machine."""
    dtype = jnp.dtype(dtype)
    copied = (jnp.float16, jnp.int8, jnp.bfloat16) if has_experts else (jnp.float16, jnp.int8)
    return dtype in copied and load(matmul_kernel(dtype.name, jnp.bfloat16)).target is None


def _sum_rows(x: jax.Array) -> jax.Array:
    """Sum float32 ``[..., N]`` over the last dimension, as a matmul with ones.

    The order of summation does not depend on the other dimensions. The matmul has a single output,
    so a single thread computes it for all rows. The op is differentiable.
    """
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    matmul = _Matmul(Kernel("linear", ones.dtype), _plain_sum_rows)
    operands = ones[None], _one_group(x), jnp.int32(0)
    return _multiply(matmul, x, Weight(ones), operands)


def _plain_sum_rows(x: jax.Array, ones: Weight) -> jax.Array:
    del ones
    return general_backend().sum_rows(x)


class _Matmul(NamedTuple):
    """A matmul kernel, and an equivalent function in plain JAX. Instances are hashable.

    Attributes:
      kernel: the kernel.
      plain: the equivalent function of `x` and a `Weight`.
      attributes: static parameters of the kernel.
    """

    kernel: Kernel
    plain: PlainFunction
    attributes: Attributes = ()


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply(matmul: _Matmul, x: jax.Array, w: Weight, operands: Arrays) -> jax.Array:
    """Multiply ``[..., in]`` by a weight with the kernel ``matmul.kernel``; return float32.

    The operands of the kernel are `x` and `operands`. The function ``matmul.plain`` of `x` and `w`
    replaces the kernel if it is unavailable, and JAX differentiates this function.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return _multiply_rows(matmul, rows, w, operands).reshape(*x.shape[:-1], w.values.shape[0])


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _multiply_rows(matmul: _Matmul, rows: jax.Array, w: Weight, operands: Arrays) -> jax.Array:
    kernel, plain, attributes = matmul
    inputs = rows.astype(kernel.input_dtype)
    [out] = call(kernel, (inputs, *operands), plain, (rows, w), attributes=attributes)
    return out


@_multiply.defjvp
def _multiply_jvp(matmul, primals, tangents):
    _, tangent = jax.jvp(matmul.plain, primals[:2], tangents[:2])
    return _multiply(matmul, *primals), tangent


def _grouped_linear(
    x: jax.Array,
    w: Weight,
    sizes: jax.Array,
    find_kernel: Callable[[Weight], Kernel] = _quantised_kernel,
) -> jax.Array:
    """Multiply rows by the weights of their groups, see `paged_jax.kernels.grouped_linear`.

    The result of a row does not depend on the other rows. `find_kernel` returns the kernel for a
    quantised weight.
    """
    stacked, plain = _stacked_arrays(w), general_backend().grouped_linear
    matmul, x, operands = _find_matmul(x, w, stacked, sizes, plain, find_kernel)
    args, kernel = (x, dataclasses.replace(w, stack=None), sizes), matmul.kernel
    operands = x.astype(kernel.input_dtype), *operands
    [out] = call(kernel, operands, matmul.plain, args, attributes=matmul.attributes)
    return out


def _grouped_linear_refusal(x: jax.Array, w: Weight, sizes: jax.Array) -> str | None:
    """Return why the kernels do not support these arrays, or None if they do."""
    del x, sizes
    return None if w.scales is None else _quantised_refusal(w)


def _set_rows(plain: PlainFunction, rows: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    """Write `new` to the rows `index` of the array `rows`, with the kernel `source/set_rows.cc`.

    If `rows` is donated, it is updated in place. See `paged_jax.kernels.rows.set_rows` for the
    arrays. `plain` is the equivalent function in plain JAX.
    """
    arrays = rows, index, new
    if rows.dtype not in ELEMENTS:
        return plain(*arrays)
    [out] = call(Kernel("set_rows", rows.dtype), arrays, plain, arrays, is_in_place=True)
    return out


def _sets_rows_in_place(dtype: DTypeLike) -> bool:
    """Return whether `_set_rows` updates arrays of a dtype in place on this machine."""
    dtype = jnp.dtype(dtype)
    return dtype in ELEMENTS and load(Kernel("set_rows", dtype)).target is not None


def _zeros(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Return zeros from the kernel `source/zeros.cc`, which does not touch most of their memory."""
    plain = functools.partial(jnp.zeros, shape, dtype)
    kernel = Kernel("zeros", jnp.dtype(dtype))
    return call(kernel, (), plain, ())[0] if kernel.dtype in ELEMENTS else plain()


def _state_op(step: StateStep) -> FloatOp:
    """Return the op of the kernel for a step of recurrent layers."""
    if isinstance(step, ConvolutionStep):
        return "convolution_step"
    return "delta_step" if isinstance(step, DeltaStep) else "state_space_step"


def _state_refusal(step: StateStep) -> str | None:
    """Return why the kernels do not support a step of recurrent layers, or None if they do."""
    dtype = step.rows.pool.dtype
    if dtype not in STATE_DTYPES[_state_op(step)]:
        return f"states must be float32, or any float dtype for convolutions, got {dtype}"
    if step.rows.pool.shape[2:] != state_shape(step):
        return "states must not be padded"
    if isinstance(step, DeltaStep) and step.k.shape[-1] > _MAX_KEY_DIM:
        return f"keys must have at most {_MAX_KEY_DIM} elements, got {step.k.shape[-1]}"
    return None


def _advance_rows(step: StateStep) -> tuple[jax.Array, jax.Array]:
    """Run a step of recurrent layers by `source/*_step.cc`, which updates the pool in place."""
    rows, pool = step.rows, step.rows.pool
    if isinstance(step, ConvolutionStep):
        F = step.x.shape[1]
        bias = jnp.zeros(F, jnp.float32) if step.bias is None else step.bias
        filters = step.weight.astype(jnp.float32).T
        x = step.x.astype(pool.dtype)
        arrays: Arrays = (x, filters, bias.astype(jnp.float32), step.num_tokens)
    else:
        arrays = step[1:]
    operands = (pool, jnp.asarray(rows.layer, jnp.int32), rows.sources, rows.entries, *arrays)
    kernel = Kernel(_state_op(step), pool.dtype)
    pool, out = call(kernel, operands, _plain_step, (step,), is_in_place=True)
    return out, pool


def _plain_step(step: StateStep) -> tuple[jax.Array, jax.Array]:
    out, pool = general_backend().advance_rows(step)
    return pool, out


@dataclass(frozen=True)
class _CpuKernels:
    """The kernels that `Cpu` and `CpuExact` have in common."""

    platform: ClassVar[str | None] = "cpu"

    refusal = staticmethod(_attention_refusal)
    linear = staticmethod(_linear)
    sum_rows = staticmethod(_sum_rows)
    grouped_linear = staticmethod(_grouped_linear)
    grouped_linear_refusal = staticmethod(_grouped_linear_refusal)
    advance_rows_refusal = staticmethod(_state_refusal)
    advance_rows = staticmethod(_advance_rows)

    def unavailable(self, problem: Problem) -> str | None:
        """Compile the kernel for a call; return why that failed, or None if it succeeded."""
        return load(Kernel(_attention_op(problem), jnp.dtype(problem.pool_dtype))).why_not


@dataclass(frozen=True)
class Cpu(_CpuKernels):
    """The backend ``"cpu"``. XLA does the writes and the copies of blocks."""

    attend = staticmethod(_attend)
    set_rows = staticmethod(_set_rows)
    sets_rows_in_place = staticmethod(_sets_rows_in_place)
    zeros = staticmethod(_zeros)
    copies_weights = staticmethod(_copies_weights)
    layouts = staticmethod(_layouts)
    targets = staticmethod(library.targets)
    load_called = staticmethod(library.load_called)
    load_target = staticmethod(library.load_target)
    find_targets = staticmethod(library.find_targets)
    processor = staticmethod(library.processor)
    is_any_missing = staticmethod(library.is_any_missing)

    def stored_format(self, format: WeightFormat, num_devices: int) -> WeightFormat:
        """Keep every format that the kernels read. Programs for several devices do not use them."""
        return format if num_devices == 1 and self.is_available() else format.widened

    def is_available(self) -> bool:
        """Return whether this machine has the C++ kernels, or a compiler for them."""
        return load(Kernel("linear", jnp.dtype(jnp.float32))).target is not None

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with single queries by the kernel, and with longer chunks by XLA."""
        return attend_in_parts(
            functools.partial(_attend, options=options),
            functools.partial(general_backend().attend_to_chunks, options=options),
            args,
        )


def _rope_write_exactly(args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
    """Run `paged_rope_write` with the sums of `_sum_rows`; XLA writes into the pools."""
    return rope_then_write(general_backend().write, args, options, backend="cpu_exact")


@dataclass(frozen=True)
class CpuExact(_CpuKernels):
    """The backend ``"cpu_exact"``: each row has the same bits in any program and batch.

    A prompt gives the same results as its tokens one after the other, and all sums over rows are
    those of the kernel. If a kernel cannot be compiled, the results are those of XLA, which depend
    on shapes, so callers check `unavailable_for` first.
    """

    is_exact: ClassVar[bool] = True

    attend = staticmethod(functools.partial(_attend, is_exact=True))
    rope_write = staticmethod(_rope_write_exactly)

    def unavailable_for(
        self, codes: Collection[str], dtype: DTypeLike, pool_dtype: DTypeLike
    ) -> str | None:
        """Compile the kernels for a model; return why they cannot be used, or None if they can.

        Args:
          codes: codes of the model's matrices, see `WeightFormat`.
          dtype: float dtype of the model.
          pool_dtype: dtype of the cache.
        """
        kernels = [Kernel("linear", jnp.dtype(jnp.float32))]
        kernels += [matmul_kernel(code, dtype) for code in codes]
        kernels += [Kernel(op, jnp.dtype(pool_dtype)) for op in ("decode", "prefill")]
        return next((why for why in (load(each).why_not for each in kernels) if why), None)


@dataclass(frozen=True)
class CpuInt8:
    """The backend ``"cpu_int8"``, whose matmuls round inputs to int8.

    Inputs are rounded only if the code of the weights is in `_INT8_CODES`. Ops other than matmuls
    are the same as in ``"cpu"``, except for attention, which this backend does not implement.
    """

    platform: ClassVar[str | None] = "cpu"

    refusal = staticmethod(_attention_refusal)
    linear = staticmethod(functools.partial(_linear, find_kernel=_int8_kernel))
    sum_rows = staticmethod(_sum_rows)
    grouped_linear = staticmethod(functools.partial(_grouped_linear, find_kernel=_int8_kernel))
    grouped_linear_refusal = staticmethod(_grouped_linear_refusal)
    advance_rows_refusal = staticmethod(_state_refusal)
    advance_rows = staticmethod(_advance_rows)

    def unavailable_for(self, codes: Collection[str]) -> str | None:
        """Compile the int8 kernels for weights with these codes; return why they cannot be used.

        The result is a phrase, such as "on a processor without AVX512-VNNI". It is None if at least
        one of the codes has an int8 kernel, and all of these kernels can be used.
        """
        if "avx512_vnni" not in library.processor():
            return "on a processor without AVX512-VNNI"
        if not (rounded := [each for each in codes if each in _INT8_CODES]):
            return f"for a model without matrices in {', '.join(_INT8_CODES)}"
        names = {kernel_code(each) for each in rounded}
        reasons = (load(Kernel("quantised_linear", _INT8, name)).why_not for name in sorted(names))
        return next((f"without C++ kernels ({each})" for each in reasons if each is not None), None)
