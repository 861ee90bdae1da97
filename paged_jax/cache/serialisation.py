"""State dictionaries of caches for `flax.serialization`.

A state dictionary has an entry for each field, including static fields. Flax's `to_bytes`,
`from_bytes` and `from_state_dict` take a cache, also inside a larger tree such as a train state.
"""

from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.grouped_cache import GroupedCache
from paged_jax.cache.paged_cache import PagedCache


def register_caches() -> None:
    """Register the cache classes and their tables with `flax.serialization`."""
    for kind in (BlockPool, BlockTables, PagedCache, GroupedCache):
        serialization.register_serialization_state(
            kind, _to_state_dict, _from_state_dict, override=True
        )


def _to_state_dict(cache: Any) -> dict[str, Any]:
    return {
        field.name: serialization.to_state_dict(getattr(cache, field.name))
        for field in fields(cache)
    }


def _from_state_dict(target: Any, state: dict[str, Any]) -> Any:
    """Return `target` with the arrays of `state`; raise ValueError if their sizes differ."""
    name = type(target).__name__
    expected = {field.name for field in fields(target)}
    if expected != set(state):
        raise ValueError(
            f"{name}: the state must have the fields {sorted(expected)}, got {sorted(state)}. "
            f"Restore a state of a {name}."
        )
    static = {field.name for field in fields(target) if field.metadata.get("static")}
    for each in static:
        value = serialization.to_state_dict(getattr(target, each))
        if value != state[each]:
            raise ValueError(
                f"{name}: the state must have {each} = {value}, got {state[each]}. Restore into a "
                "cache with the sizes of the saved one."
            )
    values = {
        each: _restored(f"{name}.{each}", getattr(target, each), state[each])
        for each in sorted(expected - static)
    }
    return replace(target, **values)


def _restored(name: str, target: Any, state: Any) -> Any:
    if (target is None) != (state is None):
        kinds = ["nothing" if value is None else "an array" for value in (target, state)]
        raise ValueError(
            f"{name}: the state must hold {kinds[0]}, got {kinds[1]}. Restore into a cache with "
            "the dtype and the window of the saved one."
        )
    if not isinstance(target, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return serialization.from_state_dict(target, state)
    if (target.shape, target.dtype) != (state.shape, state.dtype):
        raise ValueError(
            f"{name}: the state must be {target.dtype} {list(target.shape)}, got {state.dtype} "
            f"{list(state.shape)}. Restore into a cache with the sizes of the saved one."
        )
    return jnp.asarray(state)
