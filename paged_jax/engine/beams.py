"""The choice of beam search: which continuations of a prompt are kept, in plain Python.

    each beam brings its 2 W most probable continuations
    those that end with an end-of-sequence token are complete; the best W others continue
    in the end, the best W of all beams are returned, complete or not

An outcome is ranked by ``cum_logprob / length**length_penalty``, as in vLLM: the length is that of
the whole sequence, its prompt included and an end token left out.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from paged_jax.arguments import is_int, is_real, names_arguments
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.short_repr import short_repr

# Lengths to this power stay far within the range of float.
_MAX_LENGTH_PENALTY = 10.0


@names_arguments
@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """What to search for, with vLLM's names and meanings.

    Attributes:
      beam_width: W, beams that continue at each step, and sequences that are returned.
      max_tokens: most tokens to generate; fewer where the context ends before.
      ignore_eos: whether end-of-sequence tokens are treated as any other.
      temperature: only 0 is possible, as nothing is drawn: log-probabilities are the model's own.
      length_penalty: the power of the length by which the log-probability is divided: above 0
        favours long sequences, below 0 short ones. From -10 to 10.
      include_stop_str_in_output: whether the text keeps the end-of-sequence token.

    Raises:
      ValueError: a value is out of bounds; the message names the field and the bound.

    Example:
      >>> BeamSearchParams(beam_width=0, max_tokens=8)
      Traceback (most recent call last):
      ...
      ValueError: BeamSearchParams: beam_width must be an integer >= 1, got 0.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            _require(is_int(value) and value >= 1, name, "be an integer >= 1", value)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            _require(isinstance(getattr(self, name), bool), name, "be a bool", getattr(self, name))
        is_zero = is_real(self.temperature) and self.temperature == 0
        _require(is_zero, "temperature", "be 0, because nothing is drawn", self.temperature)
        bound, penalty = _MAX_LENGTH_PENALTY, self.length_penalty
        is_power = is_real(penalty) and abs(penalty) <= bound
        _require(is_power, "length_penalty", f"be in [-{bound:g}, {bound:g}]", penalty)


