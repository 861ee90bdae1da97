"""Marks: earlier states that slots keep while they decode, see `state_tables`.

The programs are simulated in Python. The state of an entry is a list of its tokens.
"""

import hashlib
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from paged_jax.cache.blocks import state_tables
from paged_jax.cache.blocks.state_tables import PlannedStates, StateTables
from tests.support.block_tables import check_states
from tests.support.entries_model import EntriesModel

S, C, INTERVAL = 3, 4, 8
MAX_BLOCKS = 32  # maximum number of full blocks of a slot
# Four entries more than slots: two for marks, and two for snapshots.
NUM_ENTRIES = S + 4


@pytest.fixture(autouse=True, scope="module")
def _short_interval():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_tables, "STATE_INTERVAL", INTERVAL)
        yield


class Simulation:
    """Slots, the tokens whose state each entry holds, and a plain model of the entries."""

    def __init__(self, num_entries: int):
        self.tables = StateTables.create(num_entries, S, C)
        self.model = EntriesModel(num_entries, S)
        self.contents: list[tuple[int, ...] | None] = [None] * num_entries
        self.tokens: list[list[int]] = [[] for _ in range(S)]
        self.known: dict[bytes, tuple[int, ...]] = {}
        self.next_token = 0

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.tokens], np.int32)

    def decode(self, limits: list[int], most: int) -> None:
        """Append up to `limits` tokens to each slot, like a dispatch of `most` steps."""
        is_writer = np.array(limits) > 0
        args = jnp.asarray(is_writer), jnp.asarray(self.lengths), jnp.int32(most)
        self.tables = state_tables.plan_states(self.tables, *args)
        self.plan(limits, most)
        P = self.tables.num_entries
        rows = PlannedStates.of_rows(self.tables, jnp.arange(S))
        for step in range(max(limits)):
            active = np.array(limits) > step
            now = rows.at_step(jnp.int32(step), jnp.asarray(active), jnp.asarray(self.lengths))
            sources, entries = now.sources.tolist(), now.entries.tolist()
            before = [self.contents[source] if source < P else () for source in sources]
            for slot in np.flatnonzero(active):
                assert before[slot] == tuple(self.tokens[slot])
                self.tokens[slot].append(self.next_token)
                self.next_token += 1
                self.contents[entries[slot]] = tuple(self.tokens[slot])
            assert all(
                entry == P for entry, is_on in zip(entries, active, strict=True) if not is_on
            )
        self.commit()

    def plan(self, limits: list[int], most: int) -> None:
        writers = [slot for slot, limit in enumerate(limits) if limit]
        movers = self.model.reserve(writers)
        self.model.plan_marks(writers, movers, self.lengths.tolist(), most, INTERVAL)

    def commit(self) -> None:
        self.tables = state_tables.commit_marks(self.tables, jnp.asarray(self.lengths))
        self.model.commit_marks(self.lengths.tolist())

    def verify(self, limits: list[int]) -> None:
        """Append tokens to the slots with a limit, in one step that ends at a multiple.

        A slot with tokens and a limit of 1 is complete: it gets no token.
        """
        lengths, is_writer = self.lengths, jnp.asarray(limits) > 0
        self.tables = state_tables.reserve_states(self.tables, is_writer)
        self.tables = state_tables.plan_marks(self.tables, is_writer, jnp.asarray(lengths), 1)
        self.plan(limits, 1)
        P = self.tables.num_entries
        rows = PlannedStates.of_rows(self.tables, jnp.arange(S))
        sources, entries = (x.tolist() for x in rows.at_step(0, is_writer, jnp.asarray(lengths)))
        before = [self.contents[source] if source < P else () for source in sources]
        for slot in np.flatnonzero(limits):
            assert before[slot] == tuple(self.tokens[slot])
            count = limits[slot] - bool(self.tokens[slot])
            count = min(count, INTERVAL - lengths[slot] % INTERVAL)
            self.tokens[slot] += range(self.next_token, self.next_token + count)
            self.next_token += count
            self.contents[entries[slot]] = tuple(self.tokens[slot])
        self.commit()

    def publish(self, slot: int) -> None:
        """Ask for a snapshot at the end of each full block of a slot."""
        tokens = self.tokens[slot]
        ends = np.arange(C, len(tokens) + 1, C, dtype=np.int32)
        digests = [hashlib.sha256(str(tokens[:end]).encode()).digest() for end in ends]
        self.known |= {
            digest: tuple(tokens[:end]) for digest, end in zip(digests, ends, strict=True)
        }
        if not digests:
            return
        words = np.stack([np.frombuffer(digest, np.uint32) for digest in digests])
        blocks = np.array([tokens[end - C : end] for end in ends], np.int32)
        slots, marks = np.full(len(ends), slot, np.int32), np.ones(len(ends), bool)
        # Pad to a fixed number of rows, so that JAX compiles a single program.
        padding = MAX_BLOCKS - len(ends)
        arrays: Any = [
            np.pad(each, [(0, padding)] + [(0, 0)] * (each.ndim - 1))
            for each in (slots, marks, words, blocks, ends)
        ]
        arrays = map(jnp.asarray, (*arrays, self.lengths))
        self.tables = state_tables.publish_states(self.tables, *arrays)
        for digest, end in zip(digests, ends, strict=True):
            self.model.publish(slot, digest, tokens[:end], len(tokens))

    def attach(self, slot: int, index: int) -> None:
        """Start an empty slot from a snapshot, if there is one."""
        if self.tokens[slot] or not self.model.cached:
            return
        entry = sorted(self.model.cached)[index % len(self.model.cached)]
        self.tokens[slot] = list(self.model.cached[entry][1])
        self.tables = state_tables.attach_state(self.tables, jnp.int32(slot), jnp.int32(entry))
        self.model.attach(slot, entry)

    def forget(self) -> None:
        self.tables = state_tables.forget_states(self.tables)
        self.model.forget()

    def follow(self, parents: list[int]) -> None:
        new = [
            slot if not self.tokens[max(parent, 0)] or parent < 0 else parent
            for slot, parent in enumerate(parents)
        ]
        self.tokens = [list(self.tokens[parent]) for parent in new]
        args = jnp.asarray(new, jnp.int32), jnp.asarray(True)
        self.tables = state_tables.follow_states(self.tables, *args)
        self.model.follow(new)

    def release(self, slot: int) -> None:
        mask = np.arange(S) == slot
        self.tables = state_tables.release_states(self.tables, jnp.asarray(mask))
        self.tokens[slot] = []
        self.model.release(mask.tolist())

    def check(self) -> None:
        tables = self.tables
        check_states(tables, self.lengths)
        for slot in range(S):
            if self.tokens[slot]:
                assert self.contents[int(tables.entries[slot])] == tuple(self.tokens[slot])
            if (mark := int(tables.marks[slot])) < tables.num_entries:
                length = int(tables.mark_lengths[slot])
                assert length % INTERVAL == 0
                assert self.contents[mark] == tuple(self.tokens[slot][:length])
        for entry in np.flatnonzero(tables.pool.is_cached):
            assert (
                self.contents[entry] == self.known[np.asarray(tables.pool.digests[entry]).tobytes()]
            )
        pool, model, P = tables.pool, self.model, tables.num_entries
        for ids, expected in ((tables.entries, model.entries), (tables.marks, model.marks)):
            assert ids.tolist() == [P if entry is None else entry for entry in expected]
        for slot, mark in enumerate(model.marks):
            assert mark is None or int(tables.mark_lengths[slot]) == model.mark_lengths[slot]
        assert pool.ref_counts.tolist() == list(model.refs.values())
        assert np.flatnonzero(pool.is_cached).tolist() == sorted(model.cached)
        ring = (int(pool.head) + np.arange(int(pool.num_free))) % P
        assert np.asarray(pool.free_queue)[ring].tolist() == list(model.free)


