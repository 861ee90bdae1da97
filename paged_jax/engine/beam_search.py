"""Beam search: the most probable continuations, by keeping the best few at every step.

Each beam of W has a slot, and the beams of a prompt share the blocks of all they have in common:

    prompt -- the -- cat -- sat         slot 0   [ 3  1  5 ]
                  \\- dog -- ran         slot 1   [ 3  1  4 ]     3 and 1 are held three times
                         \\- is          slot 2   [ 3  1  2 ]

A step on the device is one program: every slot becomes what the slot of its beam's parent was (in
the tables only), takes the beam's last token, with a copy of the block where that is shared still,
and answers with the most probable next tokens. The host chooses among those of all beams: `beams`.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from paged_jax.cache.sequence_blocks import num_cached_tokens_at
from paged_jax.engine.beams import (
    Beam,
    BeamChoice,
    BeamSearchOutput,
    BeamSearchParams,
    num_candidates,
)
from paged_jax.engine.engine import Engine
from paged_jax.engine.exclusive import ExclusiveUse
from paged_jax.engine.inputs import Prompt
from paged_jax.runner.slots import slot_of
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.block_budget import BlockBudget
from paged_jax.scheduler.completion import Completion
from paged_jax.scheduler.request import Request
from paged_jax.scheduler.request import Sequence as SlotUser


def beam_search(
    engine: Engine, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Find the most probable continuations of prompts, several prompts at once where they fit.

    A prompt begins when slots for all its beams are free, and blocks for all that they may come to
    need, so that no beam ever has to leave. Its blocks come from the prefix cache, and stay there.
    Of the engine's totals, this counts steps, blocks, what sharing saves and what the prefix cache
    finds.

    Args:
      engine: an engine without unfinished requests. It is empty again afterwards, whatever happens.
      prompts: one prompt or several, see `LLM.generate`.
      params: parameters of the search, the same for all prompts.

    Returns:
      One output for each prompt, in their order.

    Raises:
      ValueError: a prompt is empty, too long or holds tokens out of range, or there can never be
        slots or blocks enough for it. Nothing has been run then.
      RuntimeError: a request is unfinished.
      FloatingPointError: the model gave NaN.

    Cost: a step is a decode step of all beams. Its program is compiled once for each `beam_width`
    and for each power of two of beams at once, at the first use: `Engine.warmup` leaves it out.
    """
    parts = engine.exclusive("beam_search")
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    end_ids = frozenset() if params.ignore_eos else parts.eos_token_ids
    most_bias = max((0.0, *engine.token_bias.values))
    searches = [
        _Search(_as_request(parts, number, prompt, params), params, end_ids, most_bias)
        for number, prompt in enumerate(prompts)
    ]
    for search in searches:
        _check_fits(engine, search, parts.block_budget)
    with parts.running():
        _SearchBatch(engine, parts, params, num_end_ids=len(end_ids)).run(searches)
    return [search.output(engine.tokenizer) for search in searches]


def _as_request(
    parts: ExclusiveUse, number: int, prompt: Prompt, params: BeamSearchParams
) -> Request:
    """The prompt as token ids, checked as that of any request."""
    return parts.inputs.make_request(
        f"beam search {number}",
        number,
        prompt,
        SamplingParams(temperature=0, max_tokens=params.max_tokens),
        arrival_time=time.perf_counter(),
    )


def _check_fits(engine: Engine, search: "_Search", block_budget: BlockBudget) -> None:
    width, num_tokens = search.params.beam_width, len(search.prompt_token_ids)
    if width > engine.max_num_seqs:
        raise ValueError(
            f"beam_search: beam_width must be at most max_num_seqs, {engine.max_num_seqs} slots, "
            f"got {width}."
        )
    num_blocks = search.most_blocks(block_budget)
    if num_blocks > engine.num_blocks:
        raise ValueError(
            f"beam_search: {width} beams of {num_tokens} prompt tokens and {search.max_tokens} new "
            f"ones must fit the pool of {engine.num_blocks} blocks of {engine.block_size} tokens, "
            f"but may need {num_blocks}. Use fewer beams or tokens, or more num_blocks."
        )


class _Search(BeamChoice):
    """The beams of one prompt, and the slots that they have while it runs."""

    def __init__(
        self,
        request: Request,
        params: BeamSearchParams,
        end_ids: frozenset[int],
        most_bias: float,
    ):
        super().__init__(request.prompt_token_ids, request.max_tokens, params, end_ids, most_bias)
        self.request = request
        self.slot_users: list[SlotUser] = []  # of beam 0, 1, ...

    def most_blocks(self, block_budget: BlockBudget) -> int:
        """Most blocks that the beams hold: they share full ones of the prompt, maybe no others."""
        num_prompt = len(self.prompt_token_ids)
        num_common = block_budget.num_shared(num_prompt)
        num_each = block_budget.num_wanted(num_cached_tokens_at(num_prompt + self.max_tokens))
        return num_common + self.params.beam_width * (num_each - num_common)

    def last_token(self, beam: Beam) -> int:
        """The token to be fed next: all others of the beam are in the cache."""
        return beam.token_ids[-1] if beam.token_ids else self.prompt_token_ids[-1]


class _SearchBatch:
    """The searches that run at once, in the slots of an idle engine."""

    def __init__(
        self, engine: Engine, parts: ExclusiveUse, params: BeamSearchParams, *, num_end_ids: int
    ):
        self._engine = engine
        self._parts = parts
        self._runner = parts.runner
        self._width = width = params.beam_width
        self._num_top = min(num_candidates(width, num_end_ids), engine.config.vocab_size)
        self._free_slots = list(range(engine.max_num_seqs))
        self._running: list[_Search] = []

    def run(self, searches: Sequence[_Search]) -> None:
        """Run searches to their ends, in their order, each as soon as there is room for it."""
        waiting = deque(searches)
        while waiting or self._running:
            admitted = []
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
        num_blocks = sum(s.most_blocks(self._parts.block_budget) for s in searches)
        return len(self._free_slots) >= self._width and num_blocks <= self._engine.num_blocks

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

    def _prefill(self, sequences: list[SlotUser]) -> None:
        """Compute prompts, all but their last tokens, and let them be found in the prefix cache."""
        for sequence in sequences:
            self._parts.attach_prefix(sequence)
        max_chunk = self._runner.sizes.max_chunk
        while chunks := [(s, min(s.num_prefill, max_chunk)) for s in sequences if s.num_prefill]:
            self._runner.prefill(chunks)
            for sequence, count in chunks:
                sequence.advance(count)
                self._runner.slots.publish(sequence)

    def _step(self) -> None:
        """Feed the last token of every beam, and choose among the tokens that may come next."""
        rows = []
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
        """Count blocks that are held, and that would be if beams shared none, as a step does."""
        row = self._parts.block_budget.num_in_row
        num_unshared = sum(
            len(search.beams) * row(search.num_tokens, num_cached_tokens_at(search.num_tokens))
            for search in self._running
        )
        self._parts.count_step(num_unshared)

    def _release(self, search: _Search) -> None:
        for user in search.slot_users:
            self._runner.slots.release(user)
            self._free_slots.append(slot_of(user))
        self._running.remove(search)