@short_repr
@dataclasses.dataclass(frozen=True)
class BeamSearchSequence:
    """One of the best sequences.

    Attributes:
      tokens: token ids of the prompt, then the generated ones, an end-of-sequence token included.
      cum_logprob: the sum of the log-probabilities of the generated tokens, in nats.
      text: the text of all tokens, the prompt's included, without special tokens; empty without
        a tokenizer.
      finish_reason: ``"stop"`` (an end-of-sequence token) or ``"length"``.
      stop_reason: the end-of-sequence token; None where the length ended it.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: int | None = None


@short_repr
@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    """What was found for one prompt.

    Attributes:
      sequences: the best `beam_width` sequences or, if there are fewer, all; the best first.
    """

    sequences: list[BeamSearchSequence]


class Beam(NamedTuple):
    """A continuation of a prompt."""

    token_ids: tuple[int, ...]  # generated
    cum_logprob: float
    parent: int = 0  # the rank, a step ago, of the beam that it continues
    is_complete: bool = False


class BeamChoice:
    """The beams of one prompt.

    Args:
      prompt_token_ids: the prompt.
      max_tokens: most tokens to generate; those of `params` where the context allows it.
      params: parameters of the search.
      end_ids: token ids that complete a sequence.
      most_bias: the largest bias that is added to a log-probability; at least 0.

    Attributes:
      beams: those that continue, the best first.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        params: BeamSearchParams,
        end_ids: frozenset[int],
        most_bias: float = 0.0,
    ):
        self.params = params
        self.prompt_token_ids = list(prompt_token_ids)
        self.max_tokens = max_tokens
        self._end_ids = end_ids
        self._most_bias = most_bias
        self.beams = [Beam((), 0.0)]
        self._completed: list[Beam] = []  # the best W, the best first

    @property
    def num_generated(self) -> int:
        """Number of generated tokens of each beam."""
        return len(self.beams[0].token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of each beam, including the prompt."""
        return len(self.prompt_token_ids) + self.num_generated

    def advance(
        self, top_ids: Sequence[Sequence[int]], top_logprobs: Sequence[Sequence[float]]
    ) -> None:
        """Choose the beams that continue, from the continuations of the present ones.

        Args:
          top_ids: for each beam the N most probable tokens, the most probable first.
          top_logprobs: their log-probabilities, in nats.

        Raises:
          FloatingPointError: a log-probability is NaN.
        """
        if any(math.isnan(logprob) for row in top_logprobs for logprob in row):
            raise FloatingPointError(
                f"beam_search: the model gave NaN after {self.num_tokens} tokens. Its weights may "
                "be damaged, or overflow in their dtype."
            )
        candidates = sorted(
            (
                (beam.cum_logprob + logprob, parent, token_id)
                for parent, beam in enumerate(self.beams)
                for token_id, logprob in zip(top_ids[parent], top_logprobs[parent], strict=True)
                if logprob > -math.inf  # a suppressed token
            ),
            # Stable: of equals, the continuation of the better beam comes first.
            key=lambda candidate: -candidate[0],
        )
        width, continued, ended = self.params.beam_width, [], []
        for cum_logprob, parent, token_id in candidates:
            is_end = token_id in self._end_ids
            chosen = ended if is_end else continued
            if len(chosen) < width:
                token_ids = (*self.beams[parent].token_ids, token_id)
                chosen.append(Beam(token_ids, cum_logprob, parent, is_end))
        self._completed = self._best(self._completed + ended)
        self.beams = continued

    @property
    def is_done(self) -> bool:
        """Whether no beam may continue, or none that does can still end among the best."""
        if not self.beams or self.num_generated == self.max_tokens:
            return True
        if len(self._completed) < self.params.beam_width:
            return False
        # A token lowers the sum unless its bias is positive. The score is monotonic in the length.
        num_prompt, num_left = len(self.prompt_token_ids), self.max_tokens - self.num_generated
        best = self.beams[0].cum_logprob + num_left * self._most_bias
        lengths = self.num_tokens, num_prompt + self.max_tokens
        hope = max(best / length**self.params.length_penalty for length in lengths)
        return hope <= self._score(self._completed[-1])

    def best(self) -> list[Beam]:
        """The best beams so far, complete or not, the best first."""
        return self._best(self._completed + self.beams)

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """The best beams as sequences."""
        return BeamSearchOutput([self._sequence(beam, tokenizer) for beam in self.best()])

    def _best(self, beams: list[Beam]) -> list[Beam]:
        # Stable: of equals, the one that was complete first comes first.
        return sorted(beams, key=self._score, reverse=True)[: self.params.beam_width]

    def _score(self, beam: Beam) -> float:
        length = len(self.prompt_token_ids) + len(beam.token_ids) - beam.is_complete
        return beam.cum_logprob / length**self.params.length_penalty

    def _sequence(self, beam: Beam, tokenizer: Tokenizer | None) -> BeamSearchSequence:
        token_ids = [*self.prompt_token_ids, *beam.token_ids]
        end = [token_ids[-1]] if beam.is_complete else []
        text = ""
        if tokenizer is not None:
            text = tokenizer.decode(token_ids[: len(token_ids) - len(end)])
            if self.params.include_stop_str_in_output:
                text += tokenizer.decode(end, skip_special_tokens=False, continues_text=True)
        return BeamSearchSequence(
            tokens=token_ids,
            cum_logprob=beam.cum_logprob,
            text=text,
            finish_reason="stop" if end else "length",
            stop_reason=end[0] if end else None,
        )


def num_candidates(width: int, num_end_ids: int) -> int:
    """Most probable tokens that each of W beams must bring: as many more than W as may be end
    tokens, so that W others continue, and at least 2 W."""
    return width + max(width, num_end_ids)


def _require(is_ok: bool, name: str, rule: str, value: object) -> None:
    if not is_ok:
        raise ValueError(f"BeamSearchParams: {name} must {rule}, got {value!r}.")
