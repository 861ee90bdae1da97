"""The block allocator: each behaviour by itself, then random histories against a plain model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_model import BlockModel
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax import blocks
from paged_jax.blocks import BlockTables, check_invariants

P, S, M, C = 12, 5, 4, 4
MAX_TOKENS = 10  # two and a half blocks


def i32(values) -> jax.Array:
    return jnp.array(values, jnp.int32)


# Compiled once for each shape and bound: the tests below keep to three slots, and to 4 or P blocks.
RESERVE = jax.jit(blocks.reserve, static_argnames="max_tokens")
FORK = jax.jit(blocks.fork)
RELEASE = jax.jit(blocks.release)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: blocks.reserve(t, i32([1])), "reserve: num_tokens must have S"),
        (lambda t: blocks.reserve(t, jnp.ones(S)), "reserve: num_tokens must be int32"),
        (lambda t: blocks.reserve(t, i32([1] * S), max_tokens=0), "reserve: max_tokens must be"),
        (lambda t: blocks.fork(t, i32([[0] * S])), "fork: parents must have shape"),
        (lambda t: blocks.fork(t, jnp.zeros(S, bool)), "fork: parents must be int32"),
        (lambda t: blocks.release(t, i32([0] * S)), "release: mask must be bool"),
        (lambda t: blocks.release(t, jnp.zeros(S + 1, bool)), "release: mask must have S"),
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


def test_release_queues_the_end_of_a_sequence_before_its_beginning():
    tables = make_tables([3 * C, C + 1, 1])
    tables = RELEASE(tables, jnp.array([True, True, False]))
    assert free_blocks(tables) == [6, 7, 8, 9, 10, 11, 2, 1, 0, 4, 3]
    assert tables.lengths.tolist() == [0, 0, 1]
    check_invariants(tables)


def test_release_queues_a_shared_block_once_and_with_its_last_holder():
    tables, ok = FORK(make_tables([2 * C, C, 0]), i32([-1, -1, 0]))
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


@pytest.mark.parametrize(
    ("operation", "argument"),
    [(blocks.reserve, i32([1] * 64)), (blocks.fork, i32([-1] * 64)), (blocks.release, True)],
    ids=["reserve", "fork", "release"],
)
def test_operations_update_donated_state_in_place(operation, argument):
    tables = BlockTables.create(2**20, 64, 64, C)
    if operation is blocks.release:
        argument = jnp.ones(64, bool)
    compiled = jax.jit(operation, donate_argnums=0).lower(tables, argument).compile()
    memory = compiled.memory_analysis()
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tables))
    assert memory.alias_size_in_bytes == nbytes
    limit = {"reserve": 0.01, "fork": 0.02, "release": 0.6}[operation.__name__]
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
    ],
)
def test_check_invariants_names_what_is_broken(message, changes):
    tables = make_tables([C + 1, 2, 0])
    check_invariants(tables)
    with pytest.raises(AssertionError, match=f"check_invariants: {message}"):
        check_invariants(broken(tables, **changes))


class Operations:
    """The operations under test, with shapes that never change, so that `jit` compiles once."""

    def __init__(self, wrap: Callable):
        self.prompts = wrap(partial(blocks.reserve, max_tokens=MAX_TOKENS))
        self.token = wrap(partial(blocks.reserve, max_tokens=1))
        self.fork = wrap(blocks.fork)
        self.release = wrap(blocks.release)


EAGER = Operations(lambda function: function)
JITTED = Operations(partial(jax.jit, donate_argnums=0))


class AllocatorMachine(RuleBasedStateMachine):
    """Random histories, in step with the model.

    `memory` plays the part of K and V: the tokens of each block, written and copied only as the
    allocator says. What the tables then read back must be what the model knows each slot to hold.
    """

    operations = EAGER

    @initialize()
    def start(self):
        self.tables = BlockTables.create(P, S, M, C)
        self.model = BlockModel(P, S, M, C)
        self.memory = np.full((P, C), -1)
        self.num_written = 0

    def reserve(self, operation: Callable, counts: list[int], max_tokens: int):
        new_tokens = [
            [self.num_written + 100 * s + i for i in range(n)] for s, n in enumerate(counts)
        ]
        self.num_written += 1000
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

    @rule(slot=st.integers(0, S - 1), count=st.integers(1, MAX_TOKENS))
    def reserve_for_one(self, slot, count):
        self.reserve(self.operations.prompts, [count * (s == slot) for s in range(S)], MAX_TOKENS)

    @rule(is_running=st.lists(st.booleans(), min_size=S, max_size=S))
    def append_one_token(self, is_running):
        self.reserve(self.operations.token, [int(running) for running in is_running], 1)

    @rule()
    def append_to_all_that_hold_tokens(self):
        self.reserve(self.operations.token, [int(bool(t)) for t in self.model.tokens], 1)

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
        running = [slot for slot, tokens in enumerate(self.model.tokens) if tokens]
        choices = st.sampled_from([-1, *running])
        self.fork([-1 if tokens else data.draw(choices) for tokens in self.model.tokens])

    @rule(mask=st.lists(st.booleans(), min_size=S, max_size=S))
    def release(self, mask):
        self.model.release(mask)
        self.tables = self.operations.release(self.tables, jnp.array(mask))

    @invariant()
    def agrees_with_the_model(self):
        check_invariants(self.tables)
        assert self.tables.lengths.tolist() == [len(tokens) for tokens in self.model.tokens]
        assert rows(self.tables) == self.model.blocks
        assert self.tables.pool.ref_counts.tolist() == list(self.model.refs.values())
        assert free_blocks(self.tables) == list(self.model.free)
        for row, tokens in zip(rows(self.tables), self.model.tokens, strict=True):
            assert self.memory[row].reshape(-1)[: len(tokens)].tolist() == tokens


class JittedAllocatorMachine(AllocatorMachine):
    operations = JITTED


def bounded(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


# Eager execution is some twenty times slower than compiled execution.
TestEagerHistories = AllocatorMachine.TestCase
TestEagerHistories.settings = bounded(3)
TestJittedHistories = JittedAllocatorMachine.TestCase
TestJittedHistories.settings = bounded(50)
