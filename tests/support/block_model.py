"""Block allocator in plain Python: it serves slots one at a time, with lists and a queue.

The oracle of `tests/cache/test_histories.py`. It also keeps the content of every slot as a list of
tokens, independent of shared and copied blocks.
"""

import copy
from collections import deque
from typing import NamedTuple


class Content(NamedTuple):
    """Content of a cached block."""

    digest: tuple[int, ...]
    token_ids: list[int]


class BlockModel:
    """Free blocks, reference counts, cached contents, and for each slot its blocks and tokens."""

    def __init__(self, num_blocks: int, num_slots: int, max_blocks_per_slot: int, block_size: int):
        self.num_blocks = num_blocks
        self.max_blocks_per_slot = max_blocks_per_slot
        self.block_size = block_size
        self.free = deque(range(num_blocks))
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.cached: dict[int, Content] = {}
        self.blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self.tokens: list[list[int]] = [[] for _ in range(num_slots)]

    def reserve(
        self, new_tokens: list[list[int]], max_tokens: int
    ) -> tuple[bool, list[tuple[int, int] | None]]:
        """Append tokens to slots. Return ok, and for each slot the copy-on-write pair or None."""
        no_copies: list[tuple[int, int] | None] = [None] * len(self.blocks)
        capacity = self.max_blocks_per_slot * self.block_size
        for tokens, new in zip(self.tokens, new_tokens, strict=True):
            if len(new) > max_tokens or len(tokens) + len(new) > capacity:
                return False, no_copies
        before = copy.deepcopy((self.free, self.refs, self.cached, self.blocks))
        copies = list(no_copies)
        try:
            for slot, new in enumerate(new_tokens):
                copies[slot] = self._grow(slot, len(self.tokens[slot]), len(new))
        except IndexError:  # no free block left
            self.free, self.refs, self.cached, self.blocks = before
            return False, no_copies
        for tokens, new in zip(self.tokens, new_tokens, strict=True):
            tokens.extend(new)
        return True, copies

    def _grow(self, slot: int, length: int, num_new: int) -> tuple[int, int] | None:
        row, copied = self.blocks[slot], None
        if num_new and length % self.block_size:
            if self.refs[row[-1]] > 1:
                source, target = row[-1], self._take()
                self.refs[source] -= 1
                row[-1] = target
                copied = (source, target)
            else:
                self.cached.pop(row[-1], None)  # overwritten blocks can no longer be found
        while len(row) * self.block_size < length + num_new:
            row.append(self._take())
        return copied

    def _take(self) -> int:
        block = self.free.popleft()
        self.refs[block] = 1
        self.cached.pop(block, None)
        return block

    def _hold(self, block: int) -> None:
        self.refs[block] += 1

    def _give_back(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if block in self.cached:
                self.free.append(block)
            else:
                self.free.appendleft(block)

    def fork(self, parents: list[int]) -> bool:
        """Make slots copies of other slots; -1 leaves a slot unchanged."""
        children = [slot for slot, parent in enumerate(parents) if parent != -1]
        for child in children:
            parent = parents[child]
            if not 0 <= parent < len(parents) or parent in children or self.tokens[child]:
                return False
        return self.reorder(parents)

    def reorder(self, parents: list[int]) -> bool:
        """Replace slots by the previous state of other slots; -1 leaves a slot unchanged."""
        if not all(-1 <= parent < len(parents) for parent in parents):
            return False
        changed = [slot for slot, parent in enumerate(parents) if parent not in (-1, slot)]
        blocks, tokens = copy.deepcopy((self.blocks, self.tokens))
        for slot in changed:
            self.blocks[slot] = list(blocks[parents[slot]])
            self.tokens[slot] = list(tokens[parents[slot]])
            for block in self.blocks[slot]:
                self._hold(block)
        for slot in changed:
            for block in reversed(blocks[slot]):
                self._give_back(block)
        return True

    def release(self, mask: list[bool]) -> None:
        """Empty slots, starting with the last block of each."""
        self.truncate([0 if is_released else 2**30 for is_released in mask], 2**30)

    def truncate(self, lengths: list[int], max_tokens: int) -> None:
        """Shorten slots to `lengths`, by at most `max_tokens`, from the last block."""
        for slot, length in enumerate(lengths):
            tokens, row = self.tokens[slot], self.blocks[slot]
            del tokens[max(length, len(tokens) - max_tokens, 0) :]
            while (len(row) - 1) * self.block_size >= len(tokens) and row:
                self._give_back(row.pop())

    def attach(self, slot: int, contents: list[Content]) -> int:
        """Start an empty slot with cached blocks of the first `contents`; return their number."""
        if not 0 <= slot < len(self.blocks) or self.tokens[slot]:
            return 0
        for content in contents:
            found = [block for block, known in self.cached.items() if known == content]
            if not found or found[0] in self.blocks[slot]:
                break
            [block] = found
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1
            self.blocks[slot].append(block)
            self.tokens[slot] += content.token_ids
        return len(self.blocks[slot])

    def publish(
        self, entries: list[tuple[int, int, Content]], replaces: list[bool] | None = None
    ) -> None:
        """Publish the blocks at some slots and columns, perhaps in place of older blocks."""
        before = dict(self.cached)
        for (slot, column, content), is_newer in zip(
            entries, replaces or [False] * len(entries), strict=True
        ):
            if not 0 <= slot < len(self.blocks):
                continue
            if not 0 <= column < len(self.tokens[slot]) // self.block_size:
                continue
            block = self.blocks[slot][column]
            known = [b for b, each in self.cached.items() if each.digest == content.digest]
            if block in before or block in self.cached:
                continue
            if is_newer and known and known[0] in before:
                del self.cached[known[0]]
            elif known:
                continue
            self.cached[block] = content

    def forget(self) -> None:
        """Remove all blocks from the prefix cache."""
        self.cached.clear()
