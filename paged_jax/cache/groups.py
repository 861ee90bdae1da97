# pyright: strict, reportUnknownMemberType=false
"""`Group`: the contract of the kinds of cache groups. Its kinds are `CacheGroup` and `StateGroup`.

A cache has groups of layers that keep the same data of a sequence::

    CacheGroup    K and V of tokens, in blocks. Its `Retention` says which tokens: all of them (full
                  and latent attention), or those of a sliding window
    StateGroup    the states of all recurrent layers, in entries: one for each slot, and snapshots

`paged_cache` calls the methods of `Group` for all groups of a cache. So do, through it, the models,
the scheduler and the programs of the engine. They do not know which kinds there are.

The pools of K and V have shape ``[L, P, K, C, D]``: layer of the group, block, KV head, token in
the block, head dimension. A block id refers to the same block in every layer of the group, in K and
in V.

Pools of recurrent states have shape ``[L, P, ...]``: layer, entry, and the shape of a sequence's
state. The tables in `paged_jax.cache.blocks.state_tables` list the entry of each slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, Self, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from paged_jax.arguments import check_positive, names_arguments
from paged_jax.cache import blocks as allocator
from paged_jax.cache.attention_metadata import (
    BlockMetadata,
    LayerPlaces,
    SlotMapping,
    StateMetadata,
)
from paged_jax.cache.blocks import BlockCopies, BlockTables, ReservePlan
from paged_jax.cache.blocks.prefix import (
    FoundPrefix,
    PrefixQuery,
    find_blocks,
    find_prefix,
    start_slot,
)
from paged_jax.cache.blocks.reserve import (
    Reservation,
    begin_reserve,
    begin_restore,
    finish_reserve,
    num_possible,
)
from paged_jax.cache.blocks.state_tables import (
    PlannedStates,
    StateTables,
    attach_state,
    commit_marks,
    follow_states,
    forget_states,
    plan_marks,
    plan_states,
    publish_states,
    release_states,
    reserve_states,
    state_interval,
)
from paged_jax.cache.blocks.tables import describe_use, shortest_lengths
from paged_jax.cache.copies import num_values_blocks, read_pools, write_pools
from paged_jax.cache.retention import Retention
from paged_jax.dims import bind
from paged_jax.formatting import cut, integers, shortened
from paged_jax.kernels.kv_dtypes import SCALE_DTYPE, check_pool_dtype
from paged_jax.kernels.op import backend_for
from paged_jax.kernels.opaque_call import take_or_fill, without_index_checks
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.rows import pool_of_zeros, set_rows
from paged_jax.kernels.writing import check_num_rows, copy_blocks

# The pools of a group of recurrent layers. Each pool has shape ``[L, P, ...]``: L layers of the
# group, P entries, and then the shape of the state of one sequence.
StatePools = tuple[jax.Array, ...]


class Group(Protocol):
    """A group of layers in a cache: their pools, and tables that say what each slot holds in them.

    Every method is pure, and processes all slots together. Methods return a new group. A cache
    changes all of its groups or none: it first asks each group whether an operation is possible,
    and then applies the operation to all groups, with masks (`ok`) instead of branches.

    =====================  ================================================================
    what a sequence holds  `read`, `write` (swapping); `tables`
    what a step uses       `metadata`, `draft_metadata`; `planned_rows`, `step_metadata`
    growth                 `begin_reserve`, `begin_restore`, `finish`; `slide`, `num_possible`,
                           `plan`, `commit`
    draft tokens           `max_drafts`, `plan_drafts`, `accept`
    sharing                `fork`, `reorder`: slots share blocks or states, until one of them
                           writes and gets a copy
    when it is freed       `release`, `slide`, `truncate`
    prefix cache           `find_prefix`, `attach`; `publish_snapshots`, `forget`
    cost                   `nbytes`, `num_free`
    =====================  ================================================================

    Attributes:
      can_run_out: whether the pool may have too few free blocks for a slot. The first group of a
        cache always can. If False, `begin_reserve` is always possible.
      takes_tiles: whether several rows of a program may append tokens to the same slot.
      has_blocks: whether the group keeps blocks of tokens, so that `tables` are `BlockTables`. Its
        blocks in the prefix cache are found by their digests. The other groups have snapshots.
    """

    can_run_out: ClassVar[bool]
    takes_tiles: ClassVar[bool]
    has_blocks: ClassVar[bool]

    @property
    def pools(self) -> Any:
        """The pools, in the form in which loops over layers carry them."""
        ...

    @property
    def tables(self) -> Any:
        """Arrays with what each slot holds, and with the free part of the pools."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the pools, without the tables, which are small."""
        ...

    @property
    def num_free(self) -> jax.Array:
        """Number of blocks or entries that no slot holds, i32[]; cached ones are free."""
        ...

    def replace_pools(self, pools: Any) -> Self:
        """Return the group with other pools."""
        ...

    def metadata(self, tokens: "NewTokens") -> BlockMetadata | StateMetadata:
        """Find the places of new tokens, for which `finish` has reserved blocks or states."""
        ...

    def draft_metadata(self, tokens: "NewTokens") -> BlockMetadata | StateMetadata:
        """Find the places of draft tokens, after `plan_drafts`."""
        ...

    def planned_rows(self, planned: Any, slots: jax.Array) -> Any:
        """Take the plan of the rows with these slots, i32 ``[B]``, from a result of `plan`.

        Slots that do not exist are padding.
        """
        ...

    def step_metadata(self, rows: Any, step: "DecodeStep") -> BlockMetadata | StateMetadata:
        """Find the places of the tokens of one decode step; `rows` is from `planned_rows`."""
        ...

    def begin_reserve(self, num_tokens: jax.Array, *, max_tokens: int) -> "GroupReservation":
        """Prepare the reservation of `num_tokens` i32[S] tokens, see `blocks.reserve`."""
        ...

    def begin_restore(self, num_tokens: jax.Array, *, max_tokens: int) -> "GroupReservation":
        """Prepare a reservation for tokens that `write` will fill in, see `blocks.restore`."""
        ...

    def finish(self, reservation: "GroupReservation", ok: jax.Array, backend: str | None) -> Self:
        """Apply a reservation if `ok` bool[], and copy blocks that are shared and written to."""
        ...

    def slide(self, limits: jax.Array) -> Self:
        """Free what slots with a limit above 0 do not need any more; see `blocks.slide`."""
        ...

    def num_possible(self, limits: jax.Array, *, max_tokens: int) -> jax.Array:
        """Return how many tokens each slot can get, see `blocks.reserve.num_possible`.

        It is called only if the group can run out.
        """
        ...

    def plan(
        self,
        limits: jax.Array,
        num_steps: jax.Array,
        *,
        max_tokens: int,
        lengths: jax.Array,
        backend: str | None,
    ) -> tuple[Self, Any]:
        """Choose where the next tokens go, see `blocks.plan`; `lengths` are the current ones.

        The group has room for `num_steps` tokens per slot, if it can run out.
        """
        ...

    def commit(self, planned: Any, lengths: jax.Array) -> Self:
        """Allocate what was used of a plan, see `blocks.commit`."""
        ...

    def max_drafts(self, lengths: jax.Array) -> jax.Array | None:
        """Return the maximum number of draft tokens in slots of these lengths; None for any."""
        ...

    def plan_drafts(self, is_writer: jax.Array, lengths: jax.Array) -> Self:
        """Prepare the verification of draft tokens after `finish`; `lengths` are those before."""
        ...

    def accept(self, lengths: jax.Array, *, max_tokens: int) -> Self:
        """Remove rejected draft tokens, at most `max_tokens`: slots get `lengths` i32[S]."""
        ...

    def fork(self, parents: jax.Array, ok: jax.Array | None) -> tuple[Self, jax.Array]:
        """Make empty slots copies of other slots, see `blocks.fork`.

        `ok`, bool[], is the result of the first group; None for the first group.
        """
        ...

    def reorder(self, parents: jax.Array, ok: jax.Array | None) -> tuple[Self, jax.Array]:
        """Replace slots by copies of other slots, see `blocks.reorder` and `fork`."""
        ...

    def release(self, mask: jax.Array) -> Self:
        """Empty slots, see `blocks.release`."""
        ...

    def shortest_lengths(self) -> jax.Array | None:
        """Return the smallest lengths to which slots can be truncated, i32[S]; None for any.

        Raises:
          ValueError: slots cannot be truncated.
        """
        ...

    def truncate(self, lengths: jax.Array, *, max_tokens: int) -> Self:
        """Shorten slots, see `blocks.truncate`."""
        ...

    def find_prefix(self, query: PrefixQuery) -> FoundPrefix:
        """Look up what the prefix cache has of a sequence."""
        ...

    def attach(self, slot: jax.Array, prefix: FoundPrefix, num_cached: jax.Array) -> Self:
        """Start an empty slot with the first `num_cached` i32[] blocks of a cached prefix.

        Nothing changes if `slot` i32[] is equal to the number of slots.
        """
        ...

    def publish_snapshots(
        self,
        is_snapshot: jax.Array,
        slots: jax.Array,
        columns: jax.Array,
        digests: jax.Array,
        token_ids: jax.Array,
        lengths: jax.Array,
    ) -> Self:
        """Publish what no block of tokens contains, at the ends of the blocks in `is_snapshot`.

        `lengths` are those of the slots; see `blocks.publish` for the other arguments. The blocks
        of tokens of all groups are published together, see `blocks.prefix.publish_groups`.
        """
        ...

    def forget(self) -> Self:
        """Remove everything from the prefix cache, see `blocks.forget`."""
        ...

    def read(self, slot: ArrayLike, first: ArrayLike, width: int) -> Any:
        """Copy `width` blocks of a slot out of the pools, see `contents.read_blocks`."""
        ...

    def write(self, slot: ArrayLike, first: ArrayLike, values: Any) -> Self:
        """Overwrite blocks of a slot with a result of `read`, see `contents.write_blocks`."""
        ...


