"""Order of waiting sequences, in turns of the clients; running slots, and deadlines.

`FairQueue` decides the order of waiting sequences: by priority, then in turns of the clients.
"""

import bisect
import collections
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping

from paged_jax.arguments import ArgumentError
from paged_jax.scheduler.block_budget import BlockBudget
from paged_jax.scheduler.outputs import WaitReason
from paged_jax.scheduler.request import Request, Sequence

# Sort key of a waiting sequence: (priority, turn, arrival, index), see `FairQueue`. The keys of two
# sequences are never equal.
_Rank = tuple[int, int, int, int]


class FairQueue:
    """The waiting sequences, ordered so that clients take turns.

    The turn of a sequence is the number of sequences of the same client that are running or are
    queued before it. Sequences are ordered by priority (lower values first), then by turn, then by
    arrival:

        client a    runs a1 a2, waits a3 a4      turns 2, 3
        client b    runs none, waits b1 b2       turns 0, 1        order: b1 b2 a3 a4

    So a free slot goes to the client with the fewest running sequences, no matter how many
    sequences other clients have queued. The sequences of a single client run in the order of their
    arrival. No sequence waits forever, because its turn decreases whenever a sequence of its client
    ends, and new sequences come after older sequences with the same turn.

    Args:
      running: the sequences in slots. The caller may change the list later.
    """

    def __init__(self, running: list[Sequence]):
        self._running = running
        # The waiting sequences of each client, sorted by seniority (priority, then arrival).
        self._by_client: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._by_client.get(sequence.request.client, ())

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a copy of the queue, so the queue may change during the iteration."""
        if len(self._by_client) == 1:
            [sequences] = self._by_client.values()
            return iter(sequences.copy())
        num_running = collections.Counter(s.request.client for s in self._running)
        queues = [
            _with_ranks(sequences.copy(), num_running[client])
            for client, sequences in self._by_client.items()
        ]
        return (sequence for _, sequence in heapq.merge(*queues))

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the queue."""
        sequences = self._by_client.setdefault(sequence.request.client, [])
        bisect.insort(sequences, sequence, key=lambda s: s.seniority)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""
        client = sequence.request.client
        sequences = self._by_client[client]
        sequences.remove(sequence)
        if not sequences:
            del self._by_client[client]


def _with_ranks(waiting: list[Sequence], num_running: int) -> Iterator[tuple[_Rank, Sequence]]:
    """Yield the waiting sequences of one client, each with its sort key.

    `num_running` is the number of running sequences of this client.
    """
    for rank, sequence in enumerate(waiting, num_running):
        priority, arrival, index = sequence.seniority
        yield (priority, rank, arrival, index), sequence


