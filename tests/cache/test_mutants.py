"""Defects of the states of recurrent layers that the tests must find.

Each mutant is a function with other source text. The scenario passes with the real function and
must fail with the mutant, so a scenario that checks nothing fails here.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.cache import paged_cache
from paged_jax.cache.blocks import prefix, state_tables
from paged_jax.models.layer_attention import Recurrence
from paged_jax.models.layer_groups import StateShape
from paged_jax.models.state_places import StatePlaces
from tests.cache.test_marks import INTERVAL, S, Simulation
from tests.cache.test_states import S as NUM_SLOTS
from tests.cache.test_states import make_cache
from tests.support.block_tables import C, M, as_arrays, contents_of, i32, publish
from tests.support.mutants import mutate


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch) -> None:
    monkeypatch.setattr(state_tables, "STATE_INTERVAL", INTERVAL)


def decode_over_a_mark() -> None:
    """Decode over multiples of the interval, in one dispatch and in several."""
    simulation = Simulation(3 * S)
    for limits, most in (([3, 0, 3], 3), ([8, 5, 0], 9), ([1, 6, 6], 6)):
        simulation.decode(limits, most)
        simulation.check()
    simulation.publish(0)
    simulation.check()
    assert simulation.tables.mark_lengths.tolist()[:2] == [8, 8]


def verify_over_a_mark() -> None:
    """Verify drafts in steps that end at multiples of the interval, and continue from there."""
    simulation = Simulation(3 * S)
    for limits in ([5, 0, 8], [6, 0, 1], [4, 4, 3]):
        simulation.verify(limits)
        simulation.check()
    assert simulation.tables.mark_lengths.tolist() == [8, 0, 8]


def fork_and_decode() -> None:
    """Decode one of two slots that share a state, and then the other."""
    simulation = Simulation(2 * S)
    simulation.decode([5, 0, 0], 5)
    simulation.follow([-1, 0, -1])
    simulation.decode([2, 0, 0], 2)
    simulation.check()
    simulation.decode([0, 2, 0], 2)
    simulation.check()


def publish_and_decode() -> None:
    """Decode after a state has become a snapshot, while no other entry is free."""
    simulation = Simulation(S)
    simulation.decode([4, 4, 4], 4)
    simulation.publish(0)
    simulation.check()
    simulation.decode([3, 0, 0], 3)
    simulation.check()


def attach_without_a_snapshot() -> None:
    """Look up a prefix with cached blocks, but without a snapshot of the states."""
    tokens = list(range(2 * C))
    counts = i32([len(tokens)] + [0] * (NUM_SLOTS - 1))
    cache, ok = paged_cache.reserve(make_cache(), counts, max_tokens=2 * C)
    assert ok
    known = contents_of(tokens)
    entries = [(0, column, content) for column, content in enumerate(known)]
    cache = publish(cache, entries, paged_cache.publish)
    cache = paged_cache.release(cache, jnp.arange(NUM_SLOTS) == 0)
    arguments = i32(1), *as_arrays(known, M), i32(len(known))
    _, num_found, num_possible = paged_cache.attach_prefix(cache, *arguments)
    assert (int(num_found), int(num_possible)) == (0, 2)


def verify_drafts() -> None:
    """Accept one of three tokens, none, and all. A state is the sum of its tokens."""

    def advance(inputs, states, num_tokens):
        is_token = jnp.arange(3)[None] < num_tokens[:, None]
        sums = jnp.sum(jnp.where(is_token, inputs[0][:, :, 0], 0), axis=1)
        return inputs[0], (states[0] + sums[:, None],)

    inputs = jnp.arange(1.0, 10.0).reshape(9, 1)
    ids, none = jnp.arange(3, dtype=jnp.int32), jnp.full(3, 4, jnp.int32)
    places = StatePlaces(ids, ids, none, none, 4, ((0, 0),), 0, [])
    carry = ((jnp.full((1, 4, 1), 100.0),),)
    recurrence = Recurrence((inputs,), advance, (StateShape("sum", (1,), None),))
    out, carry = places.advance(0, recurrence, carry, i32([3, 3, 3]))
    np.testing.assert_array_equal(out, inputs)
    [[pool]] = places.advance_postponed(carry, i32([1, 0, 3]))
    assert pool[0, :, 0].tolist() == [101, 100, 100 + 7 + 8 + 9, 100]


MUTANTS = {
    "a snapshot is one token late": (
        decode_over_a_mark,
        (StatePlaces, "at_step", "(lengths >= self.switch_lengths)",
         "(lengths > self.switch_lengths)"),
    ),
    "a verification writes over its mark": (
        verify_over_a_mark,
        (StatePlaces, "at_step", "(lengths >= self.switch_lengths)",
         "(lengths > self.switch_lengths)"),
    ),
    "a verification leaves no mark": (
        verify_over_a_mark,
        (state_tables, "plan_marks", "(switch_lengths < lengths + most)",
         "(switch_lengths > lengths)"),
    ),
    "a mark has the length of the next token": (
        decode_over_a_mark,
        (state_tables, "commit_marks", "has_switched, tables.switch_lengths,",
         "has_switched, tables.switch_lengths + 1,"),
    ),
    "a mark is not kept": (
        decode_over_a_mark,
        (state_tables, "commit_marks", "has_switched, tables.next_entries, tables.entries",
         "has_switched, tables.entries, tables.entries"),
    ),
    "later steps read the entry of the first step": (
        fork_and_decode,
        (StatePlaces, "at_step", "jnp.where(step == 0, self.sources, self.entries)",
         "self.sources"),
    ),
    "the first step reads the entry to write": (
        fork_and_decode,
        (StatePlaces, "at_step", "jnp.where(step == 0, self.sources, self.entries)",
         "self.entries"),
    ),
    "rows without a token write": (
        decode_over_a_mark,
        (StatePlaces, "at_step", "jnp.where(active, entries, P)", "entries"),
    ),
    "a state is not copied on fork": (
        fork_and_decode,
        (state_tables, "reserve_states", "may_keep &= held < P", "may_keep = held < P"),
    ),
    "an overwritten snapshot stays in the prefix cache": (
        publish_and_decode,
        (state_tables, "reserve_states",
         "block_pool.forget(pool, jnp.where(may_keep & ~is_taken, held, P))", "pool"),
    ),
    "a hit needs no snapshot": (
        attach_without_a_snapshot,
        (prefix, "_longest_prefix", "(counts <= most) & is_allowed", "(counts <= most)"),
    ),
    "the states of rejected drafts stay": (
        verify_drafts,
        (StatePlaces, "advance_postponed", "carry, num_tokens)",
         "carry, jnp.full_like(num_tokens, 3))"),
    ),
    "a verification writes states": (
        verify_drafts,
        (StatePlaces, "advance", "return out, carry", "pass"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_scenarios_find_each_mutant(mutant, monkeypatch) -> None:
    scenario: Callable[[], None]
    scenario, change = MUTANTS[mutant]
    mutate(monkeypatch, *change)
    with pytest.raises(AssertionError):
        scenario()


@pytest.mark.parametrize("scenario", dict.fromkeys(row[0] for row in MUTANTS.values()))
def test_scenarios_pass_without_mutants(scenario) -> None:
    scenario()
