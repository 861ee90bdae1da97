"""A request and its sequences, one for each sample, while they run: plain Python, no arrays."""

import dataclasses
import weakref
from dataclasses import dataclass, field
from typing import Any

from paged_jax.cache.sequence_blocks import PrefixChain
from paged_jax.models.text.grammar import GrammarCursor
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.completion import Completion
from paged_jax.scheduler.history import History
from paged_jax.scheduler.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    WaitReason,
)
from paged_jax.short_repr import short_repr


@short_repr
@dataclass(eq=False)
class Request:
    """One prompt and what is asked of it.

    Attributes:
      request_id: name of the request; unique among the requests that are not finished.
      arrival: number of requests that came before it; ranks equal priorities.
      prompt: the text; None if it was given as token ids.
      prompt_token_ids: the tokens that the model reads.
      params: sampling parameters.
      seed: seed of its random draws.
      max_tokens: most tokens of each sample, with the context taken into account.
      metrics: times of the request.
      priority: rank of the request; lower is served first.
      deadline: time at which it expires, on the clock of the metrics; None for never.
      cache_salt: salt of the prefix cache: requests share cached blocks only where it is the same.
      client: whose request it is; clients take turns for slots.
      sample_offset: number of its first sample among those of its seed.
      num_cached_tokens: tokens of the prompt that were found in the prefix cache.
      prompt_logprobs: see `RequestOutput`; grows while the prompt is computed.
      history: waits and preemptions; None if no explanation was asked for.
      sequences: the sequence of each sample, in their order.
    """

    request_id: str
    arrival: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    metrics: RequestMetrics
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    client: str = ""
    sample_offset: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    history: History | None = None
    sequences: list["Sequence"] = field(default_factory=list, repr=False)

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        for sequence in self.sequences:  # asked so often that `all` of a generator would show
            if sequence.completion.finish_reason is None:
                return False
        return True

    def mark(self, **times: float) -> None:
        """Note when something happened, unless it was noted before."""
        new = {name: t for name, t in times.items() if getattr(self.metrics, name) is None}
        self.metrics = dataclasses.replace(self.metrics, **new)

    def output(self) -> RequestOutput:
        """What is final so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.is_finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            explanation=(
                None if self.history is None else self.history.explanation(self.num_cached_tokens)
            ),
        )


@short_repr
@dataclass(eq=False, init=False)
class Sequence:
    """One sample of a request: its tokens, how many of them are in the cache, and its text.

    Attributes:
      request: the request, which all of its sequences share; kept weakly: a request owns its
        sequences, and both are freed as soon as nothing else holds the request.
      index: index of the sample.
      token_ids: prompt and generated tokens.
      max_length: number of tokens at which it is complete; that of the prompt's or above.
      completion: the text of the generated tokens, and why they ended.
      chain: names the full blocks for the prefix cache; None if they are not cached.
      grammar: where its text is in its grammar, as of the last `followed_grammar`; None if the
        text may have any form.
      num_computed: tokens that are in the cache, or in its copy in host memory.
      program_start: how many there were when the last program began that added some: layers with a
        sliding window still hold what that one read, or less.
      slot: row of the block tables; None unless the sequence runs.
      is_swapped: whether the blocks are in host memory.
      host_blocks: what `BlockMemory` keeps there, so that it is freed with the sequence.
      is_fork: whether the slot began as a copy of that of another sample.
      waits_for: why the sequence does not run; empty if it does.
      num_preemptions: times that the sequence was preempted.
    """

    index: int
    token_ids: list[int] = field(repr=False)
    max_length: int
    completion: Completion = field(repr=False)
    chain: PrefixChain | None = field(default=None, repr=False)
    grammar: GrammarCursor | None = field(default=None, repr=False)
    num_computed: int = 0
    program_start: int = 0
    slot: int | None = None
    is_swapped: bool = False
    host_blocks: Any = field(default=None, repr=False)
    is_fork: bool = False
    waits_for: WaitReason = ""
    num_preemptions: int = 0

    def __init__(
        self,
        request: Request,
        index: int,
        token_ids: list[int],
        max_length: int,
        completion: Completion,
        chain: PrefixChain | None = None,
        grammar: GrammarCursor | None = None,
    ):
        self._request = weakref.ref(request)
        self.index = index
        self.token_ids = token_ids
        self.max_length = max_length
        self.completion = completion
        self.chain = chain
        self.grammar = grammar

    @property
    def request(self) -> Request:
        """The request, which must be held elsewhere: by the scheduler until the sequence ends."""
        request = self._request()
        assert request is not None, "its request must be held as long as the sequence is used"
        return request

    @property
    def seniority(self) -> tuple[int, int, int]:
        """Ranks sequences: the smaller, the more senior."""
        return self.request.priority, self.request.arrival, self.index

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the tokens are the prompt's."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """How many of the tokens were generated."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_prefill(self) -> int:
        """How many tokens prefill still has to put into the cache."""
        return len(self.token_ids) - 1 - self.num_computed

    @property
    def draws_tokens(self) -> bool:
        """Whether tokens are to come; else it is complete once its prompt is computed."""
        return len(self.token_ids) < self.max_length

    @property
    def digests(self) -> list[bytes]:
        """The digests of the full blocks of its tokens, computed when asked for."""
        return [] if self.chain is None else self.chain.digests(self.token_ids)

    def followed_grammar(self) -> GrammarCursor | None:
        """Its grammar, behind all of its tokens; None if none binds what comes next."""
        grammar = self.grammar
        if grammar is None:
            return None
        grammar.follow(self.token_ids, self.num_prompt_tokens)
        return None if grammar.is_over else grammar

    @property
    def history(self) -> History | None:
        """Where its waits are noted; None if no explanation was asked for."""
        return self.request.history

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for any reason."""
        return self.completion.finish_reason is not None

    def append(
        self,
        token_id: int,
        logprob: float,
        *,
        eos_token_ids: frozenset[int],
        candidates: dict[int, Logprob] | None = None,
    ) -> None:
        """Append a generated token to tokens and text, and end the sequence if that stops it.

        The number of computed tokens stays; `advance` counts it.

        Args:
          token_id: the token.
          logprob: its log-probability, in nats.
          eos_token_ids: tokens that end a sequence, unless its parameters ignore them.
          candidates: the token and the most probable ones, where they are asked for.
        """
        before, num_tokens = self.completion.snapshot(), len(self.token_ids)
        try:
            self.token_ids.append(token_id)
            self.completion.append(
                token_id,
                logprob,
                num_tokens=self.num_generated,
                is_last=len(self.token_ids) >= self.max_length,
                eos_token_ids=eos_token_ids,
                candidates=candidates,
            )
        except BaseException:  # Ctrl-C: tokens and text belong together
            self._undo(before, num_tokens)
            raise

    def extend(
        self, token_ids: list[int], logprobs: list[float], *, eos_token_ids: frozenset[int]
    ) -> bool:
        """Append several tokens at once, if surely none of them ends the sequence.

        Args:
          token_ids, logprobs: the tokens, and their log-probabilities, in nats.
          eos_token_ids: see `append`.

        Returns:
          Whether they were appended. If not, nothing has changed: `append` them one by one.
        """
        before, num_tokens = self.completion.snapshot(), len(self.token_ids)
        if num_tokens + len(token_ids) >= self.max_length:
            return False
        try:
            if not self.completion.extend(token_ids, logprobs, eos_token_ids=eos_token_ids):
                return False
            self.token_ids += token_ids
            return True
        except BaseException:
            self._undo(before, num_tokens)
            raise

    def _undo(self, snapshot: tuple[Any, ...], num_tokens: int) -> None:
        del self.token_ids[num_tokens:]
        self.completion.restore(snapshot)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that are now in the cache: those of a chunk, or one for each that decode
        has drawn, as each decode step puts the token before into the cache."""
        if num_tokens:
            self.program_start = self.num_computed
        self.num_computed += num_tokens
        assert self.num_prefill >= 0, "the last known token is left to decode"

    def restart(self) -> None:
        """Keep the tokens, and forget all that was computed of them."""
        self.num_computed = self.program_start = 0
        self.slot = None
        self.is_swapped, self.host_blocks = False, None
        self.is_fork = False
        self.num_preemptions = 0
        if self.grammar is not None:
            self.grammar.reset()

    def output(self) -> CompletionOutput:
        """What is final so far."""
        completion = self.completion
        return CompletionOutput(
            index=self.index,
            text=completion.text,
            token_ids=self.token_ids[self.num_prompt_tokens :],
            cumulative_logprob=completion.cumulative_logprob,
            logprobs=None if completion.logprobs is None else list(completion.logprobs),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
