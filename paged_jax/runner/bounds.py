"""What grammars allow next, from the host to the device."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from paged_jax.runner.buckets import no_slots
from paged_jax.runner.sizes import Sizes
from paged_jax.sampling.filters import num_words
from paged_jax.scheduler.request import Sequence


class Bounds(NamedTuple):
    """Rows for `Constraints.write`, one for each slot of the engine; those of slots -1 are empty.

    Attributes:
      slots: i32[S], the slots that are bound.
      starts: i32[S], positions of their next tokens.
      num_forced: i32[S], tokens from there on that are known.
      forced_ids: i32[S, N], those tokens.
      masks: i32[S, V / 32], rounded up: bits of the tokens that may follow.
    """

    slots: np.ndarray
    starts: np.ndarray
    num_forced: np.ndarray
    forced_ids: np.ndarray
    masks: np.ndarray

    @classmethod
    def create(cls, sizes: Sizes, vocab_size: int) -> "Bounds":
        """No slot is bound."""
        S = sizes.num_slots
        return cls(
            slots=no_slots(S),
            starts=np.zeros(S, np.int32),
            num_forced=np.zeros(S, np.int32),
            forced_ids=np.zeros((S, sizes.max_forced), np.int32),
            masks=np.zeros((S, num_words(vocab_size)), np.int32),
        )


def find_bounds(
    sequences: Collection[Sequence], num_steps: int, sizes: Sizes, vocab_size: int
) -> Bounds | None:
    """What the grammars of some sequences allow in the next dispatch; None if none has one.

    Args:
      sequences: the sequences that decode.
      num_steps: most tokens that the dispatch draws for each.
      sizes: sizes of the engine's programs.
      vocab_size: V.
    """
    grammars = [(s, grammar) for s in sequences if (grammar := s.active_grammar()) is not None]
    if not grammars:
        return None
    bounds = Bounds.create(sizes, vocab_size)
    for row, (sequence, grammar) in enumerate(grammars):
        forced = grammar.forced[: sizes.max_forced]
        assert sequence.slot is not None
        bounds.slots[row], bounds.starts[row] = sequence.slot, len(sequence.token_ids)
        bounds.num_forced[row], bounds.forced_ids[row, : len(forced)] = len(forced), forced
        # What follows an end is no grammar's any more: the row stands until the slot has another
        # sequence, and must let everything through.
        if len(grammar.forced) < num_steps or grammar.ends:
            grammar.write_mask(bounds.masks[row])
    return bounds
