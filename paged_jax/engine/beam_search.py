# pyright: strict, reportUnknownMemberType=false
r"""Beam search: the most probable continuations of a prompt.

Each of the W beams of a prompt has a slot, and the beams share the blocks of their common tokens:

    prompt -- the -- cat -- sat         slot 0   [ 3  1  5 ]
                  \- dog -- ran         slot 1   [ 3  1  4 ]     blocks 3 and 1 have 3 references
                         \- is          slot 2   [ 3  1  2 ]

On the device, a step is one program. It gives each slot the block table of its beam's parent
(`paged_cache.reorder`) and appends the last token of the beam; if other slots share the block of
this token, the block is copied first. The program returns the most probable next tokens of each
beam. Then the host chooses the beams of the next step:

    the candidates are the beams, extended by at least 2 W most probable next tokens per beam
    a candidate that ends with an end-of-sequence token is complete and does not continue
    the best W of the other candidates are the beams of the next step
    at the end of the search, the best W of all beams are returned, complete or not

Beams are ranked by ``cum_logprob / length**length_penalty``, as in vLLM. The length includes the
prompt, but not the end-of-sequence token.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged_jax.arguments import is_int, is_real, names_arguments
from paged_jax.cache.sequence_blocks import num_cached_tokens_at
from paged_jax.engine.core import EngineCore
from paged_jax.engine.request_factory import Prompt, list_prompts
from paged_jax.formatting import short_repr
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.runner.runner import slot_of
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.block_budget import BlockBudget
from paged_jax.scheduler.completion import Completion
from paged_jax.scheduler.request import Request
from paged_jax.scheduler.request import Sequence as SlotUser

# Maximum absolute value of `length_penalty`. It is limited so that a sequence length raised to the
# power of the penalty neither overflows nor underflows a float.
_MAX_LENGTH_PENALTY = 10.0


@names_arguments
@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, with the names and meanings of vLLM.

    Attributes:
      beam_width: W, number of beams that continue at each step, and number of sequences returned.
      max_tokens: maximum number of tokens to generate; the context may allow fewer.
      ignore_eos: whether end-of-sequence tokens are treated like other tokens.
      temperature: must be 0, because beam search does not sample.
      length_penalty: exponent p of the score ``cum_logprob / length**p``, -10 to 10. Positive
        values favour long sequences, negative values short sequences.
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
    """A sequence found by beam search.

    Attributes:
      tokens: token ids of the prompt and the generated tokens, including the end-of-sequence token.
      cum_logprob: sum of the log-probabilities of the generated tokens, in nats.
      text: text of all tokens, including the prompt, without special tokens; empty without a
        tokenizer.
      finish_reason: ``"stop"`` (an end-of-sequence token) or ``"length"``.
      stop_reason: id of the end-of-sequence token; None if `finish_reason` is ``"length"``.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: int | None = None


@short_repr
@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    """Result of beam search for a prompt.

    Attributes:
      sequences: up to `beam_width` sequences, the best first.
    """

    sequences: list[BeamSearchSequence]


class Beam(NamedTuple):
    """One beam: a continuation of the prompt by generated tokens."""

    token_ids: tuple[int, ...]  # the generated tokens
    cum_logprob: float
    parent: int = 0  # index of the beam of the previous step that this beam extends by one token
    is_complete: bool = False


