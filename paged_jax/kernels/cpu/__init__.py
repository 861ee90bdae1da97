"""Backend for CPUs: C++ kernels that are compiled on the machine that runs them.

XLA's CPU backend has no matmul that takes rows by index, so it copies K and V of each tile out of
the pool. When it multiplies few rows, it reads bfloat16 weights at a third of the memory's speed.
The kernels in `source/` read both the pool and the weights in place. They run on XLA's own threads,
through its foreign function interface.

Each call is a JAX primitive with an equivalent function in plain JAX. When a program is lowered for
a single CPU of this machine, the primitive becomes a custom call of the kernel, which `library`
compiles. The primitive becomes the plain function if that fails, on other platforms, in exported
programs, and in programs that XLA partitions over devices.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.typing import DTypeLike

from paged_jax.kernels.backend import (
    AttentionArgs,
    GroupedArgs,
    Options,
    Pages,
    Pools,
    Problem,
    RaggedArgs,
    RaggedOptions,
    Stack,
    Weight,
)
from paged_jax.kernels.cpu import library
from paged_jax.kernels.cpu.library import ELEMENTS, Kernel, attention_attributes, load
from paged_jax.kernels.dispatch import general_backend
from paged_jax.kernels.ragged import attend_in_parts
from paged_jax.kernels.weight_formats import FLOAT_CODES, WeightArrays, WeightFormat

# Static parameters of a kernel, by name.
Attributes = tuple[tuple[str, np.generic], ...]
# A function in plain JAX. It is hashable, as a parameter of the primitive: a program with an
# unequal function would be compiled again.
PlainFunction = Callable[..., Sequence[jax.Array]]
Arrays = tuple[jax.Array, ...]

# Maximum head dimension: the size of arrays on the stack of the attention kernels (MAX_D in
# `source/decode.cc`).
_MAX_HEAD_DIM = 512

# Maximum rows for float32 and bfloat16 weights. For more rows XLA is up to a tenth faster if all
# rows are tokens. But in a batch of prompts a fourth of the rows is padding, which the kernel
# skips.
_MAX_ROWS = 256

# Weight types that the kernel multiplies by any number of rows, because XLA would convert all of
# the weight to float32 first.
_ANY_ROWS = (jnp.float16, jnp.int8)
# Formats of weights that `source/linear.cc` supports.
_FORMATS = (*map(WeightFormat, FLOAT_CODES), WeightFormat("int8", None, "float32"))


def _attention_refusal(problem: Problem) -> str | None:
    """Return why the kernels cannot solve a problem of attention, or None if they can."""
    if problem["D"] > _MAX_HEAD_DIM:
        return f"its head dimension is at most {_MAX_HEAD_DIM}, not {problem['D']}"
    dtype = jnp.dtype(problem.pool_dtype)
    if dtype not in ELEMENTS:
        return f"its pools are {', '.join(each.name for each in ELEMENTS)}, not {dtype}"
    return None


@functools.partial(jax.jit, static_argnames="options")
def _attend(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Run a decode or prefill by `source/decode.cc` or `source/prefill.cc`."""
    pools, sinks = args.pools, args.sinks
    is_interleaved = isinstance(pools, Pages)
    arrays = (pools.kv, pools.kv) if isinstance(pools, Pages) else (pools.k, pools.v)
    operands = [args.q.astype(jnp.float32), *arrays, args.block_tables, args.context_lens]
    operands.append(jnp.asarray(args.layer, jnp.int32))
    if pools.k_scale is not None and pools.v_scale is not None:
        operands += [pools.k_scale, pools.v_scale]
    if sinks is not None:
        operands.append(sinks.astype(jnp.float32))
    if args.query_lens is not None:
        operands.append(args.query_lens)
    has_scales, has_sinks = pools.is_quantised, sinks is not None
    plain = _PlainAttention(args.op, options, has_scales, has_sinks, is_interleaved)
    attributes = attention_attributes(options, has_scales, has_sinks, is_interleaved)
    out, lse = _call(Kernel(args.op, pools.dtype), plain, tuple(operands), attributes)
    return (out * options.value_scale).astype(args.q.dtype), lse


@dataclass(frozen=True)
class _PlainAttention:
    """Attention in plain JAX, as a function of a kernel's operands."""

    op: Literal["decode", "prefill"]
    options: Options
    has_scales: bool
    has_sinks: bool
    is_interleaved: bool

    def __call__(self, q, k, v, block_tables, context_lens, layer, *rest):
        rest = list(rest)
        scales = (rest.pop(0), rest.pop(0)) if self.has_scales else (None, None)
        sinks = rest.pop(0) if self.has_sinks else None
        query_lens = rest.pop(0) if self.op == "prefill" else None
        pools = Pages(k) if self.is_interleaved else Pools(k, v, *scales)
        args = AttentionArgs(q, pools, block_tables, context_lens, query_lens, sinks, layer)
        return general_backend().attend(args, dataclasses.replace(self.options, value_scale=1.0))


