"""Block counts of sequences, and the scheduler's interface to the KV cache.

Layers with the same kind of attention form a group with its own blocks. The scheduler counts only
the first group, which keeps the most tokens, because no other group can run out of blocks earlier.
With P blocks in the first group and S slots, another group has ``min(P, S * w)`` blocks. Here w is
the maximum number of blocks that one slot holds in that group, so ``S * w`` blocks suffice for all
slots. P blocks suffice as well: a slot holds no more blocks there than in the first group. Slots
that share blocks in the first group share them in the others, because all groups publish and look
up blocks together.

`BlockBudget` counts for models with a group that keeps all tokens. If all layers have a sliding
window, `WindowBlockBudget` counts the blocks of the largest window.
"""

from collections.abc import Sequence as Items
from typing import Protocol

from paged_jax.cache.sequence_blocks import (
    first_kept_column,
    max_blocks_in_window,
    num_blocks_needed,
    num_cached_tokens_at,
    num_kept_blocks,
)
from paged_jax.models.layer_groups import LayerGroup
from paged_jax.scheduler.request import Sequence


class BlockMemory(Protocol):
    """Interface of the scheduler to the KV cache: counts of blocks, no arrays or block ids.

    Each call takes effect immediately.
    """

    @property
    def num_free(self) -> int:
        """Number of free blocks, including blocks that only the prefix cache holds."""
        ...

    def attach(self, sequence: Sequence) -> int:
        """Fill the empty slot of a sequence with the longest cached prefix of its tokens.

        Only the ``(len(token_ids) - 1) // C`` full blocks before the last token are looked up.
        Sets `Sequence.num_known`.

        Returns:
          Number of tokens found.
        """
        ...

    def num_held(self, sequences: list[Sequence]) -> int:
        """Return the number of blocks that releasing these running sequences would free."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of the sequence's slot. Full blocks stay in the prefix cache."""
        ...

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the blocks of a sequence to host memory and release its slot."""
        ...

    def swap_in(self, sequence: Sequence) -> None:
        """Fill the empty slot of a sequence with its ``num_computed`` tokens from host memory."""
        ...


def num_swapped_blocks(
    num_tokens: int,
    block_size: int,
    groups: Items[LayerGroup],
    state_groups: Items[LayerGroup] = (),
) -> int:
    """Return the number of blocks that swapping a sequence copies.

    The unit is one block of all layers. A block of a group counts as a fraction: the values that
    the group keeps of a token, divided by the values of all groups. Groups with a window copy only
    the blocks inside the window. The values of recurrent states count like values of tokens. The
    sum is rounded up.

    Example:
      >>> groups = LayerGroup(None, (3,)), LayerGroup(8, (0, 1, 2))
      >>> num_swapped_blocks(64, 16, groups[:1]), num_swapped_blocks(64, 16, groups)
      (4, 2)
    """
    if len(groups) == 1 and not state_groups:
        return num_kept_blocks(num_tokens, groups[0].sliding_window, block_size)
    kept = [num_kept_blocks(num_tokens, group.sliding_window, block_size) for group in groups]
    sizes = [group.num_values for group in groups]
    total = sum(size * num_blocks for size, num_blocks in zip(sizes, kept, strict=True))
    total += -(-sum(group.num_state_values for group in state_groups) // block_size)
    return -(-total // sum(sizes))


class BlockBudget:
    """Block counts of sequences in a model where some layers keep all tokens.

    The number of blocks of a sequence depends only on its length.

    Args:
      num_blocks: P, number of blocks of the first group.
      block_size: C, number of tokens in a block.
      groups: the groups of layers. The first group keeps the most tokens.
      state_groups: the groups of recurrent layers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Items[LayerGroup],
        state_groups: Items[LayerGroup] = (),
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._groups = groups
        self._state_groups = state_groups

    # Counts for a single sequence

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a sequence that fits the pool; None if unlimited."""
        return self.num_blocks * self.block_size + 1  # the last token is not in the cache

    def num_required(self, num_tokens: int) -> int:
        """Return the minimum number of blocks for a sequence of `num_tokens` tokens."""
        return num_blocks_needed(num_tokens, self.block_size)

    def num_wanted(self, num_tokens: int) -> int:
        """Return the number of blocks of a sequence that is prefilled in chunks of full size."""
        return num_blocks_needed(num_tokens, self.block_size)

    def num_shared(self, num_tokens: int) -> int:
        """Return the number of blocks that slots share if their first `num_tokens` are equal."""
        return num_tokens // self.block_size

    def num_in_row(self, num_tokens: int, program_start: int) -> int:
        """Return the number of blocks in a slot's row of the block table.

        Args:
          num_tokens: number of tokens in the cache.
          program_start: see `Sequence.program_start`.
        """
        return num_blocks_needed(num_tokens, self.block_size)

    def num_swapped(self, num_tokens: int) -> int:
        """Return the number of blocks that swapping a sequence copies."""
        return num_swapped_blocks(num_tokens, self.block_size, self._groups, self._state_groups)

    # Counts for sequences while a step is planned

    def num_free(self, memory: BlockMemory, running: list[Sequence]) -> int:
        """Return the number of blocks outside of the slots of these sequences."""
        return memory.num_free

    def num_held(self, memory: BlockMemory, sequences: list[Sequence]) -> int:
        """Return the number of blocks that releasing these running sequences would free."""
        return memory.num_held(sequences)

    def num_for_admission(self, num_tokens: int) -> int:
        """Return the number of blocks promised to a sequence of `num_tokens` that gets a slot."""
        return self.num_wanted(num_tokens)

    def num_freed_next(self, sequence: Sequence) -> int:
        """Return the number of blocks that a sequence's next program frees before it allocates."""
        return 0

    def num_claimed(self, sequence: Sequence) -> int:
        """Return the number of blocks that a running sequence still needs for its first decode."""
        size = self.block_size  # a local name: this runs for every sequence in every step
        num_blocks = num_blocks_needed(len(sequence.token_ids), size)
        return num_blocks - num_blocks_needed(sequence.num_computed, size)

    num_for_decode = num_claimed
    """Return the number of blocks that the next decode step adds; negative if it frees more."""

    def num_for_fork(self, leader: Sequence) -> int:
        """Return the number of blocks that a fork of `leader` takes in the step that creates it."""
        return 1

    def can_grow(self, sequence: Sequence) -> bool:
        """Return whether a sequence may need more blocks than its known tokens need."""
        most = num_blocks_needed(num_cached_tokens_at(sequence.max_length), self.block_size)
        return most > num_blocks_needed(len(sequence.token_ids), self.block_size)