class BeamChoice:
    """The beams of a prompt on the host; `advance` chooses the beams of the next step.

    Args:
      prompt_token_ids: the prompt.
      max_tokens: maximum number of tokens to generate: `params.max_tokens`, limited by the context.
      params: parameters of the search.
      end_ids: token ids that complete a sequence.
      max_bias: the largest value that the engine's `token_bias` adds to a log-probability; 0 if it
        adds no positive values.

    Attributes:
      beams: the beams of the next step, the best first; complete beams are not among them.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        params: BeamSearchParams,
        end_ids: frozenset[int],
        max_bias: float = 0.0,
    ):
        self.params = params
        self.prompt_token_ids = list(prompt_token_ids)
        self.max_tokens = max_tokens
        self._end_ids = end_ids
        self._max_bias = max_bias
        self.beams = [Beam((), 0.0)]
        # The W best of the complete beams so far, in descending order of score.
        self._completed: list[Beam] = []

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
        """Extend each beam by a token, and keep the best of the extended beams.

        Args:
          top_ids: for each beam, the ids of its N most probable next tokens, the most probable
              first.
          top_logprobs: the log-probabilities of these tokens, in nats.

        Raises:
          FloatingPointError: a log-probability is NaN.
        """
        if any(math.isnan(logprob) for row in top_logprobs for logprob in row):
            raise FloatingPointError(
                f"beam_search: the model gave NaN after {self.num_tokens} tokens. Its weights may "
                "be damaged, or its activations may overflow in their dtype."
            )
        candidates = sorted(
            (
                (beam.cum_logprob + logprob, parent, token_id)
                for parent, beam in enumerate(self.beams)
                for token_id, logprob in zip(top_ids[parent], top_logprobs[parent], strict=True)
                if logprob > -math.inf  # skip suppressed tokens
            ),
            # The sort is stable: among equal scores, the candidate of the better beam comes first.
            key=lambda candidate: -candidate[0],
        )
        width = self.params.beam_width
        running_beams: list[Beam] = []
        ended_beams: list[Beam] = []
        for cum_logprob, parent, token_id in candidates:
            is_end = token_id in self._end_ids
            beams = ended_beams if is_end else running_beams
            if len(beams) < width:
                token_ids = (*self.beams[parent].token_ids, token_id)
                beams.append(Beam(token_ids, cum_logprob, parent, is_end))
        self._completed = self._best(self._completed + ended_beams)
        self.beams = running_beams

    @property
    def is_done(self) -> bool:
        """Whether the search is over: no further token can change the best W beams."""
        if not self.beams or self.num_generated == self.max_tokens:
            return True
        if len(self._completed) < self.params.beam_width:
            return False
        # Compute an upper bound on the score that the best beam can reach. Each further token adds
        # at most `max_bias` to the sum of log-probabilities. For a fixed sum, the score is
        # monotonic in the length, so its maximum is at the shortest or at the longest possible
        # length.
        num_prompt, num_remaining = len(self.prompt_token_ids), self.max_tokens - self.num_generated
        best = self.beams[0].cum_logprob + num_remaining * self._max_bias
        lengths = self.num_tokens, num_prompt + self.max_tokens
        max_score = max(best / length**self.params.length_penalty for length in lengths)
        return max_score <= self._score(self._completed[-1])

    def best(self) -> list[Beam]:
        """Return the best W beams so far, complete or not, the best first."""
        return self._best(self._completed + self.beams)

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Return the best `beam_width` beams as sequences of tokens with their texts."""
        return BeamSearchOutput([self._sequence(beam, tokenizer) for beam in self.best()])

    def _best(self, beams: list[Beam]) -> list[Beam]:
        # The sort is stable: among equal scores, the beam that was completed first comes first.
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
    """Return the number of most probable next tokens that the device returns per beam.

    It is `width` plus the number of end-of-sequence tokens, but at least ``2 * width``. So even if
    all end-of-sequence tokens are among the candidates of a beam, `width` candidates can continue.
    """
    return width + max(width, num_end_ids)


def _require(is_ok: bool, name: str, rule: str, value: object) -> None:
    if not is_ok:
        raise ValueError(f"BeamSearchParams: {name} must {rule}, got {value!r}.")


