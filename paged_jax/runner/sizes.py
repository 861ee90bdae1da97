"""Sizes that compiled programs depend on, and the padding of batches to a few shapes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged_jax.cache.sequence_blocks import num_blocks_needed

# Number of tokens in a call of the program `score`. Log-probabilities of prompts are rarely
# requested, so only one program is compiled for them.
SCORE_WIDTH = 128
# Number of blocks that a swap copies per call. The last call is padded to this number of blocks,
# which costs less than one call per block.
SWAP_WIDTH = 16
# Number of blocks that one call publishes. The last call is padded to this number of blocks, which
# costs less than one call per block.
PUBLISH_WIDTH = 32
# Minimum number of decode steps that a compiled program has room for, so that engines with a
# smaller `max_steps` share a program. The unused room costs a few KB of memory.
MIN_DISPATCH_CAPACITY = 8


class Sizes(NamedTuple):
    """Sizes that the programs of an engine depend on, except for the number of blocks.

    The number of blocks is chosen later, when the memory that these programs need is known.

    Attributes:
      block_size: C, number of tokens in a block.
      num_slots: S, maximum number of running sequences.
      max_model_len: maximum number of tokens in a sequence, prompt and generated.
      max_chunk: maximum number of tokens in a prefill batch.
      max_steps: maximum number of decode steps in a dispatch.
      num_drafts: maximum number of draft tokens per sequence; 0 without speculative decoding.
      max_logit_bias: maximum number of tokens with a logit bias in a request, including the biases
        of the engine.
      max_stop_ids: maximum number of stop tokens of a request, including end-of-sequence tokens.
      tile: number of tokens per row of a prefill program, if all rows have the same length and a
        chunk takes several rows, see `pack_tiles`. None if each chunk takes one row, padded to one
        of several lengths, see `pack_chunks`.
      num_states: number of states of recurrent layers, for slots and snapshots; 0 if no layer is
        recurrent.

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
    tile: int | None = None
    num_states: int = 0

    @property
    def max_blocks_per_slot(self) -> int:
        """Maximum number of blocks per slot (M), which is the width of the block tables."""
        return num_blocks_needed(self.max_model_len, self.block_size)

    @property
    def max_step_tokens(self) -> int:
        """Maximum number of tokens that any program appends to a sequence."""
        return max(self.max_chunk, self.max_steps, 1 + self.num_drafts)

    @property
    def max_prefill(self) -> int:
        """Number of tokens, including padding, of the largest prefill program."""
        if self.tile is None:
            return self.max_chunk
        return self.tile * tile_buckets(self)[-1]

    @property
    def dispatch_capacity(self) -> int:
        """Maximum number of decode steps in a call of the compiled decode program.

        It is `max_steps`, rounded up to a power of two of at least `MIN_DISPATCH_CAPACITY`, so that
        engines with similar `max_steps` share a program. The actual number of steps is an argument
        of each call.
        """
        return max(MIN_DISPATCH_CAPACITY, 1 << (self.max_steps - 1).bit_length())

    @property
    def max_forced(self) -> int:
        """Maximum number of forced tokens of a sequence in one call.

        A token is forced if the grammar of the sequence allows no other token.
        """
        return max(self.dispatch_capacity, self.num_drafts)

    @property
    def score_width(self) -> int:
        """Number of tokens in a call of the program `score`."""
        return min(SCORE_WIDTH, self.max_chunk)

    @property
    def swap_width(self) -> int:
        """Number of blocks per call when a sequence is copied to or from the host."""
        return min(SWAP_WIDTH, self.max_blocks_per_slot)


# Value of `Sizes.tile` for models that use it: the number of queries per row. Shorter rows need
# less padding (half a row per chunk on average). Longer rows make the attention kernel faster,
# because it processes the queries of a row together, for 4 heads at a time.
TILE = 8
# Smallest length to which prompt chunks are padded, see `chunk_bucket`.
MIN_CHUNK = 16


# A batch of prompt chunks for a prefill call, ``(T, B, indices)``: number of tokens per row, number
# of rows, and the indices of the chunks. A chunk of more than T tokens takes several consecutive
# rows.
Batch = tuple[int, int, list[int]]


def pack(counts: Sequence[int], sizes: Sizes) -> list[Batch]:
    """Distribute prompt chunks to `Batch`es; `counts` has the number of tokens of each chunk."""
    if sizes.tile is not None:
        return pack_tiles(counts, sizes)
    return pack_chunks(counts, sizes.max_chunk, sizes.num_slots)


def pack_chunks(counts: Sequence[int], max_chunk: int, num_slots: int) -> list[Batch]:
    """Distribute chunks to batches; each chunk takes a single row, padded to T tokens.

    In the example below, the chunks of 12, 9 and 16 tokens form a batch of 4 rows with 16 tokens
    each, and the chunk of 500 tokens forms a batch of a single row with 512 tokens.

    Example:
      >>> pack_chunks([500, 12, 9, 16], max_chunk=512, num_slots=8)
      [(16, 4, [1, 2, 3]), (512, 1, [0])]
    """
    widths: dict[int, list[int]] = {}
    for index, count in enumerate(counts):
        widths.setdefault(chunk_bucket(count, max_chunk), []).append(index)
    batches = []
    for width, indices in sorted(widths.items()):
        buckets = prefill_rows(width, max_chunk, num_slots)
        while indices:
            # Take the largest batch that is at least half full.
            size = max(b for b in buckets if b < 2 * len(indices))
            batches.append((width, size, indices[:size]))
            indices = indices[size:]
    return batches


