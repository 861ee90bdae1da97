"""Lends the parts of an idle engine to a search that fills slots and blocks by itself."""

import contextlib

from paged_jax.engine.inputs import Inputs
from paged_jax.engine.recovery import ChangeGuard
from paged_jax.engine.requests import RequestTable
from paged_jax.engine.stats import BlockMeter, EngineStats
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.block_budget import BlockBudget
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.scheduler import Scheduler


class ExclusiveUse:
    """What beam search needs of an engine. See `Engine.exclusive`.

    Attributes:
      runner: runs programs.
      inputs: checks prompts and parameters.
      eos_token_ids: the model's end tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        inputs: Inputs,
        eos_token_ids: frozenset[int],
        *,
        requests: RequestTable,
        scheduler: Scheduler,
        blocks: BlockMeter,
        stats: EngineStats,
        guard: ChangeGuard,
    ):
        self.runner = runner
        self.inputs = inputs
        self.eos_token_ids = eos_token_ids
        self._requests = requests
        self._scheduler = scheduler
        self._blocks = blocks
        self._stats = stats
        self._guard = guard

    @property
    def block_budget(self) -> BlockBudget:
        """What counts the blocks of sequences."""
        return self._scheduler.block_budget

    def running(self) -> contextlib.AbstractContextManager[None]:
        """A context for use of the runner. It ends with empty slots; an exception empties all."""
        return self._guard.change()

    def attach_prefix(self, sequence: Sequence) -> None:
        """Begin the slot of a sequence with the blocks of its prompt that are cached."""
        if not self._scheduler.enable_prefix_caching:
            return
        sequence.chain = self._requests.prefix_chain(sequence.request)
        num_tokens = self.runner.slots.attach(sequence)
        sequence.num_computed = sequence.program_start = num_tokens
        self._scheduler.stats.num_queried_tokens += len(sequence.token_ids) - 1
        self._scheduler.stats.num_cached_tokens += sequence.num_computed

    def count_step(self, num_unshared: int) -> None:
        """Count a step, and the blocks after it, of which so many would be held without sharing."""
        self._stats.num_steps += 1
        self._blocks.count(num_unshared, self.runner.slots.num_free)