class Queue:
    """All unfinished sequences, which are waiting in the queue or running in a slot.

    Args:
      num_slots: S, maximum number of sequences that run at the same time.
      block_budget: object that counts the blocks of sequences.

    Attributes:
      waiting: the waiting sequences.
      running: the sequences with a slot, sorted by seniority.
      free_slots: the indices of the free slots.
      unfinished: all unfinished sequences.
      requests: the requests of these sequences, by id.
      by_deadline: ``(deadline, arrival, request)`` of each request with a deadline, sorted.
      num_swapped_blocks: number of blocks of waiting sequences that are in host memory.
    """

    def __init__(self, num_slots: int, block_budget: BlockBudget):
        self._num_slots = num_slots
        self._block_budget = block_budget
        self.clear()

    def clear(self) -> None:
        """Remove all sequences."""
        self.running: list[Sequence] = []
        self.waiting = FairQueue(self.running)
        # The slots are in descending order. Slots are popped from the end, so slot 0 is taken
        # first.
        self.free_slots = list(range(self._num_slots))[::-1]
        self.unfinished: set[Sequence] = set()
        self.requests: dict[str, Request] = {}
        self.by_deadline: list[tuple[float, int, Request]] = []
        self.num_swapped_blocks = 0

    @property
    def sequences(self) -> list[Sequence]:
        """All unfinished sequences, sorted by seniority."""
        return sorted(self.unfinished, key=lambda s: s.seniority)

    def unfinished_of(self, request: Request) -> list[Sequence]:
        """Return the unfinished sequences of a request."""
        return [sequence for sequence in request.sequences if sequence in self.unfinished]

    def check_is_new(self, sequences: list[Sequence]) -> None:
        """Check that no unfinished request has the id of a new request.

        `sequences` are the samples of the new request.

        Raises:
          ArgumentError: an unfinished request has the same id.
        """
        request, tokens = sequences[0].request, sequences[0].token_ids
        assert all(s.request is request and s.token_ids == tokens for s in sequences)
        if request.request_id in self.requests:
            raise ArgumentError(
                "Scheduler.add", f"must be unique, got {request.request_id!r} again.", "request_id"
            )

    def track(self, request: Request, sequences: list[Sequence]) -> None:
        """Add sequences of a request to `unfinished`, but not to the waiting queue."""
        self.requests[request.request_id] = request
        self.unfinished.update(sequences)
        if request.deadline is not None:
            bisect.insort(self.by_deadline, (request.deadline, request.arrival, request))

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended. Its `siblings`, which waited for it, join the queue."""
        # Keep a reference to the request until this method returns. Sequences only have a weak
        # reference, and the last strong reference may be in this queue.
        request = sequence.request
        if sequence.slot is not None:
            self.free_slot(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.unfinished.remove(sequence)
        siblings, sequence.siblings = sequence.siblings, []
        for sibling in siblings:
            self.join(sibling)
        self.mark_swapped(sequence, False)
        sequence.host_blocks = None
        self._end_wait(sequence)
        if not any(s in self.unfinished for s in request.sequences):
            del self.requests[request.request_id]
            if request.deadline is not None:
                self.by_deadline = [x for x in self.by_deadline if x[2] is not request]

    def expired(self, now: float) -> list[Sequence]:
        """Return the unfinished sequences with a deadline that has passed."""
        entries = itertools.takewhile(lambda entry: entry[0] <= now, self.by_deadline)
        return [sequence for *_, request in entries for sequence in self.unfinished_of(request)]

    # Waiting

    def join(
        self, sequence: Sequence, reason: WaitReason = "turn", *, siblings: Iterable[Sequence] = ()
    ) -> None:
        """Add a sequence to the waiting queue.

        `reason` is the reason why it waits. `siblings` are other samples of a new request; they
        become forks of the sequence when its prompt has been computed.
        """
        sequence.num_wanted = 0
        for sibling in siblings:
            sequence.siblings.append(sibling)
            self.note_wait(sibling, "fork")
        self.waiting.add(sequence)
        if reason == "turn":
            self.note_turn(sequence)
        else:
            self.note_wait(sequence, reason)

    def note_turn(self, sequence: Sequence) -> None:
        """Record that a sequence waits because other sequences come before it."""
        numbers = {}
        if sequence.history is not None:
            numbers["num_ahead"] = list(self.waiting).index(sequence)
        self.note_wait(sequence, "turn", numbers=numbers)

    def note_wait(
        self,
        sequence: Sequence,
        reason: WaitReason,
        *,
        numbers: Mapping[str, int] | None = None,
        other_request: str | None = None,
    ) -> None:
        """Record why a sequence waits; see `Wait` for the arguments."""
        sequence.waits_for = reason
        if sequence.history is not None:
            sequence.history.wait(
                sequence.index, reason, numbers=numbers, other_request=other_request
            )

    def _end_wait(self, sequence: Sequence) -> None:
        sequence.waits_for = ""
        if sequence.history is not None:
            sequence.history.run(sequence.index)

    # Slots

    def take_slot(self, sequence: Sequence) -> None:
        """Move a sequence that has left the waiting queue into a free slot."""
        sequence.slot = self.free_slots.pop()
        self._end_wait(sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.seniority)

    def free_slot(self, sequence: Sequence) -> None:
        """Free the slot of a sequence."""
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot = None

    def mark_swapped(self, sequence: Sequence, is_swapped: bool) -> None:
        """Set `is_swapped` of a sequence, and update the number of blocks in host memory."""
        if sequence.is_swapped != is_swapped:
            num_blocks = self._block_budget.num_swapped(sequence.num_computed)
            self.num_swapped_blocks += num_blocks if is_swapped else -num_blocks
            sequence.is_swapped = is_swapped
