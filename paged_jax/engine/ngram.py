"""Guesses of the next tokens from the text itself: what followed the last time.

Prompt lookup (Saxena, 2023): text often repeats what came before, above all summaries, edits and
code. No model is needed for that, and a wrong guess costs only its share of a verification.
"""

from collections.abc import Sequence


class NgramIndex:
    """Where each n-gram of a growing sequence of tokens occurred last.

    Args:
      max_size: the longest n-grams; longer ones are tried first.
      min_size: the shortest.

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

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take a sequence that begins with all tokens taken so far, and goes on from there."""
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
