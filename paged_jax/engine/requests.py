"""Keeps the requests that have not finished: from them, the device's state can be made again."""

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import jax

from paged_jax.cache.sequence_blocks import PrefixChain, root_digest
from paged_jax.engine.drafts import Drafter
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.scheduler import Scheduler


class RequestTable:
    """Requests from their arrival to their end.

    Args:
      scheduler, runner, drafter: parts that forget a request when it ends.

    Attributes:
      unfinished: requests that have not finished, by their ids.
      ended: requests that have ended and were not returned: in the step that is under way, or in
        one that was cut short, which the next one returns.
      num_added: requests added so far.
      weights_version: number of times that the weights were replaced.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, drafter: Drafter):
        self._scheduler = scheduler
        self._runner = runner
        self._drafter = drafter
        self.unfinished: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.num_added = 0
        self.weights_version = 0

    def next_id(self) -> str:
        """A name for a request without one: its number, or the next that is free."""
        numbers = itertools.count(self.num_added)
        return next(name for i in numbers if (name := str(i)) not in self.unfinished)

    def check(self, request: Request) -> None:
        """See that a new request can be queued.

        Raises:
          ValueError: it could never run, or its id is taken.
        """
        self._scheduler.check(request.sequences)

    def add(self, request: Request) -> None:
        """Queue a request, which `check` has passed.

        Cut short, it is forgotten by `restart`, unless it is in the table already.
        """
        self._name_blocks(request)
        self._scheduler.add(request.sequences)
        self.unfinished[request.request_id] = request
        self.num_added += 1

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a sequence that is complete."""
        self._scheduler.finish(self._runner.slots, sequence)
        self._drafter.drop(sequence)

    def end(self, request: Request, finish_reason: str, stop_reason: str | None = None) -> None:
        """End a request that has not finished by itself, and free its slots and blocks."""
        for sequence in self._scheduler.abort(self._runner.slots, request):
            self._drafter.drop(sequence)
        for sequence in request.sequences:
            sequence.completion.end(finish_reason, stop_reason)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a finished request."""
        request.mark(finished_time=time.perf_counter())
        # Another request may have taken the id of one that ended in a step that was cut short.
        if self.unfinished.get(request.request_id) is request:
            del self.unfinished[request.request_id]

    def take_ended(self, request_id: str) -> Request | None:
        """Take a request that ended in a step that was cut short; None if there is no such one."""
        for index, request in enumerate(self.ended):
            if request.request_id == request_id:
                return self.ended.pop(index)
        return None

    def restart(self) -> None:
        """Empty the device, and queue again all requests that have not finished."""
        for request in list(self.unfinished.values()):
            if request.is_finished:
                self.ended.append(request)
                self.remove(request)
        self._runner.reset()
        self._drafter.clear()
        for request in self.unfinished.values():
            self._name_blocks(request)
        sequences = [s for request in self.unfinished.values() for s in request.sequences]
        self._scheduler.restart([s for s in sequences if not s.is_finished])

    def note_new_weights(self) -> bool:
        """Record that the weights were replaced; return whether requests are unfinished."""
        self.weights_version += 1
        for request in self.unfinished.values():
            if request.prompt_logprobs is not None:
                request.prompt_logprobs = [None]  # not half of them from either
        return bool(self.unfinished)

    def check_idle(self, function: str) -> None:
        """Refuse a call while requests are unfinished.

        Raises:
          RuntimeError: one is.
        """
        if self.unfinished:
            raise RuntimeError(
                f"{function}: no request may be unfinished, got {len(self.unfinished)}. "
                "Finish or abort them."
            )

    def prefix_chain(self, request: Request) -> PrefixChain:
        """What names the blocks of a request's prompt in the prefix cache."""
        # Neither the blocks of earlier weights nor those of another tenant are found.
        root = root_digest(self.weights_version.to_bytes(8, "little"), request.cache_salt)
        return PrefixChain(root, self._scheduler.block_size)

    def _name_blocks(self, request: Request) -> None:
        """Let the prefix cache find the blocks of a request, under the present weights."""
        # Log-probabilities of a prompt need all of it computed.
        is_cached = self._scheduler.enable_prefix_caching and request.prompt_logprobs is None
        for sequence in request.sequences:
            sequence.chain = self.prefix_chain(request) if is_cached else None


