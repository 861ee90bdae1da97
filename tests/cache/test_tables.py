"""Block tables: fork, release, truncate, reorder, arguments, and memory of all operations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.cache import blocks
from paged_jax.cache.blocks import BlockTables, check_invariants
from tests.support.block_model import BlockModel, Content
from tests.support.block_tables import (
    FORK,
    RELEASE,
    REORDER,
    RESERVE,
    TRUNCATE,
    C,
    M,
    P,
    S,
    assert_unchanged,
    attach,
    broken,
    cached,
    contents_of,
    free_blocks,
    i32,
    make_tables,
    publish_slot,
    rows,
)


def test_create_has_only_free_blocks():
    tables = BlockTables.create(P, S, M, C)
    assert (tables.num_blocks, tables.num_slots, tables.max_blocks_per_slot) == (P, S, M)
    assert free_blocks(tables) == list(range(P))
    assert tables.block_tables.tolist() == [[P] * M] * S
    check_invariants(tables)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_create_rejects_sizes_that_are_not_positive_integers(position, size):
    sizes = [P, S, M, C]
    sizes[position] = size
    with pytest.raises(ValueError, match=r"BlockTables.create: \w+ must be a positive integer"):
        BlockTables.create(*sizes)


@pytest.mark.parametrize("sizes", [(2**30, 1, 1, 1), (1, 1, 2**20, 2**10)])
def test_create_rejects_sizes_that_overflow(sizes):
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
        (
            lambda t: call_attach(t, count=M + 1),
            "attach: digests must have at most 4 rows, got 5",
        ),
        (lambda t: call_attach(t, dtype=jnp.int32), "attach: digests must be uint32"),
        (lambda t: call_publish(t, slots=i32([0])), "publish: slots must have N"),
        (lambda t: call_publish(t, columns=jnp.zeros(2)), "publish: columns must be int32"),
        (lambda t: call_publish(t, slots=jnp.zeros(2, bool)), "publish: slots must be int32"),
    ],
)
def test_operations_reject_wrong_arguments_when_traced(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, BlockTables.create(P, S, M, C))


def test_fork_of_a_fork_shares_every_block():
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
def test_fork_changes_nothing_if_a_child_is_impossible(parents):
    tables = make_tables([3, 3, 0])
    after, ok = FORK(tables, i32(parents))
    assert not ok
    assert_unchanged(after, tables)


def test_fork_rejects_a_parent_that_is_a_child_in_the_same_call():
    tables = make_tables([3, 0, 0])
    after, ok = FORK(tables, i32([-1, 0, 1]))
    assert not ok
    assert_unchanged(after, tables)


def test_release_queues_cached_blocks_from_the_end_of_the_sequence():
    tables = make_tables([3 * C, C + 1, 1])
    tables = publish_slot(tables, 0, list(range(3 * C)))
    tables = RELEASE(tables, jnp.array([True, False, False]))
    assert free_blocks(tables) == [6, 7, 8, 9, 10, 11, 2, 1, 0]
    assert tables.lengths.tolist() == [0, C + 1, 1]
    check_invariants(tables)


def test_release_queues_uncached_blocks_before_cached_blocks():
    tables = make_tables([2 * C + 1, 2 * C, 0])
    tables = publish_slot(tables, 0, list(range(2 * C)))
    tables = RELEASE(tables, jnp.array([True, True, False]))
    # Block 2 is partly filled; 3 and 4 were not published.
    assert free_blocks(tables) == [3, 4, 2, 5, 6, 7, 8, 9, 10, 11, 1, 0]
    check_invariants(tables)


def test_release_evicts_the_least_recently_used_sequence_first():
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


def test_release_queues_a_shared_block_once_with_its_last_holder():
    tables, ok = FORK(make_tables([2 * C, C, 0]), i32([-1, -1, 0]))
    for slot in (0, 1):
        tables = publish_slot(tables, slot, [slot] * int(tables.lengths[slot]))
    kept = RELEASE(tables, jnp.array([True, False, False]))
    assert free_blocks(kept) == list(range(3, P))
    check_invariants(kept)
    tables = RELEASE(tables, jnp.array([True, True, True]))
    assert free_blocks(tables) == [*range(3, P), 2, 1, 0]
    check_invariants(tables)


def test_release_of_an_empty_slot_changes_nothing():
    once = RELEASE(make_tables([5, 3, 0]), jnp.array([True, False, False]))
    twice = RELEASE(once, jnp.array([True, False, False]))
    assert_unchanged(twice, once)


@pytest.mark.parametrize("seed", range(2))
def test_fork_reorder_and_release_in_several_pieces_match_the_model(seed):
    """The slots hold more blocks than a piece of table entries."""
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


@pytest.mark.slow
@pytest.mark.optimised
def test_release_needs_no_memory_for_unused_capacity():
    tables = jax.eval_shape(lambda: BlockTables.create(2**17, 256, 2**13, C))
    mask = jax.ShapeDtypeStruct([256], bool)
    compiled = jax.jit(blocks.release, donate_argnums=0).lower(tables, mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**17


def test_truncate_frees_the_blocks_past_the_new_end():
    tables = make_tables([2 * C + 1, C, 0])
    tables = TRUNCATE(tables, i32([C + 1, C, 0]), max_tokens=C)
    assert tables.lengths.tolist() == [C + 1, C, 0] and rows(tables) == [[0, 1], [3], []]
    assert free_blocks(tables)[0] == 2
    check_invariants(tables)


def test_truncate_queues_cached_blocks_from_the_end_of_the_sequence():
    tables = publish_slot(make_tables([3 * C, 0, 0]), 0, list(range(3 * C)))
    tables = TRUNCATE(tables, i32([1, 0, 0]), max_tokens=M * C)
    assert rows(tables)[0] == [0] and free_blocks(tables) == [*range(3, P), 2, 1]
    check_invariants(tables)


@pytest.mark.parametrize("length", [1, 0, -1, -(2**31)])
def test_truncate_cuts_at_most_max_tokens(length):
    tables = make_tables([M * C, 2, 0])
    tables = TRUNCATE(tables, i32([length] * 3), max_tokens=C)
    assert tables.lengths.tolist() == [3 * C, max(length, 0), 0]
    check_invariants(tables)


def test_truncate_does_not_change_shorter_slots():
    tables = make_tables([C, 1, 0])
    assert_unchanged(TRUNCATE(tables, i32([C, 2**31 - 1, 5]), max_tokens=C), tables)


def test_append_after_truncate_removes_the_overwritten_block_from_the_cache():
    tables = publish_slot(make_tables([2 * C, 0, 0]), 0, list(range(2 * C)))
    tables = TRUNCATE(tables, i32([C + 1, 0, 0]), max_tokens=C)
    assert list(cached(tables)) == [0, 1]
    tables, copies, ok = RESERVE(tables, i32([1, 0, 0]))
    assert ok and copies.source[0] == P and list(cached(tables)) == [0]


def test_append_after_truncate_copies_a_block_that_was_attached():
    tokens = list(range(2 * C))
    tables = publish_slot(make_tables([2 * C, 0, 0]), 0, tokens)
    tables = TRUNCATE(tables, i32([C + 1, 0, 0]), max_tokens=C)
    tables, num_found = attach(tables, 1, contents_of(tokens))
    assert num_found == 2
    tables, copies, ok = RESERVE(tables, i32([1, 0, 0]))
    assert ok and copies.source.tolist() == [1, P, P] and copies.target.tolist() == [2, P, P]
    assert list(cached(tables)) == [0, 1]
    check_invariants(tables)


def test_reorder_permutes_slots():
    tables = make_tables([C + 1, 2 * C, 1])
    tables, ok = REORDER(tables, i32([1, 2, 0]))
    assert ok and rows(tables) == [[2, 3], [4], [0, 1]]
    assert tables.lengths.tolist() == [2 * C, 1, C + 1] and int(tables.pool.num_free) == P - 5
    check_invariants(tables)


def test_reorder_frees_blocks_without_a_slot():
    tables, ok = REORDER(make_tables([C + 1, 2 * C, 1]), i32([-1, 0, 0]))
    assert ok and rows(tables) == [[0, 1]] * 3
    assert tables.pool.ref_counts.tolist()[:5] == [3, 3, 0, 0, 0]
    # Freed blocks join the head of the queue, the last block of slot 1 first.
    assert free_blocks(tables) == [4, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    check_invariants(tables)


def test_reorder_to_an_empty_parent_empties_the_slot():
    tables, ok = REORDER(make_tables([C, 1, 0]), i32([2, -1, -1]))
    assert ok and rows(tables) == [[], [1], []]
    check_invariants(tables)


@pytest.mark.parametrize("parents", [[-1, -1, -1], [0, 1, 2], [-1, 1, -1]])
def test_reorder_does_not_change_a_slot_that_is_its_own_parent(parents):
    tables = make_tables([C + 1, 2 * C, 1])
    after, ok = REORDER(tables, i32(parents))
    assert ok
    assert_unchanged(after, tables)


@pytest.mark.parametrize("parent", [3, -2, 2**31 - 1, -(2**31)])
def test_reorder_changes_nothing_if_a_parent_does_not_exist(parent):
    tables = make_tables([C + 1, 2 * C, 1])
    after, ok = REORDER(tables, i32([1, 0, parent]))
    assert not ok
    assert_unchanged(after, tables)


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


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("operation", "arguments", "limit"),
    [
        (blocks.reserve, (i32([1] * N),), 0.01),
        (blocks.fork, (i32([-1] * N),), 0.01),
        (blocks.release, (jnp.ones(N, bool),), 0.1),
        (blocks.reorder, (i32([-1] * N),), 0.1),
        (partial(blocks.truncate, max_tokens=N), (i32([1] * N),), 0.1),
        (blocks.attach, (i32(0), *CONTENTS, i32(N)), 0.4),
        (blocks.publish, (i32([0] * N), i32([0] * N), *CONTENTS), 0.25),
    ],
    ids=["reserve", "fork", "release", "reorder", "truncate", "attach", "publish"],
)
def test_operations_update_donated_state_in_place(operation, arguments, limit):
    # Digests are nearly half of the state, so these limits leave no room for a copy of them.
    tables = BlockTables.create(2**20, 64, 64, C)
    compiled = jax.jit(operation, donate_argnums=0).lower(tables, *arguments).compile()
    memory = compiled.memory_analysis()
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tables))
    assert memory.alias_size_in_bytes == nbytes
    assert memory.temp_size_in_bytes < limit * nbytes
