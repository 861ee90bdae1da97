"""Where each sequence is: in the waiting line, in a slot, or gone; and when its request expires."""

import bisect
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paged_jax.checks import ArgumentError
from paged_jax.scheduler.holdings import Holdings
from paged_jax.scheduler.line import Line
from paged_jax.scheduler.outputs import WaitReason
from paged_jax.scheduler.plan import SchedulerStats
from paged_jax.scheduler.reasons import NO_FACTS, WaitFacts
from paged_jax.scheduler.request import Request, Sequence


@dataclass
class Entry:
    """What the scheduler remembers of a sequence that has not finished.

    Attributes:
      siblings: samples that become forks of this one when its prompt is computed.
      num_wanted: free blocks that it needed when it was last tried; 0 if that is not known.
      num_lost: tokens that left the cache for good at the last preemption.
      length_before: tokens that it had at the last preemption.
    """

    siblings: list[Sequence] = field(default_factory=list)
    num_wanted: int = 0
    num_lost: int = 0
    length_before: int = 0


class Unfinished(NamedTuple):
    """A request, which this keeps alive, and those of its sequences that have not finished."""

    request: Request
    sequences: list[Sequence]


class Deadlines:
    """A heap of the times at which requests expire. It may name requests that are gone."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Note the deadline of a request, if it has one."""
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.arrival, request.request_id))

    def is_due(self, now: float) -> bool:
        """Whether any of the deadlines has passed."""
        return bool(self._heap) and self._heap[0][0] <= now

    def pop_due(self, now: float) -> list[tuple[int, str]]:
        """Remove the deadlines that have passed; return the arrivals and ids of their requests."""
        due = []
        while self.is_due(now):
            _, arrival, request_id = heapq.heappop(self._heap)
            due.append((arrival, request_id))
        return due

    def keep_only(self, arrivals: Mapping[str, int]) -> None:
        """Remove the deadlines of requests that are not among these ids with their arrivals."""
        self._heap = [entry for entry in self._heap if arrivals.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)


class Queue:
    """The waiting line, the slots, and all sequences that have not finished.

    Args:
      num_slots: S, most sequences that run at once.
      holdings: counts blocks.
      stats: totals of the scheduler; sequences that get a slot are counted here.

    Attributes:
      waiting: sequences in line.
      running: sequences with a slot, the most senior first.
      free_slots: slots that are not taken.
      entries: what is remembered of each unfinished sequence.
      unfinished: the unfinished sequences of each request, with the request, by its id.
      deadlines: when these requests expire.
      num_swapped_blocks: blocks of waiting sequences that are in host memory.
    """

    def __init__(self, num_slots: int, holdings: Holdings, stats: SchedulerStats):
        self._num_slots = num_slots
        self._holdings = holdings
        self._stats = stats
        self.clear()

    def clear(self) -> None:
        """Forget all sequences."""
        self.running: list[Sequence] = []
        self.waiting = Line(self.running)
        # Popped from the end: slot 0 is taken first.
        self.free_slots = list(range(self._num_slots))[::-1]
        self.entries: dict[Sequence, Entry] = {}
        self.unfinished: dict[str, Unfinished] = {}
        self.deadlines = Deadlines()
        self.num_swapped_blocks = 0

    @property
    def sequences(self) -> list[Sequence]:
        """All unfinished sequences, the most senior first."""
        unfinished = [s for _, sequences in self.unfinished.values() for s in sequences]
        return sorted(unfinished, key=lambda s: s.seniority)

    def check_is_new(self, sequences: list[Sequence]) -> None:
        """Refuse samples of a request whose id an unfinished one has. They begin alike."""
        request, tokens = sequences[0].request, sequences[0].token_ids
        assert all(s.request is request and s.token_ids == tokens for s in sequences)
        if request.request_id in self.unfinished:
            raise ArgumentError(
                "Scheduler.add", f"must be unique, got {request.request_id!r} again.", "request_id"
            )

    def track(self, request: Request, sequences: list[Sequence]) -> None:
        """Count sequences of a request as unfinished. They are not in line yet."""
        self.unfinished[request.request_id] = Unfinished(request, list(sequences))
        self.entries.update((sequence, Entry()) for sequence in sequences)
        self.deadlines.add(request)
        if len(self.deadlines) > 2 * len(self.unfinished):
            # Deadlines of requests that are gone may lie in a far future.
            self.deadlines.keep_only(
                {name: request.arrival for name, (request, _) in self.unfinished.items()}
            )

    def drop(self, sequence: Sequence) -> None:
        """Count a sequence as finished, wherever it is. Its siblings join the line."""
        request = sequence.request  # freed at the end, if only the queue holds it
        if sequence.slot is not None:
            self.give_slot(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        for sibling in self.entries.pop(sequence).siblings:
            self.join(sibling)
        self.mark_swapped(sequence, False)
        sequence.host_blocks = None
        self._end_wait(sequence)
        left = self.unfinished[request.request_id].sequences
        left.remove(sequence)
        if not left:
            del self.unfinished[request.request_id]

    def due(self, now: float) -> list[Sequence]:
        """The unfinished sequences whose deadlines have passed since the last call."""
        due: list[Sequence] = []
        for arrival, request_id in self.deadlines.pop_due(now):
            unfinished = self.unfinished.get(request_id)
            # Another request may have taken the id since.
            if unfinished is not None and unfinished.request.arrival == arrival:
                due += unfinished.sequences
        return due

    # The waiting line

    def join(
        self, sequence: Sequence, reason: WaitReason = "turn", *, siblings: Iterable[Sequence] = ()
    ) -> None:
        """Put a sequence in line.

        Args:
          sequence: the sequence.
          reason: why it waits.
          siblings: new sequences that wait to be forks of it.
        """
        self.entries[sequence].num_wanted = 0
        for sibling in siblings:
            self.entries[sequence].siblings.append(sibling)
            self.note_wait(sibling, "fork")
        self.waiting.add(sequence)
        if reason == "turn":
            self.note_turn(sequence)
        else:
            self.note_wait(sequence, reason)

    def note_turn(self, sequence: Sequence) -> None:
        """Note that a sequence waits for those before it."""
        facts = NO_FACTS
        if sequence.history is not None:
            facts = WaitFacts({"num_ahead": list(self.waiting).index(sequence)})
        self.note_wait(sequence, "turn", facts)

    def note_wait(
        self, sequence: Sequence, reason: WaitReason, facts: WaitFacts = NO_FACTS
    ) -> None:
        """Note what a sequence waits for."""
        sequence.waits_for = reason
        if sequence.history is not None:
            sequence.history.wait(sequence.index, reason, facts)

    def _end_wait(self, sequence: Sequence) -> None:
        sequence.waits_for = ""
        if sequence.history is not None:
            sequence.history.run(sequence.index)

    # Slots

    def take_slot(self, sequence: Sequence) -> None:
        """Let a sequence run in a free slot. It is not in line any more."""
        sequence.slot = self.free_slots.pop()
        self._end_wait(sequence)
        self._stats.num_admitted += not sequence.num_preemptions
        bisect.insort(self.running, sequence, key=lambda s: s.seniority)

    def give_slot(self, sequence: Sequence) -> None:
        """Free the slot of a sequence."""
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot = None

    def mark_swapped(self, sequence: Sequence, is_swapped: bool) -> None:
        """Count the blocks of a sequence as moved to host memory, or as gone from there."""
        if sequence.is_swapped != is_swapped:
            num_blocks = self._holdings.num_swapped(sequence.num_computed)
            self.num_swapped_blocks += num_blocks if is_swapped else -num_blocks
            sequence.is_swapped = is_swapped
