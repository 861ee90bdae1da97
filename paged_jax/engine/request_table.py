"""`RequestTable`: the unfinished requests of an engine, and how they restart.

Ctrl-C or a lack of memory may interrupt a step at any point, and leave the state on the device
unknown. All tokens of the requests are on the host. So the engine discards the state on the device
and computes the K and V of the tokens again. `ChangeGuard` notices the interruption.
"""

import itertools
import time

from paged_jax.cache.digests import PrefixChain, root_digest
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.explain import describe_match
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan


class RequestTable:
    """Table of the unfinished requests.

    Args:
      scheduler: scheduler with the same requests. The table adds them to the scheduler, and removes
        them from it.
      runner: runner that frees the slots of ended requests.

    Attributes:
      unfinished: unfinished requests by id.
      ended: requests that have ended but have not been returned by `EngineCore.step` yet. They
        ended in the current step, or in an earlier step that was interrupted.
      num_added: number of requests added so far.
      weights_version: number of times that the weights were replaced.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner):
        self._scheduler = scheduler
        self._runner = runner
        self.unfinished: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.num_added = 0
        self.weights_version = 0

    def next_id(self) -> str:
        """Return an id for a new request that no unfinished request has.

        It is the number of requests added before or, if this id is taken, the next free number.
        """
        counter = itertools.count(self.num_added)
        return next(name for i in counter if (name := str(i)) not in self.unfinished)

    def add(self, request: Request) -> None:
        """Add a request, which `Scheduler.check` has accepted, to the scheduler and the table."""
        # Add the request to the table last. If an interrupt occurs before that, the request is not
        # in the table, so `restart` removes it from the scheduler too.
        self._set_chains(request)
        self._scheduler.add(request.sequences)
        self.unfinished[request.request_id] = request
        self.num_added += 1

    def note_start(self, plan: StepPlan) -> None:
        """Record start time and cached tokens of the requests that run for the first time."""
        now = time.perf_counter()
        chunked = (sequence for sequence, _ in plan.chunks)
        for sequence in [*chunked, *plan.computed, *plan.decodes]:
            request = sequence.request
            if request.metrics.first_scheduled_time is None:
                request.mark(first_scheduled_time=now)
                request.num_cached_tokens = sequence.num_computed
                if request.history is not None:
                    request.history.prefix_match = self._describe_match(request)

    def _describe_match(self, request: Request) -> str:
        if not self._scheduler.enable_prefix_caching:
            return "nothing was looked up: the engine runs without prefix caching"
        if request.prompt_logprobs is not None:
            return "nothing was looked up: log-probabilities of a prompt need all of it computed"
        return describe_match(
            len(request.prompt_token_ids),
            request.num_cached_tokens,
            self._scheduler.block_size,
            request.sequences[0].num_known,
        )

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a complete sequence."""
        self._scheduler.finish(self._runner, sequence)

    def end(self, request: Request, finish_reason: str, stop_reason: str | None = None) -> None:
        """End an unfinished request before it is complete, and free its slots and blocks.

        The request keeps the tokens that it has generated so far. `finish_reason` and `stop_reason`
        are stored in its samples.
        """
        self._scheduler.abort(self._runner, request)
        for sequence in request.sequences:
            sequence.completion.end(finish_reason, stop_reason)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a finished request from the table."""
        request.mark(finished_time=time.perf_counter())
        # Compare the requests, not only their ids: if this request ended in an interrupted step, a
        # newer request may have the same id by now.
        if self.unfinished.get(request.request_id) is request:
            del self.unfinished[request.request_id]

    def take_ended(self, request_id: str) -> Request | None:
        """Remove a request from `ended` and return it; None if `ended` has no such request."""
        for index, request in enumerate(self.ended):
            if request.request_id == request_id:
                return self.ended.pop(index)
        return None

    def restart(self) -> None:
        """Discard the state on the device, and queue all unfinished requests again."""
        for request in list(self.unfinished.values()):
            if request.is_finished:
                self.ended.append(request)
                self.remove(request)
        self._runner.reset()
        for request in self.unfinished.values():
            self._set_chains(request)
        sequences = [s for request in self.unfinished.values() for s in request.sequences]
        self._scheduler.restart([s for s in sequences if not s.is_finished])

    def note_new_weights(self) -> bool:
        """Record that the weights are replaced; return whether there are unfinished requests."""
        self.weights_version += 1
        for request in self.unfinished.values():
            if request.prompt_logprobs is not None:
                # Compute the log-probabilities of the whole prompt again, so that they are all from
                # the new weights.
                request.prompt_logprobs = [None]
        return bool(self.unfinished)

    def check_idle(self, function: str) -> None:
        """Check that no request is unfinished.

        Raises:
          RuntimeError: a request is unfinished.
        """
        if self.unfinished:
            raise RuntimeError(
                f"{function}: no request may be unfinished, got {len(self.unfinished)} unfinished "
                "requests. Finish or abort them."
            )

    def prefix_chain(self, request: Request) -> PrefixChain:
        """Return a new `PrefixChain` for the blocks of a request and the current weights."""
        # Requests with different weights or salts get different roots, so they never share blocks.
        root = root_digest(self.weights_version.to_bytes(8, "little"), request.cache_salt)
        return PrefixChain(root, self._scheduler.block_size)

    def _set_chains(self, request: Request) -> None:
        """Give each sample of a request a new `PrefixChain` for the current weights."""
        # For prompt log-probabilities, the model must compute every prompt token. So requests with
        # `prompt_logprobs` do not use the prefix cache.
        is_cached = self._scheduler.enable_prefix_caching and request.prompt_logprobs is None
        for sequence in request.sequences:
            sequence.chain = self.prefix_chain(request) if is_cached else None
