"""The jitted programs of the engine, each ``(weights, state, ...) -> (state, result)``.

The state, a `decoding.DecodeState`, is donated. The weights come as a flat list of arrays:
flattening a Flax module, or hashing its graph, would cost more than a small model's step each time.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.cache import paged_cache
from paged_jax.models.llama import Llama
from paged_jax.runner import decoding
from paged_jax.sampling import sample as sampling


class Scores(NamedTuple):
    """How probable the tokens of a prompt are, one row for each: fetched in one transfer."""

    logprobs: jax.Array  # f32 [T]
    ranks: jax.Array  # i32 [T], 1 is the most probable token
    top_ids: jax.Array  # i32 [T, N], the N most probable tokens
    top_logprobs: jax.Array  # f32 [T, N]


class BeamTokens(NamedTuple):
    """What may follow each beam, fetched in one transfer."""

    top_ids: jax.Array  # i32 [B, N], the N most probable tokens, the most probable first
    top_logprobs: jax.Array  # f32 [B, N]
    num_free: jax.Array  # i32 [], free blocks in the pool
    ok: jax.Array  # bool [], false where blocks did not suffice


class Programs(NamedTuple):
    """The compiled functions of one model structure, shared by all engines that have it.

    Slots below 0 are padding. Arguments after weights and state, and the result:

    prefill: ``(token_ids i32[B, T], slots i32[B], num_tokens i32[B])`` to ``ok``.
    score: ``(token_ids i32[1, T], slots i32[1], num_tokens i32[1], targets i32[T], num_top)`` to
      ``(Scores, ok)``: as prefill, and how probable the tokens that come next, `targets`, are.
    decode: ``(slots i32[B], num_steps i32[], leave_on_stop bool[], max_steps, num_top)`` to
      `StepTokens`, see `decoding.decode_steps`.
    verify: ``(drafts i32[B, T], num_drafts i32[B], slots i32[B], num_top)`` to `StepTokens`, see
      `decoding.verify_steps`.
    beam: ``(parents i32[S], token_ids i32[B], slots i32[B], num_top)`` to `BeamTokens`: slots
      become what their parents were, see `cache.reorder`, then take one token each.
    fork: ``(parents i32[S])`` to ``ok``.
    release: ``(mask bool[S])`` to None.
    reserve: ``(num_tokens i32[S])`` to ``ok``.
    attach: ``(slot i32[], digests u32[M, 8], token_ids i32[M, C], num_blocks i32[])`` to the number
      of blocks found.
    publish: ``(slots i32[N], columns i32[N], digests u32[N, 8], token_ids i32[N, C])`` to None.
    forget: ``()`` to None.
    read_blocks: ``(slot i32[], first i32[], width)`` to their K and V.
    write_blocks: ``(slot i32[], first i32[], values)`` to None.
    """

    prefill: Callable[..., Any]
    score: Callable[..., Any]
    decode: Callable[..., Any]
    verify: Callable[..., Any]
    beam: Callable[..., Any]
    fork: Callable[..., Any]
    release: Callable[..., Any]
    reserve: Callable[..., Any]
    attach: Callable[..., Any]
    publish: Callable[..., Any]
    forget: Callable[..., Any]
    read_blocks: Callable[..., Any]
    write_blocks: Callable[..., Any]


@functools.lru_cache(maxsize=16)
def programs(
    graphdef: Any,
    treedef: Any,
    cascade: bool,
    backend: str | None,
    placement: jax.sharding.Sharding | None = None,
) -> Programs:
    """Build the steps of a model; each is compiled at its first call with a shape.

    Args:
      graphdef, treedef: the structure of a `Llama`: of its module, and of its weights.
      cascade: whether decoding reads shared blocks once, see `Llama.decode`.
      backend: of the attention, see `paged_attention`.
      placement: where all results go. None is for one device, where nothing needs to be said.
    """

    def model(weights: list[jax.Array]) -> Llama:
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))

    def prefill(weights, state, token_ids, slots, num_tokens):
        # The logits are not used, so that the compiled program has no output head.
        _, cache, ok = model(weights).prefill(
            state.cache, token_ids, slots, num_tokens, backend=backend
        )
        return replace(state, cache=cache), ok

    def score(weights, state, token_ids, slots, num_tokens, targets, *, num_top):
        logits, cache, ok = model(weights).score(
            state.cache, token_ids, slots, num_tokens, backend=backend
        )
        return replace(state, cache=cache), (_score(logits[0], targets, num_top), ok)

    def decode(weights, state, slots, num_steps, leave_on_stop, *, max_steps, num_top):
        tokens, state = decoding.decode_steps(
            model(weights), state, slots, num_steps, leave_on_stop,
            max_steps=max_steps, num_top=num_top, cascade=cascade, backend=backend,
        )  # fmt: skip
        return state, tokens

    def verify(weights, state, drafts, num_drafts, slots, *, num_top):
        tokens, state = decoding.verify_steps(
            model(weights), state, drafts, num_drafts, slots, num_top=num_top, backend=backend
        )
        return state, tokens

    def beam(weights, state, parents, token_ids, slots, *, num_top):
        cache, are_slots = paged_cache.reorder(state.cache, parents)
        logits, cache, ok = model(weights).decode(
            cache, token_ids, slots, cascade=cascade, backend=backend
        )
        top_logprobs, top_ids = sampling.top_logprobs(logits, num_top)
        num_free = cache.tables.pool.num_free
        tokens = BeamTokens(top_ids, top_logprobs, num_free, ok & are_slots)
        return replace(state, cache=cache), tokens

    def jit(program: Callable[..., Any], *static: str) -> Callable[..., Any]:
        # Else XLA would choose how the state lies, and not the same way in all programs.
        return jax.jit(program, donate_argnums=1, static_argnames=static, out_shardings=placement)

    return Programs(
        prefill=jit(prefill),
        score=jit(score, "num_top"),
        decode=jit(decode, "max_steps", "num_top"),
        verify=jit(verify, "num_top"),
        beam=jit(beam, "num_top"),
        fork=jit(_of_cache(paged_cache.fork)),
        release=jit(_of_cache(paged_cache.release)),
        reserve=jit(_of_cache(functools.partial(_reserve, backend=backend))),
        attach=jit(_of_cache(paged_cache.attach)),
        publish=jit(_of_cache(paged_cache.publish)),
        forget=jit(_of_cache(paged_cache.forget)),
        read_blocks=jit(_of_cache(_read_blocks), "width"),
        write_blocks=jit(_of_cache(paged_cache.write_blocks)),
    )


def _of_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """A program of a function that changes the cache, and perhaps answers something."""

    def program(weights, state, *args, **static):
        del weights
        out = function(state.cache, *args, **static)
        cache, result = out if isinstance(out, tuple) else (out, None)
        return replace(state, cache=cache), result

    return program


def _reserve(cache, num_tokens, *, backend):
    capacity = cache.block_tables.shape[1] * cache.block_size
    return paged_cache.reserve(cache, num_tokens, max_tokens=capacity, backend=backend)


def _read_blocks(cache, slot, first, *, width):
    return cache, paged_cache.read_blocks(cache, slot, first, width=width)


def _score(logits: jax.Array, targets: jax.Array, num_top: int) -> Scores:
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)
    top_logprobs, top_ids = sampling.top_logprobs(logits, num_top)
    return Scores(
        logprobs=chosen[:, 0] - jax.nn.logsumexp(logits, axis=-1),
        ranks=sampling.ranks(logits, targets),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
