"""Unfinished requests of an engine, and how they survive a step that is cut short.

Ctrl-C or a lack of memory may end a step at any point, and leaves the device in an unknown state.
All tokens of the requests are on the host, so the engine empties the device and computes their KV
again.
"""

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import jax

from paged_jax.cache.sequence_blocks import PrefixChain, root_digest
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.explain import describe_match
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan


class RequestTable:
    """Table of the unfinished requests.

    Args:
      scheduler, runner: these objects are told when a request ends.

    Attributes:
      unfinished: unfinished requests by id.
      ended: requests that have ended but have not been returned yet. They ended in this step, or in
        an earlier step that was cut short.
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
        """Return an id for a new request: its number, or the next number that no request has."""
        numbers = itertools.count(self.num_added)
        return next(name for i in numbers if (name := str(i)) not in self.unfinished)

    def add(self, request: Request) -> None:
        """Queue a request that `Scheduler.check` has accepted."""
        # Add it to the table last: if this is interrupted earlier, `restart` forgets the request.
        self._set_chains(request)
        self._scheduler.add(request.sequences)
        self.unfinished[request.request_id] = request
        self.num_added += 1

    def note_start(self, plan: StepPlan) -> None:
        """Record the start of requests that run for the first time, and their cached tokens."""
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
        """End an unfinished request with its tokens so far, and free its slots and blocks."""
        self._scheduler.abort(self._runner, request)
        for sequence in request.sequences:
            sequence.completion.end(finish_reason, stop_reason)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a finished request."""
        request.mark(finished_time=time.perf_counter())
        # If it ended in a step that was cut short, a newer request may have the same id.
        if self.unfinished.get(request.request_id) is request:
            del self.unfinished[request.request_id]

    def take_ended(self, request_id: str) -> Request | None:
        """Remove and return a request that ended in an interrupted step; None if there is none."""
        for index, request in enumerate(self.ended):
            if request.request_id == request_id:
                return self.ended.pop(index)
        return None

    def restart(self) -> None:
        """Empty the device, and queue all unfinished requests again."""
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
        """Record that the weights were replaced, and return whether requests are unfinished."""
        self.weights_version += 1
        for request in self.unfinished.values():
            if request.prompt_logprobs is not None:
                # Score the whole prompt again: do not mix log-probabilities of two models.
                request.prompt_logprobs = [None]
        return bool(self.unfinished)

    def check_idle(self, function: str) -> None:
        """Check that no request is unfinished.

        Raises:
          RuntimeError: a request is unfinished.
        """
        if self.unfinished:
            raise RuntimeError(
                f"{function}: no request may be unfinished, got {len(self.unfinished)}. "
                "Finish or abort them."
            )

    def prefix_chain(self, request: Request) -> PrefixChain:
        """Return the chain that computes the digests of a request's blocks for the prefix cache."""
        # Different weights or salts have different roots, so they share no blocks.
        root = root_digest(self.weights_version.to_bytes(8, "little"), request.cache_salt)
        return PrefixChain(root, self._scheduler.block_size)

    def _set_chains(self, request: Request) -> None:
        """Give each sample of a request a prefix chain for the current weights."""
        # Prompt log-probabilities need every prompt token to be computed, so these requests look up
        # no cached blocks.
        is_cached = self._scheduler.enable_prefix_caching and request.prompt_logprobs is None
        for sequence in request.sequences:
            sequence.chain = self.prefix_chain(request) if is_cached else None


class Delivery:
    """Hands requests with new tokens to the calls that wait for them.

    Requests share steps, so a step that one call runs may draw tokens for requests of other calls.
    Each call therefore subscribes to its requests. Requests without a subscriber are kept in `kept`
    until `drop`.

    Example:
      >>> delivery = Delivery()
      >>> delivery.kept
      []
    """

    def __init__(self) -> None:
        self._receivers: dict[str, Callable[[Request], None]] = {}
        # Keys are requests, because an ended request and a newer request may have the same id.
        self._kept: dict[Request, None] = {}

    def subscribe(self, request_id: str, receive: Callable[[Request], None]) -> None:
        """Call a function with a request whenever it has new tokens, and when it has ended."""
        self._receivers[request_id] = receive

    def unsubscribe(self, request_id: str) -> None:
        """End a subscription, if there is one."""
        self._receivers.pop(request_id, None)

    def deliver(self, requests: Iterable[Request]) -> None:
        """Give each request to its subscriber, or keep it."""
        for request in requests:
            if not self.notify(request):
                self._kept[request] = None

    def notify(self, request: Request) -> bool:
        """Give a request to its subscriber, and return whether it has one."""
        receive = self._receivers.get(request.request_id)
        if receive is not None:
            receive(request)
        return receive is not None

    @property
    def kept(self) -> list[Request]:
        """Delivered requests without a subscriber, until they are dropped."""
        return list(self._kept)

    def keep(self, requests: Iterable[Request]) -> None:
        """Add requests to `kept`, for example after their `drop` came too early."""
        self._kept |= dict.fromkeys(requests)

    def drop(self, requests: Iterable[Request]) -> None:
        """Forget requests that were kept."""
        gone = set(requests)
        self._kept = {request: None for request in self._kept if request not in gone}


class ChangeGuard:
    """Guard of the engine's state: one change, such as a step, at a time.

    After a change that was cut short, the engine restarts immediately. If the restart is cut short
    as well, it restarts before the next change.

    Args:
      restart: function that brings the device into a known state, from the requests on the host.
    """

    def __init__(self, restart: Callable[[], None]):
        self._restart = restart
        self._is_broken = False  # a change or a restart began and did not end
        self._postponed: list[Callable[[], None]] = []
        self._latest: Callable[[], Any] = lambda: None  # weak reference to the latest change

    @property
    def _is_changing(self) -> bool:
        # Inspect the generator of the change instead of a flag: an interrupt could leave a flag
        # set.
        latest = self._latest()
        return latest is not None and latest.gi_frame is not None

    def change(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a change of the state.

        Raises:
          RuntimeError: another change is under way.
        """
        if self._is_changing:
            raise RuntimeError(
                "Engine: calls must not overlap, got a call during another call. Use AsyncEngine "
                "to add requests while the engine runs."
            )
        while self._postponed:
            self._postponed.pop()()
        change = self._change()
        self._latest = weakref.ref(change)
        return contextlib.contextmanager(lambda: change)()

    def _change(self) -> Generator[None]:
        with own_transfers():
            if self._is_broken:
                self.recover()
            self._is_broken = True
            try:
                yield
            except BaseException:
                self.recover()
                raise
            self._is_broken = False

    def recover(self) -> None:
        """Restart the engine from the requests on the host."""
        self._is_broken = True
        self._restart()
        self._is_broken = False

    def when_idle(self, action: Callable[[], None]) -> None:
        """Call a function now or, during a change, before the next change."""
        if self._is_changing:
            self._postponed.append(action)
        else:
            action()


@contextlib.contextmanager
def own_transfers() -> Iterator[None]:
    """Allow the engine's transfers between host and device, despite a caller's transfer guard.

    Every step must transfer token ids, slots and flags, but a caller's ``jax.transfer_guard`` is
    meant for accidental transfers. The guard stays on for copies between devices. The engine makes
    none, except to load weights from other devices.
    """
    with jax.transfer_guard_host_to_device("allow"), jax.transfer_guard_device_to_host("allow"):
        yield
