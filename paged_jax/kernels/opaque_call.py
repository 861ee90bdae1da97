"""Calls of functions as a single JAX primitive, so that JAX does not look inside them.

The primitive has two uses:

- `jax.experimental.checkify` reports every out-of-range index, even in scatters with
  ``mode="drop"``. The ops and the allocator use such scatters to drop rows on purpose. `checkify`
  does not look inside the primitive.
- In a program for several platforms, JAX lowers every branch of `jax.lax.platform_dependent` for
  every platform. A kernel can only be lowered for its own platform. The primitive is lowered for
  this platform alone.

Under `jax.disable_jit`, the functions are called without the primitive.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

Fn = TypeVar("Fn", bound=Callable[..., Any])
Index = jax.Array | tuple[jax.Array, ...]

_call_p = Primitive("paged_jax_opaque_call")
_call_p.multiple_results = True


def without_index_checks(function: Fn, *, static_argnums: tuple[int, ...] = ()) -> Fn:
    """Return a function that `checkify.index_checks` does not look into.

    Use it for functions that drop or fill out-of-range rows on purpose. The results are the results
    of `function`, also under `jax.jit`, `jax.vmap` and `jax.grad`.

    Args:
      function: function of trees of arrays, which are positional arguments. Keyword arguments are
        static.
      static_argnums: indices of positional arguments that are static.

    Example:
      >>> from jax.experimental import checkify
      >>> put = without_index_checks(lambda x, index: x.at[index].set(1, mode="drop"))
      >>> error, x = checkify.checkify(put, errors=checkify.index_checks)(jax.numpy.zeros(2), 2)
      >>> error.get() is None, x.tolist()
      (True, [0.0, 0.0])
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return function(*args, **kwargs)
        arrays = [x for i, x in enumerate(args) if i not in static_argnums]
        trace = jax.make_jaxpr(
            functools.partial(function, **kwargs), static_argnums, return_shape=True
        )
        return _bind_tree(*trace(*args), arrays)

    return cast(Fn, call)


def typed_jit(function: Fn, **options: Any) -> Fn:
    """Return ``jax.jit(function, **options)`` with the type of `function` for type checkers."""
    return cast(Fn, jax.jit(function, **options))