class Delivery:
    """Where the requests go that a step has touched.

    Requests share steps, so a step that one call runs may bring tokens for the request of another
    call. That call gets them by the function it has subscribed with. A request without a subscriber
    is kept until it is taken.

    Example:
      >>> delivery = Delivery()
      >>> delivery.kept
      []
    """

    def __init__(self) -> None:
        self._receivers: dict[str, Callable[[Request], None]] = {}
        # Not by their ids: one that has ended and one that has taken its id may both be there.
        self._kept: dict[Request, None] = {}

    def subscribe(self, request_id: str, receive: Callable[[Request], None]) -> None:
        """Call a function with a request whenever it has new tokens, and when it has ended."""
        self._receivers[request_id] = receive

    def unsubscribe(self, request_id: str) -> None:
        """End a subscription; nothing if there is none."""
        self._receivers.pop(request_id, None)

    def deliver(self, requests: Iterable[Request]) -> None:
        """Give each request to its subscriber, or keep it."""
        for request in requests:
            if not self.notify(request):
                self._kept[request] = None

    def notify(self, request: Request) -> bool:
        """Give a request to its subscriber, if it has one."""
        receive = self._receivers.get(request.request_id)
        if receive is not None:
            receive(request)
        return receive is not None

    @property
    def kept(self) -> list[Request]:
        """The requests without a subscriber that were delivered, until they are dropped."""
        return list(self._kept)

    def keep(self, requests: Iterable[Request]) -> None:
        """Keep requests again that were dropped."""
        self._kept |= dict.fromkeys(requests)

    def drop(self, requests: Iterable[Request]) -> None:
        """Forget requests that were kept."""
        gone = set(requests)
        self._kept = {request: None for request in self._kept if request not in gone}


class ChangeGuard:
    """Guards the changes of an engine's state, such as a step.

    A change that is cut short, by Ctrl-C for example, leaves the device in a state that is not
    known. The engine is recovered at once or, if that is cut short too, before the next change.

    Args:
      restart: makes a state that is known, from what the host knows.
    """

    def __init__(self, restart: Callable[[], None]):
        self._restart = restart
        self._is_broken = False  # a change or a recovery began and did not end
        self._postponed: list[Callable[[], None]] = []
        self._latest: Callable[[], Any] = lambda: None  # the generator of the latest change

    @property
    def _is_changing(self) -> bool:
        # Asked of the change itself: a flag could be left behind by one that is cut short.
        latest = self._latest()
        return latest is not None and latest.gi_frame is not None

    def change(self) -> contextlib.AbstractContextManager[None]:
        """A context for a change of state.

        Raises:
          RuntimeError: another one is under way.
        """
        if self._is_changing:
            raise RuntimeError("Engine: a call must end before the next begins, got one within it.")
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
        """Restart from what the host knows."""
        self._is_broken = True
        self._restart()
        self._is_broken = False

    def when_idle(self, action: Callable[[], None]) -> None:
        """Call a function now or, while a change is under way, before the next one."""
        if self._is_changing:
            self._postponed.append(action)
        else:
            action()


@contextlib.contextmanager
def own_transfers() -> Iterator[None]:
    """A context in which an engine may move its own numbers between host and device.

    Token ids, slots and flags cross with every step, as they must, so that a caller's
    ``jax.transfer_guard`` should not stop them: it is there to find transfers that nobody wants.
    Copies from device to device stay under the caller's guard. The engine makes none, unless
    weights come from other devices.
    """
    with jax.transfer_guard_host_to_device("allow"), jax.transfer_guard_device_to_host("allow"):
        yield
