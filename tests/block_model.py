"""The block allocator in plain Python: slots served one by one, with lists and a queue.

The oracle of `tests/test_blocks.py`. It also keeps the content of every slot as a list of tokens,
which is what a sequence holds no matter how its blocks are shared or copied.
"""

from collections import deque


class BlockModel:
    """Free blocks, reference counts, and for each slot its blocks and its tokens."""

    def __init__(self, num_blocks: int, num_slots: int, max_blocks_per_slot: int, block_size: int):
        self.num_blocks = num_blocks
        self.max_blocks_per_slot = max_blocks_per_slot
        self.block_size = block_size
        self.free = deque(range(num_blocks))
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self.tokens: list[list[int]] = [[] for _ in range(num_slots)]

    def reserve(
        self, new_tokens: list[list[int]], max_tokens: int
    ) -> tuple[bool, list[tuple[int, int] | None]]:
        """Append tokens to slots; return ok, and for each slot the copy on write as a pair."""
        no_copies: list[tuple[int, int] | None] = [None] * len(self.blocks)
        capacity = self.max_blocks_per_slot * self.block_size
        for tokens, new in zip(self.tokens, new_tokens, strict=True):
            if len(new) > max_tokens or len(tokens) + len(new) > capacity:
                return False, no_copies
        before = deque(self.free), dict(self.refs), [list(row) for row in self.blocks]
        copies = list(no_copies)
        try:
            for slot, new in enumerate(new_tokens):
                copies[slot] = self._grow(slot, len(self.tokens[slot]), len(new))
        except IndexError:  # no free block left
            self.free, self.refs, self.blocks = before
            return False, no_copies
        for tokens, new in zip(self.tokens, new_tokens, strict=True):
            tokens.extend(new)
        return True, copies

    def _grow(self, slot: int, length: int, num_new: int) -> tuple[int, int] | None:
        row, copy = self.blocks[slot], None
        if num_new and length % self.block_size and self.refs[row[-1]] > 1:
            source, target = row[-1], self._take()
            self.refs[source] -= 1
            row[-1] = target
            copy = (source, target)
        while len(row) * self.block_size < length + num_new:
            row.append(self._take())
        return copy

    def _take(self) -> int:
        block = self.free.popleft()
        self.refs[block] = 1
        return block

    def fork(self, parents: list[int]) -> bool:
        """Make slots into copies of others; -1 leaves a slot alone."""
        children = [slot for slot, parent in enumerate(parents) if parent != -1]
        for child in children:
            parent = parents[child]
            if not 0 <= parent < len(parents) or parent in children or self.tokens[child]:
                return False
        for child in children:
            self.tokens[child] = list(self.tokens[parents[child]])
            self.blocks[child] = list(self.blocks[parents[child]])
            for block in self.blocks[child]:
                self.refs[block] += 1
        return True

    def release(self, mask: list[bool]) -> None:
        """Empty slots, the last block of each first."""
        for slot, is_released in enumerate(mask):
            if is_released:
                for block in reversed(self.blocks[slot]):
                    self.refs[block] -= 1
                    if self.refs[block] == 0:
                        self.free.append(block)
                self.blocks[slot], self.tokens[slot] = [], []