def only_on(platform: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that can only be lowered for a single platform.

    Args:
      platform: ``"cuda"`` or ``"tpu"``. In a program for several platforms, the call must be in a
        branch of `jax.lax.platform_dependent` for this platform alone.
      function: function that takes and returns trees of arrays. It cannot be differentiated.
      *args: arguments of the function.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return function(*args)
    return _bind_tree(*jax.make_jaxpr(function, return_shape=True)(*args), args, platform)


@without_index_checks
def take_or_fill(array: jax.Array, index: Index, *, fill_value: int = 0) -> jax.Array:
    """Return the rows of an array at `index`, or `fill_value` where it is out of range.

    Args:
      array: the array.
      index: indices into the first axis, or a tuple with indices into each leading axis. Negative
        indices are out of range.
      fill_value: value of rows with an index out of range.
    """
    return array.at[index].get(mode="fill", fill_value=fill_value, wrap_negative_indices=False)


@without_index_checks
def put_or_drop(array: jax.Array, index: Index, new: ArrayLike) -> jax.Array:
    """Return a copy of `array` with the rows `new` at `index`.

    Rows with indices past the end are dropped. Negative indices count from the end, as in NumPy.
    """
    return array.at[index].set(new, mode="drop")


def _bind_tree(program: ClosedJaxpr, shapes: Any, args: Any, platform: str | None = None) -> Any:
    results = _bind(program, jax.tree.leaves(args), platform)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _bind(program: ClosedJaxpr, operands: Sequence[Any], platform: str | None) -> list[Any]:
    jaxpr, consts = program.jaxpr, program.consts
    if consts:
        # Pass the constants as operands, because they may be traced arrays of an outer function.
        jaxpr = jaxpr.replace(
            constvars=[],
            invars=[*jaxpr.constvars, *jaxpr.invars],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        program = ClosedJaxpr(jaxpr, ())
    return _call_p.bind(*consts, *operands, program=program, platform=platform)


def _run(*operands: Any, program: ClosedJaxpr, platform: str | None) -> list[Any]:
    del platform
    return jaxpr_as_fun(program)(*operands)


def _abstract(*operands: Any, program: ClosedJaxpr, platform: str | None) -> Any:
    del operands, platform
    # Remove a mesh without axes from the types of the results. Such a mesh only names the device
    # that a kernel is compiled for.
    plain = [
        ShapedArray(x.shape, x.dtype, weak_type=x.weak_type) if x.sharding.mesh.empty else x
        for x in program.out_avals
    ]
    return plain, program.effects


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, platform: str | None, **params: Any
) -> Any:
    if platform is not None:
        module = ctx.module_context
        if tuple(module.platforms) != (platform,):
            # Use empty caches. The caches of the module contain functions that were lowered for all
            # of its platforms. Code for a single platform must not use these functions.
            caches = {"lowering_cache": {}, "cached_primitive_lowerings": {}}
            module = module.replace(platforms=(platform,), **caches)
        ctx = ctx.replace(module_context=module, platforms=None)
    return mlir.lower_fun(_run, multiple_results=True)(ctx, *operands, platform=platform, **params)


def _batched(operands: Any, axes: Any, *, program: ClosedJaxpr, platform: str | None) -> Any:
    batched = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), in_axes=axes))(*operands)
    results = _bind(batched, operands, platform)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, *, program: ClosedJaxpr, platform: str | None) -> Any:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    is_real = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in program.out_avals]

    def push(primals: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        def of_moving(*values: Any) -> list[Any]:
            operands = list(primals)
            for i, value in zip(moving, values, strict=True):
                operands[i] = value
            results = _run(*operands, program=program, platform=platform)
            return [x for x, real in zip(results, is_real, strict=True) if real]

        return jax.jvp(of_moving, [primals[i] for i in moving], list(moved))[1]

    moved = [tangents[i] for i in moving]
    tangent = jax.make_jaxpr(push)(list(primals), moved)
    pushed = iter(_bind(tangent, [*primals, *moved], platform))
    dots = [
        next(pushed) if real else ad.Zero(aval.to_tangent_aval())
        for real, aval in zip(is_real, program.out_avals, strict=True)
    ]
    return _call_p.bind(*primals, program=program, platform=platform), dots


def _transposed(cotangents: Any, *operands: Any, program: ClosedJaxpr, platform: str | None) -> Any:
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (operands[i].aval for i in linear)]
    fixed = [x for x in operands if not ad.is_undefined_primal(x)]
    cotangents = [ad.instantiate_zeros(x) for x in cotangents]

    def pull(fixed: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def of_linear(*values: Any) -> list[Any]:
            mixed, remaining = dict(zip(linear, values, strict=True)), iter(fixed)
            return _run(
                *(mixed[i] if i in mixed else next(remaining) for i in range(len(operands))),
                program=program,
                platform=platform,
            )

        return jax.linear_transpose(of_linear, *shapes)(list(cotangents))

    cotangent = jax.make_jaxpr(pull)(fixed, cotangents)
    pulled = iter(_bind(cotangent, [*fixed, *cotangents], platform))
    return [next(pulled) if i in linear else None for i in range(len(operands))]


# Since JAX 0.12, some functions of `jax.numpy` use primitives of hijax. JAX would lower a call that
# contains them by another rule, which this primitive does not need: its operands and results are
# plain arrays.
_call_p.is_high = lambda *operands, **params: False  # type: ignore[method-assign]
_call_p.def_impl(_run)
_call_p.def_effectful_abstract_eval(_abstract)
batching.primitive_batchers[_call_p] = _batched
ad.primitive_jvps[_call_p] = _jvp
ad.primitive_transposes[_call_p] = _transposed
mlir.register_lowering(_call_p, _lower)
