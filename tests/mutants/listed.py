"""All mutants. A feature adds those that its tests kill.

`STATES` are defects of the states of recurrent layers, `SURVIVORS` are defects that the tests once
did not find, and `DRAWN` are changes of functions that were drawn by lot from all folders.
"""

from tests.mutants.drawn import DRAWN
from tests.mutants.mutant import mutant
from tests.mutants.survivors import SURVIVORS

_TABLES = "paged_jax.cache.blocks.state_tables"
_PLACES = "paged_jax.models.state_places"
_SCENARIOS = "tests/cache/test_state_scenarios.py"
_DECODE = f"{_SCENARIOS}::test_a_decode_over_a_multiple_leaves_a_mark"
_VERIFY = f"{_SCENARIOS}::test_a_verification_that_ends_at_a_multiple_leaves_a_mark"
_SHARE = f"{_SCENARIOS}::test_slots_that_share_a_state_decode_one_after_the_other"
_OVERWRITE = f"{_SCENARIOS}::test_a_decode_overwrites_a_snapshot_only_if_no_entry_is_free"
_SNAPSHOT = f"{_SCENARIOS}::test_a_prefix_without_a_snapshot_is_possible_but_not_found"
_DRAFTS = "tests/models/test_state_places.py"

STATES = (
    mutant(
        "a snapshot is one token late",
        "cache/states",
        f"{_PLACES}:StatePlaces.at_step",
        "lengths >= self.switch_lengths",
        "lengths > self.switch_lengths",
        _DECODE,
    ),
    mutant(
        "a verification writes over its mark",
        "cache/states",
        f"{_PLACES}:StatePlaces.at_step",
        "lengths >= self.switch_lengths",
        "lengths > self.switch_lengths",
        _VERIFY,
    ),
    mutant(
        "a verification leaves no mark",
        "cache/states",
        f"{_TABLES}:plan_marks",
        "switch_lengths < lengths + most",
        "switch_lengths > lengths",
        _VERIFY,
    ),
    mutant(
        "a mark has the length of the next token",
        "cache/states",
        f"{_TABLES}:commit_marks",
        "jnp.where(has_switched, tables.switch_lengths, tables.mark_lengths)",
        "jnp.where(has_switched, tables.switch_lengths + 1, tables.mark_lengths)",
        _DECODE,
    ),
    mutant(
        "a mark is not kept",
        "cache/states",
        f"{_TABLES}:commit_marks",
        "jnp.where(has_switched, tables.next_entries, tables.entries)",
        "jnp.where(has_switched, tables.entries, tables.entries)",
        _DECODE,
    ),
    mutant(
        "later steps read the entry of the first step",
        "cache/states",
        f"{_PLACES}:StatePlaces.at_step",
        "jnp.where(step == 0, self.sources, self.entries)",
        "self.sources",
        _SHARE,
    ),
    mutant(
        "the first step reads the entry to write",
        "cache/states",
        f"{_PLACES}:StatePlaces.at_step",
        "jnp.where(step == 0, self.sources, self.entries)",
        "self.entries",
        _SHARE,
    ),
    mutant(
        "rows without a token write",
        "cache/states",
        f"{_PLACES}:StatePlaces.at_step",
        "jnp.where(active, entries, P)",
        "entries",
        _DECODE,
    ),
    mutant(
        "a state is not copied on fork",
        "cache/states",
        f"{_TABLES}:reserve_states",
        "may_keep &= held < P",
        "may_keep = held < P",
        _SHARE,
    ),
    mutant(
        "an overwritten snapshot stays in the prefix cache",
        "cache/states",
        f"{_TABLES}:reserve_states",
        "block_pool.forget(pool, jnp.where(may_keep & ~is_taken, held, P))",
        "pool",
        _OVERWRITE,
    ),
    mutant(
        "a hit needs no snapshot",
        "cache/states",
        "paged_jax.cache.blocks.prefix:_longest_prefix",
        "(counts <= most) & is_allowed",
        "counts <= most",
        _SNAPSHOT,
    ),
    mutant(
        "the states of rejected drafts stay",
        "cache/states",
        f"{_PLACES}:StatePlaces.advance_postponed",
        "places.advance(layer, recurrence, carry, num_tokens)",
        "places.advance(layer, recurrence, carry, jnp.full_like(num_tokens, 3))",
        _DRAFTS,
    ),
    mutant(
        "a verification writes states",
        "cache/states",
        f"{_PLACES}:StatePlaces.advance",
        "return out, carry",
        "pass",
        _DRAFTS,
    ),
)

MUTANTS = (*STATES, *SURVIVORS, *DRAWN)
