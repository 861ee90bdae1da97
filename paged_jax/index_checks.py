"""Functions that `checkify.index_checks` does not look into.

The ops and the allocator drop rows by an index past the end of an array, as JAX defines for
``mode="drop"``. `jax.experimental.checkify` reports each such index as an error, whatever the mode.
It does not look into primitives that it does not know, so these functions are one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

_call_p = Primitive("paged_jax_without_index_checks")
_call_p.multiple_results = True


def without_index_checks(
    function: Callable[..., Any], *, static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Decorate a function whose indices out of range are meant to be dropped.

    The function keeps its meaning under `jax.jit`, `jax.vmap` and `jax.grad`.

    Args:
      function: takes trees of arrays as positional arguments. Keyword arguments are static.
      static_argnums: positional arguments that are static.

    Example:
      >>> from jax.experimental import checkify
      >>> put = without_index_checks(lambda x, index: x.at[index].set(1, mode="drop"))
      >>> error, x = checkify.checkify(put, errors=checkify.index_checks)(jax.numpy.zeros(2), 2)
      >>> error.get() is None, x.tolist()
      (True, [0.0, 0.0])
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        trace = jax.make_jaxpr(
            functools.partial(function, **kwargs), static_argnums, return_shape=True
        )
        program, shapes = trace(*args)
        arrays = [x for i, x in enumerate(args) if i not in static_argnums]
        results = _bind(program, jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


@without_index_checks
def take_or_zero(array: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows of an array by their index, and zeros for an index past its end."""
    return array.at[index].get(mode="fill", fill_value=0)


def _bind(program: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    jaxpr, consts = program.jaxpr, program.consts
    if consts:
        # Constants may be traced arrays of an outer function, so they are operands too.
        jaxpr = jaxpr.replace(
            constvars=[],
            invars=[*jaxpr.constvars, *jaxpr.invars],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        program = ClosedJaxpr(jaxpr, ())
    return _call_p.bind(*consts, *operands, program=program)


def _run(*operands: Any, program: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(program)(*operands)


def _abstract(*operands: Any, program: ClosedJaxpr) -> list[ShapedArray]:
    del operands
    return program.out_avals


def _batched(operands: Any, axes: Any, *, program: ClosedJaxpr) -> Any:
    batched = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), in_axes=axes))(*operands)
    results = _bind(batched, operands)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, *, program: ClosedJaxpr) -> Any:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    is_real = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in program.out_avals]

    def push(primals: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        def of_moving(*values: Any) -> list[Any]:
            operands = list(primals)
            for i, value in zip(moving, values, strict=True):
                operands[i] = value
            results = _run(*operands, program=program)
            return [x for x, real in zip(results, is_real, strict=True) if real]

        return jax.jvp(of_moving, [primals[i] for i in moving], list(moved))[1]

    moved = [tangents[i] for i in moving]
    pushed = iter(_bind(jax.make_jaxpr(push)(list(primals), moved), [*primals, *moved]))
    dots = [
        next(pushed) if real else ad.Zero(aval.to_tangent_aval())
        for real, aval in zip(is_real, program.out_avals, strict=True)
    ]
    return _call_p.bind(*primals, program=program), dots


def _transposed(cotangents: Any, *operands: Any, program: ClosedJaxpr) -> Any:
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (operands[i].aval for i in linear)]
    fixed = [x for x in operands if not ad.is_undefined_primal(x)]
    cotangents = [ad.instantiate_zeros(x) for x in cotangents]

    def pull(fixed: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def of_linear(*values: Any) -> list[Any]:
            mixed, rest = dict(zip(linear, values, strict=True)), iter(fixed)
            return _run(
                *(mixed[i] if i in mixed else next(rest) for i in range(len(operands))),
                program=program,
            )

        return jax.linear_transpose(of_linear, *shapes)(list(cotangents))

    pulled = iter(_bind(jax.make_jaxpr(pull)(fixed, cotangents), [*fixed, *cotangents]))
    return [next(pulled) if i in linear else None for i in range(len(operands))]


_call_p.def_impl(_run)
_call_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_call_p] = _batched
ad.primitive_jvps[_call_p] = _jvp
ad.primitive_transposes[_call_p] = _transposed
mlir.register_lowering(_call_p, mlir.lower_fun(_run, multiple_results=True))
