# pyright: strict, reportUnknownMemberType=false
"""Attention over whole sequences without a cache, for `Decoder.__call__`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from paged_jax.models.config import ModelConfig
from paged_jax.models.layer_attention import Heads, LayerInputs, Projection, Reach, Recurrence

# Carry of the layers: the keys and values that later layers read, with the layers that made them.
_Carry = tuple[tuple[int, tuple[jax.Array, jax.Array]], ...]


@dataclass(frozen=True)
class CausalAttention:
    """Attention of whole sequences ``[B, T, ...]``, without a cache, see `layer_attention.Attend`.

    Attention is causal, and the states of recurrent layers start at zero. The first layer gets the
    empty tuple as carry.

    Attributes:
      config: configuration of the model.
    """

    config: ModelConfig

    def __call__(
        self, layer: int | jax.Array, inputs: LayerInputs, carry: _Carry
    ) -> tuple[jax.Array, _Carry]:
        """Run the attention or the recurrence of a layer."""
        if isinstance(inputs, Recurrence):
            B, T, _ = inputs.inputs[0].shape
            states = inputs.initial_states(B, jnp.float32)
            return inputs.run(states, jnp.full(B, T, jnp.int32))[0], carry
        if isinstance(inputs, Heads) and inputs.k is None:
            assert isinstance(layer, int)
            k, v = dict(carry)[self.config.kv_sources[layer]]
            inputs = inputs._replace(k=k, v=v)
        q, k, v = inputs.split()
        if isinstance(layer, int) and self.config.is_read_by_others(layer):
            carry = *carry, (layer, (k, v))
        reach = self.config.reach(layer)
        is_usual = inputs.soft_cap is None and inputs.sinks is None and inputs.value_dim is None
        if is_usual and reach.chunk is None:
            window = reach.sliding_window
            local = None if window is None else (window - 1, 0)
            out = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=local, scale=inputs.scale
            )
        else:
            out = _masked_attention(q, k, v, inputs, reach)
        return out, carry


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
