# pyright: strict, reportUnknownMemberType=false
"""The paged KV cache: blocks with K and V of every token, and a block table per sequence.

A cache is a list of groups. The layers of a group keep the same tokens, so they share block tables
and pools. Most models have one group. Models with sliding windows in some layers have two groups:
layers with full attention keep all tokens; layers with a window free the blocks that leave the
window, so they need fewer blocks. Recurrent layers have a state for each slot, see `StateGroup`.
All groups have the same slots, and a slot has the same length in all groups::

    layers  0  1  2  3  4  5          groups[0]  all tokens      layers 5 and 11
            6  7  8  9 10 11          groups[1]  a window        the other ten

            pools             table of slot 0, 100 tokens, C = 16, window 32
    group 0 [2,  P0, K, C, D]   [ 4  7  1  0  9  3  2 ]
    group 1 [10, P1, K, C, D]   [ .  .  .  .  5  8  6 ]        . stands for P1, "no block"

`CacheGroup` describes the pools. A decode step makes these calls, `paged_write` once per layer::

    cache, ok = reserve(cache, num_tokens)                               # blocks for the new tokens
    token_blocks, offsets = locate(cache.tables, slots, positions)       # where the tokens are
    pools = paged_write(pools.k, pools.v, k, v, token_blocks, offsets, layer=layer)

A model instead calls `reserve_rows`, which reserves blocks and returns an `AttentionMetadata` for
all groups. For several decode steps, `plan` and `PlannedRows` do the same.

The ops that read and write pools are in `paged_jax.kernels`. A loop over layers takes the pools of
all layers as its carry; afterwards `replace_pools` puts them back into the cache. On CPU, use pools
in float32, float16 or int8, because XLA does not update other dtypes in place there.

The functions of this module either change all groups or change nothing. The first group keeps the
most tokens, and no other group runs out of blocks before it, for two reasons. For each block that a
slot holds in another group, it also holds a block in the first group. And slots that share a block
in the first group share the corresponding block in all groups (`prefix.publish_groups`). So callers
only need to count the free blocks of the first group.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from paged_jax.arguments import names_arguments
from paged_jax.cache.attention_metadata import AttentionMetadata, LayerPlaces
from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.blocks.prefix import begin_attach, longest_prefix, publish_groups
from paged_jax.cache.groups import CacheGroup, DecodeStep, Group, GroupReservation, NewTokens
from paged_jax.cache.retention import Retention
from paged_jax.formatting import cut
from paged_jax.kernels.opaque_call import put_or_drop, take_or_fill
from paged_jax.kernels.pools import Pools


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """The KV cache of a model: one or more groups of layers with the same slots.

    The properties `k`, `v`, `k_scale`, `v_scale`, `pools`, `num_kv_heads` and `head_dim` are for
    caches with a single group of attention layers. With several groups they raise AttributeError;
    read them from an element of `groups` instead.

    Attributes:
      groups: the groups, see `Group`. First the groups of attention layers, of which the first one
        keeps the most tokens; then the group of recurrent layers, if any.
      layers: for each layer of the model, the index of its group and its index in that group
        (static). None for layers without K and V.
      recurrent_layers: for each layer of the model, the index of its group, the index of its pools
        in that group, and its index in these pools (static). None for layers without states. Empty
        if the model has no recurrent layers.

    Example:
      >>> sizes = dict(num_kv_heads=1, block_size=4, head_dim=8, num_slots=2,
      ...              max_blocks_per_slot=8)
      >>> cache = PagedCache.create(num_layers=2, num_blocks=8, **sizes)
      >>> cache, ok = reserve(cache, jnp.array([5, 0]), max_tokens=8)
      >>> bool(ok), cache.lengths.tolist(), cache.nbytes
      (True, [5, 0], 4096)

      Three layers, two of them with a window:

      >>> full = CacheGroup.create(num_layers=1, num_blocks=16, **sizes)
      >>> window = CacheGroup.create(num_layers=2, num_blocks=8, window=4, **sizes)
      >>> cache = PagedCache((full, window), layers=((1, 0), (1, 1), (0, 0)))
      >>> for num_tokens in (12, 1):
      ...     cache, ok = reserve(cache, jnp.array([num_tokens, 0]), max_tokens=12)
      >>> [group.block_tables[0].tolist() for group in cache.groups]
      [[0, 1, 2, 3, 16, 16, 16, 16], [8, 8, 2, 0, 8, 8, 8, 8]]
    """

    groups: tuple[Group, ...]
    layers: LayerPlaces = field(metadata={"static": True})
    recurrent_layers: LayerPlaces = field(default=(), metadata={"static": True})

    def __repr__(self) -> str:
        return cut(f"PagedCache({', '.join(map(repr, self.groups))})")

    def _repr_html_(self) -> str:
        return "".join(group.tables._repr_html_() or "" for group in self.block_groups)  # pyright: ignore[reportPrivateUsage]

    @classmethod
    @names_arguments
    def create(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        value_dim: int | None = None,
        num_slots: int,
        max_blocks_per_slot: int,
        dtype: DTypeLike = jnp.float32,
        window: int | Retention | None = None,
    ) -> "PagedCache":
        """Return a cache with one group for all layers: empty slots and zeroed pools.

        See `CacheGroup.create` for the arguments and the errors.
        """
        group = CacheGroup.create(
            num_layers=num_layers,
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            value_dim=value_dim,
            num_slots=num_slots,
            max_blocks_per_slot=max_blocks_per_slot,
            dtype=dtype,
            window=window,
        )
        return cls((group,), tuple((0, layer) for layer in range(num_layers)))

    def replace_pools(self, pools: Pools) -> "PagedCache":
        """Return a copy of the cache with the pools of its only group replaced."""
        return self.replace_groups([self._only_group.replace_pools(pools), *self.groups[1:]])

    def replace_group_pools(self, pools: Sequence[Any]) -> "PagedCache":
        """Return a copy of the cache with all pools replaced, in the order of `group_pools`."""
        groups = zip(self.groups, pools, strict=True)
        return self.replace_groups(group.replace_pools(new) for group, new in groups)

    def replace_tables(self, tables: Iterable[BlockTables]) -> "PagedCache":
        """Return a copy of the cache with other tables, one `BlockTables` per `block_groups`."""
        groups = zip(self.block_groups, tables, strict=True)
        new_groups = [replace(group, tables=new) for group, new in groups]
        return self.replace_groups([*new_groups, *self.groups[len(new_groups) :]])

    def replace_groups(self, groups: Iterable[Group]) -> "PagedCache":
        """Return a copy of the cache with other groups."""
        return replace(self, groups=tuple(groups))

    @property
    def group_pools(self) -> tuple[Any, ...]:
        """The pools of each group, as the carry of loops over layers."""
        return tuple(group.pools for group in self.groups)

    @property
    def block_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of attention layers, which come first in `groups`."""
        return cast(Any, tuple(group for group in self.groups if group.has_blocks))

    @property
    def tables(self) -> BlockTables:
        """The block tables of the first group, whose free blocks limit the whole cache."""
        return self.groups[0].tables

    @property
    def block_tables(self) -> jax.Array:
        """Block ids of each slot in the first group, i32[S, M], padded with P (no block)."""
        return self.tables.block_tables

    @property
    def lengths(self) -> jax.Array:
        """Number of tokens in each slot, i32[S], the same in all groups."""
        return self.tables.lengths

    @property
    def num_free_blocks(self) -> tuple[jax.Array, ...]:
        """Number of free blocks in each group, then of free state entries, if any; i32[] each."""
        return tuple(group.num_free for group in self.groups)

    @property
    def num_layers(self) -> int:
        """Number of layers in all groups together."""
        return len(self.layers)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pools of the first group (P)."""
        return self.tables.num_blocks

    @property
    def block_size(self) -> int:
        """Number of tokens in a block (C)."""
        return self.tables.block_size

    @property
    def num_slots(self) -> int:
        """Number of slots (S)."""
        return self.tables.num_slots

    @property
    def nbytes(self) -> int:
        """Bytes of all pools and their scales, without the tables, which are small."""
        return sum(group.nbytes for group in self.groups)

    @property
    def _only_group(self) -> CacheGroup:
        first, *other_groups = self.block_groups
        if other_groups:
            raise AttributeError(
                "PagedCache: this property is only for caches with one group of layers, got "
                f"{1 + len(other_groups)} groups. Use cache.groups."
            )
        return first

    @property
    def pools(self) -> Pools:
        """`Pools` of the only group: K, V and their scales, in the form that kernels take."""
        return self._only_group.pools

    @property
    def k(self) -> jax.Array:
        """Pool of K of the only group, ``[L, P, K, C, D]``."""
        return self.pools.k

    @property
    def v(self) -> jax.Array | None:
        """Pool of V of the only group, ``[L, P, K, C, U]``; None with latent attention."""
        return self.pools.v

    @property
    def k_scale(self) -> jax.Array | None:
        """Scales of K, f32 ``[L, P, K, C]``; None unless the pools are quantised."""
        return self.pools.k_scale

    @property
    def v_scale(self) -> jax.Array | None:
        """Scales of V, f32 ``[L, P, K, C]``; None unless the pools are quantised."""
        return self.pools.v_scale

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads of the only group (K)."""
        return self._only_group.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Head dimension of the only group (D)."""
        return self._only_group.head_dim


def reserve(
    cache: PagedCache,
    num_tokens: jax.Array,
    *,
    max_tokens: int = 1,
    backend: str | None = None,
) -> tuple[PagedCache, jax.Array]:
    """Allocate blocks for new tokens, and copy shared blocks that the tokens are written to.

    This function calls `paged_jax.blocks.reserve` for every group, and makes the block copies in
    all layers. If no block must be copied, the pools are not touched. For recurrent layers,
    `reserve_states` chooses the states to read and to write.

    Args:
      cache: the state. Donate it, or the pools are copied.
      num_tokens: i32[S], the number of tokens to append to each slot.
      max_tokens: upper bound on `num_tokens` (static).
      backend: backend of `copy_blocks`, which makes the block copies. If the backend does not
        implement it, the default backend of the platform is used.

    Returns:
      `(cache, ok)`. If `ok`, bool[], is False, no group has changed, except that slots may have
      freed blocks that left their windows.

    Raises:
      ValueError: `num_tokens` is not i32[S] or `max_tokens` is not a positive integer.
    """
    reservations = [
        group.begin_reserve(num_tokens, max_tokens=max_tokens) for group in cache.groups
    ]
    return _finish(cache, reservations, backend)


def restore(
    cache: PagedCache, num_tokens: jax.Array, *, max_tokens: int, backend: str | None = None
) -> tuple[PagedCache, jax.Array]:
    """Allocate blocks in empty slots for tokens that `write_blocks` will copy into them.

    This function calls `paged_jax.blocks.restore` for every group. Groups with a window allocate
    only the blocks inside the window. `num_tokens` i32[S] is the number of tokens of each slot; 0
    leaves a slot unchanged. See `reserve` for the other arguments and the result.
    """
    reservations = [
        group.begin_restore(num_tokens, max_tokens=max_tokens) for group in cache.groups
    ]
    return _finish(cache, reservations, backend)


def reserve_rows(
    cache: PagedCache,
    slots: jax.Array,
    num_tokens: jax.Array,
    *,
    max_tokens: int,
    backend: str | None = None,
    has_tiles: bool = False,
    has_drafts: bool = False,
) -> tuple[PagedCache, jax.Array, AttentionMetadata]:
    """Reserve blocks for the new tokens of rows, and find the places of the tokens in the cache.

    Args:
      cache: the cache.
      slots: i32 ``[B]``, slot of each row, distinct unless `has_tiles` is set. Rows with a negative
        slot are skipped.
      num_tokens: i32 ``[B]``, number of new tokens, at most T.
      max_tokens: T, maximum number of new tokens per row (static).
      backend: backend that copies shared blocks before they are written, see `reserve`.
      has_tiles: whether several rows may have the same slot (static). The tokens of these rows are
        appended to the slot in the order of the rows.
      has_drafts: whether the tokens are drafts, so that the states of recurrent layers must stay
        unchanged until it is known which of them are accepted (static).

    Returns:
      The new cache; ``ok``, bool ``[]``, which is False if there were not enough blocks or a slot
      does not exist; and the metadata of the tokens. If ``ok`` is False, all rows are skipped.

    Raises:
      ValueError: `has_tiles` is set, and the cache has states of recurrent layers. Several rows
        would then advance the state of the same slot at the same time.
    """
    if has_tiles and not all(group.takes_tiles for group in cache.groups):
        raise ValueError(
            "prefill_tiles: cache must have no states of recurrent layers, because several rows of "
            "a slot would advance the same state at the same time. Use prefill."
        )
    num_slots, lengths, T = cache.num_slots, cache.lengths, max_tokens
    is_row = slots >= 0
    # `put_or_drop` ignores indices past the end. (A negative index would count from the end.)
    rows = jnp.where(is_row, slots, num_slots)
    starts = take_or_fill(lengths, rows)
    if has_tiles:
        before, slot_tokens = _sum_by_slot(rows, num_tokens, num_slots)
        starts, max_tokens = starts + before, rows.size * T
    else:
        slot_tokens = jnp.zeros(num_slots, jnp.int32)
        slot_tokens = put_or_drop(slot_tokens, rows, num_tokens.astype(jnp.int32))
    # If the index of a slot is too large, request -1 tokens, so that `reserve` returns ok = False.
    slot_tokens = jnp.where(jnp.all(slots < num_slots), slot_tokens, -1)
    cache, ok = reserve(cache, slot_tokens, max_tokens=max_tokens, backend=backend)
    num_tokens = jnp.where(is_row & ok, num_tokens, 0)
    if has_drafts:
        cache = plan_drafts(cache, (slot_tokens > 0) & ok, lengths)

    steps = jnp.arange(T, dtype=jnp.int32)[None]
    positions = (starts[:, None] + steps).reshape(-1)
    owners = jnp.where(steps < num_tokens[:, None], slots[:, None], -1).reshape(-1)
    tokens = NewTokens(rows, starts, num_tokens, owners, positions)
    groups = tuple(
        group.draft_metadata(tokens) if has_drafts else group.metadata(tokens)
        for group in cache.groups
    )
    metadata = AttentionMetadata(
        seq_lens=jnp.where(num_tokens > 0, starts + num_tokens, 0),
        num_tokens=num_tokens,
        positions=jnp.where(owners < 0, -1, positions),
        groups=groups,
        layers=cache.layers,
        recurrent_layers=cache.recurrent_layers,
        block_size=cache.block_size,
    )
    return cache, ok, metadata


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
    before, slot_tokens = (
        jnp.sum(jnp.where(mask, num_tokens[None, :], 0), axis=1, dtype=jnp.int32)
        for mask in (is_before, is_of_slot)
    )
    return before, slot_tokens


def plan(
    cache: PagedCache,
    limits: jax.Array,
    num_steps: jax.Array,
    *,
    max_tokens: int,
    backend: str | None,
) -> tuple[PagedCache, tuple[Any, ...]]:
    """Choose blocks for new tokens in all groups, and copy shared blocks that are written to.

    See `paged_jax.blocks.plan` for `limits`, `most` (here `num_steps`) and `max_tokens`, and
    `reserve` for `backend`.
    Slots with a limit above 0 first free the blocks that left their windows. If there are blocks
    for at least one token per slot, `plan_states` chooses the recurrent states to read and to
    write. The next operation on the tables must be `commit`.

    Returns:
      `(cache, plans)`, with the plan of each group: a `ReservePlan`, or None for recurrent layers,
      whose tables contain the plan. All plans have the same `num_tokens`.
    """
    groups = [group.slide(limits) for group in cache.groups]
    if sum(group.can_run_out for group in groups) > 1:
        counts = [g.num_possible(limits, max_tokens=max_tokens) for g in groups if g.can_run_out]
        num_steps = functools.reduce(jnp.minimum, counts, jnp.asarray(num_steps, jnp.int32))
    plans: list[Any] = []
    for index, group in enumerate(groups):
        groups[index], plan = group.plan(
            limits, num_steps, max_tokens=max_tokens, lengths=cache.lengths, backend=backend
        )
        plans.append(plan)
        num_steps = plans[0].num_tokens
    return cache.replace_groups(groups), tuple(plans)


class PlannedRows(NamedTuple):
    """Blocks and states that `plan` has chosen for the rows of several decode steps.

    Attributes:
      cache: the cache with the plan.
      groups: for each group, the plan of the rows, see `Group.planned_rows`.
    """

    cache: PagedCache
    groups: tuple[Any, ...]

    @classmethod
    def take(cls, cache: PagedCache, plans: Sequence[Any], slots: jax.Array) -> "PlannedRows":
        """Take the plan of the rows with these slots from the results of `plan`.

        Slots i32 ``[B]`` past the end are padding.
        """
        groups = zip(cache.groups, plans, strict=True)
        return cls(
            cache, tuple(group.planned_rows(group_plan, slots) for group, group_plan in groups)
        )

    def at_step(
        self, index: int | jax.Array, is_active: jax.Array, lengths: jax.Array
    ) -> AttentionMetadata:
        """Find the place of each active row's next token in the cache.

        Args:
          index: i32 ``[]``, index of the decode step, from 0.
          is_active: bool ``[B]``, False for rows that get no token.
          lengths: i32 ``[B]``, sequence lengths without the next token.
        """
        cache, C = self.cache, self.cache.block_size
        columns = (lengths // C)[:, None]
        seq_lens = jnp.where(is_active, lengths + 1, 0)
        num_tokens = is_active.astype(jnp.int32)
        positions = jnp.where(is_active, lengths, -1)
        step = DecodeStep(index, is_active, lengths, columns, lengths % C)
        groups = zip(cache.groups, self.groups, strict=True)
        return AttentionMetadata(
            seq_lens=seq_lens,
            num_tokens=num_tokens,
            positions=positions,
            groups=tuple(group.step_metadata(rows, step) for group, rows in groups),
            layers=cache.layers,
            recurrent_layers=cache.recurrent_layers,
            block_size=C,
        )


def commit(cache: PagedCache, plans: Sequence[Any], lengths: jax.Array) -> PagedCache:
    """Allocate the planned blocks that were used, and set the lengths of slots to `lengths`.

    `lengths` is i32[S]; see `paged_jax.blocks.commit`.
    """
    pairs = zip(cache.groups, plans, strict=True)
    return cache.replace_groups(group.commit(plan, lengths) for group, plan in pairs)


def _finish(
    cache: PagedCache, reservations: Sequence[GroupReservation], backend: str | None
) -> tuple[PagedCache, jax.Array]:
    """Apply the reservations of all groups and copy their blocks, if all are possible."""
    conditions = [
        reservation.is_possible
        for reservation in reservations
        if reservation.is_possible is not None
    ]
    ok = functools.reduce(lambda a, b: a & b, conditions)
    pairs = zip(cache.groups, reservations, strict=True)
    return cache.replace_groups(
        group.finish(reservation, ok, backend) for group, reservation in pairs
    ), ok


def max_drafts(cache: PagedCache, lengths: jax.Array, maximum: jax.Array) -> jax.Array:
    """Return the number of draft tokens that slots of these lengths can verify, at most `maximum`.

    All arguments are i32[B] or, for `maximum`, a number.
    """
    limits = [group.max_drafts(lengths) for group in cache.groups]
    return functools.reduce(jnp.minimum, [limit for limit in limits if limit is not None], maximum)


def plan_drafts(cache: PagedCache, is_writer: jax.Array, lengths: jax.Array) -> PagedCache:
    """Prepare the verification of draft tokens, directly after `reserve`.

    Args:
      cache: the cache; may be donated.
      is_writer: bool[S], whether each slot gets tokens.
      lengths: i32[S], the lengths of the slots before `reserve`.
    """
    return cache.replace_groups(group.plan_drafts(is_writer, lengths) for group in cache.groups)


def accept_drafts(cache: PagedCache, lengths: jax.Array, *, max_tokens: int) -> PagedCache:
    """Remove rejected draft tokens, so that slots have `lengths` i32[S].

    Args:
      cache: the cache after verification; may be donated.
      lengths: the lengths with the accepted tokens.
      max_tokens: upper bound on the number of rejected tokens of a slot (static).
    """
    return cache.replace_groups(
        group.accept(lengths, max_tokens=max_tokens) for group in cache.groups
    )


def fork(cache: PagedCache, parents: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Make empty slots copies of other slots by sharing blocks; see `paged_jax.blocks.fork`."""
    return _share(cache, lambda group, ok: group.fork(parents, ok))