class WindowBlockBudget(BlockBudget):
    """Block counts of sequences in a model where every layer has a sliding window.

    A sequence holds a bounded number of blocks, so a long prompt runs in few blocks. Each program
    of a sequence (a prefill chunk or a dispatch of decode steps) first frees the blocks that have
    left the window. A shared block becomes free only when all of its sequences free it, and the
    host does not know when that happens. The budget therefore counts the row of each sequence as if
    no block was shared. The pool never uses more blocks than that, so a plan within P blocks always
    fits. The cost: a sequence waits for the blocks of a window and a chunk even if it shares its
    prompt with another sequence.

    Counting shared blocks would need the reference counts of the device: either a copy on the host
    that follows forks, block copies and prefix hits, or waiting for the device in every step. The
    gain would be short. Once no window reaches the prompt, samples share no blocks, and the samples
    admitted because of shared blocks would be preempted.

    Args:
      num_blocks, block_size, groups, state_groups: see `BlockBudget`.
      max_chunk: maximum number of tokens that a step prefills per sequence.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Items[LayerGroup],
        state_groups: Items[LayerGroup],
        max_chunk: int,
    ):
        super().__init__(num_blocks, block_size, groups, state_groups)
        window = groups[0].sliding_window
        assert window is not None
        self._window = window  # the largest of the model
        self._most_decoding = max_blocks_in_window(window, 1, block_size)
        self._most = max_blocks_in_window(window, max_chunk, block_size)

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a sequence; None if the pool has room for a whole window."""
        return None if self.num_blocks >= self._most_decoding else super().max_length

    def num_required(self, num_tokens: int) -> int:
        """Return the number of blocks to prefill in short chunks, at most a window and a block."""
        return min(self._most_decoding, super().num_required(num_tokens))

    def num_wanted(self, num_tokens: int) -> int:
        """Return the number of blocks to prefill in full chunks, at most a window and a chunk."""
        return min(self._most, super().num_wanted(num_tokens))

    def num_shared(self, num_tokens: int) -> int:
        """Return 0, because this budget counts no block as shared."""
        return 0

    def num_in_row(self, num_tokens: int, program_start: int) -> int:
        """Return the number of blocks in a slot's row, without blocks freed by the last program."""
        num_blocks = num_blocks_needed(num_tokens, self.block_size)
        return num_blocks - self._first_kept(program_start)

    def num_free(self, memory: BlockMemory, running: list[Sequence]) -> int:
        """Return P minus the number of blocks in all rows; at least this many are free.

        The result is negative if rows that share blocks have more than P blocks in total.
        """
        return self.num_blocks - self.num_held(memory, running)

    def num_held(self, memory: BlockMemory, sequences: list[Sequence]) -> int:
        """Return the number of blocks in the rows of these sequences."""
        return sum(self.num_in_row(s.num_computed, s.program_start) for s in sequences)

    def num_for_admission(self, num_tokens: int) -> int:
        """Return `num_wanted`, but at most P: in a small pool, chunks are shorter than wanted."""
        return min(self.num_blocks, self.num_wanted(num_tokens))

    def num_freed_next(self, sequence: Sequence) -> int:
        """Return the number of blocks that have left the window since the last program began."""
        return self._first_kept(sequence.num_computed) - self._first_kept(sequence.program_start)

    def num_for_decode(self, sequence: Sequence) -> int:
        """Return the number of blocks that the next decode step adds; negative if it frees more."""
        return super().num_claimed(sequence) - self.num_freed_next(sequence)

    def num_claimed(self, sequence: Sequence) -> int:
        """Return the number of blocks that a running sequence still needs for its first decode."""
        if not sequence.num_prefill:
            return max(0, self.num_for_decode(sequence))
        num_held = self.num_in_row(sequence.num_computed, sequence.program_start)
        return max(0, self.num_for_admission(len(sequence.token_ids)) - num_held)

    def num_for_fork(self, leader: Sequence) -> int:
        """Return the number of blocks of the fork's whole row after its first decode step."""
        length = len(leader.token_ids)
        return self.num_in_row(length, num_cached_tokens_at(length))

    def can_grow(self, sequence: Sequence) -> bool:
        """Return whether a sequence holds less than a window and may need more blocks."""
        length = len(sequence.token_ids)
        most = self.num_required(num_cached_tokens_at(sequence.max_length))
        return most > self.num_in_row(length, num_cached_tokens_at(length))

    def _first_kept(self, num_tokens: int) -> int:
        return first_kept_column(num_tokens, self._window, self.block_size)
