"""Block tables for tests: small tables, compiled operations, and their contents as lists."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.cache import blocks
from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.blocks.invariants import check_pool, require
from paged_jax.cache.blocks.state_tables import StateTables
from tests.support.block_model import Content

P, S, M, C = 12, 5, 4, 4


def i32(values) -> jax.Array:
    return jnp.array(values, jnp.int32)


# Tests use three slots, and 4 or P blocks, so that few programs are compiled.
RESERVE = jax.jit(blocks.reserve, static_argnames="max_tokens")
PLAN = jax.jit(blocks.plan, static_argnames="max_tokens")
COMMIT = jax.jit(blocks.commit)
FORK = jax.jit(blocks.fork)
RELEASE = jax.jit(blocks.release)
REORDER = jax.jit(blocks.reorder)
TRUNCATE = jax.jit(blocks.truncate, static_argnames="max_tokens")
ATTACH = jax.jit(blocks.attach)
PUBLISH = jax.jit(blocks.publish)


def make_tables(lengths: list[int], *, num_blocks: int = P) -> BlockTables:
    """Return tables with three slots that hold the given numbers of tokens."""
    tables = BlockTables.create(num_blocks, 3, M, C)
    tables, _, ok = RESERVE(tables, i32(lengths), max_tokens=M * C)
    assert ok
    return tables


def free_blocks(tables: BlockTables) -> list[int]:
    pool = tables.pool
    ring = (int(pool.head) + np.arange(int(pool.num_free))) % pool.num_blocks
    return np.asarray(pool.free_queue)[ring].tolist()


def rows(tables: BlockTables) -> list[list[int]]:
    """Return the blocks of each slot, without the entries past its length."""
    table = np.asarray(tables.block_tables)
    held = -(-np.asarray(tables.lengths) // tables.block_size)
    return [row[:count].tolist() for row, count in zip(table, held, strict=True)]


def contents_of(tokens: list[int]) -> list[Content]:
    """Return the digest and the tokens of each full block."""
    contents = []
    for end in range(C, len(tokens) + 1, C):
        digest = hashlib.sha256(np.array(tokens[:end], np.int32).tobytes()).digest()
        words = tuple(np.frombuffer(digest, np.uint32).tolist())
        contents.append(Content(words, tokens[end - C : end]))
    return contents


def as_arrays(contents: list[Content], size: int = M) -> tuple[jax.Array, jax.Array]:
    """Return digests u32[N, 8] and tokens i32[N, C], padded to a fixed size."""
    digests, token_ids = np.zeros((size, 8), np.uint32), np.zeros((size, C), np.int32)
    for entry, content in enumerate(contents):
        digests[entry], token_ids[entry] = content
    return jnp.asarray(digests), jnp.asarray(token_ids)


def publish(
    tables: Any,
    entries: list[tuple[int, int, Content]],
    operation: Callable = PUBLISH,
    size: int = S * M,
) -> Any:
    """Publish the contents of blocks given by slot and column, in tables or in a cache."""
    entries = entries + [(-1, 0, Content((0,) * 8, [0] * C))] * (size - len(entries))
    slots, columns, contents = zip(*entries, strict=True)
    return operation(tables, i32(slots), i32(columns), *as_arrays(list(contents), size))


def publish_slot(tables: BlockTables, slot: int, tokens: list[int]) -> BlockTables:
    """Publish every full block of a slot that holds these tokens."""
    contents = contents_of(tokens)
    return publish(tables, [(slot, column, content) for column, content in enumerate(contents)])


def attach(
    tables: BlockTables, slot: int, contents: list[Content], operation: Callable = ATTACH
) -> tuple[BlockTables, int]:
    arrays = as_arrays(contents)
    tables, num_found = operation(tables, i32(slot), *arrays, i32(len(contents)))
    return tables, int(num_found)


def cached(tables: BlockTables) -> dict[int, Content]:
    """Return the content of each cached block."""
    digests, token_ids = tables.pool.digests.tolist(), tables.pool.token_ids.tolist()
    found = np.flatnonzero(tables.pool.is_cached).tolist()
    return {block: Content(tuple(digests[block]), token_ids[block]) for block in found}


def assert_unchanged(after: BlockTables, before: BlockTables) -> None:
    jax.tree.map(np.testing.assert_array_equal, after, before)


def broken(tables: BlockTables, **changes: Callable[[jax.Array], jax.Array]) -> BlockTables:
    """Return the tables with some arrays changed by functions, named as in the classes."""
    for name, change in changes.items():
        if hasattr(tables.pool, name):
            pool = replace(tables.pool, **{name: change(getattr(tables.pool, name))})
            tables = replace(tables, pool=pool)
        else:
            tables = replace(tables, **{name: change(getattr(tables, name))})
    return tables


def check_states(tables: StateTables, lengths: np.ndarray) -> None:
    """Check on the host that every entry is either free or used as often as the slots say.

    Args:
      tables: the entries of recurrent layers.
      lengths: i32[S], the number of tokens in each slot.

    Raises:
      AssertionError: an invariant does not hold; the message names the first one.
    """
    check_pool(tables.pool)
    entries, num_entries = np.asarray(tables.entries), tables.num_entries
    is_held = entries < num_entries
    rule = f"be below {num_entries} if and only if a slot has tokens"
    require(np.array_equal(is_held, np.asarray(lengths) > 0), "entries", rule, entries.tolist())
    marks = np.asarray(tables.marks)
    is_marked = marks < num_entries
    require(np.all(is_held | ~is_marked), "marks", "be of slots with tokens", marks.tolist())
    used = np.concatenate([entries[is_held], marks[is_marked]])
    counts = np.bincount(used, minlength=num_entries)
    refs = np.asarray(tables.pool.ref_counts)
    rule = f"be {counts.tolist()}, as in the entries and marks"
    require(np.array_equal(refs, counts), "ref_counts", rule, refs.tolist())
