"""Random histories of the block allocator, compared with a plain model."""

from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.cache import blocks
from paged_jax.cache.blocks import BlockTables, check_invariants
from tests.support.block_model import BlockModel, Content
from tests.support.block_tables import (
    C,
    M,
    P,
    S,
    attach,
    cached,
    contents_of,
    free_blocks,
    i32,
    publish,
    rows,
)

MAX_TOKENS = 10  # two and a half blocks
MAX_CUT = 6  # one and a half blocks


class Operations:
    """Compiled operations with fixed shapes."""

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
    """Random histories, compared with the model after each operation.

    `memory` stands for K and V: the tokens of each block, written and copied only as the allocator
    says. The tokens read back through the tables must be the tokens of each slot in the model.
    """

    operations = Operations()

    @initialize()
    def start(self):
        self.tables = BlockTables.create(P, S, M, C)
        self.model = BlockModel(P, S, M, C)
        self.memory = np.full((P, C), -1)
        self.num_written = 0
        self.published = []  # for each of the latest published blocks: all tokens up to its end

    def running(self) -> list[int]:
        return [slot for slot, tokens in enumerate(self.model.tokens) if tokens]

    def reserve(self, operation: Callable, counts: list[int], max_tokens: int):
        """Append new unique tokens."""
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
        """Append tokens that depend only on the position, so slots have equal, unshared blocks."""
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


def test_histories_like_an_engine_match_the_model():
    """Attach, append, truncate and release sequences in a full pool.

    Hypothesis combines few rules in each example; this test combines all of them.
    """
    machine, rng = AllocatorMachine(), np.random.default_rng(0)
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
