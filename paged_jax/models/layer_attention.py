"""Interface between a layer and its attention, and attention without a cache.

A layer passes queries, keys and values, as `Projection` or `Heads`, to a function of the type
`Attend`. The function decides what they attend to.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from paged_jax.formatting import short_repr
from paged_jax.kernels.norm_rope import split_and_rotate


class Projection(NamedTuple):
    """Projected queries, keys and values, before they are normalised and rotated.

    Attributes:
      qkv: float32 ``[..., K, G + 2, D]``: for each KV head its G queries, its key and its value.
      cos: float32 ``[..., D / 2]``, cosines of the rotation angles.
      sin: float32 ``[..., D / 2]``, sines of the rotation angles.
      norms: weights ``[D]`` of the RMS norms of queries and of keys, or None.
      norm_eps: constant added to the mean square of a head.
      sm_scale: factor of the attention scores; None for ``D ** -0.5``.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None for no cap.
      sinks: floating point ``[H]``, an additional logit in the softmax of each head, or None.
    """

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    norms: tuple[jax.Array, jax.Array] | None
    norm_eps: float
    sm_scale: float | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None

    # Projections have values of D elements.
    value_dim = None

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries ``[..., H, D]``, keys and values ``[..., K, D]``, ready for attention."""
        return split_and_rotate(self.qkv, self.cos, self.sin, self.norms, norm_eps=self.norm_eps)


@short_repr
class Heads(NamedTuple):
    """Queries, keys and values of a layer, ready for attention.

    Attributes:
      q: ``[N, H, D]``, floating point.
      k: ``[N, K, D]``. Query heads ``g * H / K`` to ``(g + 1) * H / K - 1`` share KV head ``g``.
      v: ``[N, K, D]``. None if the values are the first `value_dim` elements of the keys, so that
        a cache stores them once.
      sm_scale, soft_cap, sinks: see `Projection`.
      value_dim: elements of a value (U) and of the output of a head, if `v` is None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array | None
    sm_scale: float | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None
    value_dim: int | None = None

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries ``[..., H, D]``, keys ``[..., K, D]`` and values ``[..., K, U]``."""
        return self.q, self.k, self.k[..., : self.value_dim] if self.v is None else self.v


# State that each layer passes to the next: the K and V pools, or nothing without a cache.
Carry = TypeVar("Carry")

# Attention of a layer: (layer index, projection or heads, carry) -> (output ``[..., H, U]``,
# floating point, new carry). The index is traced if the layers run in a scan.
Attend = Callable[[int | jax.Array, Projection | Heads, Carry], tuple[jax.Array, Carry]]


def sliding_window_of(sliding_windows: Sequence[int | None], index: int | jax.Array) -> int | None:
    """Return the sliding window of a layer. The index may be traced if all windows are equal."""
    if len(set(sliding_windows)) == 1:
        return sliding_windows[0]
    assert isinstance(index, int)
    return sliding_windows[index]


def causal_attention(sliding_windows: Sequence[int | None]) -> Attend[Carry]:
    """Return an `Attend` function: causal attention over sequences ``[B, T, ...]``, no cache.

    Args:
      sliding_windows: sliding window of each layer, see `LlamaConfig`.
    """

    def attend(
        index: int | jax.Array, heads: Projection | Heads, carry: Carry
    ) -> tuple[jax.Array, Carry]:
        q, k, v = heads.split()
        sliding_window = sliding_window_of(sliding_windows, index)
        if heads.soft_cap is None and heads.sinks is None and heads.value_dim is None:
            local = None if sliding_window is None else (sliding_window - 1, 0)
            out = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=local, scale=heads.sm_scale
            )
        else:
            out = _masked_attention(q, k, v, heads, sliding_window)
        return out, carry

    return attend


def _masked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, heads: Projection | Heads, sliding_window: int | None
) -> jax.Array:
    """Compute attention with a soft cap, sinks or short values, which `jax.nn` does not support."""
    B, T, H, D = q.shape
    K = k.shape[2]
    scale = D**-0.5 if heads.sm_scale is None else heads.sm_scale
    q = q.reshape(B, T, K, H // K, D) * scale
    scores_BKGTN = jnp.einsum("btkgd,bnkd->bkgtn", q, k)
    if heads.soft_cap is not None:
        scores_BKGTN = heads.soft_cap * jnp.tanh(scores_BKGTN / heads.soft_cap)
    distance_TN = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    seen_TN = distance_TN >= 0
    if sliding_window is not None:
        seen_TN &= distance_TN < sliding_window
    scores_BKGTN = jnp.where(seen_TN[None, None, None], scores_BKGTN, -jnp.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.astype(jnp.float32).reshape(1, K, H // K, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores_BKGTN.shape[:-1], 1))
        scores_BKGTN = jnp.concatenate([scores_BKGTN, sinks], axis=-1)
    weights_BKGTN = jax.nn.softmax(scores_BKGTN, axis=-1)[..., :T]
    return jnp.einsum("bkgtn,bnku->btkgu", weights_BKGTN, v).reshape(B, T, H, -1)
