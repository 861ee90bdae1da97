"""Calls of the C++ kernels for CPUs in JAX programs.

A call is a JAX primitive with an equivalent function in plain JAX. When a program is lowered for a
single CPU of this machine, the primitive becomes a custom call of the kernel, which `library`
compiles. Otherwise, the primitive becomes the plain function.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from paged_jax.kernels.cpu.kernels import Kernel
from paged_jax.kernels.cpu.library import load

# Static parameters of a kernel, by name.
Attributes = tuple[tuple[str, np.generic], ...]
# A function in plain JAX. It must be hashable, because it is a parameter of the primitive: programs
# with different functions are compiled separately.
PlainFunction = Callable[..., Sequence[jax.Array]]
Arrays = tuple[jax.Array, ...]

_call_p = Primitive("paged_jax_cpu_kernel")
_call_p.multiple_results = True


def call(
    kernel: Kernel,
    plain: PlainFunction,
    operands: Arrays,
    attributes: Mapping[str, np.generic] | None = None,
    *,
    plain_operands: Arrays | None = None,
    is_in_place: bool = False,
) -> list[jax.Array]:
    """Call a kernel, or the equivalent function in plain JAX.

    Args:
      kernel: the kernel.
      plain: the equivalent function.
      operands: arguments of the kernel.
      attributes: static parameters of the kernel.
      plain_operands: arguments of `plain`, by default `operands`. XLA does not compute them in a
        program that calls the kernel.
      is_in_place: whether the kernel returns its first operand, changed in place.
    """
    mine = () if plain_operands is None else plain_operands
    return _call_p.bind(
        *mine,
        *operands,
        kernel=kernel,
        plain=plain,
        num_plain=len(mine) or len(operands),
        is_in_place=is_in_place,
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
    is_in_place: bool,
    **rest: Any,
) -> Any:
    if _is_for_one_device_here(ctx.module_context):
        target = load(kernel).target
        if target is not None:
            is_shared = num_plain == len(operands)
            begin = 0 if is_shared else num_plain
            inner = ctx.replace(avals_in=ctx.avals_in[begin:])
            lower = jax.ffi.ffi_lowering(
                target, operand_output_aliases={0: 0} if is_in_place else None
            )
            return lower(inner, *operands[begin:], **dict(attributes))
    return _lower_plain(ctx, *operands, num_plain=num_plain, **rest)


def _is_for_one_device_here(context: mlir.ModuleContext) -> bool:
    """Return whether XLA will run the program in this process on one device, not partitioned."""
    if context.lowering_parameters.for_export:
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