def _linear(x: jax.Array, w: Weight) -> jax.Array:
    """Multiply the last dimension of `x` by a weight; see `paged_jax.kernels.linear.linear`.

    The result of a row does not depend on the number of rows. A row of zeros, such as padding,
    costs nothing and gives zeros for any weight.
    """
    if not _has_kernel_for(math.prod(x.shape[:-1]), w):
        return general_backend().linear(x, w)
    stack = w.stack or Stack(jax.tree.map(lambda x: x[None], w.arrays), 0)
    L, num_inputs = stack.arrays.values.shape[0], w.shape[-1]
    weight: Arrays = (w.values.reshape(-1, num_inputs),)
    stacked = stack.arrays.values.reshape(L, -1, num_inputs), jnp.asarray(stack.layer, jnp.int32)
    if w.scales is not None:
        weight += (w.scales.reshape(-1, 1),)
        stacked += (stack.arrays.scales.reshape(L, -1),)
    y = _multiply(_PlainLinear(w.dtype), x, weight, stacked)
    return y.reshape(*x.shape[:-1], *w.values.shape[:-1])


def _has_kernel_for(num_rows: int, w: Weight) -> bool:
    dtype = w.values.dtype
    if w.values.size == 0 or num_rows == 0 or w.format not in _FORMATS:
        return False
    # XLA would convert a whole stack of bfloat16 weights to float32.
    is_copied = dtype in _ANY_ROWS or (dtype == jnp.bfloat16 and w.stack is not None)
    return is_copied or num_rows <= _MAX_ROWS


def _copies_weights(dtype: DTypeLike) -> bool:
    """Return whether programs for this machine convert all weights of a type to float32 first."""
    dtype = jnp.dtype(dtype)
    return dtype in _ANY_ROWS and load(Kernel("linear", dtype)).target is None


def _sum_rows(x: jax.Array) -> jax.Array:
    """Sum float32 ``[..., N]`` over the last dimension, as a matmul with ones. Differentiable.

    The order of summation does not depend on the other dimensions. One thread sums all rows.
    """
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    return _multiply(_plain_sum_rows, x, (ones,), (ones[None], jnp.int32(0)))


def _plain_sum_rows(x: jax.Array, ones: jax.Array) -> list[jax.Array]:
    del ones
    return [general_backend().sum_rows(x)]