def release(cache: PagedCache, mask: jax.Array) -> PagedCache:
    """Empty the slots for which `mask` bool[S] is True; see `paged_jax.blocks.release`."""
    return cache.replace_groups(group.release(mask) for group in cache.groups)


def reorder(cache: PagedCache, parents: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Replace slots by copies of other slots; see `paged_jax.blocks.reorder`."""
    return _share(cache, lambda group, ok: group.reorder(parents, ok))


def _share(
    cache: PagedCache, share: Callable[[Group, jax.Array | None], tuple[Group, jax.Array]]
) -> tuple[PagedCache, jax.Array]:
    """Apply `fork` or `reorder` to all groups; the first group decides whether it is possible."""
    groups: list[Group] = []
    ok = None
    for group in cache.groups:
        group, result = share(group, ok)
        groups.append(group)
        ok = result if ok is None else ok
    assert ok is not None
    return cache.replace_groups(groups), ok


def truncate(cache: PagedCache, lengths: jax.Array, *, max_tokens: int) -> PagedCache:
    """Shorten slots to `lengths` i32[S]; see `paged_jax.blocks.truncate`.

    Raises:
      ValueError: the cache has states of recurrent layers, or an argument is invalid, see
        `paged_jax.blocks.truncate`.
    """
    min_lengths = [group.shortest_lengths() for group in cache.groups]
    # All groups have the same lengths, so the window of a group limits all of them.
    limits = [length for length in min_lengths if length is not None]
    lengths = functools.reduce(jnp.maximum, limits, lengths)
    return cache.replace_groups(
        group.truncate(lengths, max_tokens=max_tokens) for group in cache.groups
    )


def attach(
    cache: PagedCache,
    slot: ArrayLike,
    digests: jax.Array,
    token_ids: jax.Array,
    num_blocks: ArrayLike,
) -> tuple[PagedCache, jax.Array]:
    """Start an empty slot with the cached prefix of its tokens; see `paged_jax.blocks.attach`.

    In groups with a window, only the blocks that the next token attends to must be cached. In a
    cache with recurrent layers, the prefix ends at a block with a snapshot of their states.
    """
    cache, num_cached, _ = attach_prefix(cache, slot, digests, token_ids, num_blocks)
    return cache, num_cached


def attach_prefix(
    cache: PagedCache,
    slot: ArrayLike,
    digests: jax.Array,
    token_ids: jax.Array,
    num_blocks: ArrayLike,
) -> tuple[PagedCache, jax.Array, jax.Array]:
    """Attach a cached prefix like `attach`, and also return how long it could have been.

    A prefix is possible only if every group has what it needs: see `prefix.find_prefix` for the
    blocks of tokens. Recurrent layers need a snapshot of their state at the end of the prefix.

    Returns:
      ``(cache, num_cached, num_possible)``. `num_possible` is i32[], the number of blocks that
      would have been attached if recurrent layers had a snapshot at the end of every block.
    """
    slot, query = begin_attach(cache.tables, slot, digests, token_ids, num_blocks)
    prefixes = [group.find_prefix(query) for group in cache.groups]
    block_prefixes = [
        prefix for group, prefix in zip(cache.groups, prefixes, strict=True) if group.has_blocks
    ]
    num_possible = num_cached = longest_prefix(block_prefixes, query)
    if len(block_prefixes) < len(prefixes):
        num_cached = longest_prefix(prefixes, query)
    # If no block was found, replace `slot` by an index past the last slot, so that JAX drops all
    # writes and no slot changes.
    slot = jnp.where(num_cached > 0, slot, cache.num_slots)
    groups = zip(cache.groups, prefixes, strict=True)
    cache = cache.replace_groups(group.attach(slot, prefix, num_cached) for group, prefix in groups)
    return cache, num_cached, num_possible


def publish(
    cache: PagedCache,
    slots: jax.Array,
    columns: jax.Array,
    digests: jax.Array,
    token_ids: jax.Array,
    is_snapshot: jax.Array | None = None,
) -> PagedCache:
    """Add full blocks to the prefix cache; see `paged_jax.blocks.publish`.

    A block has the same digest in all groups. `is_snapshot` bool[N] selects blocks (None selects
    none). For each selected block, the recurrent state after its last token is also added, if it is
    the slot's current state or its mark (see `StateTables`).
    """
    before, lengths = tuple(group.tables for group in cache.block_groups), cache.lengths
    if is_snapshot is not None:
        blocks = slots, columns, digests, token_ids
        cache = cache.replace_groups(
            group.publish_snapshots(is_snapshot, *blocks, lengths) for group in cache.groups
        )
    return cache.replace_tables(publish_groups(before, slots, columns, digests, token_ids))


def forget(cache: PagedCache) -> PagedCache:
    """Remove all blocks from the prefix cache; see `paged_jax.blocks.forget`."""
    return cache.replace_groups(group.forget() for group in cache.groups)
