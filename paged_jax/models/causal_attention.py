# pyright: strict, reportUnknownMemberType=false
"""Attention over whole sequences without a cache, for `Decoder.__call__`."""

import jax
import jax.numpy as jnp

from paged_jax.models.config import ModelConfig
from paged_jax.models.layer_attention import (
    Attend,
    Carry,
    Heads,
    LayerInputs,
    Projection,
    Reach,
    Recurrence,
)


def causal_attention(config: ModelConfig) -> Attend[Carry]:
    """Return an `Attend` function for whole sequences ``[B, T, ...]``, without a cache.

    Attention is causal, and the states of recurrent layers start at zero. Make a new function for
    each forward pass, because the function stores the keys and values that later layers read.
    """
    sources = config.kv_sources
    is_read = {source for layer, source in enumerate(sources) if source != layer}
    kept: dict[int, tuple[jax.Array, jax.Array]] = {}

    def attend(index: int | jax.Array, heads: LayerInputs, carry: Carry) -> tuple[jax.Array, Carry]:
        if isinstance(heads, Recurrence):
            B, T, _ = heads.inputs[0].shape
            states = heads.initial_states(B, jnp.float32)
            return heads.run(states, jnp.full(B, T, jnp.int32))[0], carry
        if isinstance(heads, Heads) and heads.k is None:
            assert isinstance(index, int)
            k, v = kept[sources[index]]
            heads = heads._replace(k=k, v=v)
        q, k, v = heads.split()
        if is_read and isinstance(index, int) and index in is_read:
            kept[index] = k, v
        reach = config.reach(index)
        is_usual = heads.soft_cap is None and heads.sinks is None and heads.value_dim is None
        if is_usual and reach.chunk is None:
            window = reach.sliding_window
            local = None if window is None else (window - 1, 0)
            out = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=local, scale=heads.scale
            )
        else:
            out = _masked_attention(q, k, v, heads, reach)
        return out, carry

    return attend


def _masked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, heads: Projection | Heads, reach: Reach
) -> jax.Array:
    """Compute attention with options that `jax.nn.dot_product_attention` does not support.

    These options are a soft cap, attention sinks, values that have fewer elements than keys, and
    chunked attention.
    """
    B, T, H, D = q.shape
    K = k.shape[2]
    scale = D**-0.5 if heads.scale is None else heads.scale
    q = q.reshape(B, T, K, H // K, D) * scale
    scores_BKGTN = jnp.einsum("btkgd,bnkd->bkgtn", q, k)
    if heads.soft_cap is not None:
        scores_BKGTN = heads.soft_cap * jnp.tanh(scores_BKGTN / heads.soft_cap)
    distance_TN = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    seen_TN = distance_TN >= 0
    if reach.sliding_window is not None:
        seen_TN &= distance_TN < reach.sliding_window
    if (chunk := reach.chunk) is not None:
        seen_TN &= (jnp.arange(T)[:, None] // chunk) == (jnp.arange(T)[None] // chunk)
    scores_BKGTN = jnp.where(seen_TN[None, None, None], scores_BKGTN, -jnp.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.astype(jnp.float32).reshape(1, K, H // K, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores_BKGTN.shape[:-1], 1))
        scores_BKGTN = jnp.concatenate([scores_BKGTN, sinks], axis=-1)
    weights_BKGTN = jax.nn.softmax(scores_BKGTN, axis=-1)[..., :T]
    return jnp.einsum("bkgtn,bnku->btkgu", weights_BKGTN, v).reshape(B, T, H, -1)
