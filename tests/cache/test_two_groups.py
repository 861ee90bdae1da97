"""Two groups of which one has evicted blocks: all situations, compared with a plain model.

The first group keeps all tokens, the second one has a window. `lax.map` runs all situations in one
program.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.blocks.prefix import publish_groups
from paged_jax.cache.groups import CacheGroup, StateGroup
from paged_jax.cache.paged_cache import PagedCache, attach_prefix
from tests.support.block_model import Content
from tests.support.block_tables import i32
from tests.support.window_model import GroupsModel

C, M, S, P = 2, 2, 2, 6
PUBLISHED, OTHER = Content((1,) * 8, [1, 2]), Content((2,) * 8, [3, 4])
FREE = 4  # a block that no slot holds


class Situation(NamedTuple):
    """Two slots with two full blocks each. Blocks of column 0 are published.

    Attributes:
      is_shared: whether the slots share the block in column 0.
      is_held: for each slot, whether the second group still holds its block in column 0.
      copies: for each group, the block that is cached under the digest to publish; None if no block
        is.
      is_other: for each group, whether the block of slot 0 is cached under another digest.
      slots: the slots in the order in which their blocks are published.
    """

    is_shared: bool
    is_held: tuple[bool, bool]
    copies: tuple[int | None, int | None]
    is_other: tuple[bool, bool]
    slots: tuple[int, ...]


def situations() -> Iterator[Situation]:
    """List all situations. Blocks of slot 0 are 0 and 1, those of slot 1 are 2 and 3."""
    flags = list(itertools.product([False, True], repeat=2))
    for is_shared, is_held in itertools.product([False, True], flags):
        blocks = [0] if is_shared else [0, 2]
        firsts = [None, FREE, *blocks]
        held = [0 if is_shared else 2 * slot for slot in range(S) if is_held[slot]]
        for copies in itertools.product(firsts, [None, FREE, *dict.fromkeys(held)]):
            for is_other in flags:
                is_possible = [
                    not other or (copy != 0 and (not group or 0 in held))
                    for group, (copy, other) in enumerate(zip(copies, is_other, strict=True))
                ]
                if all(is_possible):
                    for slots in ((0,), (1,), (0, 1), (1, 0)):
                        yield Situation(is_shared, is_held, copies, is_other, slots)


def make_model(situation: Situation) -> GroupsModel:
    model = GroupsModel([None, 1], [P, P], S, M, C)
    for group, each in enumerate(model.models):
        each.tokens = [[slot] * (M * C) for slot in range(S)]
        rows = [[0, 1], [0 if situation.is_shared else 2, 3]]
        if group:
            rows = [
                row if held else [None, row[1]]
                for row, held in zip(rows, situation.is_held, strict=True)
            ]
        each.blocks = rows  # type: ignore[assignment]
        for block in itertools.chain(*rows):
            if block is not None:
                each.refs[block] += 1
        if (copy := situation.copies[group]) is not None:
            each.cached[copy] = PUBLISHED
        if situation.is_other[group]:
            each.cached[0] = OTHER
        free = [block for block in range(P) if not each.refs[block]]
        each.free.clear()
        each.free.extend(sorted(free, key=lambda block: block in each.cached))
    return model


@functools.cache
def empty_tables(window: int | None) -> BlockTables:
    return jax.device_get(BlockTables.create(P, S, M, C, window))


def as_tables(model: GroupsModel) -> tuple[BlockTables, ...]:
    """Return tables in the state of the model, as NumPy arrays."""
    groups = []
    for window, each in zip((None, 1), model.models, strict=True):
        tables = jax.tree.map(np.copy, empty_tables(window))
        pool = tables.pool
        pool.free_queue[: len(each.free)] = list(each.free)
        pool.ref_counts[:] = list(each.refs.values())
        for block, content in each.cached.items():
            pool.is_cached[block] = True
            pool.digests[block], pool.token_ids[block] = content
        rows = [[P if block is None else block for block in row] for row in each.blocks]
        tables = replace(
            tables,
            pool=replace(pool, num_free=np.int32(len(each.free))),
            block_tables=np.array(rows, np.int32),
            lengths=np.full(S, M * C, np.int32),
        )
        if window is not None:
            firsts = [row.count(None) for row in each.blocks]
            tables = replace(tables, first_columns=np.array(firsts, np.int32))
        groups.append(tables)
    return tuple(groups)


def run_all(function: Any, arguments: list[Any]) -> Any:
    """Call a function with each of the arguments, in one program."""
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *arguments)
    return jax.device_get(jax.jit(lambda each: jax.lax.map(function, each))(stacked))


def test_publish_in_all_situations_matches_the_model() -> None:
    models, arguments = [], []
    for situation in situations():
        models.append(make_model(situation))
        slots = [*situation.slots, *[-1] * (S - len(situation.slots))]
        arguments.append((as_tables(models[-1]), np.array(slots, np.int32)))
    digests = jnp.array([PUBLISHED.digest] * S, jnp.uint32)
    token_ids = i32([PUBLISHED.token_ids] * S)
    columns = i32([0] * S)

    def publish(each: Any) -> Any:
        groups, slots = each
        return publish_groups(groups, slots, columns, digests, token_ids)

    groups = run_all(publish, arguments)
    num_replaced = 0
    for index, (situation, model) in enumerate(zip(situations(), models, strict=True)):
        before = [dict(each.cached) for each in model.models]
        model.publish([(slot, 0, PUBLISHED) for slot in situation.slots])
        for tables, each, old in zip(groups, model.models, before, strict=True):
            pool = jax.tree.map(lambda x, i=index: x[i], tables.pool)
            found = {
                int(block): Content(tuple(pool.digests[block].tolist()), [*pool.token_ids[block]])
                for block in np.flatnonzero(pool.is_cached)
            }
            assert found == each.cached, situation
            ring = (int(pool.head) + np.arange(int(pool.num_free))) % P
            assert pool.free_queue[ring].tolist() == list(each.free), situation
            num_replaced += bool(set(old) - set(found))
    assert len(models) > 500 and num_replaced > 50


@pytest.mark.parametrize("is_needed", [False, True])
def test_publish_keeps_a_copy_that_a_third_group_needs(is_needed) -> None:
    """The second group has evicted its copy. In the third group, only the copy may be left."""
    situation = Situation(False, (True, False), (FREE, None), (False, False), (0,))
    other = situation._replace(is_held=(not is_needed, False), copies=(FREE, FREE))
    groups = *as_tables(make_model(situation)), as_tables(make_model(other))[1]
    digests = jnp.array([PUBLISHED.digest], jnp.uint32)
    groups = publish_groups(groups, i32([0]), i32([0]), digests, i32([PUBLISHED.token_ids]))
    cached = [np.flatnonzero(tables.pool.is_cached).tolist() for tables in groups]
    assert cached == ([[FREE], [], [FREE]] if is_needed else [[0], [0], [0]])


NUM_COLUMNS, WINDOW = 4, 6  # with a window of 6, prefixes of 3 and 4 blocks of 4 need no block 0


def test_attach_finds_the_longest_prefix_that_all_groups_have() -> None:
    """All sets of cached blocks of both groups, and all sets of snapshots of recurrent layers."""
    size, patterns = 4, list(itertools.product([False, True], repeat=NUM_COLUMNS))
    sizes: Any = {"block_size": size, "num_slots": 1}
    heads: Any = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1}
    blocks: Any = {"num_blocks": NUM_COLUMNS, "max_blocks_per_slot": NUM_COLUMNS}
    base = (
        *(CacheGroup.create(**sizes, **heads, **blocks, window=each) for each in (None, WINDOW)),
        StateGroup.create([], **sizes, num_entries=NUM_COLUMNS),
    )
    digests = jnp.arange(8 * NUM_COLUMNS, dtype=jnp.uint32).reshape(-1, 8)
    token_ids = jnp.arange(size * NUM_COLUMNS, dtype=jnp.int32).reshape(-1, size)

    def with_cached(group: Any, is_cached: jax.Array) -> Any:
        pool = replace(group.tables.pool, is_cached=is_cached, digests=digests, token_ids=token_ids)
        return replace(group, tables=replace(group.tables, pool=pool))

    def attach(is_cached: jax.Array) -> Any:
        cache = PagedCache(tuple(map(with_cached, base, is_cached)), layers=((0, 0), (1, 0)))
        arguments = jnp.int32(0), digests, token_ids, jnp.int32(NUM_COLUMNS)
        cache, num_found, num_possible = attach_prefix(cache, *arguments)
        *groups, states = cache.groups
        rows = [group.tables.block_tables[0] for group in groups]
        lengths = [group.tables.lengths[0] for group in groups]
        return num_found, num_possible, rows, lengths, states.tables.entries[0]

    cases = list(itertools.product(patterns, repeat=3))
    found, possible, rows, lengths, entries = run_all(attach, [np.array(case) for case in cases])
    kept = [max(n * size - WINDOW + 1, 0) // size for n in range(NUM_COLUMNS + 1)]
    for index, (first, second, snapshots) in enumerate(cases):
        counts = [n for n in range(NUM_COLUMNS + 1) if all(first[:n]) and all(second[kept[n] : n])]
        count = max(n for n in counts if not n or snapshots[n - 1])
        assert (found[index], possible[index]) == (count, max(counts)), cases[index]
        assert entries[index] == (count - 1 if count else NUM_COLUMNS)
        for group, begin in enumerate((0, kept[count])):
            held = [m if begin <= m < count else NUM_COLUMNS for m in range(NUM_COLUMNS)]
            assert rows[group][index].tolist() == held and lengths[group][index] == count * size