def beam_search(
    core: EngineCore, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Find the most probable continuations of each prompt by beam search.

    Prompts run at the same time if they fit. The search of a prompt starts when there are enough
    free slots for all its beams, and enough free blocks for all tokens that the beams may generate.
    So beams are never preempted. Prompts share blocks through the prefix cache.

    Args:
      core: core of an engine that has no unfinished requests.
      prompts: one prompt or several, see `LLM.generate`.
      params: parameters of the search, the same for all prompts.

    Returns:
      One output for each prompt, in their order.

    Raises:
      ValueError: a prompt is empty, does not fit the context or contains token ids out of range; or
        a search needs more slots or blocks than the engine has. In these cases nothing has been
        run.
      RuntimeError: the engine has an unfinished request.
      FloatingPointError: the model returned NaN.

    The program of a step is compiled at its first use, for each `beam_width` and each power of two
    of running beams. `Engine.warmup` does not compile it.
    """
    core.check_idle("beam_search")
    prompts = list_prompts("LLM.beam_search", prompts)
    end_ids = frozenset[int]() if params.ignore_eos else core.loaded.eos_token_ids
    max_bias = max((0.0, *core.loaded.token_bias.values))
    sampling_params = SamplingParams(temperature=0, max_tokens=params.max_tokens)
    make_request, now = core.request_factory.make_request, time.perf_counter()
    requests = [
        make_request(f"beam search {i}", i, prompt, sampling_params, arrival_time=now)
        for i, prompt in enumerate(prompts)
    ]
    searches = [_Search(request, params, end_ids, max_bias) for request in requests]
    for search in searches:
        _check_fits(core, search)
    with core.guard.change():
        _SearchBatch(core, params, num_end_ids=len(end_ids)).run(searches)
    return [search.output(core.loaded.tokenizer) for search in searches]


def _check_fits(core: EngineCore, search: "_Search") -> None:
    width, num_tokens = search.params.beam_width, len(search.prompt_token_ids)
    num_slots, block_size = core.options.max_num_seqs, core.executor.sizes.block_size
    if width > num_slots:
        raise ValueError(
            f"beam_search: beam_width must be at most max_num_seqs = {num_slots}, got {width}."
        )
    num_blocks = search.max_blocks(core.scheduler.block_budget)
    if num_blocks > core.num_blocks:
        raise ValueError(
            f"beam_search: {width} beams of {num_tokens} prompt tokens and {search.max_tokens} new "
            f"tokens must fit the pool of {core.num_blocks} blocks of {block_size} tokens, "
            f"but may need {num_blocks} blocks. Use fewer beams or tokens, or more num_blocks."
        )


class _Search(BeamChoice):
    """Beam search for one prompt: the beams, and their slots while the search runs."""

    def __init__(
        self,
        request: Request,
        params: BeamSearchParams,
        end_ids: frozenset[int],
        max_bias: float,
    ):
        super().__init__(request.prompt_token_ids, request.max_tokens, params, end_ids, max_bias)
        self.request = request
        self.slot_users: list[SlotUser] = []  # one per beam

    def max_blocks(self, block_budget: BlockBudget) -> int:
        """Return the maximum number of blocks that all beams of the search hold together.

        The beams share the full blocks of the prompt, which count once.
        """
        num_prompt = len(self.prompt_token_ids)
        num_common = block_budget.num_shared(num_prompt)
        blocks_per_beam = block_budget.num_wanted(
            num_cached_tokens_at(num_prompt + self.max_tokens)
        )
        return num_common + self.params.beam_width * (blocks_per_beam - num_common)

    def last_token(self, beam: Beam) -> int:
        """Return the last token of a beam, the only one that is not in the cache yet."""
        return beam.token_ids[-1] if beam.token_ids else self.prompt_token_ids[-1]


class _SearchBatch:
    """Runs the searches of several prompts in the slots of an engine that has no requests."""

    def __init__(self, core: EngineCore, params: BeamSearchParams, *, num_end_ids: int):
        self._core = core
        self._runner = core.runner
        self._block_budget = core.scheduler.block_budget
        self._width = width = params.beam_width
        self._num_top = min(num_candidates(width, num_end_ids), core.loaded.config.vocab_size)
        self._free_slots = list(range(core.options.max_num_seqs))
        self._running: list[_Search] = []

    def run(self, searches: Sequence[_Search]) -> None:
        """Run all searches. They start in order, each when there are enough slots and blocks."""
        waiting = deque(searches)
        while waiting or self._running:
            admitted: list[_Search] = []
            while waiting and self._has_room(waiting[0]):
                admitted.append(waiting.popleft())
                self._admit(admitted[-1])
            assert self._running, "each search fits alone"
            self._prefill([search.slot_users[0] for search in admitted])
            self._step()
            for search in [search for search in self._running if search.is_done]:
                self._release(search)

    def _has_room(self, search: _Search) -> bool:
        searches = (*self._running, search)
        num_blocks = sum(s.max_blocks(self._block_budget) for s in searches)
        return len(self._free_slots) >= self._width and num_blocks <= self._core.num_blocks

    def _admit(self, search: _Search) -> None:
        slots = self._free_slots[: self._width]
        del self._free_slots[: self._width]
        for index, slot in enumerate(slots):
            user = SlotUser(
                search.request,
                index,
                search.prompt_token_ids,
                len(search.prompt_token_ids) + search.max_tokens,
                Completion(search.request.params, None),
            )
            user.slot = slot
            search.slot_users.append(user)
        self._running.append(search)

    def _attach_prefix(self, sequence: SlotUser) -> None:
        """Fill the slot of a sequence with the prefix of its prompt that is in the prefix cache."""
        scheduler = self._core.scheduler
        if not scheduler.enable_prefix_caching:
            return
        sequence.chain = self._core.requests.prefix_chain(sequence.request)
        num_tokens = self._runner.attach(sequence)
        sequence.num_computed = sequence.program_start = num_tokens
        self._core.stats.num_queried_tokens += len(sequence.token_ids) - 1
        self._core.stats.num_cached_tokens += num_tokens

    def _prefill(self, sequences: list[SlotUser]) -> None:
        """Compute K and V of the prompts, except for their last tokens, and publish the blocks."""
        for sequence in sequences:
            self._attach_prefix(sequence)
        max_chunk = self._runner.executor.sizes.max_chunk
        while chunks := [(s, min(s.num_prefill, max_chunk)) for s in sequences if s.num_prefill]:
            self._runner.prefill(chunks)
            for sequence, count in chunks:
                sequence.advance(count)
                self._runner.publish(sequence)

    def _step(self) -> None:
        """Run the model on the last token of every beam, and choose the beams of the next step."""
        rows: list[tuple[int, int, int, int]] = []
        for search in self._running:
            slots = [slot_of(user) for user in search.slot_users]
            for slot, beam in zip(slots, search.beams, strict=False):
                token_id = search.last_token(beam)
                rows.append((slots[beam.parent], slot, token_id, search.num_generated))
        num_rows = self._width * len(self._running)
        tokens = self._runner.beam(rows, num_rows=num_rows, num_top=self._num_top)
        self._note_blocks()
        top_ids, top_logprobs = np.asarray(tokens.top_ids), np.asarray(tokens.top_logprobs)
        start = 0
        for search in self._running:
            end = start + len(search.beams)
            search.advance(top_ids[start:end].tolist(), top_logprobs[start:end].tolist())
            start = end

    def _note_blocks(self) -> None:
        """Count the blocks in use, and the blocks that would be in use without sharing."""
        row = self._block_budget.num_in_row
        num_unshared = sum(
            len(search.beams) * row(search.num_tokens, num_cached_tokens_at(search.num_tokens))
            for search in self._running
        )
        self._core.stats.num_steps += 1
        self._core.block_meter.count(num_unshared, self._runner.free_blocks)

    def _release(self, search: _Search) -> None:
        for user in search.slot_users:
            self._runner.release(user)
            self._free_slots.append(slot_of(user))
        self._running.remove(search)
