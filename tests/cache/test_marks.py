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
from paged_jax.cache.blocks.state_tables import StateTables
from paged_jax.models.state_places import StatePlaces
from tests.support.block_tables import check_states

S, C, INTERVAL = 3, 4, 8
MAX_BLOCKS = 32  # maximum number of full blocks of a slot


@pytest.fixture(autouse=True, scope="module")
def _short_interval():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_tables, "STATE_INTERVAL", INTERVAL)
        yield


class Simulation:
    """Slots, and the tokens whose state each entry holds."""

    def __init__(self, num_entries: int):
        self.tables = StateTables.create(num_entries, S, C)
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
        tables = self.tables
        ids = (tables.sources, tables.entries, tables.switch_lengths, tables.next_entries)
        P = self.tables.num_entries
        places = StatePlaces(*ids, P, (), 0)
        for step in range(max(limits)):
            active = np.array(limits) > step
            now = places.at_step(jnp.int32(step), jnp.asarray(active), jnp.asarray(self.lengths))
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
        self.tables = state_tables.commit_marks(self.tables, jnp.asarray(self.lengths))

    def verify(self, limits: list[int]) -> None:
        """Append tokens to the slots with a limit, in one step that ends at a multiple.

        A slot with tokens and a limit of 1 is complete: it gets no token.
        """
        lengths, is_writer = self.lengths, jnp.asarray(limits) > 0
        self.tables = state_tables.reserve_states(self.tables, is_writer)
        self.tables = state_tables.plan_marks(self.tables, is_writer, jnp.asarray(lengths), 1)
        tables = self.tables
        ids = (tables.sources, tables.entries, tables.switch_lengths, tables.next_entries)
        P = self.tables.num_entries
        places = StatePlaces(*ids, P, (), 0).at_step(0, is_writer, jnp.asarray(lengths))
        sources, entries = places.sources.tolist(), places.entries.tolist()
        before = [self.contents[source] if source < P else () for source in sources]
        for slot in np.flatnonzero(limits):
            assert before[slot] == tuple(self.tokens[slot])
            count = limits[slot] - bool(self.tokens[slot])
            count = min(count, INTERVAL - lengths[slot] % INTERVAL)
            self.tokens[slot] += range(self.next_token, self.next_token + count)
            self.next_token += count
            self.contents[entries[slot]] = tuple(self.tokens[slot])
        self.tables = state_tables.commit_marks(self.tables, jnp.asarray(self.lengths))

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

    def follow(self, parents: list[int]) -> None:
        new = [
            slot if not self.tokens[max(parent, 0)] or parent < 0 else parent
            for slot, parent in enumerate(parents)
        ]
        self.tokens = [list(self.tokens[parent]) for parent in new]
        args = jnp.asarray(new, jnp.int32), jnp.asarray(True)
        self.tables = state_tables.follow_states(self.tables, *args)

    def release(self, slot: int) -> None:
        mask = np.arange(S) == slot
        self.tables = state_tables.release_states(self.tables, jnp.asarray(mask))
        self.tokens[slot] = []

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


LIMITS = st.lists(st.integers(0, 6), min_size=S, max_size=S).filter(any)
ACTIONS = st.one_of(
    st.tuples(st.just("decode"), LIMITS, st.integers(0, 3)),
    st.tuples(st.just("verify"), LIMITS),
    st.tuples(st.just("publish"), st.integers(0, S - 1)),
    st.tuples(st.just("release"), st.integers(0, S - 1)),
    st.tuples(st.just("follow"), st.lists(st.integers(-1, S - 1), min_size=S, max_size=S)),
)


@settings(max_examples=25)
@given(st.sampled_from([S, 2 * S]), st.lists(ACTIONS, min_size=4, max_size=14))
def test_states_and_marks_hold_the_tokens_of_their_slots(num_entries, actions) -> None:
    """Nothing leaks, no snapshot is overwritten, and as many entries as slots suffice."""
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
    simulation = Simulation(2 * S)
    while len(simulation.tokens[0]) < 21:
        count = min(steps, 21 - len(simulation.tokens[0]))
        simulation.decode([count, 0, 0], steps)
    assert simulation.tables.mark_lengths.tolist()[0] == 16
    simulation.publish(0)
    simulation.release(0)
    simulation.check()
    [entry] = np.flatnonzero(simulation.tables.pool.is_cached)
    assert len(simulation.contents[entry] or ()) == 16
