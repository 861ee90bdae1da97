"""The block allocator: each behaviour by itself, then random histories against a plain model."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.cache import blocks
from paged_jax.cache.blocks import BlockTables, check_invariants
from tests.support.block_model import BlockModel, Content

P, S, M, C = 12, 5, 4, 4
MAX_TOKENS = 10  # two and a half blocks
MAX_CUT = 6  # one and a half blocks


def i32(values) -> jax.Array:
    return jnp.array(values, jnp.int32)


# Compiled once for each shape and bound: the tests below keep to three slots, and to 4 or P blocks.
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
    """Three slots that hold the given numbers of tokens."""
    tables = BlockTables.create(num_blocks, 3, M, C)
    tables, _, ok = RESERVE(tables, i32(lengths), max_tokens=M * C)
    assert ok
    return tables


def free_blocks(tables: BlockTables) -> list[int]:
    pool = tables.pool
    ring = (int(pool.head) + np.arange(int(pool.num_free))) % pool.num_blocks
    return np.asarray(pool.free_queue)[ring].tolist()


def rows(tables: BlockTables) -> list[list[int]]:
    """The blocks of each slot, without what is past its length."""
    table = np.asarray(tables.block_tables)
    held = -(-np.asarray(tables.lengths) // tables.block_size)
    return [row[:count].tolist() for row, count in zip(table, held, strict=True)]


def contents_of(tokens: list[int]) -> list[Content]:
    """The digest and the tokens of each full block."""
    contents = []
    for end in range(C, len(tokens) + 1, C):
        digest = hashlib.sha256(np.array(tokens[:end], np.int32).tobytes()).digest()
        words = tuple(np.frombuffer(digest, np.uint32).tolist())
        contents.append(Content(words, tokens[end - C : end]))
    return contents


def as_arrays(contents: list[Content], size: int = M) -> tuple[jax.Array, jax.Array]:
    """Digests u32[N, 8] and tokens i32[N, C], padded to one size so that it is compiled once."""
    digests, token_ids = np.zeros((size, 8), np.uint32), np.zeros((size, C), np.int32)
    for entry, content in enumerate(contents):
        digests[entry], token_ids[entry] = content
    return jnp.asarray(digests), jnp.asarray(token_ids)


def publish(
    tables: BlockTables, entries: list[tuple[int, int, Content]], operation: Callable = PUBLISH
) -> BlockTables:
    """Publish the contents of blocks given by slot and column."""
    entries = entries + [(-1, 0, Content((0,) * 8, [0] * C))] * (S * M - len(entries))
    slots, columns, contents = zip(*entries, strict=True)
    return operation(tables, i32(slots), i32(columns), *as_arrays(list(contents), S * M))


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
    """What is known of each cached block."""
    digests, token_ids = tables.pool.digests.tolist(), tables.pool.token_ids.tolist()
    found = np.flatnonzero(tables.pool.is_cached).tolist()
    return {block: Content(tuple(digests[block]), token_ids[block]) for block in found}


def assert_unchanged(after: BlockTables, before: BlockTables) -> None:
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_create_has_only_free_blocks():
    tables = BlockTables.create(P, S, M, C)
    assert (tables.num_blocks, tables.num_slots, tables.max_blocks_per_slot) == (P, S, M)
    assert free_blocks(tables) == list(range(P))
    assert tables.block_tables.tolist() == [[P] * M] * S
    check_invariants(tables)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_create_refuses_sizes_that_are_no_positive_integers(position, size):
    sizes = [P, S, M, C]
    sizes[position] = size
    with pytest.raises(ValueError, match=r"BlockTables.create: \w+ must be a positive integer"):
        BlockTables.create(*sizes)


@pytest.mark.parametrize("sizes", [(2**30, 1, 1, 1), (1, 1, 2**20, 2**10)])
def test_create_refuses_sizes_that_overflow(sizes):
    with pytest.raises(ValueError, match="must be below 1073741824"):
        BlockTables.create(*sizes)


def call_attach(
    tables, *, count=2, words=8, num_tokens=None, block_size=C, dtype=jnp.uint32
) -> None:
    num_tokens = count if num_tokens is None else num_tokens
    token_ids = jnp.zeros((num_tokens, block_size), jnp.int32)
    blocks.attach(tables, 0, jnp.zeros((count, words), dtype), token_ids, 1)


def call_publish(tables, *, slots=None, columns=None) -> None:
    none = i32([-1, -1])
    digests, token_ids = jnp.zeros((2, 8), jnp.uint32), jnp.zeros((2, C), jnp.int32)
    slots, columns = (none if x is None else x for x in (slots, columns))
    blocks.publish(tables, slots, columns, digests, token_ids)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: blocks.reserve(t, i32([1])), "reserve: num_tokens must have S"),
        (lambda t: blocks.reserve(t, jnp.ones(S)), "reserve: num_tokens must be int32"),
        (lambda t: blocks.reserve(t, i32([1] * S), max_tokens=0), "reserve: max_tokens must be"),
        (lambda t: blocks.plan(t, i32([1]), 1, max_tokens=1), "plan: limits must have S"),
        (lambda t: blocks.plan(t, i32([1] * S), 1, max_tokens=0), "plan: max_tokens must be"),
        (lambda t: blocks.fork(t, i32([[0] * S])), "fork: parents must have shape"),
        (lambda t: blocks.fork(t, jnp.zeros(S, bool)), "fork: parents must be int32"),
        (lambda t: blocks.release(t, i32([0] * S)), "release: mask must be bool"),
        (lambda t: blocks.release(t, jnp.zeros(S + 1, bool)), "release: mask must have S"),
        (lambda t: blocks.reorder(t, i32([0])), "reorder: parents must have S"),
        (lambda t: blocks.truncate(t, i32(0), max_tokens=1), "truncate: lengths must have shape"),
        (lambda t: blocks.truncate(t, i32([0] * S), max_tokens=0), "truncate: max_tokens must be"),
        (lambda t: call_attach(t, words=7), r"attach: digests must have shape \[N, 8\]"),
        (lambda t: call_attach(t, block_size=C + 1), "attach: token_ids must have C"),
        (lambda t: call_attach(t, num_tokens=3), "attach: token_ids must have N"),
        (lambda t: call_attach(t, count=M + 1), "attach: digests must be at most M = 4, got 5"),
        (lambda t: call_attach(t, dtype=jnp.int32), "attach: digests must be uint32"),
        (lambda t: call_publish(t, slots=i32([0])), "publish: slots must have N"),
        (lambda t: call_publish(t, columns=jnp.zeros(2)), "publish: columns must be int32"),
        (lambda t: call_publish(t, slots=jnp.zeros(2, bool)), "publish: slots must be int32"),
    ],
)
def test_operations_refuse_wrong_arguments_when_traced(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, BlockTables.create(P, S, M, C))


@pytest.mark.parametrize("num_tokens", [0, 1, C - 1, C, C + 1, M * C])
def test_reserve_takes_just_the_blocks_that_are_needed(num_tokens):
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
def test_reserve_changes_nothing_if_one_slot_cannot_be_served(num_tokens):
    tables = make_tables([C, 1, 0], num_blocks=4)
    after, copies, ok = RESERVE(tables, i32(num_tokens), max_tokens=M * C)
    assert not ok
    assert_unchanged(after, tables)
    assert copies.source.tolist() == copies.target.tolist() == [4] * 3


def test_reserve_refuses_more_than_max_tokens():
    tables = make_tables([0, 0, 0])
    after, _, ok = RESERVE(tables, i32([1, 2, 1]))
    assert not ok
    assert_unchanged(after, tables)


def test_reserve_may_use_the_last_block_but_no_more():
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


def test_reserve_leaves_a_block_that_all_holders_write_to_the_last_of_them():
    tables, ok = FORK(make_tables([2, 0, 0]), i32([-1, 0, 0]))
    tables, copies, ok = RESERVE(tables, i32([1, 1, 1]))
    assert ok and rows(tables) == [[1], [2], [0]]
    assert copies.source.tolist() == [0, 0, P] and copies.target.tolist() == [1, 2, P]
    check_invariants(tables)


def test_reserve_leaves_a_block_to_the_holder_that_does_not_write():
    tables, ok = FORK(make_tables([2, 0, 0]), i32([-1, 0, 0]))
    tables, copies, ok = RESERVE(tables, i32([1, 0, 1]))
    assert ok and rows(tables) == [[1], [0], [2]]
    assert copies.source.tolist() == [0, P, 0]
    check_invariants(tables)


def test_reserve_counts_copies_among_the_blocks_it_needs():
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
def test_plan_has_room_for_the_most_that_reserve_grants(lengths, limits, num_blocks, is_forked):
    tables = make_tables(lengths, num_blocks=num_blocks)
    if is_forked:  # the partly filled block of slot 0 is shared by slots that write
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
        elif 1 <= count < most:  # not in the same blocks, but as many
            committed = COMMIT(tables, planned, tables.lengths + num_tokens)
            assert int(committed.pool.num_free) == int(reserved.pool.num_free)
            check_invariants(committed)
    assert int(PLAN(tables, i32(limits), 1, max_tokens=M * C).num_tokens) == min(1, most)


def test_commit_leaves_what_it_does_not_take_as_it_was():
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
    # In the order of before, so that what is cached goes last.
    taken = {*rows(after)[0], *rows(after)[2]}
    assert free_blocks(after) == [block for block in in_line if block not in taken]
    assert set(cached(after)) == set(in_line[-2:]) - taken


def test_fork_shares_every_block_and_so_does_its_fork():
    tables, ok = FORK(make_tables([C + 1, 0, 0]), i32([-1, 0, -1]))
    tables, ok = FORK(tables, i32([-1, -1, 1]))
    assert ok and rows(tables) == [[0, 1]] * 3
    assert tables.pool.ref_counts.tolist()[:3] == [3, 3, 0]
    assert int(tables.pool.num_free) == P - 2
    check_invariants(tables)


def test_fork_of_an_empty_slot_is_empty():
    tables = make_tables([0, 0, 0])
    after, ok = FORK(tables, i32([-1, 0, -1]))
    assert ok
    assert_unchanged(after, tables)


@pytest.mark.parametrize(
    "parents",
    [[-1, 0, -1], [-1, -1, 2], [-1, -1, 3], [-1, -1, -2], [-1, -1, -(2**31)]],
    ids=["not empty", "itself", "past the end", "negative", "most negative"],
)
def test_fork_changes_nothing_if_one_child_cannot_be_made(parents):
    tables = make_tables([3, 3, 0])
    after, ok = FORK(tables, i32(parents))
    assert not ok
    assert_unchanged(after, tables)


def test_fork_refuses_a_parent_that_is_a_child_in_the_same_call():
    tables = make_tables([3, 0, 0])
    after, ok = FORK(tables, i32([-1, 0, 1]))
    assert not ok
    assert_unchanged(after, tables)


def test_release_queues_cached_blocks_the_end_of_a_sequence_before_its_beginning():
    tables = make_tables([3 * C, C + 1, 1])
    tables = publish_slot(tables, 0, list(range(3 * C)))
    tables = RELEASE(tables, jnp.array([True, False, False]))
    assert free_blocks(tables) == [6, 7, 8, 9, 10, 11, 2, 1, 0]
    assert tables.lengths.tolist() == [0, C + 1, 1]
    check_invariants(tables)


def test_release_lets_blocks_that_are_not_cached_be_reused_first():
    tables = make_tables([2 * C + 1, 2 * C, 0])
    tables = publish_slot(tables, 0, list(range(2 * C)))
    tables = RELEASE(tables, jnp.array([True, True, False]))
    # 2 began but is not full, 3 and 4 were never published.
    assert free_blocks(tables) == [3, 4, 2, 5, 6, 7, 8, 9, 10, 11, 1, 0]
    check_invariants(tables)


def test_release_lets_the_least_recently_used_sequence_be_forgotten_first():
    tables = make_tables([2 * C, 2 * C, 0], num_blocks=4)
    for slot in (0, 1):
        tables = publish_slot(tables, slot, [slot] * (2 * C))
    for mask in ([False, True, False], [True, False, False]):
        tables = RELEASE(tables, jnp.array(mask))
    assert free_blocks(tables) == [3, 2, 1, 0]
    forgotten = []
    for _ in range(4):
        before = set(cached(tables))
        tables, _, ok = RESERVE(tables, i32([0, 0, C]), max_tokens=M * C)
        assert ok
        forgotten += before - set(cached(tables))
        check_invariants(tables)
    assert forgotten == [3, 2, 1, 0]


def test_release_queues_a_shared_block_once_and_with_its_last_holder():
    tables, ok = FORK(make_tables([2 * C, C, 0]), i32([-1, -1, 0]))
    for slot in (0, 1):
        tables = publish_slot(tables, slot, [slot] * int(tables.lengths[slot]))
    kept = RELEASE(tables, jnp.array([True, False, False]))
    assert free_blocks(kept) == list(range(3, P))
    check_invariants(kept)
    tables = RELEASE(tables, jnp.array([True, True, True]))
    assert free_blocks(tables) == [*range(3, P), 2, 1, 0]
    check_invariants(tables)


def test_release_twice_changes_nothing():
    once = RELEASE(make_tables([5, 3, 0]), jnp.array([True, False, False]))
    twice = RELEASE(once, jnp.array([True, False, False]))
    assert_unchanged(twice, once)


@pytest.mark.parametrize("seed", range(2))
def test_many_blocks_are_shared_and_released_in_the_order_of_few(seed):
    """More than one piece of them: free blocks and counts are those of the plain model."""
    num_blocks, num_slots, width = 1400, 6, 300
    rng = np.random.default_rng(seed)
    lengths = [*rng.integers(1, width * C, size=4).tolist(), 0, 0]
    model = BlockModel(num_blocks, num_slots, width, C)
    tables = BlockTables.create(num_blocks, num_slots, width, C)
    model.reserve([[0] * length for length in lengths], width * C)
    tables, _, ok = RESERVE(tables, i32(lengths), max_tokens=width * C)
    assert ok
    for block in rng.choice(num_blocks, size=num_blocks // 2, replace=False).tolist():
        if model.refs[block]:
            model.cached[block] = Content((block,) * 8, [0] * C)
    is_cached = np.isin(np.arange(num_blocks), list(model.cached))
    digests = jnp.tile(jnp.arange(num_blocks, dtype=jnp.uint32)[:, None], 8)
    tables = broken(tables, is_cached=lambda x: jnp.array(is_cached), digests=lambda x: digests)

    def agree() -> None:
        assert rows(tables) == model.blocks
        assert free_blocks(tables) == list(model.free)
        assert tables.pool.ref_counts.tolist() == list(model.refs.values())

    tables, ok = FORK(tables, i32([-1, -1, -1, -1, 0, 2]))
    assert ok and model.fork([-1, -1, -1, -1, 0, 2])
    agree()
    tables, ok = REORDER(tables, i32([1, 1, 0, -1, 3, 2]))
    assert ok and model.reorder([1, 1, 0, -1, 3, 2])
    agree()
    for mask in ([True, False, True, False, False, True], [True] * 6):
        tables = RELEASE(tables, jnp.array(mask))
        model.release(mask)
        agree()
    check_invariants(tables)


@pytest.mark.optimised
def test_release_takes_no_memory_for_what_slots_could_hold():
    tables = jax.eval_shape(lambda: BlockTables.create(2**17, 256, 2**13, C))
    mask = jax.ShapeDtypeStruct([256], bool)
    compiled = jax.jit(blocks.release, donate_argnums=0).lower(tables, mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**17


def test_truncate_gives_back_the_blocks_past_the_new_end():
    tables = make_tables([2 * C + 1, C, 0])
    tables = TRUNCATE(tables, i32([C + 1, C, 0]), max_tokens=C)
    assert tables.lengths.tolist() == [C + 1, C, 0] and rows(tables) == [[0, 1], [3], []]
    assert free_blocks(tables)[0] == 2
    check_invariants(tables)


def test_truncate_queues_cached_blocks_the_end_of_a_sequence_before_its_beginning():
    tables = publish_slot(make_tables([3 * C, 0, 0]), 0, list(range(3 * C)))
    tables = TRUNCATE(tables, i32([1, 0, 0]), max_tokens=M * C)
    assert rows(tables)[0] == [0] and free_blocks(tables) == [*range(3, P), 2, 1]
    check_invariants(tables)


@pytest.mark.parametrize("length", [1, 0, -1, -(2**31)])
def test_truncate_cuts_no_more_than_max_tokens(length):
    tables = make_tables([M * C, 2, 0])
    tables = TRUNCATE(tables, i32([length] * 3), max_tokens=C)
    assert tables.lengths.tolist() == [3 * C, max(length, 0), 0]
    check_invariants(tables)


def test_truncate_leaves_shorter_slots_alone():
    tables = make_tables([C, 1, 0])
    assert_unchanged(TRUNCATE(tables, i32([C, 2**31 - 1, 5]), max_tokens=C), tables)


def test_truncate_then_append_forgets_what_is_written_over():
    tables = publish_slot(make_tables([2 * C, 0, 0]), 0, list(range(2 * C)))
    tables = TRUNCATE(tables, i32([C + 1, 0, 0]), max_tokens=C)
    assert list(cached(tables)) == [0, 1]
    tables, copies, ok = RESERVE(tables, i32([1, 0, 0]))
    assert ok and copies.source[0] == P and list(cached(tables)) == [0]


def test_truncate_then_append_copies_a_block_that_another_slot_found():
    tokens = list(range(2 * C))
    tables = publish_slot(make_tables([2 * C, 0, 0]), 0, tokens)
    tables = TRUNCATE(tables, i32([C + 1, 0, 0]), max_tokens=C)
    tables, num_found = attach(tables, 1, contents_of(tokens))
    assert num_found == 2
    tables, copies, ok = RESERVE(tables, i32([1, 0, 0]))
    assert ok and copies.source.tolist() == [1, P, P] and copies.target.tolist() == [2, P, P]
    assert list(cached(tables)) == [0, 1]
    check_invariants(tables)


def test_reorder_serves_all_slots_at_once():
    tables = make_tables([C + 1, 2 * C, 1])
    tables, ok = REORDER(tables, i32([1, 2, 0]))
    assert ok and rows(tables) == [[2, 3], [4], [0, 1]]
    assert tables.lengths.tolist() == [2 * C, 1, C + 1] and int(tables.pool.num_free) == P - 5
    check_invariants(tables)


def test_reorder_releases_what_no_slot_goes_on_with():
    tables, ok = REORDER(make_tables([C + 1, 2 * C, 1]), i32([-1, 0, 0]))
    assert ok and rows(tables) == [[0, 1]] * 3
    assert tables.pool.ref_counts.tolist()[:5] == [3, 3, 0, 0, 0]
    # Each joins the head of the queue: slot 1's last block first, slot 2's only one last.
    assert free_blocks(tables) == [4, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    check_invariants(tables)


def test_reorder_to_an_empty_slot_empties():
    tables, ok = REORDER(make_tables([C, 1, 0]), i32([2, -1, -1]))
    assert ok and rows(tables) == [[], [1], []]
    check_invariants(tables)


@pytest.mark.parametrize("parents", [[-1, -1, -1], [0, 1, 2], [-1, 1, -1]])
def test_reorder_leaves_a_slot_alone_that_is_its_own_parent(parents):
    tables = make_tables([C + 1, 2 * C, 1])
    after, ok = REORDER(tables, i32(parents))
    assert ok
    assert_unchanged(after, tables)


@pytest.mark.parametrize("parent", [3, -2, 2**31 - 1, -(2**31)])
def test_reorder_changes_nothing_if_one_parent_is_no_slot(parent):
    tables = make_tables([C + 1, 2 * C, 1])
    after, ok = REORDER(tables, i32([1, 0, parent]))
    assert not ok
    assert_unchanged(after, tables)


def test_attach_shares_the_blocks_of_a_running_slot():
    tokens = list(range(2 * C + 1))
    tables = publish_slot(make_tables([2 * C + 1, 0, 0]), 0, tokens)
    tables, num_found = attach(tables, 2, contents_of([*tokens, 7, 7, 7]))
    assert num_found == 2 and rows(tables) == [[0, 1, 2], [], [0, 1]]
    assert tables.lengths.tolist() == [2 * C + 1, 0, 2 * C]
    assert tables.pool.ref_counts.tolist()[:3] == [2, 2, 1] and int(tables.pool.num_free) == P - 3
    check_invariants(tables)


def test_attach_takes_free_blocks_out_of_the_queue():
    tokens = list(range(3 * C))
    tables = publish_slot(make_tables([3 * C, 0, 0]), 0, tokens)
    tables = RELEASE(tables, jnp.array([True, True, True]))
    # So that the queue goes around the end of the ring.
    tables, _, _ = RESERVE(tables, i32([0, 2 * C, 0]), max_tokens=M * C)
    tables, num_found = attach(tables, 0, contents_of(tokens[: 2 * C]))
    assert num_found == 2 and rows(tables)[0] == [0, 1]
    assert free_blocks(tables) == [5, 6, 7, 8, 9, 10, 11, 2]
    check_invariants(tables)
    tables, num_found = attach(tables, 2, contents_of(tokens))
    assert num_found == 3 and rows(tables)[2] == [0, 1, 2]
    check_invariants(tables)


def test_attach_leaves_off_at_the_first_miss():
    tokens = list(range(3 * C))
    tables = make_tables([3 * C, 0, 0])
    contents = contents_of(tokens)
    tables = publish(tables, [(0, 0, contents[0]), (0, 2, contents[2])])
    tables, num_found = attach(tables, 1, contents)
    assert num_found == 1 and rows(tables)[1] == [0]


def test_attach_looks_for_no_more_blocks_than_asked():
    tokens = list(range(2 * C))
    tables = publish_slot(make_tables([2 * C, 0, 0]), 0, tokens)
    arrays = as_arrays(contents_of(tokens))
    for num_blocks, expected in ((1, 1), (0, 0), (-3, 0), (2**31 - 1, 2)):
        _, num_found = ATTACH(tables, i32(1), *arrays, i32(num_blocks))
        assert num_found == expected


@pytest.mark.parametrize("word", range(8))
def test_attach_compares_every_word_of_a_digest(word):
    [content] = contents_of(list(range(C)))
    tables = publish(make_tables([C, 0, 0]), [(0, 0, content)])
    digest = list(content.digest)
    digest[word] ^= 1
    after, num_found = attach(tables, 1, [Content(tuple(digest), content.token_ids)])
    assert num_found == 0
    assert_unchanged(after, tables)


def test_attach_tells_digests_apart_that_begin_alike():
    contents = [Content((7, 7, 7, 7, 7, 7, 7, entry), [entry] * C) for entry in range(M)]
    tables = publish(make_tables([M * C, 0, 0]), [(0, m, contents[m]) for m in (3, 0, 1)])
    assert cached(tables) == {m: contents[m] for m in (0, 1, 3)}
    tables, num_found = attach(tables, 1, contents)
    assert num_found == 2 and rows(tables)[1] == [0, 1]
    tables, num_found = attach(tables, 2, [contents[3], contents[1], contents[0]])
    assert num_found == 3 and rows(tables)[2] == [3, 1, 0]


@pytest.mark.parametrize("place", range(C))
def test_attach_is_a_miss_if_the_digest_agrees_but_a_token_does_not(place):
    [content] = contents_of(list(range(C)))
    tables = publish(make_tables([C, 0, 0]), [(0, 0, content)])
    token_ids = list(content.token_ids)
    token_ids[place] += 1
    after, num_found = attach(tables, 1, [Content(content.digest, token_ids)])
    assert num_found == 0
    assert_unchanged(after, tables)


def test_attach_finds_no_block_twice_for_one_slot():
    [content] = contents_of(list(range(C)))
    tables = publish(make_tables([C, 0, 0]), [(0, 0, content)])
    tables, num_found = attach(tables, 1, [content, content])
    assert num_found == 1
    check_invariants(tables)


@pytest.mark.parametrize("slot", [0, -1, 3, 2**31 - 1, -(2**31)])
def test_attach_does_nothing_to_a_slot_that_is_not_empty_or_does_not_exist(slot):
    tokens = list(range(C))
    tables = publish_slot(make_tables([C, 0, 0]), 0, tokens)
    after, num_found = attach(tables, slot, contents_of(tokens))
    assert num_found == 0
    assert_unchanged(after, tables)


def test_attach_finds_nothing_in_an_empty_digest():
    # What padding looks like, and what the digests of blocks that were never cached are.
    tables = make_tables([C, 0, 0])
    assert attach(tables, 1, [Content((0,) * 8, [0] * C)])[1] == 0


def test_publish_ignores_what_is_no_full_block():
    tables = make_tables([C + 3, M * C, 0])
    [content] = contents_of(list(range(C)))
    entries = [(0, 1), (1, -1), (1, M), (2, 0), (-1, 0), (3, 0), (1, 2**31 - 1), (2**31 - 1, 0)]
    assert_unchanged(publish(tables, [(*entry, content) for entry in entries]), tables)


def test_publish_takes_a_digest_once():
    tables = make_tables([C, C, C])
    [content] = contents_of(list(range(C)))
    tables = publish(tables, [(1, 0, content), (0, 0, content)])
    assert cached(tables) == {1: content}
    after = publish(tables, [(2, 0, content)])
    assert_unchanged(after, tables)
    check_invariants(tables)


def test_publish_takes_a_block_once():
    tables = make_tables([C, 0, 0])
    first, second = contents_of(list(range(2 * C)))
    tables = publish(tables, [(0, 0, first), (0, 0, second)])
    assert cached(tables) == {0: first}
    assert_unchanged(publish(tables, [(0, 0, second)]), tables)


def test_publish_refuses_an_entry_on_account_of_none_that_was_refused():
    tables = make_tables([C, C, C])
    first, second = contents_of(list(range(2 * C)))
    tables = publish(tables, [(0, 0, first)])
    # Slot 0's block is cached already, so that the digest is still to be had for slot 1's.
    tables = publish(tables, [(0, 0, second), (1, 0, second), (2, 0, second)])
    assert cached(tables) == {0: first, 1: second}
    # As in one call, where slot 0's block is taken by the entry before.
    tables = make_tables([C, C, C])
    tables = publish(tables, [(0, 0, first), (0, 0, second), (1, 0, second)])
    assert cached(tables) == {0: first, 1: second}


def test_forget_lets_nothing_be_found():
    tokens = list(range(2 * C))
    tables = publish_slot(make_tables([2 * C, C, 0]), 0, tokens)
    tables = blocks.forget(RELEASE(tables, jnp.array([True, False, False])))
    check_invariants(tables)
    assert attach(tables, 2, contents_of(tokens))[1] == 0
    tables = publish(tables, [(1, 0, contents_of(tokens)[0])])
    assert attach(tables, 2, contents_of(tokens))[1] == 1


def test_operations_run_inside_scan_and_while_loop():
    def step(tables, _):
        tables, _, ok = blocks.reserve(tables, i32([1, 0, 0]))
        return tables, ok

    tables, oks = jax.lax.scan(step, make_tables([1, 1, 0]), length=M * C + 2)
    assert oks.tolist() == [True] * (M * C - 1) + [False] * 3
    assert tables.lengths.tolist() == [M * C, 1, 0]
    check_invariants(tables)

    def body(tables):
        tables, _ = blocks.fork(tables, i32([-1, 0, -1]))
        tables, _, _ = blocks.reserve(tables, i32([1, 1, 0]))
        return blocks.release(tables, jnp.array([False, True, False]))

    tables = jax.lax.while_loop(lambda t: t.lengths[0] < 7, body, make_tables([1, 0, 0]))
    assert tables.lengths.tolist() == [7, 0, 0] and int(tables.pool.num_free) == P - 2
    check_invariants(tables)


N = 64
CONTENTS = (jnp.zeros((N, 8), jnp.uint32), jnp.zeros((N, C), jnp.int32))


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("operation", "arguments", "limit"),
    [
        (blocks.reserve, (i32([1] * N),), 0.01),
        (blocks.fork, (i32([-1] * N),), 0.01),
        (blocks.release, (jnp.ones(N, bool),), 0.1),
        (blocks.reorder, (i32([-1] * N),), 0.1),
        (partial(blocks.truncate, max_tokens=N), (i32([1] * N),), 0.1),
        # These two in the programs that users compile, and in no others.
        pytest.param(blocks.attach, (i32(0), *CONTENTS, i32(N)), 0.4, marks=pytest.mark.slow),
        pytest.param(
            blocks.publish,
            (i32([0] * N), i32([0] * N), *CONTENTS),
            0.25,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["reserve", "fork", "release", "reorder", "truncate", "attach", "publish"],
)
def test_operations_update_donated_state_in_place(operation, arguments, limit):
    # Digests are nearly half of the state: limits in proportion to it leave no room to copy them.
    tables = BlockTables.create(2**20, 64, 64, C)
    compiled = jax.jit(operation, donate_argnums=0).lower(tables, *arguments).compile()
    memory = compiled.memory_analysis()
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tables))
    assert memory.alias_size_in_bytes == nbytes
    assert memory.temp_size_in_bytes < limit * nbytes


def broken(tables: BlockTables, **changes: Callable[[jax.Array], jax.Array]) -> BlockTables:
    """The tables with some arrays, named as in the classes, changed."""
    for name, change in changes.items():
        if hasattr(tables.pool, name):
            pool = replace(tables.pool, **{name: change(getattr(tables.pool, name))})
            tables = replace(tables, pool=pool)
        else:
            tables = replace(tables, **{name: change(getattr(tables, name))})
    return tables


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"num_free must be 0 to 12", {"num_free": lambda x: x + P}),
        (r"head must be 0 to 11", {"head": lambda x: x - 4}),
        (r"free_queue must hold ids once", {"free_queue": lambda x: x.at[3].set(4)}),
        (r"free_queue must hold block ids", {"free_queue": lambda x: x.at[3].set(P)}),
        (r"lengths must fit", {"lengths": lambda x: x.at[0].set(-1)}),
        (r"lengths must fit", {"lengths": lambda x: x.at[0].set(M * C + 1)}),
        (r"block_tables\[0\] must cover the length", {"lengths": lambda x: x.at[0].set(C * 3)}),
        (r"block_tables\[0\] must be 12 past", {"lengths": lambda x: x.at[0].set(1)}),
        (r"block_tables\[0\] must hold a block", {"block_tables": lambda x: x.at[0, 1].set(0)}),
        (r"ref_counts\[2\] must be 1", {"ref_counts": lambda x: x.at[2].set(2)}),
        (r"ref_counts\[3\] must be 0 just", {"head": lambda x: x + 1, "num_free": lambda x: x - 1}),
        (
            r"ref_counts\[2\] must be 0 just",
            {"head": lambda x: x - 1, "num_free": lambda x: x + 1},
        ),
        (r"free_queue must hold cached blocks after", {"is_cached": lambda x: x.at[4].set(True)}),
        (r"digests must be unique", {"is_cached": lambda x: x.at[:2].set(True)}),
    ],
)
def test_check_invariants_names_what_is_broken(message, changes):
    tables = make_tables([C + 1, 2, 0])
    check_invariants(tables)
    with pytest.raises(AssertionError, match=f"check_invariants: {message}"):
        check_invariants(broken(tables, **changes))


class Operations:
    """The operations under test, with shapes that never change, so that `jit` compiles once."""

    def __init__(self):
        wrap = partial(jax.jit, donate_argnums=0)
        self.prompts = wrap(partial(blocks.reserve, max_tokens=MAX_TOKENS))
        self.token = wrap(partial(blocks.reserve, max_tokens=1))
        self.fork = wrap(blocks.fork)
        self.release = wrap(blocks.release)
        self.reorder = wrap(blocks.reorder)
        self.truncate = wrap(partial(blocks.truncate, max_tokens=MAX_CUT))
        self.attach = wrap(blocks.attach)
        self.publish = wrap(blocks.publish)
        self.forget = wrap(blocks.forget)


class AllocatorMachine(RuleBasedStateMachine):
    """Random histories, in step with the model.

    `memory` plays the part of K and V: the tokens of each block, written and copied only as the
    allocator says. What the tables then read back must be what the model knows each slot to hold.
    """

    operations = Operations()

    @initialize()
    def start(self):
        self.tables = BlockTables.create(P, S, M, C)
        self.model = BlockModel(P, S, M, C)
        self.memory = np.full((P, C), -1)
        self.num_written = 0
        self.published = []  # the latest published: of each block, all tokens to its end

    def running(self) -> list[int]:
        return [slot for slot, tokens in enumerate(self.model.tokens) if tokens]

    def reserve(self, operation: Callable, counts: list[int], max_tokens: int):
        """Append tokens that are nowhere else."""
        self.num_written += 1000
        self.append(
            operation,
            [[self.num_written + 100 * s + i for i in range(n)] for s, n in enumerate(counts)],
            max_tokens,
        )

    def append(self, operation: Callable, new_tokens: list[list[int]], max_tokens: int):
        counts = [len(new) for new in new_tokens]
        expected_ok, expected_copies = self.model.reserve(new_tokens, max_tokens)
        self.tables, copies, ok = operation(self.tables, i32(counts))
        assert bool(ok) == expected_ok
        pairs = zip(copies.source.tolist(), copies.target.tolist(), strict=True)
        copies = [None if pair == (P, P) else pair for pair in pairs]
        assert copies == expected_copies
        for source, target in filter(None, copies):
            self.memory[target] = self.memory[source]
        if ok:
            self.write(new_tokens)

    def write(self, new_tokens: list[list[int]]):
        table, lengths = np.asarray(self.tables.block_tables), np.asarray(self.tables.lengths)
        for slot, new in enumerate(new_tokens):
            for position, token in enumerate(new, start=lengths[slot] - len(new)):
                self.memory[table[slot, position // C], position % C] = token

    @rule(counts=st.lists(st.integers(0, MAX_TOKENS + 1), min_size=S, max_size=S))
    def reserve_for_all(self, counts):
        self.reserve(self.operations.prompts, counts, MAX_TOKENS)

    @rule(slot=st.integers(0, S - 1), count=st.integers(1, MAX_TOKENS), publishes=st.booleans())
    def reserve_for_one(self, slot, count, publishes):
        self.reserve(self.operations.prompts, [count * (s == slot) for s in range(S)], MAX_TOKENS)
        if publishes:
            self.publish_all()

    @rule(slots=st.lists(st.booleans(), min_size=S, max_size=S), count=st.integers(1, MAX_TOKENS))
    def append_alike(self, slots, count):
        """Each position has its token: slots come to hold the same without sharing it."""
        starts = [len(tokens) for tokens in self.model.tokens]
        new_tokens = [
            [*range(start, start + count)] if is_chosen else []
            for start, is_chosen in zip(starts, slots, strict=True)
        ]
        self.append(self.operations.prompts, new_tokens, MAX_TOKENS)

    @rule(is_running=st.lists(st.booleans(), min_size=S, max_size=S))
    def append_one_token(self, is_running):
        self.reserve(self.operations.token, [int(running) for running in is_running], 1)

    @rule(publishes=st.booleans())
    def append_to_all_that_hold_tokens(self, publishes):
        self.reserve(self.operations.token, [int(bool(t)) for t in self.model.tokens], 1)
        if publishes:
            self.publish_all()

    def fork(self, parents: list[int]):
        expected_ok = self.model.fork(parents)
        self.tables, ok = self.operations.fork(self.tables, i32(parents))
        assert bool(ok) == expected_ok

    @rule(parents=st.lists(st.integers(-2, S), min_size=S, max_size=S))
    def fork_anything(self, parents):
        self.fork(parents)

    @precondition(lambda self: any(self.model.tokens) and not all(self.model.tokens))
    @rule(data=st.data())
    def fork_into_empty_slots(self, data):
        choices = st.sampled_from([-1, *self.running()])
        self.fork([-1 if tokens else data.draw(choices) for tokens in self.model.tokens])

    @rule(mask=st.lists(st.booleans(), min_size=S, max_size=S), publishes=st.booleans())
    def publish_and_release(self, mask, publishes):
        if publishes:
            self.publish_all()
        self.release(mask)

    def release(self, mask):
        self.model.release(mask)
        self.tables = self.operations.release(self.tables, jnp.array(mask))

    @rule(lengths=st.lists(st.integers(-1, M * C + 1), min_size=S, max_size=S))
    def truncate_all(self, lengths):
        self.model.truncate(lengths, MAX_CUT)
        self.tables = self.operations.truncate(self.tables, i32(lengths))

    @precondition(lambda self: any(self.model.tokens))
    @rule(data=st.data(), cut=st.integers(1, MAX_CUT))
    def truncate_one(self, data, cut):
        chosen = data.draw(st.sampled_from(self.running()))
        self.truncate_all([len(t) - cut * (s == chosen) for s, t in enumerate(self.model.tokens)])

    def reorder(self, parents: list[int]):
        expected_ok = self.model.reorder(parents)
        self.tables, ok = self.operations.reorder(self.tables, i32(parents))
        assert bool(ok) == expected_ok

    @rule(parents=st.lists(st.integers(-2, S), min_size=S, max_size=S))
    def reorder_anything(self, parents):
        self.reorder(parents)

    @rule(parents=st.lists(st.integers(-1, S - 1), min_size=S, max_size=S))
    def reorder_slots(self, parents):
        self.reorder(parents)

    def publish(self, places: list[tuple[int, int]]):
        entries = []
        for slot, column in places:
            contents = contents_of(self.model.tokens[slot]) if 0 <= slot < S else []
            if 0 <= column < len(contents):
                self.published.append(self.model.tokens[slot][: (column + 1) * C])
                entries.append((slot, column, contents[column]))
            else:
                entries.append((slot, column, Content((1,) * 8, [1] * C)))
        self.published = self.published[-3 * P :]
        self.model.publish(entries)
        self.tables = publish(self.tables, entries, self.operations.publish)

    @rule(places=st.lists(st.tuples(st.integers(-1, S), st.integers(-1, M)), max_size=M))
    def publish_anything(self, places):
        self.publish(places)

    def publish_all(self):
        self.publish([(slot, column) for column in range(M) for slot in range(S)])

    def attach(self, slot: int, contents: list[Content]):
        expected = self.model.attach(slot, contents)
        self.tables, num_found = attach(self.tables, slot, contents, self.operations.attach)
        assert num_found == expected

    @precondition(lambda self: self.model.cached)
    @rule(data=st.data(), slot=st.integers(-1, S), has_collision=st.booleans())
    def attach_what_is_cached(self, data, slot, has_collision):
        if data.draw(st.integers(0, 3)):
            self.release([s == slot for s in range(S)])
        last = data.draw(st.sampled_from(list(self.model.cached.values())))
        known = {known[-1].digest: known for known in map(contents_of, self.published)}
        contents = known.get(last.digest, [last])
        if has_collision:
            entry = data.draw(st.integers(0, len(contents) - 1))
            contents[entry] = Content(contents[entry].digest, [-1] * C)
        self.attach(slot, contents)

    @precondition(lambda self: len(self.model.cached) > P // 2)
    @rule()
    def forget(self):
        self.model.forget()
        self.tables = self.operations.forget(self.tables)

    @invariant()
    def agrees_with_the_model(self):
        check_invariants(self.tables)
        assert self.tables.lengths.tolist() == [len(tokens) for tokens in self.model.tokens]
        assert rows(self.tables) == self.model.blocks
        assert self.tables.pool.ref_counts.tolist() == list(self.model.refs.values())
        assert free_blocks(self.tables) == list(self.model.free)
        assert cached(self.tables) == self.model.cached
        for block, content in self.model.cached.items():
            assert self.memory[block].tolist() == content.token_ids
        for row, tokens in zip(rows(self.tables), self.model.tokens, strict=True):
            assert self.memory[row].reshape(-1)[: len(tokens)].tolist() == tokens


TestHistories = AllocatorMachine.TestCase
TestHistories.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_histories_like_those_of_an_engine(seed):
    """Sequences that come, find their beginning, grow by guesses, and go, in a pool that is full.

    Hypothesis tries rules in small sets at a time; here all of them meet.
    """
    machine, rng = AllocatorMachine(), np.random.default_rng(seed)
    machine.start()
    num_found = num_forgotten = 0
    for _ in range(200):
        slot, before = int(rng.integers(S)), set(machine.model.cached)
        if machine.model.tokens[slot] and rng.random() < 0.6:
            machine.release([s == slot for s in range(S)])
        if not machine.model.tokens[slot] and machine.published:
            tokens = machine.published[rng.integers(len(machine.published))]
            machine.attach(slot, contents_of(tokens))
            num_found += len(machine.model.blocks[slot])
        machine.reserve_for_one(slot, int(rng.integers(1, MAX_TOKENS)), True)
        machine.append_to_all_that_hold_tokens(bool(rng.random() < 0.5))
        machine.truncate_all([len(t) - int(rng.integers(-2, 3)) for t in machine.model.tokens])
        if rng.random() < 0.1:
            machine.reorder([int(parent) for parent in rng.integers(-1, S, size=S)])
        machine.agrees_with_the_model()
        num_forgotten += len(before - set(machine.model.cached))
    assert num_found > 50 and num_forgotten > 50