def pack_tiles(counts: Sequence[int], sizes: Sizes) -> list[Batch]:
    """Distribute chunks to batches with rows of `sizes.tile` tokens.

    Each chunk takes consecutive rows of a batch, and only its last row is padded. In the example
    below, rows have 8 tokens. Chunks 0, 1 and 2 have 20, 16 and 3 tokens, so they take 6 rows of
    the first batch, which is padded to 9 rows::

        row      0  1  2  3  4  5  6  7  8
        chunk    0  0  0  1  1  2  -  -  -

    Chunk 3 has 40 tokens. It does not fit in the first batch, so it gets a second batch.

    Example:
      >>> sizes = Sizes(block_size=16, num_slots=4, max_model_len=64, max_chunk=64, max_steps=1,
      ...               num_drafts=0, max_logit_bias=32, max_stop_ids=16, tile=8)
      >>> pack_tiles([20, 16, 3, 40], sizes)
      [(8, 9, [0, 1, 2]), (8, 9, [3])]
    """
    assert sizes.tile is not None
    buckets = tile_buckets(sizes)
    batches: list[tuple[int, list[int]]] = []
    num_rows, indices = 0, []
    for index, count in enumerate(counts):
        rows = -(-count // sizes.tile)
        if num_rows + rows > buckets[-1]:
            batches.append((num_rows, indices))
            num_rows, indices = 0, []
        num_rows += rows
        indices.append(index)
    batches += [(num_rows, indices)] if indices else []
    return [(sizes.tile, min(b for b in buckets if b >= rows), batch) for rows, batch in batches]


def tile_buckets(sizes: Sizes) -> list[int]:
    """Return the batch sizes B of the prefill programs with rows of `sizes.tile` tokens.

    If there are several slots, the largest program has room for an eighth more than `max_chunk`
    tokens, because the last row of each chunk is padded.

    Example:
      >>> sizes = Sizes(block_size=16, num_slots=4, max_model_len=64, max_chunk=64, max_steps=1,
      ...               num_drafts=0, max_logit_bias=32, max_stop_ids=16, tile=8)
      >>> tile_buckets(sizes)
      [2, 4, 9]
    """
    assert sizes.tile is not None
    *smaller, largest = chunk_buckets(sizes.max_chunk)
    if sizes.num_slots > 1:
        largest += largest // 8
    return sorted({-(-size // sizes.tile) for size in (*smaller, largest)})


def chunk_bucket(count: int, max_chunk: int) -> int:
    """Return the padded length T of a chunk with `count` tokens.

    It is the next power of two, at least 16, or `max_chunk` if that is smaller.
    """
    return min(max_chunk, max(MIN_CHUNK, 1 << (count - 1).bit_length()))


def chunk_buckets(max_chunk: int) -> list[int]:
    """Return all padded lengths T that `chunk_bucket` can return.

    Example:
      >>> chunk_buckets(100)
      [16, 32, 64, 100]
    """
    widths = []
    while (width := chunk_bucket(widths[-1] + 1 if widths else 1, max_chunk)) < max_chunk:
        widths.append(width)
    return [*widths, max_chunk]


def prefill_rows(width: int, max_chunk: int, num_slots: int) -> list[int]:
    """Return all batch sizes B of the prefill programs for chunks of `width` tokens.

    Batches of 16 and more rows have at most half of `max_chunk` tokens, because larger batches are
    slower than several calls. On 2 CPU cores, a call with 16 x 32 tokens took 1.2 to 1.7 times as
    long as four calls with 4 x 32 tokens.

    Example:
      >>> [prefill_rows(width, max_chunk=512, num_slots=64) for width in (16, 32, 128, 256)]
      [[1, 4, 16], [1, 4], [1, 4], [1]]
    """
    rows = [1]
    while 4 * rows[-1] <= num_slots:
        max_tokens = max_chunk if rows == [1] else max_chunk // 2
        if 4 * rows[-1] * width > max_tokens:
            break
        rows.append(4 * rows[-1])
    return rows


def row_bucket(count: int, num_slots: int) -> int:
    """Return the padded batch size B for `count` decoding sequences.

    It is 1, or a power of two of at least 4, limited to `num_slots`. There is no batch size 2: on a
    CPU, two rows in a batch of four take only 5 to 10% longer than in a batch of two. Saving this
    time does not justify compiling one more program at every start.
    """
    return 1 if count == 1 else min(num_slots, max(4, 1 << (count - 1).bit_length()))


def row_buckets(num_slots: int) -> list[int]:
    """Return all padded batch sizes B that `row_bucket` can return.

    Example:
      >>> row_buckets(12)
      [1, 4, 8, 12]
    """
    return sorted({row_bucket(count, num_slots) for count in range(1, num_slots + 1)})


def no_slots(count: int) -> np.ndarray:
    """Return slot indices for `count` rows of padding: i32[count], all -1."""
    return np.full(count, -1, np.int32)
