"""Room for tokens of which it is not known yet how many there will be: planned, then committed."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from paged_jax.cache import block_pool
from paged_jax.cache.blocks.reserve import (
    BlockCopies,
    SharedWrites,
    plan_columns,
    plan_shared_writes,
)
from paged_jax.cache.blocks.tables import BlockTables, as_slot_values
from paged_jax.cache.sizes import num_blocks_needed
from paged_jax.checks import check_positive
from paged_jax.opaque import put_or_drop
from paged_jax.short_repr import short_repr


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReservePlan:
    """Blocks that slots will take, none of which is taken: in the tables they are still free.

    Attributes:
      num_tokens: i32[], tokens for which each slot has room, unless its own limit is lower.
      block_tables: i32[S, M], the tables with these blocks.
      copies: the copies on write that must be made before K and V are written.
      columns: i32[S, W], the columns of the tables that may change.
      blocks: i32[S, W], what will be there; P where nothing changes.
      writes: what happens to the blocks that slots write into first.
    """

    num_tokens: jax.Array
    block_tables: jax.Array
    copies: BlockCopies
    columns: jax.Array
    blocks: jax.Array
    writes: SharedWrites


def plan(
    tables: BlockTables, limits: jax.Array, most: jax.Array, *, max_tokens: int
) -> ReservePlan:
    """Plan room for as many tokens in every slot as there are blocks for.

    As `reserve` of the largest possible number, up to `most`, but that nothing is taken until
    `commit`. So what is cached in blocks that turn out not to be needed can still be found.

    Args:
      tables: the state; with a window, after `slide`, which gives back what is not needed.
      limits: i32[S], how many tokens a slot may get at most, none below 0; 0 leaves a slot alone.
      most: i32[], how many tokens any slot may get at most.
      max_tokens: N, upper bound on `most` (static). Work is in proportion to S * N.

    Raises:
      ValueError: `limits` is not i32[S] or `max_tokens` is not a positive integer.

    Example:
      >>> tables = BlockTables.create(3, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> planned = plan(tables, jnp.array([8, 8]), 8, max_tokens=8)     # too few for 5 each
      >>> int(planned.num_tokens), planned.block_tables.tolist()
      (4, [[0, 3], [1, 3]])
      >>> tables = commit(tables, planned, jnp.array([2, 0]))
      >>> tables.block_tables.tolist(), int(tables.pool.num_free)
      ([[0, 3], [3, 3]], 2)
    """
    limits = as_slot_values("plan", "limits", limits, jnp.int32, tables)
    check_positive("plan", max_tokens=max_tokens)
    max_tokens = min(max_tokens, tables.max_blocks_per_slot * tables.block_size)
    writes = plan_shared_writes(tables, limits > 0)
    num_possible = _num_possible(tables, limits, writes, max_tokens)
    num_tokens = jnp.minimum(num_possible, jnp.asarray(most, jnp.int32))
    ok = num_tokens > 0

    end = tables.lengths + jnp.minimum(limits, num_tokens)
    columns_SW, is_taken_SW = plan_columns(tables, end, writes.is_copy & ok, max_tokens)
    blocks_SW = block_pool.peek(tables.pool, is_taken_SW)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    columns_SW = jnp.where(is_taken_SW, columns_SW, tables.max_blocks_per_slot)
    is_copy = writes.is_copy & ok
    return ReservePlan(
        num_tokens=num_tokens,
        block_tables=put_or_drop(tables.block_tables, (slots[:, None], columns_SW), blocks_SW),
        copies=BlockCopies(
            source=jnp.where(is_copy, writes.block, tables.num_blocks),
            target=jnp.where(is_copy, blocks_SW[:, 0], tables.num_blocks),
        ),
        columns=columns_SW,
        blocks=blocks_SW,
        writes=writes,
    )


def num_possible(tables: BlockTables, limits: jax.Array, *, max_tokens: int) -> jax.Array:
    """The most tokens for which `plan` finds blocks in all slots, up to `max_tokens`: i32[]."""
    max_tokens = min(max_tokens, tables.max_blocks_per_slot * tables.block_size)
    return _num_possible(tables, limits, plan_shared_writes(tables, limits > 0), max_tokens)


def commit(tables: BlockTables, planned: ReservePlan, lengths: jax.Array) -> BlockTables:
    """Take those blocks of a plan that are needed; the others stay as they were.

    Args:
      tables: the state that the plan was made for; may be donated.
      planned: the plan. Unless its `num_tokens` is 0, each slot with a limit above 0 got a token.
      lengths: i32[S], how many tokens are in each slot now, as many as were planned at most.

    Raises:
      ValueError: `lengths` is not i32[S].
    """
    lengths = as_slot_values("commit", "lengths", lengths, jnp.int32, tables)
    num_held = num_blocks_needed(lengths, tables.block_size)
    is_used_SW = (planned.blocks < tables.num_blocks) & (planned.columns < num_held[:, None])
    pool = block_pool.take_some(tables.pool, planned.blocks, is_used_SW)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    columns_SW = jnp.where(is_used_SW, planned.columns, tables.max_blocks_per_slot)
    return replace(
        tables,
        pool=planned.writes.note(pool, planned.num_tokens > 0),
        block_tables=put_or_drop(tables.block_tables, (slots[:, None], columns_SW), planned.blocks),
        lengths=lengths,
    )


def _num_possible(
    tables: BlockTables, limits: jax.Array, writes: SharedWrites, max_tokens: int
) -> jax.Array:
    """The largest number of tokens up to `max_tokens` for which all slots have blocks, i32[]."""
    tokens_N1 = jnp.arange(1, max_tokens + 1, dtype=jnp.int32)[:, None]
    ends_NS = tables.lengths[None, :] + jnp.minimum(tokens_N1, limits[None, :])
    blocks_NS = num_blocks_needed(ends_NS, tables.block_size)
    num_held = num_blocks_needed(tables.lengths, tables.block_size)
    new_NS = blocks_NS - num_held[None, :] + writes.is_copy.astype(jnp.int32)[None, :]
    num_taken = jnp.sum(new_NS, axis=1, dtype=jnp.int32)
    is_in_bounds = jnp.all(blocks_NS <= tables.max_blocks_per_slot, axis=1)
    # What fewer tokens take is no more: the number of those that fit is the largest of them.
    return jnp.sum(is_in_bounds & (num_taken <= tables.pool.num_free), dtype=jnp.int32)