LIMITS = st.lists(st.integers(0, 6), min_size=S, max_size=S).filter(any)
ACTIONS = st.one_of(
    st.tuples(st.just("decode"), LIMITS, st.integers(0, 3)),
    st.tuples(st.just("verify"), LIMITS),
    st.tuples(st.just("publish"), st.integers(0, S - 1)),
    st.tuples(st.just("release"), st.integers(0, S - 1)),
    st.tuples(st.just("attach"), st.integers(0, S - 1), st.integers(0, 5)),
    st.tuples(st.just("forget")),
    st.tuples(st.just("follow"), st.lists(st.integers(-1, S - 1), min_size=S, max_size=S)),
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.sampled_from([S, NUM_ENTRIES]), st.lists(ACTIONS, min_size=4, max_size=14))
def test_states_and_marks_hold_the_tokens_of_their_slots(num_entries, actions) -> None:
    """All tables equal those of a plain model, and no snapshot is overwritten."""
    simulation = Simulation(num_entries)
    for name, *args in actions:
        if name == "decode":
            limits, more = args
            simulation.decode(limits, max(limits) + more)
        else:
            getattr(simulation, name)(*args)
        simulation.check()


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_long_decode_leaves_a_snapshot_at_the_last_multiple(steps) -> None:
    simulation = Simulation(NUM_ENTRIES)
    while len(simulation.tokens[0]) < 21:
        count = min(steps, 21 - len(simulation.tokens[0]))
        simulation.decode([count, 0, 0], steps)
    assert simulation.tables.mark_lengths.tolist()[0] == 16
    simulation.publish(0)
    simulation.release(0)
    simulation.check()
    [entry] = np.flatnonzero(simulation.tables.pool.is_cached)
    assert len(simulation.contents[entry] or ()) == 16


def test_marks_leave_half_of_the_additional_entries_to_snapshots() -> None:
    """All slots pass a multiple, and the last slot gets no mark. Snapshots can then be kept."""
    simulation = Simulation(NUM_ENTRIES)
    simulation.decode([INTERVAL - 1] * S, INTERVAL - 1)
    simulation.decode([3] * S, 3)
    simulation.check()
    assert (simulation.tables.marks < NUM_ENTRIES).tolist() == [True, True, False]
    for slot in (0, 1):
        simulation.publish(slot)
        simulation.release(slot)
    simulation.check()
    assert int(simulation.tables.pool.is_cached.sum()) == 2


@pytest.mark.parametrize("num_snapshots", [2, 3])
def test_marks_go_before_snapshots_are_overwritten(num_snapshots) -> None:
    """Slots continue from snapshots, and two entries are free: enough for two slots."""
    simulation = Simulation(NUM_ENTRIES)
    simulation.decode([INTERVAL - 1] * S, INTERVAL - 1)
    simulation.decode([5] * S, 5)
    for slot in range(num_snapshots):
        simulation.publish(slot)
    before = simulation.tables
    has_mark = [True, True, False]
    assert (before.marks < NUM_ENTRIES).tolist() == has_mark and int(before.pool.num_free) == 2
    snapshots = before.entries[:num_snapshots]
    assert np.asarray(before.pool.is_cached)[snapshots].all()
    simulation.decode([1] * S, 1)
    simulation.check()
    after = simulation.tables
    assert (after.marks < NUM_ENTRIES).tolist() == (has_mark if num_snapshots == 2 else [False] * S)
    assert np.asarray(after.pool.is_cached)[snapshots].all()