@dataclass(frozen=True)
class _PlainLinear:
    """The matmul in plain JAX, as a function of `x` and the arrays of a weight."""

    dtype: Any

    def __call__(
        self, x: jax.Array, values: jax.Array, scales: jax.Array | None = None
    ) -> list[jax.Array]:
        return [general_backend().linear(x, Weight(values, scales, dtype=self.dtype))]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply(plain: PlainFunction, x: jax.Array, weight: Arrays, stacked: Arrays) -> jax.Array:
    """Multiply by `source/linear.cc`. Differentiable like `plain`.

    Args:
      plain: the same multiplication in plain JAX, a function of `x` and the arrays of `weight`.
      x: floating point ``[..., in]``, rounded to bfloat16 if the weights are bfloat16.
      weight: values ``[out, in]``, and float32 scales ``[out, 1]`` if the values are int8.
      stacked: arrays that the kernel reads instead of `weight`: values ``[L, out, in]``, i32 ``[]``
        layer, and float32 scales ``[L, out]`` if the values are int8.

    Returns:
      float32 ``[..., out]``.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return _multiply_rows(plain, rows, weight, stacked).reshape(*x.shape[:-1], weight[0].shape[0])


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _multiply_rows(
    plain: PlainFunction, rows: jax.Array, weight: Arrays, stacked: Arrays
) -> jax.Array:
    kernel = Kernel("linear", stacked[0].dtype)
    [out] = _call(kernel, plain, (rows, *stacked), plain_operands=(rows, *weight))
    return out


@_multiply.defjvp
def _multiply_jvp(plain, primals, tangents):
    (x, weight, _), (dx, dweight, _) = primals, tangents
    _, [tangent] = jax.jvp(plain, (x, *weight), (dx, *dweight))
    return _multiply(plain, *primals), tangent


def _grouped_linear(args: GroupedArgs) -> jax.Array:
    """Multiply rows by the weights of their groups, by `source/grouped_linear.cc`.

    The result of a row does not depend on the other rows. See `paged_jax.kernels.grouped_linear`.
    """
    stack = args.w.stack or Stack(WeightArrays(args.w.values[None]), 0)
    values = stack.arrays.values
    operands = (
        args.x.astype(jnp.float32),
        values,
        args.group_sizes,
        jnp.asarray(stack.layer, jnp.int32),
    )
    [out] = _call(
        Kernel("grouped_linear", values.dtype),
        _plain_grouped_linear,
        operands,
        plain_operands=(operands[0], args.w.values, args.group_sizes),
    )
    return out


def _plain_grouped_linear(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> list[jax.Array]:
    return [general_backend().grouped_linear(GroupedArgs(x, Weight(w), group_sizes))]


def _copies_expert_weights(dtype: DTypeLike) -> bool:
    """Return whether programs for this machine convert all weights of experts to float32 first."""
    dtype = jnp.dtype(dtype)
    return dtype == jnp.bfloat16 and load(Kernel("grouped_linear", dtype)).target is None


_call_p = Primitive("paged_jax_cpu_kernel")
_call_p.multiple_results = True


def _call(
    kernel: Kernel,
    plain: PlainFunction,
    operands: Arrays,
    attributes: Mapping[str, np.generic] | None = None,
    *,
    plain_operands: Arrays | None = None,
) -> list[jax.Array]:
    """Call a kernel, or the equivalent function in plain JAX.

    Args:
      kernel: the kernel.
      plain: the equivalent function.
      operands: arguments of the kernel.
      attributes: static parameters of the kernel.
      plain_operands: arguments of `plain`, by default `operands`. XLA does not compute them in a
        program that calls the kernel.
    """
    mine = () if plain_operands is None else plain_operands
    return _call_p.bind(
        *mine,
        *operands,
        kernel=kernel,
        plain=plain,
        num_plain=len(mine) or len(operands),
        attributes=tuple((attributes or {}).items()),
    )


def _abstract(*avals: Any, plain: PlainFunction, num_plain: int, **_: Any) -> list[Any]:
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals[:num_plain]]
    return [ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(plain, *operands)]


def _run_plain(*operands: Any, plain: PlainFunction, num_plain: int, **_: Any) -> Any:
    return plain(*operands[:num_plain])


def _batched(operands: Any, axes: Any, *, plain: PlainFunction, num_plain: int, **_: Any) -> Any:
    results = jax.vmap(plain, in_axes=axes[:num_plain])(*operands[:num_plain])
    return results, [0] * len(results)


def _lower_for_cpu(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    kernel: Kernel,
    attributes: Attributes,
    num_plain: int,
    **rest: Any,
) -> Any:
    if _is_for_one_device_here(ctx.module_context):
        target = load(kernel).target
        if target is not None:
            is_shared = num_plain == len(operands)
            begin = 0 if is_shared else num_plain
            inner = ctx.replace(avals_in=ctx.avals_in[begin:])
            return jax.ffi.ffi_lowering(target)(inner, *operands[begin:], **dict(attributes))
    return _lower_plain(ctx, *operands, num_plain=num_plain, **rest)


# Whether exported programs will be compiled and run on this machine.
_IS_FOR_HERE: contextvars.ContextVar[bool] = contextvars.ContextVar("is_for_here", default=False)


@contextlib.contextmanager
def _exporting_for_here() -> Iterator[None]:
    """Let programs exported in this context call kernels, which only this machine has."""
    token = _IS_FOR_HERE.set(True)
    try:
        yield
    finally:
        _IS_FOR_HERE.reset(token)


def _is_for_one_device_here(context: mlir.ModuleContext) -> bool:
    """Return whether XLA will run the program in this process on one device, not partitioned."""
    if context.lowering_parameters.for_export and not _IS_FOR_HERE.get():
        return False
    axes = context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):  # within jax.shard_map
        return axes.manual_axes == frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


_lower_plain = mlir.lower_fun(_run_plain, multiple_results=True)
_call_p.def_impl(_run_plain)
_call_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_call_p] = _batched
mlir.register_lowering(_call_p, _lower_plain)
mlir.register_lowering(_call_p, _lower_for_cpu, platform="cpu")


@dataclass(frozen=True)
class Cpu:
    """The backend ``"cpu"``. It leaves writes and copies of blocks to XLA."""

    platform: ClassVar[str | None] = "cpu"

    refusal = staticmethod(_attention_refusal)
    attend = staticmethod(_attend)
    linear = staticmethod(_linear)
    sum_rows = staticmethod(_sum_rows)
    grouped_linear = staticmethod(_grouped_linear)
    copies_weights = staticmethod(_copies_weights)
    copies_expert_weights = staticmethod(_copies_expert_weights)
    exporting_for_here = staticmethod(_exporting_for_here)
    targets = staticmethod(library.targets)
    load_called = staticmethod(library.load_called)
    is_any_missing = staticmethod(library.is_any_missing)

    def unavailable(self, problem: Problem) -> str | None:
        """Compile the kernel for a problem; return why this machine cannot, or None if it can."""
        op = "prefill" if problem.op == "prefill" else "decode"
        return load(Kernel(op, jnp.dtype(problem.pool_dtype))).why_not

    def is_available(self) -> bool:
        """Return whether this machine has the kernels, or a compiler for them."""
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

    def grouped_refusal(self, args: GroupedArgs) -> str | None:
        """Return why the kernel cannot multiply these arrays, or None if it can."""
        if args.w.scales is not None:
            return f"its weights are floating point, not {args.w.format.code} with scales"
        return None
