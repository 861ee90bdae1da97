"""Calls of the kernels from JAX programs: which is chosen when a program is lowered.

A call is one primitive, with a plain form in JAX that means the same. Lowered for a CPU it is a
custom call of XLA's foreign function interface, where that can be had; anywhere else, in programs
that are exported, and in those that XLA divides over devices, it is the plain form.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from paged_jax.kernels.cpu.library import Kernel, load

# The static numbers of a call, by name; hashable.
Attributes = tuple[tuple[str, np.generic], ...]

_call_p = Primitive("paged_jax_cpu_kernel")
_call_p.multiple_results = True


def call(
    kernel: Kernel,
    plain: Callable[..., Any],
    operands: tuple[jax.Array, ...],
    attributes: Mapping[str, np.generic] | None = None,
    *,
    plain_operands: tuple[jax.Array, ...] | None = None,
) -> list[jax.Array]:
    """Call a kernel, or what means the same in plain JAX.

    Args:
      kernel: which one.
      plain: a function of `plain_operands` that gives a list of arrays; hashable. Programs that are
        equal but for it are not compiled twice if it is the same.
      operands: the arrays.
      attributes: what else the kernel must know.
      plain_operands: the arrays in the form that `plain` has them, by default `operands`. Whoever
        is not called does not have its own computed.
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


def _abstract(*avals: Any, plain: Callable[..., Any], num_plain: int, **_: Any) -> list[Any]:
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals[:num_plain]]
    return [ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(plain, *operands)]


def _plain(*operands: Any, plain: Callable[..., Any], num_plain: int, **_: Any) -> list[jax.Array]:
    return plain(*operands[:num_plain])


def _batched(
    operands: Any, axes: Any, *, plain: Callable[..., Any], num_plain: int, **_: Any
) -> Any:
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


# Whether what is exported will be compiled on this machine.
_IS_FOR_HERE: contextvars.ContextVar[bool] = contextvars.ContextVar("is_for_here", default=False)


@contextlib.contextmanager
def exporting_for_here() -> Iterator[None]:
    """A context in which programs that are exported call kernels, as only this machine has them."""
    token = _IS_FOR_HERE.set(True)
    try:
        yield
    finally:
        _IS_FOR_HERE.reset(token)


def _is_for_one_device_here(context: mlir.ModuleContext) -> bool:
    """Whether XLA will neither divide the program over devices nor is it for another process."""
    if context.lowering_parameters.for_export and not _IS_FOR_HERE.get():
        return False
    axes = context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):  # within jax.shard_map
        return axes.manual_axes == frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


_lower_plain = mlir.lower_fun(_plain, multiple_results=True)
_call_p.def_impl(_plain)
_call_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_call_p] = _batched
mlir.register_lowering(_call_p, _lower_plain)
mlir.register_lowering(_call_p, _lower_for_cpu, platform="cpu")
