"""Drafts of the next tokens by n-gram lookup, for speculative decoding.

The method is prompt lookup decoding (Saxena, 2023). Generated text often repeats earlier text,
especially in summaries, edits and code. So the tokens that followed an earlier occurrence of the
last few tokens are a good draft, and no draft model is needed. A wrong draft token costs the
computation of an additional position when the model verifies the draft.
"""

import weakref
from collections.abc import Sequence as Items

import numpy as np
from jax.typing import ArrayLike

from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.scheduler.request import Sequence


class NgramIndex:
    """Index of the last occurrence of each n-gram in a growing sequence of tokens.

    Args:
      max_size: number of tokens in the longest n-grams; `guess` tries longer n-grams first.
      min_size: number of tokens in the shortest n-grams.

    Example:
      >>> index = NgramIndex()
      >>> index.extend([7, 8, 9, 5, 7, 8])
      >>> index.guess(2)
      [9, 5]
    """

    def __init__(self, max_size: int = 4, min_size: int = 2):
        self._sizes = range(max_size, min_size - 1, -1)
        self._token_ids: list[int] = []
        # Maps each n-gram to the position after its last occurrence. An occurrence at the end of
        # the sequence does not count, because no token follows it yet.
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Items[int]) -> None:
        """Add the tokens of a sequence that are new since the last call.

        `token_ids` is the whole sequence; it must begin with the tokens of the last call.
        """
        start = len(self._token_ids)
        self._token_ids.extend(token_ids[start:])
        for end in range(max(start, 1), len(self._token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self._token_ids[end - size : end])] = end

    def guess(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed an earlier occurrence of the last n-gram.

        The list is empty if no n-gram at the end of the sequence occurred before.
        """
        for size in self._sizes:
            if size < len(self._token_ids):
                position = self._after.get(tuple(self._token_ids[-size:]))
                if position is not None:
                    return self._token_ids[position : position + count]
        return []


class Drafter:
    """Drafter for all sequences of an engine, with an `NgramIndex` per sequence.

    Args:
      max_drafts: maximum number of draft tokens per sequence; 0 disables drafts.
      stats: statistics of the engine; `count` updates them.
      state_interval: None in models without recurrent layers. In other models, a step verifies no
        draft tokens past the next multiple of this number of tokens.
    """

    def __init__(self, max_drafts: int, stats: EngineStats, state_interval: int | None = None):
        self._max_drafts = max_drafts
        self._stats = stats
        self._state_interval = state_interval
        self._indices: weakref.WeakKeyDictionary[Sequence, NgramIndex]
        self._indices = weakref.WeakKeyDictionary()

    def drafts(self, sequences: Items[Sequence], max_tokens: int) -> list[list[int]] | None:
        """Draft the next tokens of each sequence.

        Args:
          sequences: the decoding sequences.
          max_tokens: maximum number of tokens in all drafts together.

        Returns:
          A list of draft tokens for each sequence. None if the step should decode without drafts,
          because drafts are disabled, would not make the step faster, or exceed `max_tokens`.
        """
        if not self._max_drafts:
            return None
        drafts = [self._draft(sequence)[: self._max_drafts_of(sequence)] for sequence in sequences]
        # Verify draft tokens only if there is at least one per sequence on average. With fewer, it
        # is faster to decode several steps in one dispatch, without drafts.
        return drafts if len(drafts) <= sum(map(len, drafts)) <= max_tokens else None

    def _draft(self, sequence: Sequence) -> list[int]:
        if (grammar := sequence.active_grammar()) is not None:
            # Draft only tokens that are forced by the grammar. Other tokens would need a token mask
            # at each draft position.
            return grammar.forced[: self._max_drafts]
        index = self._indices.setdefault(sequence, NgramIndex())
        index.extend(sequence.token_ids)
        return index.guess(self._max_drafts)

    def _max_drafts_of(self, sequence: Sequence) -> int:
        """Return the maximum number of draft tokens of a sequence that one step can verify."""
        num_known = len(sequence.token_ids)
        # The model draws one more token after the drafts.
        max_drafts = sequence.max_length - num_known - 1
        if self._state_interval is not None:
            max_drafts = min(max_drafts, -num_known % self._state_interval)
        return max(max_drafts, 0)

    def count(self, drafts: list[list[int]], num_new: ArrayLike) -> None:
        """Update the statistics after a step that verified `drafts`.

        `num_new` i32[B] is the number of tokens that each sequence got: the accepted draft tokens
        and one sampled token.
        """
        stats, num_accepted = self._stats, np.maximum(np.asarray(num_new) - 1, 0)
        stats.num_drafts += sum(map(bool, drafts))
        stats.num_draft_tokens += sum(map(len, drafts))
        stats.num_accepted_tokens += int(num_accepted.sum())
        positions = np.arange(self._max_drafts)
        before = stats.num_accepted_at or (0,) * len(positions)
        counts = before + (num_accepted[:, None] > positions).sum(axis=0)
        stats.num_accepted_at = tuple(counts.tolist())
