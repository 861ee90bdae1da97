"""Drafts of the next tokens by n-gram lookup, for speculative decoding.

Prompt lookup (Saxena, 2023): text often repeats earlier text, above all in summaries, edits and
code. The lookup needs no draft model. A wrong draft costs only its part of a verification pass.
"""

import weakref
from collections.abc import Sequence as Items

import numpy as np
from jax.typing import ArrayLike

from paged_jax.scheduler.outputs import EngineStats
from paged_jax.scheduler.request import Sequence


class NgramIndex:
    """Index of the last occurrence of each n-gram in a growing sequence of tokens.

    Args:
      max_size: number of tokens in the longest n-grams, which are tried first.
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
        # For each n-gram, the position after its last occurrence. Occurrences at the end of the
        # sequence, without a next token, do not count.
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Items[int]) -> None:
        """Add the new tokens of a sequence, which must begin with all tokens added before."""
        start = len(self._token_ids)
        self._token_ids.extend(token_ids[start:])
        for end in range(max(start, 1), len(self._token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self._token_ids[end - size : end])] = end

    def guess(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed an earlier occurrence of the last n-gram."""
        for size in self._sizes:
            if size < len(self._token_ids):
                place = self._after.get(tuple(self._token_ids[-size:]))
                if place is not None:
                    return self._token_ids[place : place + count]
        return []


class Drafter:
    """Drafter for all sequences of an engine, with one `NgramIndex` per sequence.

    Args:
      max_drafts: maximum number of tokens in a draft; 0 turns drafts off.
      stats: totals of the engine; `count` updates them.
    """

    def __init__(self, max_drafts: int, stats: EngineStats):
        self._max_drafts = max_drafts
        self._stats = stats
        self._indices: weakref.WeakKeyDictionary[Sequence, NgramIndex]
        self._indices = weakref.WeakKeyDictionary()

    def drafts(self, sequences: Items[Sequence], max_tokens: int) -> list[list[int]] | None:
        """Draft the next tokens of each sequence.

        Args:
          sequences: the decoding sequences.
          max_tokens: maximum number of tokens in all drafts together.

        Returns:
          A list of draft tokens for each sequence. None if this step should decode without drafts:
          if they are turned off, do not make the step faster, or exceed `max_tokens`.
        """
        if not self._max_drafts:
            return None
        drafts = [self._draft(sequence) for sequence in sequences]
        # With fewer draft tokens than rows, several plain steps in one dispatch are faster.
        return drafts if len(drafts) <= sum(map(len, drafts)) <= max_tokens else None

    def _draft(self, sequence: Sequence) -> list[int]:
        if (grammar := sequence.active_grammar()) is not None:
            # Draft only tokens that the grammar forces: others would need a mask after each draft
            # token.
            return grammar.forced[: self._max_drafts]
        index = self._indices.setdefault(sequence, NgramIndex())
        index.extend(sequence.token_ids)
        return index.guess(self._max_drafts)

    def count(self, drafts: list[list[int]], num_new: ArrayLike) -> None:
        """Count the drafts of a step, in which each sequence got `num_new` i32[B] tokens."""
        stats, num_accepted = self._stats, np.maximum(np.asarray(num_new) - 1, 0)
        stats.num_drafts += sum(map(bool, drafts))
        stats.num_draft_tokens += sum(map(len, drafts))
        stats.num_accepted_tokens += int(num_accepted.sum())
        positions = np.arange(self._max_drafts)
        before = stats.num_accepted_at or (0,) * len(positions)
        counts = before + (num_accepted[:, None] > positions).sum(axis=0)
        stats.num_accepted_at = tuple(counts.tolist())
