# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryIsInstance=false
"""`TokenBias`: biases of a model, which every request adds to the logits."""

from typing import NamedTuple


class TokenBias(NamedTuple):
    """Biases of a model, which are added to the logits of some tokens in every request.

    Most come from the model's generation_config.json.

    Attributes:
      ids: ids of the biased tokens.
      values: the bias of each token of `ids`; -inf means that it is never generated.
      start_ids: ids of tokens that must not be the first generated token.

    In the example, token 2 must not be the first generated token (index 0). It may be generated
    later.

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
        """Ids of all biased tokens: `start_ids`, followed by `ids`."""
        return self.start_ids + self.ids

    @property
    def suppresses_only(self) -> bool:
        """Whether every bias is -inf."""
        return all(value == -float("inf") for value in self.values)

    def values_at(self, index: int) -> tuple[float, ...]:
        """Return the biases of `all_ids` for the `index`-th generated token, counted from 0."""
        at_start = -float("inf") if index == 0 else 0.0
        return (at_start,) * len(self.start_ids) + self.values


NO_BIAS = TokenBias()
"""The bias of a model without recommended biases."""
