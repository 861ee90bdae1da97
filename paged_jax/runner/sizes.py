"""What shapes the compiled programs of an engine: plain numbers, known before any array is made."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged_jax.cache.sequence_blocks import num_blocks_needed

# Prompt tokens that one call scores: rarely asked for, so one program must do.
SCORE_WIDTH = 128
# Blocks that one call moves to or from the host: a call for each would cost more than the padding.
SWAP_WIDTH = 16
# Blocks that one call publishes, for the same reason.
PUBLISH_WIDTH = 32
# Every limit of decode steps up to this one has the same program: the arrays that depend on it are
# a few KB.
MIN_DISPATCH_CAPACITY = 8


class Sizes(NamedTuple):
    """What shapes the programs of an engine, but for the number of blocks in the pool.

    That number is chosen once it is known how much memory programs of these sizes take.

    Attributes:
      block_size: C, tokens in a block.
      num_slots: S, sequences that can run at once.
      max_model_len: most tokens of a sequence, prompt and generated.
      max_chunk: most tokens of one prefill batch.
      max_steps: most decode steps in one dispatch.
      num_drafts: most guessed tokens of a sequence in one verification; 0 is for no speculation.
      max_logit_bias: most entries in the logit bias of a request.
      max_stop_ids: most tokens that end a request's sequences.

    Example:
      >>> sizes = Sizes(block_size=16, num_slots=4, max_model_len=500, max_chunk=64,
      ...               max_steps=1, num_drafts=0, max_logit_bias=32, max_stop_ids=16)
      >>> sizes.max_blocks_per_slot, sizes.dispatch_capacity, sizes.score_width, sizes.swap_width
      (32, 8, 64, 16)
    """

    block_size: int
    num_slots: int
    max_model_len: int
    max_chunk: int
    max_steps: int
    num_drafts: int
    max_logit_bias: int
    max_stop_ids: int

    @property
    def max_blocks_per_slot(self) -> int:
        """M, the width of the block tables."""
        return num_blocks_needed(self.max_model_len, self.block_size)

    @property
    def most_tokens(self) -> int:
        """Most tokens that one program appends to a sequence."""
        return max(self.max_chunk, self.max_steps, 1 + self.num_drafts)

    @property
    def dispatch_capacity(self) -> int:
        """Decode steps that the compiled program has room for, a power of two.

        The number of steps is an argument of each call. So engines that differ in nothing but
        `max_steps` share one program.
        """
        return max(MIN_DISPATCH_CAPACITY, 1 << (self.max_steps - 1).bit_length())

    @property
    def max_forced(self) -> int:
        """Tokens of a sequence, known from its grammar, that one call has room for."""
        return max(self.dispatch_capacity, self.num_drafts)

    @property
    def score_width(self) -> int:
        """Prompt tokens that one call scores."""
        return min(SCORE_WIDTH, self.max_chunk)

    @property
    def swap_width(self) -> int:
        """Blocks that one call moves to or from the host."""
        return min(SWAP_WIDTH, self.max_blocks_per_slot)


# A chunk is padded to a power of two no smaller than this.
MIN_CHUNK = 16


def pack(counts: Sequence[int], max_chunk: int, num_slots: int) -> list[tuple[int, int, list[int]]]:
    """Arrange chunks of so many tokens in batches: ``(T, B, indices of the chunks)`` each.

    Example:
      >>> pack([500, 12, 9, 16], max_chunk=512, num_slots=8)
      [(16, 4, [1, 2, 3]), (512, 1, [0])]
    """
    widths: dict[int, list[int]] = {}
    for index, count in enumerate(counts):
        widths.setdefault(chunk_bucket(count, max_chunk), []).append(index)
    batches = []
    for width, indices in sorted(widths.items()):
        buckets = prefill_rows(width, max_chunk, num_slots)
        while indices:
            # The largest batch of which at least half is used.
            size = max(b for b in buckets if b < 2 * len(indices))
            batches.append((width, size, indices[:size]))
            indices = indices[size:]
    return batches


def chunk_bucket(count: int, max_chunk: int) -> int:
    """T for a chunk of so many tokens."""
    return min(max_chunk, max(MIN_CHUNK, 1 << (count - 1).bit_length()))


def chunk_buckets(max_chunk: int) -> list[int]:
    """All T.

    Example:
      >>> chunk_buckets(100)
      [16, 32, 64, 100]
    """
    return sorted({chunk_bucket(count, max_chunk) for count in range(1, max_chunk + 1)})


def prefill_rows(width: int, max_chunk: int, num_slots: int) -> list[int]:
    """All B for prefill of chunks of `width` tokens.

    Batches of 16 and more have at most half of `max_chunk`: where each of four calls has enough
    tokens, a call for all of them gains nothing. (On 2 CPU cores 16 x 32 tokens took 1.2 to 1.7
    times as long as four calls of 4 x 32.)

    Example:
      >>> [prefill_rows(width, max_chunk=512, num_slots=64) for width in (16, 32, 128, 256)]
      [[1, 4, 16], [1, 4], [1, 4], [1]]
    """
    rows = [1]
    while 4 * rows[-1] <= num_slots:
        most = max_chunk if rows == [1] else max_chunk // 2
        if 4 * rows[-1] * width > most:
            break
        rows.append(4 * rows[-1])
    return rows


def row_bucket(count: int, num_slots: int) -> int:
    """B for decoding so many sequences: 1, or a power of two from 4.

    Two rows in a batch of four cost 5 to 10% more than in one of two, on CPU, which is less than
    another program would cost at every start.
    """
    return 1 if count == 1 else min(num_slots, max(4, 1 << (count - 1).bit_length()))


def row_buckets(num_slots: int) -> list[int]:
    """All B for decoding.

    Example:
      >>> row_buckets(12)
      [1, 4, 8, 12]
    """
    return sorted({row_bucket(count, num_slots) for count in range(1, num_slots + 1)})


def no_slots(count: int) -> np.ndarray:
    """Rows of a batch that are all padding, i32[count]: their slots are -1."""
    return np.full(count, -1, np.int32)
