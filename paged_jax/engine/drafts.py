"""Guesses the next tokens from the text itself, and decides when guesses are worth verifying.

Prompt lookup (Saxena, 2023): text often repeats what came before, above all summaries, edits and
code. No model is needed for that, and a wrong guess costs only its share of a verification.
"""

from collections.abc import Sequence as Row

from paged_jax.scheduler.request import Sequence


class NgramIndex:
    """Where each n-gram of a growing sequence of tokens occurred last.

    Args:
      max_size: tokens of the longest n-grams, which are tried first.
      min_size: tokens of the shortest.

    Example:
      >>> index = NgramIndex()
      >>> index.extend([7, 8, 9, 5, 7, 8])
      >>> index.guess(2)
      [9, 5]
    """

    def __init__(self, max_size: int = 4, min_size: int = 2):
        self._sizes = range(max_size, min_size - 1, -1)
        self._token_ids: list[int] = []
        # From an n-gram to the place after its last occurrence that something follows.
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Row[int]) -> None:
        """Take a sequence that begins with all tokens taken so far and continues them."""
        start = len(self._token_ids)
        self._token_ids.extend(token_ids[start:])
        for end in range(max(start, 1), len(self._token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self._token_ids[end - size : end])] = end

    def guess(self, count: int) -> list[int]:
        """The tokens, `count` at most, that followed the sequence's last n-gram before."""
        for size in self._sizes:
            if size < len(self._token_ids):
                place = self._after.get(tuple(self._token_ids[-size:]))
                if place is not None:
                    return self._token_ids[place : place + count]
        return []


class Drafter:
    """Drafts of the sequences that decode.

    Args:
      max_drafts: most tokens that are guessed for a sequence; 0 guesses none.
    """

    def __init__(self, max_drafts: int):
        self._max_drafts = max_drafts
        self._indices: dict[Sequence, NgramIndex] = {}

    def drafts(self, sequences: Row[Sequence], max_tokens: int) -> list[list[int]] | None:
        """Guess the next tokens of each sequence.

        Args:
          sequences: the sequences that decode.
          max_tokens: most tokens that all guesses together may have.

        Returns:
          A list of tokens for each sequence; None where verifying them is not worthwhile.
        """
        if not self._max_drafts:
            return None
        drafts = [self._draft(sequence) for sequence in sequences]
        # Fewer guesses than rows are not worth giving up several steps in one dispatch.
        return drafts if len(drafts) <= sum(map(len, drafts)) <= max_tokens else None

    def _draft(self, sequence: Sequence) -> list[int]:
        if (grammar := sequence.active_grammar()) is not None:
            # Of other guesses it would have to be known what may follow each of them.
            return grammar.forced[: self._max_drafts]
        index = self._indices.setdefault(sequence, NgramIndex())
        index.extend(sequence.token_ids)
        return index.guess(self._max_drafts)

    def drop(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence that has ended."""
        self._indices.pop(sequence, None)

    def clear(self) -> None:
        """Drop what is known of all sequences."""
        self._indices.clear()