class GroupReservation(NamedTuple):
    """A prepared reservation of a group, which `Group.finish` applies.

    Attributes:
      is_possible: bool[], whether the group has enough free blocks; None if it always has.
      changes: what to apply, known only to the group.
    """

    is_possible: jax.Array | None
    changes: Any


class NewTokens(NamedTuple):
    """New tokens of B rows, at most T per row, which are flattened to N = B * T tokens.

    Attributes:
      rows: i32 ``[B]``, slot of each row; the number of slots for skipped rows.
      starts: i32 ``[B]``, length of each row without its new tokens.
      num_tokens: i32 ``[B]``, number of new tokens of each row.
      slots: i32 ``[N]``, slot of each token; -1 for padding.
      positions: i32 ``[N]``, position of each token in its sequence.
    """

    rows: jax.Array
    starts: jax.Array
    num_tokens: jax.Array
    slots: jax.Array
    positions: jax.Array


class DecodeStep(NamedTuple):
    """A decode step of B rows, one of several that were planned together.

    Attributes:
      number: i32 ``[]``, index of the step in its program, from 0.
      is_active: bool ``[B]``, False for rows that get no token.
      lengths: i32 ``[B]``, length of each row without its new token.
      columns: i32 ``[B, 1]``, column of the new token's block in the block table.
      offsets: i32 ``[B]``, offset of the new token in its block.
    """

    number: int | jax.Array
    is_active: jax.Array
    lengths: jax.Array
    columns: jax.Array
    offsets: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheGroup:
    """The pools and block tables of a group of attention layers that keep the same tokens.

    Attributes:
      pools: `Pools` with K ``[L, P, K, C, D]`` and V ``[L, P, K, C, U]``. Quantised pools also have
        scales, f32 ``[L, P, K, C]``, one factor per token and head. V is None in groups with latent
        attention.
      tables: the `BlockTables`: lengths, block tables and free blocks.
    """

    pools: Pools
    tables: BlockTables

    can_run_out: ClassVar[bool] = True
    takes_tiles: ClassVar[bool] = True
    has_blocks: ClassVar[bool] = True

    def __repr__(self) -> str:
        description, shape = describe_use(self.tables), getattr(self.pools.k, "shape", ())
        if description is None or len(shape) != 5:
            return shortened(self)
        return cut(
            f"CacheGroup({shape[0]} layers, {shape[2]} KV heads of {shape[4]}, "
            f"{self.pools.k.dtype}, {description})"
        )

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
    ) -> "CacheGroup":
        """Return a group with empty slots and zeroed pools.

        Args:
          num_layers: L, number of layers in the group.
          num_blocks: P, number of blocks in the pools.
          num_kv_heads: K, number of KV heads.
          block_size: C, number of tokens per block.
          head_dim: D, number of elements of a key per head.
          value_dim: U, number of elements of a value per head; None means D. With 0 there is no
            pool for V, as each value vector is the beginning of its key vector (latent attention).
          num_slots: S, maximum number of sequences in the cache at the same time.
          max_blocks_per_slot: M, maximum number of blocks of a sequence.
          dtype: dtype of K and V. int8 and the other dtypes of `kv_dtypes.QUANTISED` quantise them
            with one float32 scale per token and head, which costs ``4 / D`` bytes per element.
          window: sliding window of the layers, in tokens. Slots free the blocks that no later token
            attends to, see `BlockTables`. None keeps all tokens. Other rules are a `Retention`.

        Raises:
          ValueError: a size is not a positive integer, the pools have more rows than int32 can
            count, or `dtype` is not supported.
        """
        kv = check_pool_dtype("CacheGroup.create", "dtype", dtype)
        check_positive(
            "CacheGroup.create",
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        if value_dim:
            check_positive("CacheGroup.create", value_dim=value_dim)
        tables = BlockTables.create(num_blocks, num_slots, max_blocks_per_slot, block_size, window)
        shape = (num_layers, num_blocks, num_kv_heads, block_size)
        check_num_rows("CacheGroup.create", (*shape, head_dim))
        last_dims = head_dim, head_dim if value_dim is None else value_dim
        # Create K and V as separate arrays, because JAX cannot donate the same buffer twice.
        pools = [pool_of_zeros((*shape, last), dtype) if last else None for last in last_dims]
        if kv.has_scales:
            pools += [pool_of_zeros(shape, SCALE_DTYPE) if last else None for last in last_dims]
        return cls(Pools(*pools), tables)  # type: ignore[arg-type]

    def replace_pools(self, pools: Pools) -> "CacheGroup":
        """Return a copy of the group with its pools replaced."""
        return replace(self, pools=pools)

    @property
    def block_tables(self) -> jax.Array:
        """Block ids of each slot in the order of its tokens, i32[S, M], padded with P."""
        return self.tables.block_tables

    @property
    def num_layers(self) -> int:
        """Number of layers (L)."""
        return self.pools.k.shape[0]

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pools (P); also the table entry for "no block"."""
        return self.pools.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads (K)."""
        return self.pools.k.shape[2]

    @property
    def block_size(self) -> int:
        """Number of tokens in a block (C)."""
        return self.pools.k.shape[3]

    @property
    def head_dim(self) -> int:
        """Head dimension (D)."""
        return self.pools.k.shape[4]

    @property
    def nbytes(self) -> int:
        """Bytes of the pools and their scales, without the tables, which are small."""
        return sum(array.nbytes for array in self.pools if array is not None)

    # The methods of `Group`

    @property
    def num_free(self) -> jax.Array:
        """Number of free blocks, i32[]."""
        return self.tables.pool.num_free

    def metadata(self, tokens: NewTokens) -> BlockMetadata:
        """See `Group`."""
        mapping = SlotMapping(*locate(self.tables, tokens.slots, tokens.positions))
        tables = take_or_fill(self.block_tables, tokens.rows, fill_value=self.num_blocks)
        return BlockMetadata(tables, mapping, self.tables.retention)

    draft_metadata = metadata

    def planned_rows(self, planned: ReservePlan, slots: jax.Array) -> jax.Array:
        """Take the block tables of the rows, i32 ``[B, M]``, see `Group`."""
        return planned.block_tables.at[slots].get(mode="clip")

    def step_metadata(self, rows: jax.Array, step: DecodeStep) -> BlockMetadata:
        """See `Group`."""
        blocks = jnp.take_along_axis(rows, step.columns, axis=1, mode="clip")[:, 0]
        blocks = jnp.where(step.is_active, blocks, self.num_blocks)
        return BlockMetadata(rows, SlotMapping(blocks, step.offsets), self.tables.retention)

    def begin_reserve(self, num_tokens: jax.Array, *, max_tokens: int) -> GroupReservation:
        """See `Group`."""
        changes = begin_reserve(self.tables, num_tokens, max_tokens=max_tokens)
        return GroupReservation(changes.is_possible, changes)

    def begin_restore(self, num_tokens: jax.Array, *, max_tokens: int) -> GroupReservation:
        """See `Group`."""
        changes = begin_restore(self.tables, num_tokens, max_tokens=max_tokens)
        return GroupReservation(changes.is_possible, changes)

    def finish(
        self, reservation: GroupReservation, ok: jax.Array, backend: str | None
    ) -> "CacheGroup":
        """See `Group`."""
        tables, copies, _ = finish_reserve(cast(Reservation, reservation.changes), ok)
        return replace(self._copy(copies, backend), tables=tables)

    def _copy(self, copies: BlockCopies, backend: str | None) -> "CacheGroup":
        """Copy the contents of the blocks in `copies`, in all layers."""
        pools = copy_blocks(
            self.pools.k, self.pools.v, copies.source, copies.target,
            k_scale=self.pools.k_scale, v_scale=self.pools.v_scale,
            backend=backend_for("copy_blocks", backend),
        )  # fmt: skip
        return self.replace_pools(pools)

    def slide(self, limits: jax.Array) -> "CacheGroup":
        """See `Group`."""
        if not self.tables.retention.frees:
            return self
        return replace(self, tables=allocator.slide(self.tables, limits > 0))

    def num_possible(self, limits: jax.Array, *, max_tokens: int) -> jax.Array:
        """See `Group`."""
        return num_possible(self.tables, limits, max_tokens=max_tokens)

    def plan(
        self,
        limits: jax.Array,
        num_steps: jax.Array,
        *,
        max_tokens: int,
        lengths: jax.Array,
        backend: str | None,
    ) -> tuple["CacheGroup", ReservePlan]:
        """See `Group`."""
        planned = allocator.plan(self.tables, limits, num_steps, max_tokens=max_tokens)
        return self._copy(planned.copies, backend), planned

    def commit(self, planned: ReservePlan, lengths: jax.Array) -> "CacheGroup":
        """See `Group`."""
        return replace(self, tables=allocator.commit(self.tables, planned, lengths))

    def max_drafts(self, lengths: jax.Array) -> None:
        """See `Group`."""
        return None

    def plan_drafts(self, is_writer: jax.Array, lengths: jax.Array) -> "CacheGroup":
        """See `Group`."""
        return self

    def accept(self, lengths: jax.Array, *, max_tokens: int) -> "CacheGroup":
        """See `Group`."""
        return self.truncate(lengths, max_tokens=max_tokens) if max_tokens else self

    def fork(self, parents: jax.Array, ok: jax.Array | None) -> tuple["CacheGroup", jax.Array]:
        """See `Group`."""
        # The result depends only on slots and lengths, which are the same in all groups.
        tables, ok = allocator.fork(self.tables, parents)
        return replace(self, tables=tables), ok

    def reorder(self, parents: jax.Array, ok: jax.Array | None) -> tuple["CacheGroup", jax.Array]:
        """See `Group`."""
        tables, ok = allocator.reorder(self.tables, parents)
        return replace(self, tables=tables), ok

    def release(self, mask: jax.Array) -> "CacheGroup":
        """See `Group`."""
        return replace(self, tables=allocator.release(self.tables, mask))

    def shortest_lengths(self) -> jax.Array | None:
        """See `Group`."""
        min_lengths = shortest_lengths(self.tables)
        return None if isinstance(min_lengths, int) else min_lengths

    def truncate(self, lengths: jax.Array, *, max_tokens: int) -> "CacheGroup":
        """See `Group`."""
        tables = allocator.truncate(self.tables, lengths, max_tokens=max_tokens)
        return replace(self, tables=tables)

    def find_prefix(self, query: PrefixQuery) -> FoundPrefix:
        """See `Group`."""
        return find_prefix(self.tables, query)

    def attach(self, slot: jax.Array, prefix: FoundPrefix, num_cached: jax.Array) -> "CacheGroup":
        """See `Group`."""
        return replace(self, tables=start_slot(self.tables, slot, prefix.ids, num_cached))

    def publish_snapshots(
        self,
        is_snapshot: jax.Array,
        slots: jax.Array,
        columns: jax.Array,
        digests: jax.Array,
        token_ids: jax.Array,
        lengths: jax.Array,
    ) -> "CacheGroup":
        """See `Group`."""
        return self

    def forget(self) -> "CacheGroup":
        """See `Group`."""
        return replace(self, tables=allocator.forget(self.tables))

    def read(self, slot: ArrayLike, first: ArrayLike, width: int) -> Pools:
        """See `Group`."""
        return read_pools(self.pools, _held_blocks(self.tables, slot, first, width))

    def write(self, slot: ArrayLike, first: ArrayLike, values: Pools) -> "CacheGroup":
        """See `Group`."""
        width = num_values_blocks(self.pools, values)
        blocks = _held_blocks(self.tables, slot, first, width)
        return replace(self, pools=write_pools(self.pools, blocks, values))


@partial(without_index_checks, static_argnums=(3,))
def _held_blocks(tables: BlockTables, slot: ArrayLike, first: ArrayLike, width: int) -> jax.Array:
    """Return the ids of the blocks that `read` copies, i32[width]; P for no block."""
    columns = jnp.asarray(first, jnp.int32) + jnp.arange(width, dtype=jnp.int32)
    rule = tables.retention
    if rule.frees:
        length = tables.lengths.at[jnp.asarray(slot, jnp.int32)].get(mode="fill", fill_value=0)
        size = tables.block_size
        columns = rule.kept_column(columns, rule.cursor(length, size), size)
    return tables.block_tables.at[jnp.asarray(slot, jnp.int32), columns].get(
        mode="fill", fill_value=tables.num_blocks, wrap_negative_indices=False
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateGroup:
    """Pools with the states of all recurrent layers of a model, and the entry of each slot.

    Recurrent layers with states of equal shapes form a group and share pools. An entry id refers to
    the same sequence in all groups.

    Attributes:
      pools: for each group of recurrent layers, its arrays, each ``[L, P, ...]``.
      tables: the `StateTables` with the entry of each slot.
    """

    pools: tuple[StatePools, ...]
    tables: StateTables

    can_run_out: ClassVar[bool] = False
    # Several rows would advance the same state at the same time.
    takes_tiles: ClassVar[bool] = False
    has_blocks: ClassVar[bool] = False

    def __repr__(self) -> str:
        entries = integers(self.tables.pool.num_free, 0)
        if entries is None:
            return shortened(self)
        num_entries = self.tables.num_entries
        num_layers = sum(arrays[0].shape[0] for arrays in self.pools)
        return cut(
            f"StateGroup({num_layers} layers, {num_entries - int(entries)} of {num_entries} states "
            "in use)"
        )

    @classmethod
    @names_arguments
    def create(
        cls,
        arrays: Sequence[Sequence[tuple[int, tuple[int, ...], DTypeLike]]],
        *,
        num_entries: int,
        num_slots: int,
        block_size: int,
    ) -> "StateGroup":
        """Return a group with empty slots and zeroed pools.

        Args:
          arrays: for each group of recurrent layers, its arrays; each is described by the number of
            layers, the shape of a sequence's state, and the dtype.
          num_entries: P, number of entries in the pools, at least `num_slots`.
          num_slots: S, maximum number of sequences in the cache.
          block_size: C, number of tokens per block of the attention groups.

        Raises:
          ValueError: a size is not a positive integer, or there are fewer entries than slots.
        """
        tables = StateTables.create(num_entries, num_slots, block_size)
        pools = tuple(
            tuple(
                pool_of_zeros((num_layers, num_entries, *shape), dtype)
                for num_layers, shape, dtype in group
            )
            for group in arrays
        )
        return cls(pools, tables)

    @property
    def num_entries(self) -> int:
        """Number of entries in the pools (P)."""
        return self.tables.num_entries

    @property
    def nbytes(self) -> int:
        """Bytes of the pools, without the tables, which are small."""
        return sum(array.nbytes for arrays in self.pools for array in arrays)

    # The methods of `Group`

    @property
    def num_free(self) -> jax.Array:
        """Number of free entries, i32[]."""
        return self.tables.pool.num_free

    def replace_pools(self, pools: tuple[StatePools, ...]) -> "StateGroup":
        """See `Group`."""
        return replace(self, pools=pools)

    def metadata(self, tokens: NewTokens) -> StateMetadata:
        """See `Group`."""
        tables, P, rows = self.tables, self.num_entries, self._writing_rows(tokens)
        return StateMetadata(
            sources=take_or_fill(tables.sources, rows, fill_value=P),
            entries=take_or_fill(tables.entries, rows, fill_value=P),
        )

    def draft_metadata(self, tokens: NewTokens) -> StateMetadata:
        """See `Group`."""
        rows = PlannedStates.of_rows(self.tables, self._writing_rows(tokens))
        return rows.at_step(0, tokens.num_tokens > 0, tokens.starts)

    def _writing_rows(self, tokens: NewTokens) -> jax.Array:
        return jnp.where(tokens.num_tokens > 0, tokens.rows, self.tables.num_slots)

    def planned_rows(self, planned: None, slots: jax.Array) -> PlannedStates:
        """Take the entries of the rows from the tables, which contain the plan, see `Group`."""
        return PlannedStates.of_rows(self.tables, slots)

    def step_metadata(self, rows: PlannedStates, step: DecodeStep) -> StateMetadata:
        """See `Group`."""
        return rows.at_step(step.number, step.is_active, step.lengths)

    def begin_reserve(self, num_tokens: jax.Array, *, max_tokens: int) -> GroupReservation:
        """See `Group`."""
        return GroupReservation(None, jnp.asarray(num_tokens) > 0)

    begin_restore = begin_reserve

    def finish(
        self, reservation: GroupReservation, ok: jax.Array, backend: str | None
    ) -> "StateGroup":
        """See `Group`."""
        return replace(self, tables=reserve_states(self.tables, reservation.changes & ok))

    def slide(self, limits: jax.Array) -> "StateGroup":
        """See `Group`."""
        return self

    def num_possible(self, limits: jax.Array, *, max_tokens: int) -> jax.Array:
        """See `Group`."""
        raise NotImplementedError

    def plan(
        self,
        limits: jax.Array,
        num_steps: jax.Array,
        *,
        max_tokens: int,
        lengths: jax.Array,
        backend: str | None,
    ) -> tuple["StateGroup", None]:
        """See `Group`."""
        is_writer = (limits > 0) & (num_steps > 0)
        return replace(self, tables=plan_states(self.tables, is_writer, lengths, num_steps)), None

    def commit(self, planned: None, lengths: jax.Array) -> "StateGroup":
        """See `Group`."""
        return replace(self, tables=commit_marks(self.tables, lengths))

    def max_drafts(self, lengths: jax.Array) -> jax.Array:
        """See `Group`."""
        # Stop at the next multiple of the interval, so that the next program can save the state
        # there as a mark.
        interval = state_interval(self._block_size)
        return interval - 1 - lengths % interval

    def plan_drafts(self, is_writer: jax.Array, lengths: jax.Array) -> "StateGroup":
        """See `Group`."""
        # All draft tokens are appended at once, so only the state before them can become a mark.
        return replace(self, tables=plan_marks(self.tables, is_writer, lengths, 1))

    def accept(self, lengths: jax.Array, *, max_tokens: int) -> "StateGroup":
        """See `Group`."""
        # There is nothing to remove: states only cover accepted tokens.
        return replace(self, tables=commit_marks(self.tables, lengths))

    def fork(self, parents: jax.Array, ok: jax.Array | None) -> tuple["StateGroup", jax.Array]:
        """See `Group`."""
        assert ok is not None
        return replace(self, tables=follow_states(self.tables, parents, ok)), ok

    reorder = fork

    def release(self, mask: jax.Array) -> "StateGroup":
        """See `Group`."""
        return replace(self, tables=release_states(self.tables, mask))

    def shortest_lengths(self) -> None:
        """See `Group`."""
        raise ValueError(
            "truncate: cache must have no states of recurrent layers. Every new token overwrites "
            "these states, so the cache cannot return to an earlier length. Fork the slot before "
            "you append tokens that you may want to remove."
        )

    def truncate(self, lengths: jax.Array, *, max_tokens: int) -> "StateGroup":
        """See `Group`."""
        raise NotImplementedError

    def find_prefix(self, query: PrefixQuery) -> FoundPrefix:
        """See `Group`."""
        entries, is_found = find_blocks(self.tables.pool, query)
        return FoundPrefix(entries, None, jnp.pad(is_found, (1, 0), constant_values=True))

    def attach(self, slot: jax.Array, prefix: FoundPrefix, num_cached: jax.Array) -> "StateGroup":
        """See `Group`."""
        entry = take_or_fill(prefix.ids, num_cached - 1, fill_value=self.num_entries)
        return replace(self, tables=attach_state(self.tables, slot, entry))

    def publish_snapshots(
        self,
        is_snapshot: jax.Array,
        slots: jax.Array,
        columns: jax.Array,
        digests: jax.Array,
        token_ids: jax.Array,
        lengths: jax.Array,
    ) -> "StateGroup":
        """See `Group`."""
        ends = (columns + 1) * self._block_size
        new = slots, is_snapshot, digests, token_ids, ends, lengths
        return replace(self, tables=publish_states(self.tables, *new))

    def forget(self) -> "StateGroup":
        """See `Group`."""
        return replace(self, tables=forget_states(self.tables))

    def read(self, slot: ArrayLike, first: ArrayLike, width: int) -> tuple[StatePools, ...]:
        """Copy the state of a slot out of the pools, as pools with one entry; zeros if it is empty.

        `first` and `width` are not used, because a slot holds one entry.
        """
        entry = self._entry_of(slot)
        is_held = entry < self.num_entries
        index = jnp.where(is_held, entry, 0)

        def read(pool: jax.Array) -> jax.Array:
            state = jax.lax.dynamic_slice_in_dim(pool, index, 1, 1)
            return jnp.where(is_held, state, 0)

        return jax.tree.map(read, self.pools)

    def write(
        self, slot: ArrayLike, first: ArrayLike, values: tuple[StatePools, ...]
    ) -> "StateGroup":
        """Overwrite the state of a slot with the result of `read`; an empty slot stays empty."""
        entry = self._entry_of(slot)

        def write(pool: jax.Array, new: jax.Array) -> jax.Array:
            L, P, *_ = pool.shape
            layers = jnp.arange(L, dtype=jnp.int32)
            rows = jnp.where(entry < P, layers * P + entry, L * P + layers)
            return set_rows(pool, rows, new[:, 0])

        return replace(self, pools=jax.tree.map(write, self.pools, values))

    @property
    def _block_size(self) -> int:
        return self.tables.pool.token_ids.shape[1]

    def _entry_of(self, slot: ArrayLike) -> jax.Array:
        slot = jnp.asarray(slot, jnp.int32)
        return take_or_fill(self.tables.entries, slot, fill_value=self.num_entries)


def find_layer(layers: LayerPlaces, layer: Any) -> tuple[Any, ...]:
    """Return the group of a layer and, last, the index of the layer in the pools of the group.

    Args:
      layers: see `PagedCache`.
      layer: index of the layer in the model, a Python integer or, with one group, a traced i32[].

    Raises:
      ValueError: `layer` is traced and there are several groups, or the layer belongs to no group.
    """
    if not isinstance(layer, Tracer):
        if (location := layers[int(layer)]) is None:
            raise ValueError(
                f"PagedCache: layer must belong to a group of the cache, got layer {layer}, which "
                "belongs to none."
            )
        return location
    first = layers[0]
    if first is None or layers != tuple((*first[:-1], index) for index in range(len(layers))):
        raise ValueError(
            "PagedCache: layer must be a Python integer if layers are in several groups, got a "
            "traced array. Unroll the loop over layers."
        )
    return *first[:-1], cast(Any, layer)


def locate(
    tables: BlockTables, slots: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the block id of each token and its offset in the block, from slots and positions.

    Args:
      tables: the block tables.
      slots: i32[N], the slot of each token; negative for padding.
      positions: i32[N], the position of each token in its sequence, from 0.

    Returns:
      `(blocks, offsets)`, both i32[N]. The block is P if the slot does not exist, if the position
      is not below the length of the slot, or if the block was freed. `paged_write` ignores tokens
      with block P.

    Raises:
      ValueError: `slots` and `positions` differ in shape.

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(8, num_slots=2, max_blocks_per_slot=4, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([5, 2]), max_tokens=8)
      >>> [x.tolist() for x in locate(tables, jnp.array([0, 1, 1]), jnp.array([4, 1, 2]))]
      [[1, 2, 8], [0, 1, 2]]
    """
    bind("locate", slots=(slots, "N"), positions=(positions, "N"))
    is_slot = (slots >= 0) & (slots < tables.num_slots)
    row = jnp.where(is_slot, slots, 0)
    is_token = is_slot & (positions >= 0) & (positions < tables.lengths[row])
    column = jnp.where(is_token, positions // tables.block_size, 0)
    blocks = jnp.where(is_token, tables.block_tables[row, column], tables.num_blocks)
    return blocks, positions % tables.block_size
