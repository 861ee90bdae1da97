"""How many blocks sequences hold, and will: what the scheduler counts of a cache.

Layers that share a kind of attention form a group, with blocks of its own, and only those of the
first group are counted, the one that keeps most tokens. No other group is the first to run out: it
has ``min(P, S * w)`` blocks where the first has P, and w is the most that a slot ever holds of it.
With ``S * w`` there are enough for all slots, whatever they do. With P there are, as a slot holds
no block there that it does not hold in the first group too, and what slots share here they share
there: blocks that are found together were published together.

Most models have a group that keeps all tokens, and `Holdings` counts its blocks: what a sequence
holds follows from its length, and the cache says how many are free. Where all layers have a window,
`WindowHoldings` counts those of the largest one.
"""

from collections.abc import Sequence as Items

from paged_jax.cache.sequence_blocks import (
    first_kept_column,
    length_with_cached_tokens,
    max_blocks_in_window,
    num_blocks_needed,
    num_cached_tokens_at,
    num_kept_blocks,
)
from paged_jax.models.layer_types import LayerGroup
from paged_jax.scheduler.memory import BlockMemory
from paged_jax.scheduler.request import Sequence


def make_holdings(
    num_blocks: int, block_size: int, max_chunk: int, groups: Items[LayerGroup]
) -> "Holdings":
    """What counts the blocks of a model.

    Args:
      num_blocks: P, blocks of the first group.
      block_size: C, tokens in a block.
      max_chunk: most tokens of one sequence that a step prefills.
      groups: the groups of layers, the one that keeps most tokens first.
    """
    window = groups[0].window
    if window is None:
        return Holdings(num_blocks, block_size, groups)
    return WindowHoldings(num_blocks, block_size, groups, window=window, max_chunk=max_chunk)


