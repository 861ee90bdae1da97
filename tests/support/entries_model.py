"""Entries of recurrent states in plain Python: slots, marks, snapshots and free entries.

The oracle of `tests/cache/test_states.py` and `tests/cache/test_marks.py`. It serves slots one at a
time, with lists and a queue.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any


class EntriesModel:
    """Free entries, reference counts, snapshots, and for each slot its entry and its mark."""

    def __init__(self, num_entries: int, num_slots: int):
        self.free = deque(range(num_entries))
        self.refs = dict.fromkeys(range(num_entries), 0)
        self.cached: dict[int, tuple[Hashable, Any]] = {}  # the key and the tokens of each snapshot
        self.entries: list[int | None] = [None] * num_slots
        self.marks: list[int | None] = [None] * num_slots
        self.mark_lengths = [0] * num_slots
        # For each slot that will leave a mark: the next entry, and the length of the mark.
        self.planned: dict[int, tuple[int, int]] = {}
        # Half of the entries that slots do not need are for snapshots.
        self.num_for_snapshots = (num_entries - num_slots) // 2

    def hold(self, entry: int | None) -> None:
        if entry is not None:
            self.refs[entry] += 1

    def drop(self, entry: int | None) -> None:
        if entry is None:
            return
        self.refs[entry] -= 1
        if not self.refs[entry] and entry in self.cached:
            self.free.append(entry)
        elif not self.refs[entry]:
            self.free.appendleft(entry)

    def drop_marks(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.drop(self.marks[slot])
            self.marks[slot] = None

    def reserve(self, writers: list[int]) -> list[int]:
        """Choose entries to write; return the slots that write to another entry than they read."""
        held = [self.entries[slot] for slot in writers]
        # The last writer of an entry may keep it if all slots that use it write.
        keepers = {
            slot
            for slot, entry in zip(writers, held, strict=True)
            if entry is not None
            and held.count(entry) == self.refs[entry]
            and slot == max(s for s in writers if self.entries[s] == entry)
        }
        num_wanted = sum(self.entries[slot] in self.cached for slot in keepers)
        num_needed = len(writers) - len(keepers)
        if num_needed + num_wanted > len(self.free):
            self.drop_marks(range(len(self.marks)))
        num_spare = len(self.free) - num_needed
        assert num_spare >= 0, "as many entries as slots suffice"
        movers = []
        for slot in writers:
            is_spared = slot in keepers and self.entries[slot] in self.cached and num_spare > 0
            num_spare -= is_spared
            if slot not in keepers or is_spared:
                movers.append(slot)
        taken = [self._take(self.free[0]) for _ in movers]
        for slot in writers:
            if slot not in movers:
                self.cached = {e: c for e, c in self.cached.items() if e != self.entries[slot]}
        old = [self.entries[slot] for slot in movers]
        for slot, entry in zip(movers, taken, strict=True):
            self.entries[slot] = entry
        for entry in old:
            self.drop(entry)
        return movers

    def _take(self, entry: int) -> int:
        self.free.remove(entry)
        self.cached.pop(entry, None)
        self.refs[entry] = 1
        return entry

    def plan_marks(
        self, writers: list[int], movers: list[int], lengths: list[int], most: int, interval: int
    ) -> None:
        """Plan a mark at the next multiple, if the program passes it and an entry is free for it.

        Args:
          writers: the slots that get tokens.
          movers: the result of `reserve`. Their old entries keep the states at `lengths` anyway.
          lengths: number of tokens in each slot.
          most: maximum number of tokens that a slot gets.
          interval: marks are after a multiple of this number of tokens.
        """
        self.planned = {}
        for slot in writers:
            length = lengths[slot]
            target = -(-length // interval) * interval
            if not 0 < target < length + most:
                continue
            if target == length and slot in movers:
                continue
            if self.marks[slot] is not None and self.mark_lengths[slot] == target:
                continue
            if len(self.planned) < len(self.free) - self.num_for_snapshots:
                self.planned[slot] = self.free[len(self.planned)], target

    def commit_marks(self, lengths: list[int]) -> None:
        """Let the slots that got more tokens than planned for the mark use their next entry."""
        switched = {s: pair for s, pair in self.planned.items() if lengths[s] > pair[1]}
        for entry, _ in switched.values():
            self._take(entry)
        for slot in sorted(switched):
            self.drop(self.marks[slot])
        for slot, (entry, target) in switched.items():
            self.marks[slot], self.mark_lengths[slot] = self.entries[slot], target
            self.entries[slot] = entry
        self.planned = {}

    def follow(self, parents: list[int]) -> None:
        before = list(self.entries)
        changed = [slot for slot, parent in enumerate(parents) if parent not in (-1, slot)]
        self.drop_marks(changed)
        for slot in changed:
            self.entries[slot] = before[parents[slot]]
            self.hold(self.entries[slot])
        for slot in changed:
            self.drop(before[slot])

    def release(self, mask: list[bool]) -> None:
        released = [slot for slot, is_released in enumerate(mask) if is_released]
        self.drop_marks(released)
        for slot in released:
            self.drop(self.entries[slot])
            self.entries[slot] = None

    def find(self, key: Hashable) -> int | None:
        return next((entry for entry, known in self.cached.items() if known[0] == key), None)

    def attach(self, slot: int, entry: int) -> None:
        if not self.refs[entry]:
            self.free.remove(entry)
        self.hold(entry)
        self.entries[slot] = entry

    def publish(self, slot: int, key: Hashable, tokens: list[int], length: int) -> None:
        """Publish the state of a slot after `tokens`, if its entry or its mark holds this state.

        `length` is the number of tokens in the slot.
        """
        entry = self.entries[slot]
        if len(tokens) != length:
            is_marked = self.mark_lengths[slot] == len(tokens)
            entry = self.marks[slot] if is_marked else None
        if entry is not None and entry not in self.cached and self.find(key) is None:
            self.cached[entry] = key, tokens

    def forget(self) -> None:
        self.drop_marks(range(len(self.marks)))
        self.cached.clear()
