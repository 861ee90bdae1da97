"""Room for tokens: `reserve`, `plan` and `commit`."""

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.cache import blocks
from paged_jax.cache.blocks import check_invariants
from tests.support.block_tables import (
    COMMIT,
    FORK,
    PLAN,
    RELEASE,
    RESERVE,
    C,
    M,
    P,
    assert_unchanged,
    cached,
    free_blocks,
    i32,
    make_tables,
    publish_slot,
    rows,
)


@pytest.mark.parametrize("num_tokens", [0, 1, C - 1, C, C + 1, M * C])
def test_reserve_allocates_only_the_needed_blocks(num_tokens):
    tables = make_tables([num_tokens, 0, 0])
    needed = blocks.num_blocks_needed(num_tokens, C)
    assert rows(tables) == [list(range(needed)), [], []]
    assert int(tables.pool.num_free) == P - needed
    check_invariants(tables)


def test_reserve_appends_in_place_until_a_block_is_full():
    tables = make_tables([C - 1, 0, 0])
    tables, copies, ok = RESERVE(tables, i32([1, 0, 0]))
    assert ok and rows(tables) == [[0], [], []]
    tables, copies, ok = RESERVE(tables, i32([1, 0, 0]))
    assert ok and rows(tables) == [[0, 1], [], []]
    assert copies.source.tolist() == copies.target.tolist() == [P] * 3


@pytest.mark.parametrize(
    "num_tokens",
    [[C + 1, C, 0], [1, 0, M * C + 1], [1, -1, 0], [1, 2**31 - 1, 0], [M * C - C + 1, 0, 0]],
    ids=["too few blocks", "above max_tokens", "negative", "largest", "row too short"],
)
def test_reserve_changes_nothing_if_it_is_impossible_for_a_slot(num_tokens):
    tables = make_tables([C, 1, 0], num_blocks=4)
    after, copies, ok = RESERVE(tables, i32(num_tokens), max_tokens=M * C)
    assert not ok
    assert_unchanged(after, tables)
    assert copies.source.tolist() == copies.target.tolist() == [4] * 3


def test_reserve_rejects_more_than_max_tokens():
    tables = make_tables([0, 0, 0])
    after, _, ok = RESERVE(tables, i32([1, 2, 1]))
    assert not ok
    assert_unchanged(after, tables)


def test_reserve_can_use_the_last_block():
    tables = make_tables([C, C, 0], num_blocks=4)
    full, _, ok = RESERVE(tables, i32([1, 1, 0]))
    assert ok and int(full.pool.num_free) == 0
    check_invariants(full)
    after, _, ok = RESERVE(full, i32([0, 0, 1]))
    assert not ok
    assert_unchanged(after, full)


def test_reserve_copies_a_shared_partial_block():
    tables, ok = FORK(make_tables([C + 2, 0, 0]), i32([-1, 0, -1]))
    tables, copies, ok = RESERVE(tables, i32([0, 1, 0]))
    assert ok and rows(tables) == [[0, 1], [0, 2], []]
    assert copies.source.tolist() == [P, 1, P] and copies.target.tolist() == [P, 2, P]
    assert tables.pool.ref_counts.tolist()[:4] == [2, 1, 1, 0]


def test_reserve_does_not_copy_a_shared_full_block():
    tables, ok = FORK(make_tables([C, 0, 0]), i32([-1, 0, -1]))
    tables, copies, ok = RESERVE(tables, i32([1, 1, 0]))
    assert ok and rows(tables) == [[0, 1], [0, 2], []]
    assert copies.source.tolist() == [P] * 3


def test_reserve_keeps_a_block_for_the_last_writer_if_all_holders_write():
    tables, ok = FORK(make_tables([2, 0, 0]), i32([-1, 0, 0]))
    tables, copies, ok = RESERVE(tables, i32([1, 1, 1]))
    assert ok and rows(tables) == [[1], [2], [0]]
    assert copies.source.tolist() == [0, 0, P] and copies.target.tolist() == [1, 2, P]
    check_invariants(tables)


