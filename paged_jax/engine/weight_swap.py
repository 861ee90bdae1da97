"""Takes new weights for a running engine: loads them, checks names and shapes, places them."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.engine.transfers import own_transfers
from paged_jax.models.config import LlamaConfig
from paged_jax.models.llama import Llama
from paged_jax.models.weight import weight_dtype

# What a config says besides how the model computes.
_IRRELEVANT = {
    "max_position_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_ids",
    "model_type",
    "dtype",
}


def load_like(model: Llama, folder: str | Path) -> Llama:
    """Load weights that can take the place of a model's, into host memory.

    Args:
      model: the model; only its structure and types are read.
      folder: a Hugging Face folder or a checkpoint.

    Raises:
      ValueError: the folder's model computes in another way. The message names the difference.
      OSError: files are not there or cannot be read.
    """
    if Path(folder).is_dir():  # else `from_pretrained` says what is wrong
        _check_config(LlamaConfig.from_file(Path(folder)), model.config)
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    return Llama.from_pretrained(
        folder, dtype=weight_dtype(model), scan_layers=model.scan_layers, sharding=host
    )


def _check_config(config: LlamaConfig, own: LlamaConfig) -> None:
    for field in dataclasses.fields(config):
        new, old = getattr(config, field.name), getattr(own, field.name)
        if new != old and field.name not in _IRRELEVANT:
            raise ValueError(
                f"load_params: the folder's {field.name} must be the model's {old}, got {new}."
            )


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
    with own_transfers():  # of weights that are on the host
        new = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in new]
    places = [x.sharding for x in old]
    near = [
        x if x.sharding.device_set == place.device_set else jax.device_put(x, place)
        for x, place in zip(new, places, strict=True)
    ]
    return _copies(tuple(x.dtype for x in old), tuple(places))(near)


@functools.lru_cache(maxsize=16)
def _copies(dtypes: tuple[Any, ...], places: tuple[Any, ...]) -> Callable[..., list[jax.Array]]:
    """A program that copies arrays in these dtypes to these places, which have the same devices.

    A program and not `jax.device_put`: no transfer takes place.
    """

    def copy(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jnp.copy(x).astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]

    return jax.jit(copy, out_shardings=list(places))


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
