"""Takes new weights for a running engine: checks their names and shapes, and places them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.models.llama import Llama


def place_like(model: Llama, params: Any) -> list[jax.Array]:
    """Copy new weights in the dtypes and to the places of a model's.

    Args:
      model: the model whose weights they replace.
      params: a `Llama`, its ``nnx.state``, or a list of the leaves of that, in their order.

    Returns:
      The leaves, in the order of those of the model's ``nnx.state``.

    Raises:
      ValueError: names, their number or shapes differ from the model's.
    """
    state = nnx.state(model)
    if isinstance(params, Llama):
        params = nnx.state(params)
    if isinstance(params, nnx.State):
        _check_names(_names_of(params), _names_of(state))
    elif not isinstance(params, list | tuple):
        raise ValueError(
            "update_params: params must be a Llama, its nnx.state, or a list of its leaves, got "
            f"{type(params).__name__}."
        )
    new, old = jax.tree.leaves(params), jax.tree.leaves(state)
    _check_shapes([jnp.shape(x) for x in new], [x.shape for x in old])
    return [
        jax.device_put(jnp.asarray(x, y.dtype), y.sharding, may_alias=False)
        for x, y in zip(new, old, strict=True)
    ]


def _names_of(state: nnx.State) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return [jax.tree_util.keystr(path) for path, _ in paths]


def _check_names(names: list[str], own: list[str]) -> None:
    if names != own:
        differing = sorted(set(names) ^ set(own))[:3]
        raise ValueError(
            "update_params: params must have the names of the model's, got others: "
            f"{', '.join(differing)}."
        )


def _check_shapes(shapes: list[tuple[int, ...]], own: list[tuple[int, ...]]) -> None:
    if shapes != own:
        pairs = zip(shapes, own, strict=False)
        differing = next(((its, ours) for its, ours in pairs if its != ours), None)
        raise ValueError(
            f"update_params: params must be {len(own)} arrays of the model's shapes, got "
            f"{len(shapes)}" + (f", and {differing[0]} for {differing[1]}." if differing else ".")
        )
