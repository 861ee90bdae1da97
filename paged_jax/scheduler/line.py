"""`Line`: the sequences that wait for slots, in an order that is fair among clients."""

import bisect
import collections
import heapq
from collections.abc import Iterator

from paged_jax.scheduler.request import Sequence

# Priority, turn, arrival, index: no two sequences have the same.
_Rank = tuple[int, int, int, int]


class Line:
    """The waiting sequences of all clients, who take turns.

    A sequence's turn is the number of those of its client that are served before it: that run, or
    stand before it in line. Lower priorities come first, then earlier turns, then earlier arrivals:

        client a    runs a1 a2, waits a3 a4      turns 2, 3
        client b    runs none, waits b1 b2       turns 0, 1        order: b1 b2 a3 a4

    So a slot goes to a client who has fewer than others, however many sequences these have in line;
    and a client alone is served in the order of arrival. None waits for ever: a turn comes nearer
    with each sequence of its client that ends, and newcomers stand behind those of the same turn.

    Args:
      running: the sequences in slots, which others change.
    """

    def __init__(self, running: list[Sequence]):
        self._running = running
        # Of each client, the most senior first.
        self._by_client: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._by_client.get(sequence.request.client, ())

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences as they stand now: changes meanwhile are not seen."""
        if len(self._by_client) == 1:
            [own] = self._by_client.values()
            return iter(own.copy())
        num_running = collections.Counter(s.request.client for s in self._running)
        lines = [
            _with_ranks(own.copy(), num_running[client]) for client, own in self._by_client.items()
        ]
        return (sequence for _, sequence in heapq.merge(*lines))

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line."""
        own = self._by_client.setdefault(sequence.request.client, [])
        bisect.insort(own, sequence, key=lambda s: s.seniority)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, which is in line."""
        client = sequence.request.client
        own = self._by_client[client]
        own.remove(sequence)
        if not own:
            del self._by_client[client]


def _with_ranks(line: list[Sequence], num_running: int) -> Iterator[tuple[_Rank, Sequence]]:
    """The line of one client, each sequence with its rank among those of all."""
    for turn, sequence in enumerate(line, num_running):
        priority, arrival, index = sequence.seniority
        yield (priority, turn, arrival, index), sequence
