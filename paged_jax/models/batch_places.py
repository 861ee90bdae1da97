"""Positions in the paged cache for a step's new tokens, and attention over the cache.

A step appends up to T tokens to each of B sequences. The model sees them as N = B * T flattened
tokens, including padding tokens. For each token, `BatchPlaces` holds the place of its keys and
values: a block and an offset in the block. For each sequence, it holds the block table and the
length that attention needs. `decode_attention` and `prefill_attention` return the function that
a model calls in each layer::

    layer i:    output, carry = attend(i, heads, carry)

    attend      write K and V of the new tokens into the pools of the layer's group
                attend to the blocks in the block tables

`heads` holds the queries, keys and values of the layer. `carry` is a tuple with the K and V pools
of each group of layers. A recurrent layer passes a `Recurrence` instead of `heads`. `attend` then
reads the state of each sequence from the pools, advances it over the new tokens, and writes it
back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.cache import paged_cache
from paged_jax.cache.groups import CacheGroup, LayerPlaces, find_layer, locate
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.cache.retention import Retention
from paged_jax.formatting import short_repr
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
from paged_jax.kernels.attention import chunked_attention, chunked_prefill_attention
from paged_jax.kernels.cascade import is_sharing_possible
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op import is_exact
from paged_jax.kernels.opaque_call import put_or_drop, take_or_fill
from paged_jax.models.config import ModelConfig
from paged_jax.models.layer_attention import (
    Attend,
    Heads,
    LayerInputs,
    Projection,
    Reach,
    Recurrence,
)
from paged_jax.models.state_places import GroupPools, StatePlaces


class GroupPlaces(NamedTuple):
    """Block tables of a step's rows, and the blocks to write to, in one group of layers.

    Attributes:
      block_tables: i32 ``[B, M]``, block table of each row.
      blocks: i32 ``[N]``, block to which each token is written. Padding tokens have the value P
        (the number of blocks), which is out of range, so they are not written.
      retention: rule for the tokens that the group keeps.
    """

    block_tables: jax.Array
    blocks: jax.Array
    retention: Retention


@short_repr
@dataclass(frozen=True)
class BatchPlaces:
    """Cache positions of a step's new tokens, and the lengths of their sequences.

    Attributes:
      lengths: i32 ``[B]``, sequence lengths, including the new tokens; 0 in skipped rows (rows
        with a negative slot, or all rows if there are not enough blocks).
      num_tokens: i32 ``[B]``, number of new tokens; 0 in skipped rows.
      positions: i32 ``[N]``, position of each token in its sequence; -1 for padding.
      offsets: i32 ``[N]``, offset of each token in its block.
      groups: for each group of layers, the block table of each row and the block of each token.
      layers: for each layer, the index of its group and the index of the layer in this group; None
        for layers without attention.
      block_size: tokens per block (C).
      states: pool entries with the states of recurrent layers; None if no layer is recurrent.
    """

    lengths: jax.Array
    num_tokens: jax.Array
    positions: jax.Array
    offsets: jax.Array
    groups: tuple[GroupPlaces, ...]
    layers: LayerPlaces
    block_size: int
    states: StatePlaces | None = None

    def write(
        self,
        group: int,
        pools: Pools,
        heads: Projection | Heads,
        layer: int | jax.Array,
        backend: str | None,
    ) -> tuple[jax.Array, Pools]:
        """Write keys and values of the new tokens into the pools of a group.

        `group` is the index of the group, and `layer` is the index of the layer in this group. If
        `heads` is a `Projection`, it is first normalised and rotated, in the same kernel launch if
        the backend supports it. If `heads` has no keys, nothing is written.

        Returns:
          Queries ``[N, H, D]`` ready for attention, and the new pools.
        """
        blocks = self.groups[group].blocks
        options: dict[str, Any] = {
            "layer": layer,
            "k_scale": pools.k_scale,
            "v_scale": pools.v_scale,
        }
        if isinstance(heads, Projection) and is_exact(backend):
            # The sums of the norms must be those of the exact backend.
            heads = Heads(*heads.split(backend), heads.scale, heads.soft_cap, heads.sinks)
        if isinstance(heads, Heads):
            if heads.k is not None:
                pools = paged_write(
                    pools.k,
                    pools.v,
                    heads.k,
                    heads.v,
                    blocks,
                    self.offsets,
                    backend=backend_for("write", backend),
                    **options,
                )
            return heads.q.astype(KVDtype.of(pools.dtype).query_dtype), pools
        if pools.v is None:
            raise ValueError(
                "PagedModel: cache must have a V pool for layers that have keys and values, got a "
                "cache with only a K pool. Make the cache with create_cache."
            )
        q_norm, k_norm = heads.norms or (None, None)
        return paged_rope_write(
            pools.k,
            pools.v,
            heads.qkv,
            heads.cos,
            heads.sin,
            blocks,
            self.offsets,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=heads.norm_eps,
            backend=backend_for("rope_write", backend),
            **options,
        )

    def advance_postponed(self, carry: GroupPools, num_tokens: jax.Array) -> GroupPools:
        """Apply the first `num_tokens` i32 ``[B]`` draft tokens of each row to recurrent states.

        See `postpones` of `reserve_places`. Returns the new pools.
        """
        return carry if self.states is None else self.states.advance_postponed(carry, num_tokens)


def reserve_places(
    cache: PagedCache,
    slots: jax.Array,
    num_tokens: jax.Array,
    T: int,
    backend: str | None,
    *,
    has_tiles: bool = False,
    postpones: bool = False,
) -> tuple[PagedCache, jax.Array, BatchPlaces]:
    """Reserve blocks for new tokens, and return the positions of the tokens in the cache.

    Args:
      cache: the cache.
      slots: i32 ``[B]``, slot of each row, distinct unless `has_tiles` is set. Rows with a negative
        slot are skipped.
      num_tokens: i32 ``[B]``, number of new tokens, at most T.
      T: maximum number of new tokens per row.
      backend: backend that copies shared blocks before they are written, see `paged_cache.reserve`.
      has_tiles: whether several rows may have the same slot (static). The tokens of these rows are
        appended to the slot in the order of the rows.
      postpones: whether the states of recurrent layers stay unchanged until
        `BatchPlaces.advance_postponed` is called (static).

    Returns:
      The new cache; ``ok``, bool ``[]``, which is False if there were not enough blocks or a slot
      does not exist; and the `BatchPlaces` of the tokens. If ``ok`` is False, all rows are skipped.

    Raises:
      ValueError: `has_tiles` is set, and the cache has states of recurrent layers. Several rows
        would then advance the state of the same slot at the same time.
    """
    if has_tiles and not all(group.takes_tiles for group in cache.all_groups):
        raise ValueError(
            "prefill_tiles: cache must have no states of recurrent layers, because several rows of "
            "a slot would advance the same state at the same time. Use prefill."
        )
    num_slots, lengths = cache.num_slots, cache.lengths
    is_row = slots >= 0
    # `put_or_drop` ignores indices past the end. (A negative index would count from the end.)
    rows = jnp.where(is_row, slots, num_slots)
    starts, most = take_or_fill(lengths, rows), T
    if has_tiles:
        before, requested = _sum_by_slot(rows, num_tokens, num_slots)
        starts, most = starts + before, rows.size * T
    else:
        requested = jnp.zeros(num_slots, jnp.int32)
        requested = put_or_drop(requested, rows, num_tokens.astype(jnp.int32))
    # If the index of a slot is too large, request -1 tokens, so that `reserve` returns ok = False.
    requested = jnp.where(jnp.all(slots < num_slots), requested, -1)
    cache, ok = paged_cache.reserve(cache, requested, max_tokens=most, backend=backend)
    num_tokens = jnp.where(is_row & ok, num_tokens, 0)
    if postpones:
        cache = paged_cache.plan_drafts(cache, (requested > 0) & ok, lengths)
    states = StatePlaces.of_rows(cache, jnp.where(num_tokens > 0, rows, num_slots), postpones)
    if postpones and states is not None:
        states = states.at_step(0, num_tokens > 0, starts)

    steps = jnp.arange(T, dtype=jnp.int32)[None]
    positions = (starts[:, None] + steps).reshape(-1)
    owners = jnp.where(steps < num_tokens[:, None], slots[:, None], -1).reshape(-1)
    located = [locate(group.tables, owners, positions) for group in cache.groups]
    groups = [
        GroupPlaces(
            take_or_fill(group.block_tables, rows, fill_value=group.num_blocks),
            blocks,
            group.tables.retention,
        )
        for group, (blocks, _) in zip(cache.groups, located, strict=True)
    ]
    places = BatchPlaces(
        lengths=jnp.where(num_tokens > 0, starts + num_tokens, 0),
        num_tokens=num_tokens,
        positions=jnp.where(owners < 0, -1, positions),
        offsets=located[0][1],
        groups=tuple(groups),
        layers=cache.layers,
        block_size=cache.block_size,
        states=states,
    )
    return cache, ok, places


def _sum_by_slot(
    rows: jax.Array, num_tokens: jax.Array, num_slots: int
) -> tuple[jax.Array, jax.Array]:
    """Count the tokens of each slot, for steps in which several rows have the same slot.

    Returns:
      For each row, the number of tokens in earlier rows of the same slot, i32 ``[B]``. For each
      slot, the number of tokens in all of its rows, i32 ``[S]``.
    """
    index = jnp.arange(rows.size, dtype=jnp.int32)
    is_before = (rows[None, :] == rows[:, None]) & (index[None, :] < index[:, None])
    is_of_slot = rows[None, :] == jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    before, requested = (
        jnp.sum(jnp.where(each, num_tokens[None, :], 0), axis=1, dtype=jnp.int32)
        for each in (is_before, is_of_slot)
    )
    return before, requested


class PlannedPlaces(NamedTuple):
    """Blocks and states that `paged_cache.plan` has chosen for the rows of several decode steps.

    Attributes:
      cache: the cache with the plan.
      block_tables: i32 ``[B, M]`` for each group of attention layers, block table of each row.
      states: pool entries with the states of the rows; None if no layer is recurrent.
    """

    cache: PagedCache
    block_tables: tuple[jax.Array, ...]
    states: StatePlaces | None

    @classmethod
    def of_rows(
        cls, cache: PagedCache, planned: Sequence[Any], slots: jax.Array
    ) -> "PlannedPlaces":
        """Return the plan for the rows of `slots` i32 ``[B]``; slots past the end are padding."""
        plans = planned[: len(cache.groups)]
        tables = tuple(plan.block_tables.at[slots].get(mode="clip") for plan in plans)
        return cls(cache, tables, StatePlaces.of_rows(cache, slots))

    def at_step(
        self, step: int | jax.Array, active: jax.Array, lengths: jax.Array
    ) -> "BatchPlaces":
        """Return the positions in the cache of each active row's next token.

        Args:
          step: i32 ``[]``, index of the decode step, from 0.
          active: bool ``[B]``, False for rows that get no token.
          lengths: i32 ``[B]``, sequence lengths without the next token.
        """
        block_size = self.cache.block_size
        column = (lengths // block_size)[:, None]

        def find(group: CacheGroup, tables: jax.Array) -> GroupPlaces:
            blocks = jnp.take_along_axis(tables, column, axis=1, mode="clip")[:, 0]
            blocks = jnp.where(active, blocks, group.num_blocks)
            return GroupPlaces(tables, blocks, group.tables.retention)

        states = self.states and self.states.at_step(step, active, lengths)
        return BatchPlaces(
            lengths=jnp.where(active, lengths + 1, 0),
            num_tokens=active.astype(jnp.int32),
            positions=jnp.where(active, lengths, -1),
            offsets=lengths % block_size,
            groups=tuple(
                find(group, tables)
                for group, tables in zip(self.cache.groups, self.block_tables, strict=True)
            ),
            layers=self.cache.layers,
            block_size=block_size,
            states=states,
        )


def decode_attention(
    function: str, places: BatchPlaces, config: ModelConfig, *, cascade: bool, backend: str | None
) -> Attend[GroupPools]:
    """Return the `attend` function of a decode step with one new token per row.

    Args:
      function: function name for error messages.
      places: positions of the tokens in the cache.
      config: configuration of the model.
      cascade: whether blocks that all sequences share are read only once per step, instead of once
        for each sequence, see `cascade_attention`.
      backend: backend of the attention, see `paged_attention`.

    Raises:
      ValueError: the cache and `config` have different numbers of layers, or the cache keeps fewer
        tokens than a layer attends to.
    """
    # The number of shared blocks is the same in all layers of a group, so compute it once per
    # group.
    num_shared: dict[int, jax.Array] = {}
    if cascade:
        windows = enumerate(config.sliding_windows)
        full_groups = [places.layers[layer] for layer, window in windows if window is None]
        for group in {place[0]: None for place in full_groups if place is not None}:
            tables = places.groups[group].block_tables
            B, M = tables.shape
            if is_sharing_possible(B, M, places.block_size):
                num_shared[group] = num_shared_blocks(tables, places.lengths, places.block_size)

    def compute(
        q: jax.Array, pools: Pools, group: int, reach: Reach, options: dict[str, Any]
    ) -> jax.Array:
        arrays = q, pools.k, pools.v, places.groups[group].block_tables, places.lengths
        if reach.chunk is not None:
            return chunked_attention(*arrays, chunk=reach.chunk, **options)
        if reach.sliding_window is None and group in num_shared:
            return cascade_attention(*arrays, num_shared[group], **options)
        return paged_attention(*arrays, sliding_window=reach.sliding_window, **options)

    return _attend_with(compute, "decode", function, places, config, backend)


def prefill_attention(
    function: str, places: BatchPlaces, config: ModelConfig, T: int, backend: str | None
) -> Attend[GroupPools]:
    """Return the `attend` function of a prefill step, with up to T new tokens in each row.

    For the other arguments and the errors, see `decode_attention`.
    """

    def compute(
        q: jax.Array, pools: Pools, group: int, reach: Reach, options: dict[str, Any]
    ) -> jax.Array:
        tables = places.groups[group].block_tables
        rows = q.reshape(-1, T, *q.shape[1:])
        arrays = rows, pools.k, pools.v, tables, places.lengths, places.num_tokens
        if reach.chunk is None:
            window = reach.sliding_window
            out = paged_prefill_attention(*arrays, sliding_window=window, **options)
        else:
            out = chunked_prefill_attention(*arrays, chunk=reach.chunk, **options)
        return out.reshape(*q.shape[:2], out.shape[-1])

    return _attend_with(compute, "prefill", function, places, config, backend)


def _attend_with(
    compute: Callable[[jax.Array, Pools, int, Reach, dict[str, Any]], jax.Array],
    op: Literal["decode", "prefill"],
    function: str,
    places: BatchPlaces,
    config: ModelConfig,
    backend: str | None,
) -> Attend[GroupPools]:
    """Return an `attend` function that writes keys and values to the pools, then calls `compute`.

    `compute` takes the queries ``[N, H, D]``, the pools of the layer's group, the index of the
    group, the `Reach` of the layer, and keyword arguments of the attention op. It returns the
    output of the attention.
    """
    _check_layers(function, places, config.sliding_windows)

    def attend(
        layer: int | jax.Array, heads: LayerInputs, carry: GroupPools
    ) -> tuple[jax.Array, GroupPools]:
        if isinstance(heads, Recurrence):
            if places.states is None:
                raise ValueError(
                    f"attend: cache must have states for the recurrent layer {layer}, got a cache "
                    "without states. Make the cache with create_cache."
                )
            return places.states.advance(layer, heads, carry, places.num_tokens, backend)
        group, index = find_layer(places.layers, layer)
        q, pools = places.write(group, carry[group], heads, index, backend)
        options = {
            "layer": index,
            "scale": heads.scale,
            "soft_cap": heads.soft_cap,
            "sinks": heads.sinks,
            "value_dim": heads.value_dim,
            "k_scale": pools.k_scale,
            "v_scale": pools.v_scale,
            "backend": backend_for(op, backend),
        }
        out = compute(q, pools, group, config.reach(layer), options)
        return out, (*carry[:group], pools, *carry[group + 1 :])

    return attend


def _check_layers(
    function: str, places: BatchPlaces, sliding_windows: Sequence[int | None]
) -> None:
    """Check that the cache has the model's layers, and keeps all tokens that they need."""
    num_layers = len(sliding_windows)
    if len(places.layers) != num_layers:
        raise ValueError(
            f"{function}: cache must have {num_layers} layers, got {len(places.layers)}. Make the "
            "cache with create_cache."
        )
    for layer, sliding_window in enumerate(sliding_windows):
        place = places.layers[layer]
        if place is None:
            continue  # not an attention layer
        kept = places.groups[place[0]].retention
        if not kept.serves(sliding_window):
            needed = "all" if sliding_window is None else sliding_window
            raise ValueError(
                f"{function}: cache must keep {needed} tokens for layer {layer}, got a cache that "
                f"keeps the last {kept.num_tokens}. Make the cache with create_cache."
            )
