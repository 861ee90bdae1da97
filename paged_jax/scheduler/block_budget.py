"""Block counts of sequences, and the scheduler's interface to the KV cache.

Layers with the same kind of attention form a group with its own blocks. The first group keeps the
most tokens. The scheduler counts only its blocks, because no other group runs out of blocks before
it. Let P be the number of blocks of the first group, S the number of slots, and w the maximum
number of blocks that a slot holds in another group. That group has ``min(P, S * w)`` blocks:

- ``S * w`` blocks are enough for all slots.
- P blocks are also enough. A slot never holds more blocks in another group than in the first group.
  Slots that share blocks in the first group share the corresponding blocks in the other groups.

`BlockBudget` is for models with a group that keeps all tokens. `WindowBlockBudget` is for models in
which all layers have a sliding window. It counts the blocks of the largest window.
"""

from collections.abc import Sequence as Items
from typing import Protocol

from paged_jax.cache.sequence_blocks import num_blocks_needed, num_cached_tokens_at
from paged_jax.models.layer_groups import CacheSpec
from paged_jax.scheduler.request import Sequence


class BlockMemory(Protocol):
    """Interface to the KV cache that the scheduler uses; `ModelRunner` implements it.

    Its methods neither take nor return arrays or block ids. Each call takes effect immediately.
    """

    @property
    def num_free(self) -> int:
        """Number of blocks that no slot uses, including cached blocks."""
        ...

    def attach(self, sequence: Sequence) -> int:
        """Fill the empty slot of a sequence with the longest cached prefix of its tokens.

        Only the ``(len(token_ids) - 1) // C`` full blocks before the last token are looked up. The
        method also sets `Sequence.num_known`.

        Returns:
          Number of tokens in the prefix.
        """
        ...

    def num_held(self, sequences: list[Sequence]) -> int:
        """Return the number of blocks that become free if these sequences are released."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Release the slot of a sequence; its full blocks stay in the prefix cache."""
        ...

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the blocks of a sequence to host memory, and release its slot."""
        ...

    def swap_in(self, sequence: Sequence) -> None:
        """Fill the empty slot of a sequence with its `num_computed` tokens from host memory."""
        ...


def num_swapped_blocks(num_tokens: int, block_size: int, groups: Items[CacheSpec]) -> int:
    """Return the number of blocks that are copied when a sequence is swapped.

    The unit is a block of all layers. If there are several groups, a block of a single group counts
    as a fraction: the number of K and V elements per token in this group, divided by the number in
    all groups. Groups with a window copy only the blocks inside the window. The elements of
    recurrent states count like elements of K and V. The sum is rounded up.

    Example:
      >>> from paged_jax.cache.retention import AllTokens, LastTokens
      >>> from paged_jax.models.layer_groups import LayerGroup
      >>> groups = LayerGroup(AllTokens(), (3,)), LayerGroup(LastTokens(8), (0, 1, 2))
      >>> num_swapped_blocks(64, 16, groups[:1]), num_swapped_blocks(64, 16, groups)
      (4, 2)
    """
    total = sum(group.num_copied_values(num_tokens, block_size) for group in groups)
    return -(-total // (block_size * sum(group.num_values for group in groups)))


class BlockBudget:
    """Counts the blocks of sequences, for models with layers that keep all tokens.

    In such a model, the number of blocks of a sequence depends only on its length.

    Args:
      num_blocks: P, number of blocks of the first group.
      block_size: C, number of tokens in a block.
      groups: the groups of the cache. The first group keeps the most tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: Items[CacheSpec]):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._groups = groups

    # Counts for a single sequence

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a sequence that fits the pool; None if unlimited."""
        # The last token of a sequence is not stored in the cache.
        return self.num_blocks * self.block_size + 1

    def num_required(self, num_tokens: int) -> int:
        """Return the minimum number of blocks to prefill `num_tokens` tokens."""
        return num_blocks_needed(num_tokens, self.block_size)

    def num_wanted(self, num_tokens: int) -> int:
        """Return the number of blocks to prefill `num_tokens` tokens in chunks of full size."""
        return num_blocks_needed(num_tokens, self.block_size)

    def num_shared(self, num_tokens: int) -> int:
        """Return the number of blocks that sequences with a common prefix share.

        `num_tokens` is the number of tokens in the common prefix.
        """
        return num_tokens // self.block_size

    def num_in_row(self, num_tokens: int, program_start: int) -> int:
        """Return the number of blocks that a slot holds.

        Args:
          num_tokens: number of tokens in the cache.
          program_start: see `Sequence.program_start`.
        """
        return num_blocks_needed(num_tokens, self.block_size)

    def num_swapped(self, num_tokens: int) -> int:
        """Return the number of blocks that are copied when a sequence is swapped."""
        return num_swapped_blocks(num_tokens, self.block_size, self._groups)

    # The following methods count blocks of sequences while a step is planned.

    def num_free(self, memory: BlockMemory, running: list[Sequence]) -> int:
        """Return the number of blocks that running sequences do not hold."""
        return memory.num_free

    def num_held(self, memory: BlockMemory, sequences: list[Sequence]) -> int:
        """Return the number of blocks that become free if these sequences are released."""
        return memory.num_held(sequences)

    def num_for_admission(self, num_tokens: int) -> int:
        """Return the number of blocks to reserve when a sequence is admitted.

        `num_tokens` is the number of all tokens of the sequence.
        """
        return self.num_wanted(num_tokens)

    def num_freed_next(self, sequence: Sequence) -> int:
        """Return the number of blocks that a sequence frees before its next tokens are computed."""
        return 0

    def num_claimed(self, sequence: Sequence) -> int:
        """Return the number of further blocks that a sequence needs up to its next decode step.

        These are the blocks for the rest of its prefill, if any, and for this decode step.
        """
        size = self.block_size  # Use a local variable, because this method runs very often.
        num_blocks = num_blocks_needed(len(sequence.token_ids), size)
        return num_blocks - num_blocks_needed(sequence.num_computed, size)

    num_for_decode = num_claimed
    """Return the number of blocks that the next decode step of a sequence takes.

    It is negative if the step frees more blocks than it allocates.
    """

    def num_for_fork(self, leader: Sequence) -> int:
        """Return the number of blocks that a new fork of `leader` takes in its first step."""
        return 1

    def can_grow(self, sequence: Sequence) -> bool:
        """Return whether a sequence may later need more blocks than its tokens need now."""
        max_blocks = num_blocks_needed(num_cached_tokens_at(sequence.max_length), self.block_size)
        return max_blocks > num_blocks_needed(len(sequence.token_ids), self.block_size)


class WindowBlockBudget(BlockBudget):
    """Counts the blocks of sequences, for models with a sliding window in every layer.

    A sequence holds a limited number of blocks, so a long prompt needs few blocks. Each program of
    a sequence (a prefill chunk or a dispatch of decode steps) first frees the blocks that have left
    the window. A shared block becomes free only when all its sequences have freed it, and the host
    does not know when this happens. So this budget counts the blocks of each sequence as if no
    block was shared. The sequences never use more blocks than this count. If the count of a plan is
    at most P, the plan can therefore run. The disadvantage is that a sequence must wait until there
    are free blocks for a window and a chunk, even if it shares its prompt with another sequence.

    To count shared blocks, the host would need the reference counts on the device. It would have to
    keep a copy of them, updated for every fork, block copy and prefix hit, or wait for the device
    in every step. The advantage would not last long: when the windows of the samples have left the
    prompt, they share no blocks. Then samples that were admitted because they shared blocks would
    be preempted.

    Args:
      num_blocks, block_size, groups: see `BlockBudget`.
      max_chunk: maximum number of tokens that a step prefills per sequence.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: Items[CacheSpec], max_chunk: int):
        super().__init__(num_blocks, block_size, groups)
        self._rule = rule = groups[0].retention  # The group that keeps the most tokens.
        self._max_decoding = rule.max_held(1, block_size)
        self._max_blocks = rule.max_held(max_chunk, block_size)

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens in a sequence; None if the pool sets no limit.

        The pool sets no limit if it has room for the blocks of a whole window.
        """
        return None if self.num_blocks >= self._max_decoding else super().max_length

    def num_required(self, num_tokens: int) -> int:
        """Return the minimum number of blocks to prefill `num_tokens` tokens.

        A chunk can be as short as one block, and before each chunk, the slot frees the blocks that
        have left the window. So it never needs more blocks than a window and one such chunk.
        """
        return min(self._max_decoding, super().num_required(num_tokens))

    def num_wanted(self, num_tokens: int) -> int:
        """Return the number of blocks to prefill `num_tokens` tokens in chunks of full size.

        Before each chunk, the slot frees the blocks that have left the window. So it never holds
        more than the blocks of a window and of a chunk.
        """
        return min(self._max_blocks, super().num_wanted(num_tokens))

    def num_shared(self, num_tokens: int) -> int:
        """Return 0, because this budget counts no block as shared."""
        return 0

    def num_in_row(self, num_tokens: int, program_start: int) -> int:
        """Return the number of blocks of a sequence that its slot has not freed yet."""
        num_blocks = num_blocks_needed(num_tokens, self.block_size)
        return num_blocks - self._num_freed(program_start)

    def num_free(self, memory: BlockMemory, running: list[Sequence]) -> int:
        """Return P minus the blocks of running sequences; shared blocks count once per sequence.

        At least this number of blocks is free. The result is negative if the sequences hold more
        than P blocks in total, because each shared block counts several times.
        """
        return self.num_blocks - self.num_held(memory, running)

    def num_held(self, memory: BlockMemory, sequences: list[Sequence]) -> int:
        """Return the number of blocks of sequences; shared blocks count once per sequence."""
        return sum(self.num_in_row(s.num_computed, s.program_start) for s in sequences)

    def num_for_admission(self, num_tokens: int) -> int:
        """Return the number of blocks to reserve when a sequence is admitted.

        This is `num_wanted`, but at most `num_blocks`: in a small pool, chunks are shorter.
        """
        return min(self.num_blocks, self.num_wanted(num_tokens))

    def num_freed_next(self, sequence: Sequence) -> int:
        """Return the number of blocks that a sequence frees before its next tokens are computed.

        These blocks have left the window since the start of the last program (a prefill chunk or a
        dispatch of decode steps).
        """
        return self._num_freed(sequence.num_computed) - self._num_freed(sequence.program_start)

    def num_for_decode(self, sequence: Sequence) -> int:
        """Return the number of blocks that the next decode step of a sequence takes.

        It is negative if the step frees more blocks than it allocates.
        """
        return super().num_claimed(sequence) - self.num_freed_next(sequence)

    def num_claimed(self, sequence: Sequence) -> int:
        """Return the number of further blocks that a sequence needs up to its next decode step."""
        if not sequence.num_prefill:
            return max(0, self.num_for_decode(sequence))
        num_held = self.num_in_row(sequence.num_computed, sequence.program_start)
        return max(0, self.num_for_admission(len(sequence.token_ids)) - num_held)

    def num_for_fork(self, leader: Sequence) -> int:
        """Return the number of blocks that a new fork of `leader` takes in its first step.

        All blocks of the fork count, because this budget counts no block as shared.
        """
        length = len(leader.token_ids)
        return self.num_in_row(length, num_cached_tokens_at(length))

    def can_grow(self, sequence: Sequence) -> bool:
        """Return whether a sequence may later need more blocks than its tokens need now.

        This is False if it already holds the blocks of a whole window.
        """
        length = len(sequence.token_ids)
        max_blocks = self.num_required(num_cached_tokens_at(sequence.max_length))
        return max_blocks > self.num_in_row(length, num_cached_tokens_at(length))

    def _num_freed(self, num_tokens: int) -> int:
        size = self.block_size
        return self._rule.num_freed(self._rule.cursor(num_tokens, size), size)


def make_budget(
    num_blocks: int, block_size: int, groups: Items[CacheSpec], max_chunk: int
) -> BlockBudget:
    """Return the budget for the group that keeps the most tokens; see the classes."""
    if groups[0].retention.frees:
        return WindowBlockBudget(num_blocks, block_size, groups, max_chunk)
    return BlockBudget(num_blocks, block_size, groups)