def num_swapped_blocks(num_tokens: int, block_size: int, groups: Items[LayerGroup]) -> int:
    """Blocks that a swap moves: those of each group's window, in blocks of all layers, rounded up.

    Example:
      >>> groups = LayerGroup(None, (3,)), LayerGroup(8, (0, 1, 2))
      >>> num_swapped_blocks(64, 16, groups[:1]), num_swapped_blocks(64, 16, groups)
      (4, 2)
    """
    if len(groups) == 1:
        return num_kept_blocks(num_tokens, groups[0].window, block_size)
    kept = [num_kept_blocks(num_tokens, group.window, block_size) for group in groups]
    num_layers = [len(group.layers) for group in groups]
    total = sum(n * num_blocks for n, num_blocks in zip(num_layers, kept, strict=True))
    return -(-total // sum(num_layers))


class Holdings:
    """Counts the blocks of sequences whose tokens are all kept by some layers.

    Args:
      num_blocks: P, blocks of the first group.
      block_size: C, tokens in a block.
      groups: the groups of layers, the one that keeps most tokens first.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: Items[LayerGroup]):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._groups = groups

    # Of a sequence alone

    def num_required(self, num_tokens: int) -> int:
        """Blocks without which a sequence could not get as long as that, even alone."""
        return num_blocks_needed(num_tokens, self.block_size)

    def num_wanted(self, num_tokens: int) -> int:
        """Blocks with which a sequence gets as long as that in programs of full size."""
        return num_blocks_needed(num_tokens, self.block_size)

    def num_common(self, num_tokens: int) -> int:
        """Blocks that slots share for as long as they have so many tokens in common."""
        return num_tokens // self.block_size

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence for which the blocks suffice; None for any number."""
        return length_with_cached_tokens(self.num_blocks * self.block_size)

    def num_in_row(self, num_tokens: int, program_start: int) -> int:
        """Blocks in the row of a slot with so many tokens, see `Sequence.program_start`."""
        return num_blocks_needed(num_tokens, self.block_size)

    def num_swapped(self, num_tokens: int) -> int:
        """Blocks of a sequence that a swap moves, see `num_swapped_blocks`."""
        return num_swapped_blocks(num_tokens, self.block_size, self._groups)

    # Of running sequences

    def num_admitted(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many known tokens is promised when it gets a slot."""
        return self.num_wanted(num_tokens)

    def memory(self, memory: BlockMemory, running: list[Sequence]) -> BlockMemory:
        """The memory as the scheduler counts it while it plans a step."""
        return memory

    def num_back(self, sequence: Sequence) -> int:
        """Blocks that the next program of a sequence gives back before it takes others."""
        return 0

    def num_claimed(self, sequence: Sequence) -> int:
        """Blocks that a running sequence takes until it has decoded once."""
        size = self.block_size  # asked for every sequence in every step
        num_blocks = num_blocks_needed(len(sequence.token_ids), size)
        return num_blocks - num_blocks_needed(sequence.num_computed, size)

    num_growing = num_claimed
    """By how many blocks its next decode step makes a sequence hold more."""

    def num_forked(self, leader: Sequence) -> int:
        """Blocks that a fork takes in the step in which it is made."""
        return 1

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether a sequence may ever need more blocks than its known tokens take."""
        most = num_blocks_needed(num_cached_tokens_at(sequence.max_length), self.block_size)
        return most > num_blocks_needed(len(sequence.token_ids), self.block_size)


class WindowHoldings(Holdings):
    """Counts the blocks of sequences of which no layer keeps more than a window.

    So what a sequence holds is bounded, however long it is: a prompt runs in far fewer blocks than
    it has. Each program of a sequence first gives back what has left the window. Whether that makes
    blocks free depends on who shares them, so sharing is not counted here: each sequence is taken
    to hold its row alone. Never are more blocks in use than that, and what is planned within P
    blocks cannot be refused. The price: sequences that share a prompt wait for as many blocks as
    those that do not, which are no more than w for each.

    To count what is shared would take the references of each block, which the device has: a copy
    on the host, kept through forks, copies of blocks and what is found in the cache, or a wait for
    the device in every step. What that gains would not last: once samples of a prompt have drawn W
    tokens, no window reaches the prompt, each has a row alone, and those that had been let in for
    what they shared would be preempted.

    Args:
      num_blocks, block_size, groups: see `Holdings`.
      window: W, the largest window of the model, that of the first group.
      max_chunk: most tokens of one sequence that a step prefills.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Items[LayerGroup],
        *,
        window: int,
        max_chunk: int,
    ):
        super().__init__(num_blocks, block_size, groups)
        self._window = window
        self._most_decoding = max_blocks_in_window(window, 1, block_size)
        self._most = max_blocks_in_window(window, max_chunk, block_size)

    def num_required(self, num_tokens: int) -> int:
        """Those of a window: a prompt can be read token by token."""
        return min(self._most_decoding, super().num_required(num_tokens))

    def num_wanted(self, num_tokens: int) -> int:
        """Those of a window and a chunk."""
        return min(self._most, super().num_wanted(num_tokens))

    def num_admitted(self, num_tokens: int) -> int:
        """As many, if there are: else chunks are smaller."""
        return min(self.num_blocks, self.num_wanted(num_tokens))

    def num_common(self, num_tokens: int) -> int:
        """None: what has left the windows of all of them is given back."""
        return 0

    @property
    def max_length(self) -> int | None:
        """None, if there are as many blocks as a window takes."""
        return None if self.num_blocks >= self._most_decoding else super().max_length

    def num_in_row(self, num_tokens: int, program_start: int) -> int:
        """Blocks from the first that was kept when the last program began."""
        num_blocks = num_blocks_needed(num_tokens, self.block_size)
        return num_blocks - self._first_kept(program_start)

    def memory(self, memory: BlockMemory, running: list[Sequence]) -> BlockMemory:
        """The memory with all rows counted as if none shared a block."""
        return UnsharedMemory(memory, self, running)

    def num_back(self, sequence: Sequence) -> int:
        """Blocks that have left the window since the last program began."""
        return self._first_kept(sequence.num_computed) - self._first_kept(sequence.program_start)

    def num_growing(self, sequence: Sequence) -> int:
        """By how many blocks the row grows in its next decode step; below 0 if it gets shorter."""
        return super().num_claimed(sequence) - self.num_back(sequence)

    def num_claimed(self, sequence: Sequence) -> int:
        """Blocks that are still to come until it has decoded once."""
        if not sequence.num_prefill:
            return max(0, self.num_growing(sequence))
        num_held = self.num_in_row(sequence.num_computed, sequence.program_start)
        return max(0, self.num_admitted(len(sequence.token_ids)) - num_held)

    def num_forked(self, leader: Sequence) -> int:
        """The whole row, once it has decoded."""
        length = len(leader.token_ids)
        return self.num_in_row(length, num_cached_tokens_at(length))

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether a sequence does not hold a whole window yet, and may come to."""
        length = len(sequence.token_ids)
        most = self.num_required(num_cached_tokens_at(sequence.max_length))
        return most > self.num_in_row(length, num_cached_tokens_at(length))

    def _first_kept(self, num_tokens: int) -> int:
        return first_kept_column(num_tokens, self._window, self.block_size)


class UnsharedMemory(BlockMemory):
    """A memory in which each sequence holds its row alone: fewer blocks are free, never more.

    Args:
      memory: the memory.
      holdings: counts the rows.
      running: the sequences with a slot; a live list.
    """

    def __init__(self, memory: BlockMemory, holdings: WindowHoldings, running: list[Sequence]):
        self._memory = memory
        self._holdings = holdings
        self._running = running
        self._newcomer: Sequence | None = None  # which has blocks and does not run yet

    @property
    def num_free(self) -> int:
        """Blocks in no row; below 0 where rows that share blocks are more than there are."""
        num_held, newcomer = self.num_held(self._running), self._newcomer
        if newcomer is not None and newcomer not in self._running:
            num_held += self.num_held([newcomer])
        return self._holdings.num_blocks - num_held

    def num_held(self, sequences: list[Sequence]) -> int:
        """Blocks in the rows of these sequences."""
        row = self._holdings.num_in_row
        return sum(row(s.num_computed, s.program_start) for s in sequences)

    def attach(self, sequence: Sequence) -> int:
        """Begin a row, of which what the window needs is held."""
        num_tokens = self._memory.attach(sequence)
        sequence.num_computed = sequence.program_start = num_tokens
        self._newcomer = sequence
        return num_tokens

    def release(self, sequence: Sequence) -> None:
        """End a row."""
        self._memory.release(sequence)
        self._newcomer = None

    def swap_out(self, sequence: Sequence) -> None:
        """End a row, of which host memory has what the window needs."""
        self._memory.swap_out(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """Begin a row with what the window needs."""
        self._memory.swap_in(sequence)
        sequence.program_start = sequence.num_computed
        self._newcomer = sequence