def test_reserve_keeps_a_block_for_the_holder_that_does_not_write():
    tables, ok = FORK(make_tables([2, 0, 0]), i32([-1, 0, 0]))
    tables, copies, ok = RESERVE(tables, i32([1, 0, 1]))
    assert ok and rows(tables) == [[1], [0], [2]]
    assert copies.source.tolist() == [0, P, 0]
    check_invariants(tables)


def test_reserve_needs_blocks_for_copies():
    tables, ok = FORK(make_tables([2 * C + 2, 0, 0], num_blocks=4), i32([-1, 0, 0]))
    after, copies, ok = RESERVE(tables, i32([1, 1, 1]))
    assert not ok and copies.source.tolist() == [4] * 3
    assert_unchanged(after, tables)
    after, _, ok = RESERVE(tables, i32([1, 0, 0]))
    assert ok and int(after.pool.num_free) == 0


@pytest.mark.parametrize(
    ("lengths", "limits", "num_blocks"),
    [
        ([C, 1, 0], [16, 3, 16], P),
        ([C - 1, C, 0], [9, 16, 0], 4),
        ([M * C - 2, 0, 0], [5, 1, 0], P),
        ([M * C, 0, 0], [0, 0, 16], P),
        ([C, C, 2 * C], [1, 0, 0], 4),
    ],
    ids=["limits", "too few blocks", "row too short", "enough", "no block"],
)
@pytest.mark.parametrize("is_forked", [False, True])
def test_plan_has_room_for_the_maximum_that_reserve_allows(lengths, limits, num_blocks, is_forked):
    tables = make_tables(lengths, num_blocks=num_blocks)
    if is_forked:  # slots 0 and 2 share a partly filled block
        tables, _ = FORK(tables, i32([-1, -1, 0]))
    planned = PLAN(tables, i32(limits), M * C, max_tokens=M * C)
    most = int(planned.num_tokens)
    for count in range(M * C + 1):
        num_tokens = np.minimum(limits, count)
        reserved, copies, ok = RESERVE(tables, i32(num_tokens), max_tokens=M * C)
        assert bool(ok) == (count <= most), count
        if count == most:
            committed = COMMIT(tables, planned, tables.lengths + num_tokens)
            assert_unchanged(committed, reserved)
            if most:
                assert_unchanged(planned.copies, copies)
            np.testing.assert_array_equal(planned.block_tables, reserved.block_tables)
        elif 1 <= count < most:  # the same number of blocks, but not the same blocks
            committed = COMMIT(tables, planned, tables.lengths + num_tokens)
            assert int(committed.pool.num_free) == int(reserved.pool.num_free)
            check_invariants(committed)
    assert int(PLAN(tables, i32(limits), 1, max_tokens=M * C).num_tokens) == min(1, most)


def test_commit_leaves_unused_planned_blocks_unchanged():
    tokens = list(range(2 * C))
    tables = publish_slot(make_tables([2 * C, 3 * C, 0]), 0, tokens)
    tables = RELEASE(tables, jnp.array([True, False, False]))
    num_free, in_line = int(tables.pool.num_free), free_blocks(tables)
    assert list(cached(tables)) == sorted(in_line[-2:])
    limits = i32([M * C, 0, M * C])
    planned = PLAN(tables, limits, M * C, max_tokens=M * C)
    assert int(planned.num_tokens) == M * C
    after = COMMIT(tables, planned, tables.lengths + i32([M * C, 0, C + 1]))
    check_invariants(after)
    assert int(after.pool.num_free) == num_free - M - 2
    # The order is kept, so cached blocks are last.
    taken = {*rows(after)[0], *rows(after)[2]}
    assert free_blocks(after) == [block for block in in_line if block not in taken]
    assert set(cached(after)) == set(in_line[-2:]) - taken
