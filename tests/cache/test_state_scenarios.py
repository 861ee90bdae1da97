"""States of recurrent layers in a few steps: marks, shared states, and snapshots.

Each test is quick, and finds certain defects, see `STATES` in `tests.mutants.listed`. Random
histories are in `test_marks` and `test_states`.
"""

import jax.numpy as jnp
import pytest

from paged_jax.cache import paged_cache
from paged_jax.cache.blocks import state_tables
from tests.cache.test_marks import INTERVAL, S, Simulation
from tests.cache.test_states import S as NUM_SLOTS
from tests.cache.test_states import make_cache
from tests.support.block_tables import C, M, as_arrays, contents_of, i32, publish


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch) -> None:
    monkeypatch.setattr(state_tables, "STATE_INTERVAL", INTERVAL)


def test_a_decode_over_a_multiple_leaves_a_mark() -> None:
    """Decode over multiples of the interval, in one dispatch and in several."""
    simulation = Simulation(3 * S)
    for limits, most in (([3, 0, 3], 3), ([8, 5, 0], 9), ([1, 6, 6], 6)):
        simulation.decode(limits, most)
        simulation.check()
    simulation.publish(0)
    simulation.check()
    assert simulation.tables.mark_lengths.tolist()[:2] == [8, 8]


def test_a_verification_that_ends_at_a_multiple_leaves_a_mark() -> None:
    """Continue from there. The second slot does not reach a multiple."""
    simulation = Simulation(3 * S)
    for limits in ([5, 0, 8], [6, 0, 1], [4, 4, 3]):
        simulation.verify(limits)
        simulation.check()
    assert simulation.tables.mark_lengths.tolist() == [8, 0, 8]


def test_slots_that_share_a_state_decode_one_after_the_other() -> None:
    simulation = Simulation(2 * S)
    simulation.decode([5, 0, 0], 5)
    simulation.follow([-1, 0, -1])
    simulation.decode([2, 0, 0], 2)
    simulation.check()
    simulation.decode([0, 2, 0], 2)
    simulation.check()


def test_a_decode_overwrites_a_snapshot_only_if_no_entry_is_free() -> None:
    simulation = Simulation(S)
    simulation.decode([4, 4, 4], 4)
    simulation.publish(0)
    simulation.check()
    assert simulation.tables.pool.is_cached.any()
    simulation.decode([3, 0, 0], 3)
    simulation.check()
    assert not simulation.tables.pool.is_cached.any()


def test_a_prefix_without_a_snapshot_is_possible_but_not_found() -> None:
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
