"""Sizes that numbers of rows and of tokens are padded to, so that few programs serve them all."""

from collections.abc import Sequence

import numpy as np

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
