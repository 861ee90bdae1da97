"""The jitted programs of the engine: each takes the device state, donated, and returns the next.

The model's weights come as a flat list of arrays: flattening a Flax module, or hashing its graph,
would cost more than a small model's step each time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import cache as paged_cache
from paged_jax import sampling
from paged_jax.cache import PagedCache
from paged_jax.models.llama import Llama
from paged_jax.sampling import SlotSampling


class Tokens(NamedTuple):
    """What a step has drawn, one row for each sample: fetched by the host in one transfer."""

    token_ids: jax.Array  # i32 [B]
    logprobs: jax.Array  # f32 [B]
    ranks: jax.Array  # i32 [B], of the drawn token, 1 is the most probable; 0 if not asked for
    top_ids: jax.Array  # i32 [B, N], the N most probable tokens
    top_logprobs: jax.Array  # f32 [B, N]
    num_free: jax.Array  # i32 [], free blocks in the pool
    ok: jax.Array  # bool [], false where blocks did not suffice, and nothing was done


class Programs(NamedTuple):
    """The compiled functions of one model structure, shared by all engines that have it.

    prefill: ``(weights, cache, token_ids i32[1, T], slot i32[1], num_tokens i32[1])`` to
      ``(logits f32[1, V], cache, ok)``.
    first: ``(logits f32[1, V], cache, sampling, slots i32[B], position i32[])`` to
      ``(Tokens, sampling)``: one token for each sample of a prompt.
    decode: ``(weights, cache, sampling, token_ids i32[B], slots i32[B])`` to
      ``(Tokens, cache, sampling)``: one token more for each running sample.
    fork: ``(cache, parents i32[S])`` to ``(cache, ok)``.
    release: ``(cache, mask bool[S])`` to ``cache``.

    first and decode also take ``num_top`` (static): how many of the most probable tokens to report.
    """

    prefill: Callable[..., Any]
    first: Callable[..., Any]
    decode: Callable[..., Any]
    fork: Callable[..., Any]
    release: Callable[..., Any]


@functools.lru_cache(maxsize=16)
def programs(graphdef: Any, treedef: Any, backend: str | None) -> Programs:
    """Build (and compile, on first call for each shape) the steps of a model.

    Args:
      graphdef, treedef: the structure of a `Llama`: of its module, and of its weights.
      backend: of the attention, see `paged_attention`.
    """

    def model(weights: list[jax.Array]) -> Llama:
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))

    def prefill(weights, cache, token_ids, slot, num_tokens):
        return model(weights).prefill(cache, token_ids, slot, num_tokens, backend=backend)

    def first(logits, cache, state, slots, position, *, num_top):
        logits = jnp.broadcast_to(logits, (slots.shape[0], logits.shape[1]))
        positions = jnp.broadcast_to(position, slots.shape)
        return _draw(logits, cache, state, slots, positions, jnp.bool_(True), num_top)

    def decode(weights, cache, state, token_ids, slots, *, num_top):
        logits, cache, ok = model(weights).decode(cache, token_ids, slots, backend=backend)
        # The new token's position is the number of tokens before it.
        positions = cache.lengths.at[_rows(slots, cache)].get(mode="fill", fill_value=0)
        tokens, state = _draw(logits, cache, state, slots, positions, ok, num_top)
        return tokens, cache, state

    return Programs(
        prefill=jax.jit(prefill, donate_argnames="cache"),
        first=jax.jit(first, donate_argnames="state", static_argnames="num_top"),
        decode=jax.jit(decode, donate_argnames=("cache", "state"), static_argnames="num_top"),
        fork=jax.jit(paged_cache.fork, donate_argnames="cache"),
        release=jax.jit(paged_cache.release, donate_argnames="cache"),
    )


def _draw(
    logits: jax.Array,
    cache: PagedCache,
    state: SlotSampling,
    slots: jax.Array,
    positions: jax.Array,
    ok: jax.Array,
    num_top: int,
) -> tuple[Tokens, SlotSampling]:
    """Draw for the slots i32 [B] of the running samples; a negative one is padding."""
    rows = _rows(slots, cache)
    of_rows = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), state)
    token_ids, logprobs, _ = sampling.sample(logits, of_rows, positions, (slots >= 0) & ok)
    counted = jnp.where(ok, token_ids, logits.shape[1])
    counts = state.output_counts.at[rows, counted].add(1, mode="drop")
    state = dataclasses.replace(state, output_counts=counts)
    B = slots.shape[0]
    ranks, top_ids = jnp.zeros(B, jnp.int32), jnp.zeros((B, 0), jnp.int32)
    top_logprobs = jnp.zeros((B, 0))
    if num_top:
        chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
        ranks = 1 + jnp.sum((logits > chosen).astype(jnp.int32), axis=1)
        top_logprobs, top_ids = sampling.top_logprobs(logits, num_top)
    num_free = cache.tables.pool.num_free
    return Tokens(token_ids, logprobs, ranks, top_ids, top_logprobs, num_free, ok), state


def _rows(slots: jax.Array, cache: PagedCache) -> jax.Array:
    return jnp.where(slots >= 0, slots, cache.num_slots)
