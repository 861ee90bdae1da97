"""The tokens of a step in a paged cache: where each of them goes, and what it attends to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.cache import paged_cache
from paged_jax.cache.groups import CacheGroup
from paged_jax.cache.paged_cache import LayerPlaces, PagedCache, find_layer
from paged_jax.kernels import (
    Pools,
    backend_for,
    cascade_attention,
    num_shared_blocks,
    paged_attention,
    paged_prefill_attention,
    paged_rope_write,
    paged_write,
)
from paged_jax.kernels.cascade import is_sharing_possible
from paged_jax.kernels.opaque_call import put_or_drop, take_or_fill
from paged_jax.kernels.pool_format import query_dtype
from paged_jax.models.layer import Attend, Heads, Projection, sliding_window_of
from paged_jax.short_repr import short_repr


class Places(NamedTuple):
    """What differs between groups of layers of where the tokens of a step are."""

    block_tables: jax.Array  # i32 [B, M]
    blocks: jax.Array  # i32 [N], P where there is nothing to write
    window: int | None  # of the cache, which keeps no more


@short_repr
@dataclass(frozen=True)
class PagedRows:
    """Where the tokens of a step go, and what their attention may read. N = B * T."""

    lengths: jax.Array  # i32 [B], with the new tokens; 0 in rows left out
    num_tokens: jax.Array  # i32 [B], new tokens; 0 in rows left out
    positions: jax.Array  # i32 [N], in their sequences; -1 in rows that are no token
    offsets: jax.Array  # i32 [N], in their blocks
    places: tuple[Places, ...]  # of each group of layers
    layers: LayerPlaces  # see `PagedCache`
    block_size: int

    def group_of(self, layer: Any) -> int:
        """Return the index of a layer's group, see `find_layer`."""
        return find_layer(self.layers, layer)[0]

    def in_layer(
        self, layer: Any, carry: Any, compute: Callable[[Places, Pools, Any], tuple[Any, Pools]]
    ) -> tuple[Any, Any]:
        """Compute with the places and pools of a layer, and the layer's number there.

        Args:
          layer: the layer's number in the model.
          carry: the pools of each group of the cache.
          compute: returns a result and the new pools.

        Returns:
          The result and the new carry.
        """
        group, number = find_layer(self.layers, layer)
        result, pools = compute(self.places[group], carry[group], number)
        return result, (*carry[:group], pools, *carry[group + 1 :])

    def write(
        self,
        places: Places,
        pools: Pools,
        heads: Projection | Heads,
        layer: Any,
        backend: str | None,
    ) -> tuple[jax.Array, Pools]:
        """Put K and V of the tokens in their places of a layer, and return Q ``[N, H, D]``."""
        if isinstance(heads, Projection):
            return self._rope_write(places, pools, heads, layer, backend)
        pools = paged_write(
            pools.k,
            pools.v,
            heads.k,
            heads.v,
            places.blocks,
            self.offsets,
            layer=layer,
            k_scale=pools.k_scale,
            v_scale=pools.v_scale,
            backend=backend_for("write", backend),
        )
        return heads.q.astype(query_dtype(pools.k.dtype)), pools

    def _rope_write(
        self,
        places: Places,
        pools: Pools,
        projection: Projection,
        layer: Any,
        backend: str | None,
    ) -> tuple[jax.Array, Pools]:
        """From the projection on, in one launch where there is a kernel for it."""
        q_norm, k_norm = projection.norms or (None, None)
        return paged_rope_write(
            pools.k,
            pools.v,
            projection.qkv,
            projection.cos,
            projection.sin,
            places.blocks,
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
    num_slots, lengths = cache.num_slots, cache.lengths
    is_row = slots >= 0
    # Rows that are left out must not wrap around to the last slot: one past it is dropped.
    rows = jnp.where(is_row, slots, num_slots)
    starts = take_or_fill(lengths, rows)
    requested = jnp.zeros(num_slots, jnp.int32)
    requested = put_or_drop(requested, rows, num_tokens.astype(jnp.int32))
    # A slot that does not exist fails the whole step, as a negative number of tokens does.
    requested = jnp.where(jnp.all(slots < num_slots), requested, -1)
    cache, ok = paged_cache.reserve(cache, requested, max_tokens=T, backend=backend)
    num_tokens = jnp.where(is_row & ok, num_tokens, 0)

    steps = jnp.arange(T, dtype=jnp.int32)[None]
    positions = (starts[:, None] + steps).reshape(-1)
    owners = jnp.where(steps < num_tokens[:, None], slots[:, None], -1).reshape(-1)
    located = [paged_cache.locate(group.tables, owners, positions) for group in cache.groups]
    places = [
        Places(
            take_or_fill(group.block_tables, rows, fill_value=group.num_blocks),
            blocks,
            group.tables.window,
        )
        for group, (blocks, _) in zip(cache.groups, located, strict=True)
    ]
    return (
        cache,
        ok,
        PagedRows(
            lengths=jnp.where(num_tokens > 0, starts + num_tokens, 0),
            num_tokens=num_tokens,
            positions=jnp.where(owners < 0, -1, positions),
            offsets=located[0][1],
            places=tuple(places),
            layers=cache.layers,
            block_size=cache.block_size,
        ),
    )


def next_rows(
    cache: PagedCache, block_tables: Sequence[jax.Array], lengths: jax.Array, active: jax.Array
) -> PagedRows:
    """The places of the next token of each active row, for which blocks are reserved already.

    Args:
      cache: the cache that has these blocks.
      block_tables: i32 ``[B, M]``, of the rows, in each group of the cache.
      lengths: i32 ``[B]``, tokens before that one.
      active: bool ``[B]``.
    """
    block_size = cache.block_size
    column = (lengths // block_size)[:, None]

    def find(group: CacheGroup, tables: jax.Array) -> Places:
        blocks = jnp.take_along_axis(tables, column, axis=1, mode="clip")[:, 0]
        return Places(tables, jnp.where(active, blocks, group.num_blocks), group.tables.window)

    return PagedRows(
        lengths=jnp.where(active, lengths + 1, 0),
        num_tokens=active.astype(jnp.int32),
        positions=jnp.where(active, lengths, -1),
        offsets=lengths % block_size,
        places=tuple(
            find(group, tables) for group, tables in zip(cache.groups, block_tables, strict=True)
        ),
        layers=cache.layers,
        block_size=block_size,
    )


def check_layers(function: str, rows: PagedRows, windows: Sequence[int | None]) -> None:
    """Refuse a cache that is not for layers with these windows, or gives back what they read.

    Raises:
      ValueError: saying which layer.
    """
    if len(rows.layers) != len(windows):
        raise ValueError(
            f"{function}: cache must be for {len(windows)} layers, got {len(rows.layers)}. "
            "Make it with create_cache."
        )
    for layer, window in enumerate(windows):
        kept = rows.places[rows.group_of(layer)].window
        if kept is not None and (window is None or window > kept):
            raise ValueError(
                f"{function}: cache must keep {'all' if window is None else window} tokens for "
                f"layer {layer}, got a window of {kept}. Make it with create_cache."
            )


def decode_attention(
    rows: PagedRows, windows: Sequence[int | None], *, cascade: bool, backend: str | None
) -> Attend:
    """Attention of one new token a row; the pools are the carry. See `PagedModel.decode`."""
    # The blocks that all sequences share, for each group of layers without a window: counted once,
    # not in each layer.
    num_shared: dict[int, jax.Array] = {}
    for group in dict.fromkeys(rows.group_of(i) for i, w in enumerate(windows) if w is None):
        tables = rows.places[group].block_tables
        B, M = tables.shape
        if cascade and is_sharing_possible(B, M, rows.block_size):
            num_shared[group] = num_shared_blocks(tables, rows.lengths, rows.block_size)

    def attend(layer, heads, carry):
        window, group = sliding_window_of(windows, layer), rows.group_of(layer)

        def compute(places, pools, number):
            q, pools = rows.write(places, pools, heads, number, backend)
            arrays = q, pools.k, pools.v, places.block_tables, rows.lengths
            options: dict[str, Any] = {
                "layer": number,
                "scale": heads.sm_scale,
                "soft_cap": heads.soft_cap,
                "sinks": heads.sinks,
                "k_scale": pools.k_scale,
                "v_scale": pools.v_scale,
                "backend": backend,
            }
            if window is None and group in num_shared:
                return cascade_attention(*arrays, num_shared[group], **options), pools
            return paged_attention(*arrays, sliding_window=window, **options), pools

        return rows.in_layer(layer, carry, compute)

    return attend


def chunk_attention(
    rows: PagedRows, B: int, T: int, windows: Sequence[int | None], *, backend: str | None
) -> Attend:
    """Attention of B chunks of up to T tokens; the pools are the carry. See `PagedModel`."""

    def attend(layer, heads, carry):
        def compute(places, pools, number):
            q, pools = rows.write(places, pools, heads, number, backend)
            out = paged_prefill_attention(
                q.reshape(B, T, *q.shape[1:]),
                pools.k,
                pools.v,
                places.block_tables,
                rows.lengths,
                rows.num_tokens,
                layer=number,
                k_scale=pools.k_scale,
                v_scale=pools.v_scale,
                scale=heads.sm_scale,
                sliding_window=sliding_window_of(windows, layer),
                soft_cap=heads.soft_cap,
                sinks=heads.sinks,
                backend=backend,
            )
            return out.reshape(q.shape), pools

        return rows.in_layer(layer, carry, compute)

    return attend
