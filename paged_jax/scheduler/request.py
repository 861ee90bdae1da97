"""`Request` and its `Sequence`s: their tokens, and where snapshots of recurrent states are taken.

`Sequence.snapshot_points` decides after which prompt tokens a state is published. `admission` adds
the ends of shared prefixes to them, and `ModelRunner.publish` publishes.
"""

import dataclasses
import weakref
from dataclasses import dataclass, field
from typing import Any

from paged_jax.cache.digests import PrefixChain
from paged_jax.formatting import short_repr
from paged_jax.models.text.grammar import GrammarCursor
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.completion import Completion, CompletionSnapshot
from paged_jax.scheduler.explain import RequestHistory
from paged_jax.scheduler.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    WaitReason,
)


@short_repr
@dataclass(eq=False)
class Request:
    """One prompt with its sampling parameters and its samples.

    Attributes:
      request_id: name of the request, unique among unfinished requests.
      arrival: number of earlier requests; it orders requests of equal priority.
      prompt: the text of the prompt; None if it was given as token ids.
      prompt_token_ids: token ids of the prompt.
      params: sampling parameters.
      seed: random seed for sampling.
      max_tokens: maximum number of generated tokens per sample, limited by the context.
      metrics: times of the request.
      priority: lower values are served first.
      deadline: time at which the request is aborted, on the clock of `metrics`; None if never.
      cache_salt: requests share cached blocks only if their salts are equal.
      client: name of the client. Clients take turns for slots, see `FairQueue`.
      sample_offset: index of the first sample of this request among all samples that use the same
        seed.
      bad_word_ids: token sequences of the bad words of `params`.
      num_cached_tokens: number of prompt tokens found in the prefix cache.
      prompt_logprobs: see `RequestOutput`. The list grows while the prompt is computed.
      history: record of waits and preemptions; None unless an explanation was requested.
      sequences: the sequence of each sample, in order.
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
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    history: RequestHistory | None = None
    sequences: list["Sequence"] = field(default_factory=list, repr=False)

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        # Use a loop, because this property is read often and `all` with a generator is slower.
        for sequence in self.sequences:
            if sequence.completion.finish_reason is None:
                return False
        return True

    def mark(self, **times: float) -> None:
        """Set times in `metrics`; times that are already set do not change.

        Args:
          **times: times in seconds; the names are fields of `RequestMetrics`.
        """
        new = {name: t for name, t in times.items() if getattr(self.metrics, name) is None}
        self.metrics = dataclasses.replace(self.metrics, **new)

    def output(self) -> RequestOutput:
        """Return the output so far, without text that later tokens may change."""
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
    """One sample of a request: its tokens, its text, and the number of tokens in the cache.

    Attributes:
      request: the request of the sequence. The reference is weak, so that a request and its
        sequences are freed as soon as there is no other reference to the request.
      index: index of the sample.
      token_ids: ids of the prompt tokens and the generated tokens.
      max_length: maximum number of tokens; at least the length of the prompt.
      completion: text of the generated tokens, and the reason why the sample ended.
      chain: object that computes the digests of full blocks; None if the blocks are not published
        to the prefix cache.
      grammar: position in the grammar, updated by `active_grammar`; None without a grammar.
      num_computed: number of tokens with K and V in the cache or, after a swap, in host memory.
      program_start: value of `num_computed` before the last program (prefill chunk or dispatch of
        decode steps) that added tokens. In layers with a sliding window, the slot may still hold
        the blocks that this program read.
      slot: index of the slot, the row of the block tables; None if the sequence does not run.
      is_swapped: whether the blocks are in host memory.
      host_blocks: the blocks in host memory, stored by `BlockMemory`; they are freed with the
        sequence.
      is_fork: whether the slot was created as a copy of the slot of another sample.
      waits_for: why the sequence does not run; empty if it runs.
      num_preemptions: number of times that the sequence was preempted.
      siblings: samples that become forks of this sequence when its prompt has been computed.
      num_wanted: number of free blocks that the sequence needed at the last attempt to start it; 0
        if unknown.
      num_known: number of prompt tokens whose blocks were found at the last look-up. In models with
        recurrent layers, `num_computed` may be lower, if there was no snapshot at their end.
      branch_points: numbers of tokens after which the recurrent state is added to the prefix cache,
        because other sequences have the same tokens up to there.
      num_lost: value of `num_computed` when the last preemption released the blocks. Some of these
        tokens may still be in the prefix cache.
      length_before: number of tokens in `token_ids` at the last preemption.
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
    siblings: list["Sequence"] = field(default_factory=list, repr=False)
    num_wanted: int = field(default=0, repr=False)
    num_known: int = field(default=0, repr=False)
    branch_points: set[int] = field(default_factory=set, repr=False)
    num_lost: int = field(default=0, repr=False)
    length_before: int = field(default=0, repr=False)

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
        self.siblings = []
        self.branch_points = set()

    @property
    def request(self) -> Request:
        """The request. The scheduler keeps a reference to it until all its sequences end."""
        request = self._request()
        assert request is not None, "the request must outlive its sequences"
        return request

    @property
    def seniority(self) -> tuple[int, int, int]:
        """Sort key of sequences: priority, arrival, index. The smallest is the most senior."""
        return self.request.priority, self.request.arrival, self.index

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_prefill(self) -> int:
        """Number of tokens still to prefill. The last token of the sequence is never prefilled."""
        return len(self.token_ids) - 1 - self.num_computed

    def snapshot_points(self, interval: int) -> set[int]:
        """Return the token counts at which prefill adds the recurrent state to the prefix cache.

        These are the `branch_points`, and the last multiple of `interval` in the prefill, from
        which later requests with the same prompt can continue.
        """
        return {(len(self.token_ids) - 1) // interval * interval, *self.branch_points}

    @property
    def draws_tokens(self) -> bool:
        """Whether the sequence may generate tokens; if not, it ends with its prefill."""
        return len(self.token_ids) < self.max_length

    @property
    def digests(self) -> list[bytes]:
        """The digests of the full blocks, computed when they are first read.

        The list is empty if `chain` is None.
        """
        return [] if self.chain is None else self.chain.digests(self.token_ids)

    def active_grammar(self) -> GrammarCursor | None:
        """Return the grammar, advanced past all tokens of the sequence.

        The result is None without a grammar, or if the grammar has ended, so any token may follow.
        """
        grammar = self.grammar
        if grammar is None:
            return None
        grammar.follow(self.token_ids, self.num_prompt_tokens)
        return None if grammar.is_over else grammar

    @property
    def history(self) -> RequestHistory | None:
        """The `history` of the request; None unless an explanation was requested."""
        return self.request.history

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, for any reason."""
        return self.completion.finish_reason is not None

    def append(
        self,
        token_id: int,
        logprob: float,
        *,
        eos_token_ids: frozenset[int],
        candidates: dict[int, Logprob] | None = None,
    ) -> None:
        """Append a generated token, and end the sequence if this token stops it.

        See `Completion.append` for the arguments. `num_computed` does not change; call `advance`.
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
        except BaseException:  # Undo after Ctrl-C too, because the text must match the tokens.
            self._undo(before, num_tokens)
            raise

    def extend(
        self, token_ids: list[int], logprobs: list[float], *, eos_token_ids: frozenset[int]
    ) -> bool:
        """Try to append several tokens at once; change nothing if one of them may end the sequence.

        This is faster than calling `append` for each token. See `Completion.extend` for the
        arguments.

        Returns:
          True if the tokens were appended. False if nothing has changed; then the caller must call
          `append` for each token.
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

    def _undo(self, snapshot: CompletionSnapshot, num_tokens: int) -> None:
        del self.token_ids[num_tokens:]
        self.completion.restore(snapshot)

    def advance(self, num_tokens: int) -> None:
        """Increase the number of tokens in the cache, `num_computed`.

        Args:
          num_tokens: number of tokens of a prefill chunk, or number of generated tokens. A decode
            step computes K and V of the token before the generated token.
        """
        if num_tokens:
            self.program_start = self.num_computed
        self.num_computed += num_tokens
        assert self.num_prefill >= 0, "prefill leaves the last known token to decode"

    def restart(self) -> None:
        """Reset all state except the tokens, so that their K and V are computed again."""
        self.num_computed = self.program_start = 0
        self.slot = None
        self.is_swapped, self.host_blocks = False, None
        self.is_fork = False
        self.num_preemptions = 0
        self.siblings = []
        self.branch_points = set()
        self.num_wanted = self.num_known = self.num_lost = self.length_before = 0
        if self.grammar is not None:
            self.grammar.reset()

    def output(self) -> CompletionOutput:
        """Return the output so far, without text that later tokens may change."""
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
