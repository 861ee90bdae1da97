"""What the scheduler knows of a request: its samples as sequences of tokens. Imports no jax."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from paged_jax.cache.digests import PrefixChain
from paged_jax.scheduler.history import History
from paged_jax.scheduler.outputs import WaitReason


class Request(Protocol):
    """What the scheduler reads of a request; its sequences share one such object.

    Attributes:
      request_id: unique among the requests that are not finished.
      priority: lower runs earlier.
      arrival: a number of its own that grows from request to request; ranks equal priorities.
      deadline: when the request expires, on the clock of ``now``; None for never.
    """

    request_id: str
    priority: int
    arrival: int
    deadline: float | None


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its tokens, and how many of them are in the cache.

    Attributes:
      request: the object that all sequences of a request share.
      index: which sample this is.
      token_ids: prompt and generated tokens.
      max_length: number of tokens at which it is complete; above the number of known ones.
      chain: names its full blocks for the prefix cache; None if it takes no part in that.
      history: where its waits are noted; None if nobody asked.
      num_prompt_tokens: how many of the tokens were given.
      num_computed: how many of the tokens are in the cache, or in its copy in host memory.
      slot: its row of the block tables; None unless it is resident.
      is_swapped: whether its blocks are in host memory.
      host_blocks: what `Memory` keeps there. On the sequence, so that it goes when that goes.
      is_fork: whether its slot began as a copy of that of another sample.
      waits_for: why it is not resident; empty if it is.
      num_preemptions: how often it was.
    """

    request: Request
    index: int
    token_ids: list[int] = field(repr=False)
    max_length: int
    chain: PrefixChain | None = field(default=None, repr=False)
    history: History | None = field(default=None, repr=False)
    num_prompt_tokens: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    slot: int | None = field(default=None, init=False)
    is_swapped: bool = field(default=False, init=False)
    host_blocks: Any = field(default=None, init=False, repr=False)
    is_fork: bool = field(default=False, init=False)
    waits_for: WaitReason = field(default="", init=False)
    num_preemptions: int = field(default=0, init=False)
    # Samples that become forks of this one when its prompt is computed.
    _siblings: list["Sequence"] = field(default_factory=list, init=False, repr=False)
    # At the last preemption: how many tokens it had, and how many of them left the cache for good.
    _length_before: int = field(default=0, init=False, repr=False)
    _num_lost: int = field(default=0, init=False, repr=False)
    # Free blocks that were too few when it was last tried.
    _num_wanted: int = field(default=0, init=False, repr=False)

    def __post_init__(self):
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def seniority(self) -> tuple[int, int, int]:
        """Ranks sequences: the smaller, the more senior."""
        return self.request.priority, self.request.arrival, self.index

    @property
    def num_prefill(self) -> int:
        """How many tokens prefill still has to put into the cache."""
        return len(self.token_ids) - 1 - self.num_computed

    @property
    def digests(self) -> list[bytes]:
        """The digests of the full blocks of its tokens, computed when asked for."""
        return [] if self.chain is None else self.chain.digests(self.token_ids)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a chunk that was run."""
        self.num_computed += num_tokens
        assert self.num_prefill >= 0, "the last known token is left to decode"

    def append(self, token_ids: list[int]) -> None:
        """Take the tokens that decode has drawn; each step put the token before into the cache."""
        assert self.num_prefill == 0, "only a sequence with a computed prefix decodes"
        self.token_ids.extend(token_ids)
        self.num_computed += len(token_ids)
