"""Token biases that a model's authors recommend. They apply to every request."""

from typing import NamedTuple


class TokenBias(NamedTuple):
    """Biases that are added to the logits of some tokens.

    Attributes:
      ids: the biased tokens.
      values: the bias of each; -inf keeps the token from being chosen.
      start_ids: tokens that may not be the first generated one.

    Example:
      >>> bias = TokenBias(ids=(7, 4), values=(-float("inf"), 1.5), start_ids=(2,))
      >>> bias.values_at(0), bias.values_at(1)
      ((-inf, -inf, 1.5), (0.0, -inf, 1.5))
    """

    ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    start_ids: tuple[int, ...] = ()

    @property
    def all_ids(self) -> tuple[int, ...]:
        """All biased tokens; `start_ids` come first."""
        return self.start_ids + self.ids

    @property
    def suppresses_only(self) -> bool:
        """Whether every bias is -inf."""
        return all(value == -float("inf") for value in self.values)

    def values_at(self, index: int) -> tuple[float, ...]:
        """Return the biases of `all_ids` for the generated token with this index."""
        at_start = -float("inf") if index == 0 else 0.0
        return (at_start,) * len(self.start_ids) + self.values


NO_BIAS = TokenBias()
"""The bias of a model without recommended biases."""
