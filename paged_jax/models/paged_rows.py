"""The tokens of a step in a paged cache: where each of them goes, and what it attends to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.cache import paged_cache
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.kernels import (
    Pools,
    backend_for,
    paged_prefill_attention,
    paged_rope_write,
    paged_write,
)
from paged_jax.kernels.cascade import choose_decode_attention
from paged_jax.kernels.quantisation import query_dtype
from paged_jax.models.layer import Attend, Heads, Projection, window_of


@dataclass(frozen=True)
class PagedRows:
    """Where the tokens of a step go, and what their attention may read. N = B * T."""

    block_tables: jax.Array  # i32 [B, M]
    lengths: jax.Array  # i32 [B], with the new tokens; 0 in rows left out
    num_tokens: jax.Array  # i32 [B], new tokens; 0 in rows left out
    positions: jax.Array  # i32 [N], in their sequences; -1 in rows that are no token
    blocks: jax.Array  # i32 [N], P where there is nothing to write
    offsets: jax.Array  # i32 [N], in their blocks

    def write(
        self, pools: Pools, heads: Projection | Heads, layer: Any, backend: str | None
    ) -> tuple[jax.Array, Pools]:
        """Put K and V of the tokens in their places of a layer, and return Q ``[N, H, D]``."""
        if isinstance(heads, Projection):
            return self._rope_write(pools, heads, layer, backend)
        pools = paged_write(
            pools.k,
            pools.v,
            heads.k,
            heads.v,
            self.blocks,
            self.offsets,
            layer=layer,
            k_scale=pools.k_scale,
            v_scale=pools.v_scale,
            backend=backend_for("write", backend),
        )
        return heads.q.astype(query_dtype(pools.k.dtype)), pools

    def _rope_write(
        self, pools: Pools, projection: Projection, layer: Any, backend: str | None
    ) -> tuple[jax.Array, Pools]:
        """From the projection on, in one launch where there is a kernel for it."""
        q_norm, k_norm = projection.norms or (None, None)
        return paged_rope_write(
            pools.k,
            pools.v,
            projection.qkv,
            projection.cos,
            projection.sin,
            self.blocks,
            self.offsets,
            layer=layer,
            k_scale=pools.k_scale,
            v_scale=pools.v_scale,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=projection.norm_eps,
            backend=backend_for("rope_write", backend),
        )


def append_rows(
    cache: PagedCache, slots: jax.Array, num_tokens: jax.Array, T: int, backend: str | None
) -> tuple[PagedCache, jax.Array, PagedRows]:
    """Reserve room for up to T tokens in each of the slots i32 [B], and find their places."""
    is_row = slots >= 0
    # Rows that are left out must not wrap around to the last slot: one past it is dropped.
    rows = jnp.where(is_row, slots, cache.num_slots)
    starts = cache.lengths.at[rows].get(mode="fill", fill_value=0)
    requested = jnp.zeros(cache.num_slots, jnp.int32)
    requested = requested.at[rows].set(num_tokens.astype(jnp.int32), mode="drop")
    # A slot that does not exist fails the whole step, as a negative number of tokens does.
    requested = jnp.where(jnp.all(slots < cache.num_slots), requested, -1)
    cache, ok = paged_cache.reserve(cache, requested, max_tokens=T, backend=backend)
    num_tokens = jnp.where(is_row & ok, num_tokens, 0)

    steps = jnp.arange(T, dtype=jnp.int32)[None]
    positions = (starts[:, None] + steps).reshape(-1)
    owners = jnp.where(steps < num_tokens[:, None], slots[:, None], -1).reshape(-1)
    blocks, offsets = paged_cache.locate(cache.tables, owners, positions)
    return (
        cache,
        ok,
        PagedRows(
            block_tables=cache.block_tables.at[rows].get(mode="fill", fill_value=cache.num_blocks),
            lengths=jnp.where(num_tokens > 0, starts + num_tokens, 0),
            num_tokens=num_tokens,
            positions=jnp.where(owners < 0, -1, positions),
            blocks=blocks,
            offsets=offsets,
        ),
    )


def next_rows(
    block_tables: jax.Array, lengths: jax.Array, active: jax.Array, pools: Pools
) -> PagedRows:
    """The places of the next token of each active row, for which blocks are reserved already.

    Args:
      block_tables: i32 ``[B, M]``, of the rows.
      lengths: i32 ``[B]``, tokens before that one.
      active: bool ``[B]``.
      pools: the pools that have these blocks.
    """
    _, num_blocks, _, block_size, _ = pools.k.shape
    column = (lengths // block_size)[:, None]
    blocks = jnp.take_along_axis(block_tables, column, axis=1, mode="clip")[:, 0]
    return PagedRows(
        block_tables=block_tables,
        lengths=jnp.where(active, lengths + 1, 0),
        num_tokens=active.astype(jnp.int32),
        positions=jnp.where(active, lengths, -1),
        blocks=jnp.where(active, blocks, num_blocks),
        offsets=lengths % block_size,
    )


def decode_attention(
    rows: PagedRows,
    block_size: int,
    windows: Sequence[int | None],
    *,
    cascade: bool,
    backend: str | None,
) -> Attend:
    """Attention of one new token a row; the pools are the carry. See `PagedModel.decode`."""
    attentions = {
        window: choose_decode_attention(
            rows.block_tables,
            rows.lengths,
            block_size,
            cascade=cascade and window is None,
            sliding_window=window,
            backend=backend,
        )
        for window in dict.fromkeys(windows)
    }

    def attend(layer, heads, pools):
        q, pools = rows.write(pools, heads, layer, backend)
        attention = attentions[window_of(windows, layer)]
        scores = {"scale": heads.sm_scale, "soft_cap": heads.soft_cap, "sinks": heads.sinks}
        return attention(q, pools, layer, **scores), pools

    return attend


def chunk_attention(
    rows: PagedRows, B: int, T: int, windows: Sequence[int | None], *, backend: str | None
) -> Attend:
    """Attention of B chunks of up to T tokens; the pools are the carry. See `PagedModel`."""

    def attend(layer, heads, pools):
        q, pools = rows.write(pools, heads, layer, backend)
        out = paged_prefill_attention(
            q.reshape(B, T, *q.shape[1:]),
            pools.k,
            pools.v,
            rows.block_tables,
            rows.lengths,
            rows.num_tokens,
            layer=layer,
            k_scale=pools.k_scale,
            v_scale=pools.v_scale,
            scale=heads.sm_scale,
            sliding_window=window_of(windows, layer),
            soft_cap=heads.soft_cap,
            sinks=heads.sinks,
            backend=backend,
        )
        return out.reshape(q.shape), pools

    return attend
