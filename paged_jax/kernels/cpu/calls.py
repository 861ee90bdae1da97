"""Calls of the C++ kernels for CPUs in JAX programs.

A call is a JAX primitive with an equivalent function in plain JAX. When a program is lowered for a
single CPU of this machine, the primitive becomes a custom call of the kernel, which `library`
compiles. Otherwise, the primitive becomes the plain function.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from paged_jax.kernels.backend import Options
from paged_jax.kernels.cpu.kernels import Kernel
from paged_jax.kernels.cpu.library import load

# Static parameters of a kernel, by name.
Attributes = tuple[tuple[str, np.generic], ...]
# A function in plain JAX. It must be hashable, because it is a parameter of the primitive: programs
# with different functions are compiled separately.
PlainFunction = Callable[..., Any]
Arrays = tuple[jax.Array, ...]

_call_p = Primitive("paged_jax_cpu_kernel")
_call_p.multiple_results = True


def call(
    kernel: Kernel,
    operands: Arrays,
    plain: PlainFunction,
    args: tuple[Any, ...],
    *,
    attributes: Attributes = (),
    options: Options | None = None,
    is_in_place: bool = False,
) -> list[jax.Array]:
    """Call a kernel, or the equivalent function in plain JAX.

    Args:
      kernel: the kernel.
      operands: arguments of the kernel.
      plain: the equivalent function.
      args: arguments of `plain`, trees of arrays. XLA does not compute them in a program that calls
        the kernel.
      attributes: static parameters of the kernel.
      options: last argument of `plain`, if it takes options.
      is_in_place: whether the kernel returns its first operand, changed in place.

    Returns:
      The results of the kernel, which are the leaves of the result of `plain`.
    """
    leaves, structure = jax.tree.flatten(args)
    return _call_p.bind(
        *leaves,
        *operands,
        kernel=kernel,
        plain=plain,
        structure=structure,
        options=options,
        is_in_place=is_in_place,
        attributes=attributes,
    )


def _run_plain(
    *operands: Any, plain: PlainFunction, structure: Any, options: Options | None, **_: Any
) -> list[jax.Array]:
    args = jax.tree.unflatten(structure, operands[: structure.num_leaves])
    return jax.tree.leaves(plain(*args) if options is None else plain(*args, options))


def _abstract(*avals: Any, **params: Any) -> list[Any]:
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    results = jax.eval_shape(partial(_run_plain, **params), *operands)
    return [ShapedArray(x.shape, x.dtype) for x in results]


def _batched(operands: Any, axes: Any, *, structure: Any, **params: Any) -> Any:
    count = structure.num_leaves
    run = partial(_run_plain, structure=structure, **params)
    results = jax.vmap(run, in_axes=axes[:count])(*operands[:count])
    return results, [0] * len(results)


def _lower_for_cpu(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    kernel: Kernel,
    attributes: Attributes,
    structure: Any,
    is_in_place: bool,
    **rest: Any,
) -> Any:
    if _is_for_one_device_here(ctx.module_context):
        target = load(kernel).target
        if target is not None:
            begin = structure.num_leaves
            inner = ctx.replace(avals_in=ctx.avals_in[begin:])
            lower = jax.ffi.ffi_lowering(
                target, operand_output_aliases={0: 0} if is_in_place else None
            )
            return lower(inner, *operands[begin:], **dict(attributes))
    return _lower_plain(ctx, *operands, structure=structure, **rest)


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
