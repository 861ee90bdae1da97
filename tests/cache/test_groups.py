"""A cache with several groups of layers: random histories, compared with a plain model.

The K of each token is its number. So the K read back through the tables must be the tokens of each
slot, as far as the group keeps them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import initialize, invariant, precondition, rule

from paged_jax.cache import PagedCache, paged_cache
from paged_jax.cache.blocks import check_invariants
from paged_jax.cache.sequence_blocks import max_blocks_in_window
from tests.support.block_tables import as_arrays, cached, contents_of, free_blocks, i32, publish
from tests.support.cache_histories import (
    JIT,
    MAX_TOKENS,
    SETTINGS,
    C,
    CacheMachine,
    CacheOperations,
    M,
    S,
    check_tokens,
    make_groups,
    slots_of,
    swap,
    write_tokens,
)

MAX_CUT = 5
# Windows are not multiples of C. The second group is limited to the blocks of the first. The third
# has as many blocks as its slots can hold.
WINDOWS = [None, 9, 3]
P = 18
HELD = [M, *[max_blocks_in_window(window, MAX_TOKENS, C) for window in (9, 3)]]
NUM_BLOCKS = [P, *[min(P, S * held) for held in HELD[1:]]]
assert NUM_BLOCKS == [18, 18, 16]


class Operations(CacheOperations):
    """Compiled operations with fixed shapes."""

    def __init__(self, wrap: Callable[..., Any] = JIT):
        super().__init__(write_tokens, wrap)
        self.swap = wrap(swap)
        self.truncate = wrap(partial(paged_cache.truncate, max_tokens=MAX_CUT))
        self.attach = wrap(paged_cache.attach)


class GroupsMachine(CacheMachine):
    """Random histories, compared with the model after each operation."""

    windows, num_blocks = WINDOWS, NUM_BLOCKS
    operations = Operations()

    @initialize()
    def start(self):
        super().start()
        self.num_refused = 0

    def make_cache(self) -> PagedCache:
        return PagedCache(make_groups(WINDOWS, NUM_BLOCKS), ((0, 0), (1, 0), (2, 0)))

    def reserve(self, new: list[list[int]]) -> bool:
        """Check that no group runs out of blocks before the first: the scheduler relies on it."""
        ok, results = self.blocks.reserve(new, MAX_TOKENS)
        assert all(results) == results[0]
        self.num_refused += not ok
        return ok

    @rule(count=st.integers(1, MAX_TOKENS), slot=st.integers(0, S - 1), publishes=st.booleans())
    def append_to_one(self, count, slot, publishes):
        self.append([count * (s == slot) for s in range(S)], alike=True)
        if publishes:
            self.publish_all()

    @rule(publishes=st.booleans())
    def append_to_all_that_hold_tokens(self, publishes):
        self.append([int(bool(t)) for t in self.blocks.tokens], alike=False)
        if publishes:
            self.publish_all()

    @rule(parents=slots_of(st.integers(-2, S)))
    def fork_anything(self, parents):
        self.fork(parents)

    def fork(self, parents):
        expected = self.blocks.fork(parents)
        self.cache, ok = self.operations.fork(self.cache, i32(parents))
        assert bool(ok) == expected

    @precondition(lambda self: any(self.blocks.tokens) and not all(self.blocks.tokens))
    @rule(data=st.data())
    def fork_into_empty_slots(self, data):
        running = [slot for slot, tokens in enumerate(self.blocks.tokens) if tokens]
        choices = st.sampled_from([-1, *running])
        self.fork([-1 if tokens else data.draw(choices) for tokens in self.blocks.tokens])

    @rule(parents=slots_of(st.integers(-1, S - 1)))
    def reorder(self, parents):
        expected = self.blocks.reorder(parents)
        self.cache, ok = self.operations.reorder(self.cache, i32(parents))
        assert bool(ok) == expected

    @rule(mask=slots_of(st.booleans()))
    def release(self, mask):
        self.blocks.release(mask)
        self.cache = self.operations.release(self.cache, jnp.array(mask))

    @rule(lengths=slots_of(st.integers(-1, M * C + 1)))
    def truncate(self, lengths):
        self.blocks.truncate(lengths, MAX_CUT)
        self.cache = self.operations.truncate(self.cache, i32(lengths))

    @rule(cuts=slots_of(st.integers(0, MAX_CUT)))
    def cut(self, cuts):
        lengths = map(len, self.blocks.tokens)
        self.truncate([n - cut for n, cut in zip(lengths, cuts, strict=True)])

    @rule(source=st.integers(0, S - 1), goal=st.integers(0, S - 1))
    def swap(self, source, goal):
        tokens = list(self.blocks.tokens[source])
        self.blocks.release([s == source for s in range(S)])
        new = [tokens if s == goal else [] for s in range(S)]
        expected, results = self.blocks.restore(new, M * C)
        assert all(results) == results[0]
        self.cache, ok = self.operations.swap(self.cache, i32(source), i32(goal))
        assert bool(ok) == expected

    @rule(places=st.lists(st.tuples(st.integers(-1, S), st.integers(-1, M)), max_size=M))
    def publish(self, places):
        entries = self.entries_of(places)
        self.blocks.publish(entries)
        self.cache = publish(self.cache, entries, self.operations.publish, S * M)

    def attach_to(self, slot, tokens, empties):
        if empties:
            self.release([s == slot for s in range(S)])
        known = contents_of(tokens)
        expected = self.blocks.attach(slot, known)
        digests, token_ids = as_arrays(known, M)
        self.cache, num_found = self.operations.attach(
            self.cache, i32(slot), digests, token_ids, i32(len(known))
        )
        assert int(num_found) == expected
        return expected

    @precondition(lambda self: len(self.blocks.first.cached) > P // 2)
    @rule()
    def forget(self):
        self.blocks.forget()
        self.cache = self.operations.forget(self.cache)

    @invariant()
    def agrees_with_the_model(self):
        cache = jax.device_get(self.cache)
        for group, model, most in zip(cache.groups, self.blocks.models, HELD, strict=True):
            tables = group.tables
            check_invariants(tables)
            assert tables.lengths.tolist() == [len(tokens) for tokens in model.tokens]
            assert tables.pool.ref_counts.tolist() == list(model.refs.values())
            assert free_blocks(tables) == list(model.free)
            assert cached(tables) == model.cached
            none = tables.num_blocks
            for row, blocks, tokens in zip(
                tables.block_tables.tolist(), model.blocks, model.tokens, strict=True
            ):
                padded = blocks + [None] * (M - len(blocks))
                assert row == [none if block is None else block for block in padded]
                first = blocks.count(None)
                num_held = len(blocks) - first
                assert num_held <= most, "no more than a window and what was appended last"
                assert first <= tables.retention.cursor(len(tokens), C)
        check_tokens(cache, self.blocks)
        used = [count - len(model.free) for count, model in
                zip(NUM_BLOCKS, self.blocks.models, strict=True)]  # fmt: skip
        assert used[0] == max(used), "the first group has most blocks in use"


TestHistories = pytest.mark.slow(GroupsMachine.TestCase)
TestHistories.settings = SETTINGS


def test_publish_replaces_blocks_that_groups_with_windows_have_evicted():
    machine = GroupsMachine()
    machine.start()

    def fill(slot: int, num_tokens: int, alike: bool) -> None:
        for start in range(0, num_tokens, MAX_TOKENS):
            count = min(MAX_TOKENS, num_tokens - start)
            machine.append([count * (s == slot) for s in range(S)], alike)
            machine.publish_all()
            machine.agrees_with_the_model()

    fill(0, 3 * C, alike=True)
    prefix = list(machine.blocks.tokens[0])
    fill(0, 4 * C, alike=False)
    for _ in range(2):  # other sequences need the blocks that have left the windows of slot 0
        fill(3, M * C, alike=False)
        machine.release([s == 3 for s in range(S)])
    assert machine.attach_to(1, prefix, False) == 0
    assert machine.blocks.first.blocks[0][0] in machine.blocks.first.cached
    fill(1, 3 * C, alike=True)
    assert machine.attach_to(2, prefix, False) == 3
    machine.agrees_with_the_model()
    assert machine.blocks.first.blocks[2] == machine.blocks.first.blocks[1]


@pytest.mark.slow
def test_histories_like_an_engine_match_the_model():
    num_found, num_lost, num_refused = run_engine(GroupsMachine(), 0, 150)
    assert num_found > 20 and num_lost > 100 and num_refused > 5


def run_engine(machine: GroupsMachine, seed: int, num_steps: int) -> tuple[int, int, int]:
    """Attach, append, truncate, fork and release sequences in full pools.

    Returns:
      The number of blocks found, the number of columns with freed blocks, summed over steps, and
      the number of failed reservations.
    """
    rng = np.random.default_rng(seed)
    machine.start()
    num_found = num_lost = 0
    for _ in range(num_steps):
        slot = int(rng.integers(S))
        if machine.blocks.tokens[slot] and rng.random() < 0.5:
            machine.release([s == slot for s in range(S)])
        if not machine.blocks.tokens[slot] and machine.published:
            tokens = machine.published[rng.integers(len(machine.published))]
            num_found += machine.attach_to(slot, tokens, False)
        machine.append_to_one(int(rng.integers(1, MAX_TOKENS)), slot, bool(rng.random() < 0.8))
        machine.append_to_all_that_hold_tokens(bool(rng.random() < 0.5))
        machine.cut([int(rng.integers(0, 3)) for _ in range(S)])
        if rng.random() < 0.2:
            machine.reorder([int(parent) for parent in rng.integers(-1, S, size=S)])
        if rng.random() < 0.2:
            machine.swap(slot, slot)
        machine.agrees_with_the_model()
        num_lost += sum(row.count(None) for row in machine.blocks.models[1].blocks)
    return num_found, num_lost, machine.num_refused
