"""Layers of several windows in plain Python: block tables of which the beginnings are given back.

The oracle of `tests/cache/test_grouped_cache.py`, over that of blocks without a window.
"""

import copy
from collections import deque

from tests.support.block_model import BlockModel, Content


class WindowModel(BlockModel):
    """As `BlockModel`; None stands in a row for a block that was given back."""

    def __init__(self, *sizes: int, window: int | None):
        super().__init__(*sizes)
        self.window = window

    def first_kept(self, num_tokens: int) -> int:
        """The first column that a slot with so many tokens still needs."""
        if self.window is None:
            return 0
        begin = num_tokens // self.block_size * self.block_size  # of the block of the next token
        first_seen = max(begin - (self.window - 1), 0)
        return first_seen // self.block_size

    def slide(self, slots: list[int]) -> None:
        """Give back what has left the windows of these slots, the last block of each first."""
        for slot in slots:
            row = self.blocks[slot]
            for column in reversed(range(self.first_kept(len(self.tokens[slot])))):
                if row[column] is not None:
                    self._give_back(row[column])
                    row[column] = None

    def _give_back(self, block: int | None) -> None:
        if block is not None:
            super()._give_back(block)

    def _hold(self, block: int | None) -> None:
        if block is not None:
            super()._hold(block)

    def publish_alike(self, entries: list[tuple[int, int, Content]], news: list[bool]) -> None:
        """Cache what the first group has cached; in place of others, if it is new there."""
        held = [self.blocks[slot][column] for slot, column, _ in entries]
        for block, (_, _, content), is_new in zip(held, entries, news, strict=True):
            if is_new:
                self.cached = {
                    b: known for b, known in self.cached.items() if known != content or b == block
                }
        for block, (_, _, content) in zip(held, entries, strict=True):
            if block is not None and content not in self.cached.values():
                self.cached.setdefault(block, content)
        # What cannot be found any more is taken before what can.
        self.free = deque(sorted(self.free, key=lambda block: block in self.cached))

    def shortest(self, slot: int) -> int:
        """The least tokens to which a slot can be cut."""
        first = self.blocks[slot].count(None)
        lengths = range(len(self.tokens[slot]) + 1)
        return next(n for n in lengths if self.first_kept(n) >= first)

    def restore(self, new_tokens: list[list[int]], max_tokens: int) -> bool:
        """Give empty slots tokens, and blocks for what is kept of them."""
        before = copy.deepcopy((self.blocks, self.tokens))
        if any(new and tokens for new, tokens in zip(new_tokens, self.tokens, strict=True)):
            return False
        if any(len(new) > max_tokens for new in new_tokens):
            return False
        for slot, new in enumerate(new_tokens):
            first = self.first_kept(len(new))
            if new:
                self.blocks[slot] = [None] * first  # type: ignore[list-item]
                self.tokens[slot] = new[: first * self.block_size]
        rest = [new[len(self.tokens[s]) if new else 0 :] for s, new in enumerate(new_tokens)]
        ok, _ = self.reserve(rest, max_tokens)
        if not ok:
            self.blocks, self.tokens = before
        return ok


class GroupsModel:
    """Models of several windows over the same slots: an operation is done in all, or in none."""

    def __init__(self, windows: list[int | None], num_blocks: list[int], *sizes: int):
        self.models = [
            WindowModel(count, *sizes, window=window)
            for count, window in zip(num_blocks, windows, strict=True)
        ]
        self.first = self.models[0]

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each slot, the same in all models."""
        return self.first.tokens

    def _all(self, operation) -> tuple[bool, list[bool]]:
        """Do it in all models if all can: whether they could, and which of them."""
        saved = [copy.deepcopy(model.__dict__) for model in self.models]
        results = [operation(model) for model in self.models]
        if not all(results):
            for model, state in zip(self.models, saved, strict=True):
                model.__dict__ = state
        return all(results), results

    def reserve(self, new_tokens: list[list[int]], max_tokens: int) -> tuple[bool, list[bool]]:
        """Give back what has left the windows, then append; see `BlockModel.reserve`."""
        for model in self.models:
            model.slide([slot for slot, new in enumerate(new_tokens) if new])
        return self._all(lambda model: model.reserve(new_tokens, max_tokens)[0])

    def restore(self, new_tokens: list[list[int]], max_tokens: int) -> tuple[bool, list[bool]]:
        """See `WindowModel.restore`."""
        return self._all(lambda model: model.restore(new_tokens, max_tokens))

    def fork(self, parents: list[int]) -> bool:
        """See `BlockModel.fork`."""
        return all([model.fork(parents) for model in self.models])

    def reorder(self, parents: list[int]) -> bool:
        """See `BlockModel.reorder`."""
        return all([model.reorder(parents) for model in self.models])

    def release(self, mask: list[bool]) -> None:
        """See `BlockModel.release`."""
        for model in self.models:
            model.release(mask)

    def truncate(self, lengths: list[int], max_tokens: int) -> None:
        """To no less than all models can, see `BlockModel.truncate`."""
        least = [max(m.shortest(slot) for m in self.models) for slot in range(len(lengths))]
        for model in self.models:
            model.truncate([max(pair) for pair in zip(lengths, least, strict=True)], max_tokens)

    def attach(self, slot: int, contents: list[Content]) -> int:
        """Start an empty slot with the longest prefix of which each model has what it keeps."""
        if not 0 <= slot < len(self.tokens) or self.tokens[slot]:
            return 0
        size = self.first.block_size

        def has(model: WindowModel, count: int) -> bool:
            kept = contents[model.first_kept(count * size) : count]
            return all(content in model.cached.values() for content in kept)

        counts = range(len(contents), 0, -1)
        best = next((n for n in counts if all(has(model, n) for model in self.models)), 0)
        for model in self.models:
            first = model.first_kept(best * size)
            model.attach(slot, contents[first:best])
            model.blocks[slot][:0] = [None] * first  # type: ignore[list-item]
            model.tokens[slot] = [token for content in contents[:best] for token in content[1]]
        return best

    def publish(self, entries: list[tuple[int, int, Content]]) -> None:
        """Cache blocks: in the others those alone that are the cached ones of the first."""
        before = set(self.first.cached)
        self.first.publish(entries)
        taken, news = [], []
        for slot, column, content in entries:
            held = self.first.blocks[slot] if 0 <= slot < len(self.tokens) else []
            leading = held[column] if 0 <= column < len(held) else None
            if leading is not None and self.first.cached.get(leading) == content:
                taken.append((slot, column, content))
                news.append(leading not in before)
        for model in self.models[1:]:
            model.publish_alike(taken, news)

    def forget(self) -> None:
        """See `BlockModel.forget`."""
        for model in self.models:
            model.forget()
