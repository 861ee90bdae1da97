"""Block tables of layers with windows in plain Python, with freed blocks at the beginning."""

import copy
from collections import deque

from tests.support.block_model import BlockModel, Content


class WindowModel(BlockModel):
    """`BlockModel` with a window; None in a row means a freed block."""

    def __init__(self, *sizes: int, window: int | None):
        super().__init__(*sizes)
        self.window = window

    def first_kept(self, num_tokens: int) -> int:
        """Return the first column that a slot of this length needs."""
        if self.window is None:
            return 0
        # column of the block of the next token
        begin = num_tokens // self.block_size * self.block_size
        first_seen = max(begin - (self.window - 1), 0)
        return first_seen // self.block_size

    def slide(self, slots: list[int]) -> None:
        """Free the blocks outside the windows of these slots, from the last block."""
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
        """Publish the blocks that the first group has published, replacing older blocks."""
        held = [self.blocks[slot][column] for slot, column, _ in entries]
        for block, (_, _, content), is_new in zip(held, entries, news, strict=True):
            if is_new:
                self.cached = {
                    b: known for b, known in self.cached.items() if known != content or b == block
                }
        for block, (_, _, content) in zip(held, entries, strict=True):
            if block is not None and content not in self.cached.values():
                self.cached.setdefault(block, content)
        self.sort_free()

    def sort_free(self) -> None:
        """Move blocks that cannot be found before blocks that can: they are reused first."""
        self.free = deque(sorted(self.free, key=lambda block: block in self.cached))

    def shortest(self, slot: int) -> int:
        """Return the minimum length to which a slot can be cut."""
        first = self.blocks[slot].count(None)
        lengths = range(len(self.tokens[slot]) + 1)
        return next(n for n in lengths if self.first_kept(n) >= first)

    def restore(self, new_tokens: list[list[int]], max_tokens: int) -> bool:
        """Give empty slots tokens, and blocks for the tokens that are kept."""
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
    """Models of several windows over the same slots. An operation changes all models or none."""

    def __init__(self, windows: list[int | None], num_blocks: list[int], *sizes: int):
        self.models = [
            WindowModel(count, *sizes, window=window)
            for count, window in zip(num_blocks, windows, strict=True)
        ]
        self.first = self.models[0]

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each slot, equal in all models."""
        return self.first.tokens

    def _all(self, operation) -> tuple[bool, list[bool]]:
        """Apply an operation to all models if possible. Return whether it was, and the results."""
        saved = [copy.deepcopy(model.__dict__) for model in self.models]
        results = [operation(model) for model in self.models]
        if not all(results):
            for model, state in zip(self.models, saved, strict=True):
                model.__dict__ = state
        return all(results), results

    def reserve(self, new_tokens: list[list[int]], max_tokens: int) -> tuple[bool, list[bool]]:
        """Free blocks outside the windows, then append; see `BlockModel.reserve`."""
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
        """Truncate to at least the minimum length of all models, see `BlockModel.truncate`."""
        least = [max(m.shortest(slot) for m in self.models) for slot in range(len(lengths))]
        for model in self.models:
            model.truncate([max(pair) for pair in zip(lengths, least, strict=True)], max_tokens)

    def attach(self, slot: int, contents: list[Content]) -> int:
        """Start an empty slot with the longest prefix that all models have."""
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
        """Publish blocks; in other models only the blocks that match the first model."""
        before = set(self.first.cached)
        self.first.publish(entries, [self._would_complete(*entry) for entry in entries])
        self.first.sort_free()
        taken, news = [], []
        for slot, column, content in entries:
            held = self.first.blocks[slot] if 0 <= slot < len(self.tokens) else []
            leading = held[column] if 0 <= column < len(held) else None
            if leading is not None and self.first.cached.get(leading) == content:
                taken.append((slot, column, content))
                news.append(leading not in before)
        for model in self.models[1:]:
            model.publish_alike(taken, news)

    def _would_complete(self, slot: int, column: int, content: Content) -> bool:
        """Return whether a model gets a block that it has evicted, and none loses its copy."""
        adds = loses = False
        for model in self.models[1:]:
            row = model.blocks[slot] if 0 <= slot < len(model.blocks) else []
            is_full = 0 <= column < len(self.tokens[slot]) // model.block_size if row else False
            block = row[column] if is_full else None
            is_known = content.digest in [known.digest for known in model.cached.values()]
            adds |= block is not None and not is_known and block not in model.cached
            loses |= is_known and block is None
        return adds and not loses

    def forget(self) -> None:
        """See `BlockModel.forget`."""
        for model in self.models:
            model.forget()
