"""Work on the places of the table that slots fill, whatever the longest of them could fill."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.cache import block_pool
from paged_jax.cache.blocks.tables import BlockTables
from paged_jax.cache.sizes import num_blocks_needed
from paged_jax.opaque import without_index_checks

# Table entries that are shared or released at once: what most slots hold, and quick to sort.
_PIECE = 512

Update = Callable[[BlockTables, jax.Array, jax.Array], BlockTables]


def hold_slots(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Add a reference to each block of the slots of `mask` bool[S]."""
    return _update_slots(_hold_piece, tables, mask)


def empty_slots(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Empty the slots of `mask` bool[S], the last block of each first."""
    tables = _update_slots(_empty_piece, tables, mask)
    lengths = jnp.where(mask, 0, tables.lengths)
    if tables.first_columns is None:
        return replace(tables, lengths=lengths)
    first_columns = jnp.where(mask, 0, tables.first_columns)
    return replace(tables, lengths=lengths, first_columns=first_columns)


def drop_columns(tables: BlockTables, begins: jax.Array, ends: jax.Array) -> BlockTables:
    """Give the blocks in columns `begins` i32[S] to `ends` i32[S], not included, back."""
    return _drop_columns(tables, begins, ends)


def _hold_piece(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> BlockTables:
    return replace(tables, pool=block_pool.hold(tables.pool, _entries(tables, rows, columns)))


def _empty_piece(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> BlockTables:
    entries = _entries(tables, rows, columns)
    # No other places are left, but writes that depend on what was read need no copy of the array.
    columns = jnp.where(entries < tables.num_blocks, columns, tables.max_blocks_per_slot)
    return replace(
        tables,
        pool=block_pool.give_back(tables.pool, entries),
        block_tables=tables.block_tables.at[rows, columns].set(tables.num_blocks, mode="drop"),
    )


def _entries(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """The blocks at these places of the table; P where there is no such place."""
    return tables.block_tables.at[rows, columns].get(mode="fill", fill_value=tables.num_blocks)


@partial(without_index_checks, static_argnums=(0,))
@partial(jax.jit, static_argnums=0)  # so that eager calls compile the loop once, not each time
def _update_slots(update: Update, tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Apply `update(tables, rows, columns)` to all places that the slots of `mask` bool[S] fill."""
    held = jnp.where(mask, num_blocks_needed(tables.lengths, tables.block_size), 0)
    if tables.first_columns is None:
        return _in_pieces(update, tables, held)
    begins = jnp.where(mask, tables.first_columns, 0)
    return _in_pieces(update, tables, held - begins, begins)


@without_index_checks
@jax.jit
def _drop_columns(tables: BlockTables, begins: jax.Array, ends: jax.Array) -> BlockTables:
    return _in_pieces(_empty_piece, tables, jnp.maximum(ends - begins, 0), begins)


def _in_pieces(
    update: Update, tables: BlockTables, counts: jax.Array, begins: jax.Array | None = None
) -> BlockTables:
    """Apply `update` to `counts` i32[S] places of each slot, from column `begins` or 0 on.

    Slot by slot, the last block of each first. The places come in pieces of i32[_PIECE], the last
    of which is padded with places past the table: so the cost is that of what the slots hold, and
    not of what they could hold.
    """
    num_slots, width = tables.block_tables.shape
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    size = min(num_slots * width, _PIECE)

    def update_piece(piece: jax.Array, tables: BlockTables) -> BlockTables:
        index = piece * size + jnp.arange(size, dtype=jnp.int32)
        rows = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        columns = ends.at[rows].get(mode="clip") - 1 - index
        if begins is not None:
            columns += begins.at[rows].get(mode="clip")
        return update(tables, rows, jnp.where(rows < num_slots, columns, width))

    num_pieces = (ends[-1] + size - 1) // size
    return lax.fori_loop(jnp.int32(0), num_pieces, update_piece, tables)
