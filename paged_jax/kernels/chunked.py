"""Attention within chunks of consecutive tokens, with the kernels of full attention.

A token attends to the tokens of its chunk, from the first token to itself. A chunk has whole
blocks, so this is full attention over a part of the block table. No kernel needs another mask::

    chunks of 4 blocks      b0 b1 b2 b3 | b4 b5 b6 b7 | b8 b9
    a query in block b6                   b4 b5 b6             its part of the table
    a query in block b9                                 b8 b9

The queries of a prompt may belong to several chunks. Each row is then divided into a row for each
chunk, with the queries of that chunk::

    queries of a row        6 7 8 9           chunks of 8 tokens
    rows                    6 7 . .           over the first chunk
                            8 9 . .           over the second chunk
"""

from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.kernels.attention import paged_attention, paged_prefill_attention


def chunked_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    chunk: int,
    **options: Any,
) -> jax.Array:
    """Compute attention of one new token per sequence to its chunk, see `paged_attention`.

    Args:
      q: see `paged_attention`.
      k_pool: see `paged_attention`.
      v_pool: see `paged_attention`.
      block_tables: see `paged_attention`.
      context_lens: see `paged_attention`.
      chunk: number of tokens of a chunk, a multiple of the block size.
      options: further arguments of `paged_attention`.

    Raises:
      ValueError: the block size does not divide `chunk`.
    """
    if _is_single_chunk(k_pool, block_tables, chunk):
        return paged_attention(q, k_pool, v_pool, block_tables, context_lens, **options)
    numbers = jnp.maximum(context_lens - 1, 0) // chunk
    tables = _tables_of_chunks(block_tables, numbers, chunk // k_pool.shape[3])
    return paged_attention(q, k_pool, v_pool, tables, context_lens - numbers * chunk, **options)


def chunked_prefill_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    chunk: int,
    **options: Any,
) -> jax.Array:
    """Compute attention of the last tokens of each sequence to their chunks.

    Args:
      q: see `paged_prefill_attention`.
      k_pool: see `paged_prefill_attention`.
      v_pool: see `paged_prefill_attention`.
      block_tables: see `paged_prefill_attention`.
      context_lens: see `paged_prefill_attention`.
      query_lens: see `paged_prefill_attention`.
      chunk: number of tokens of a chunk, a multiple of the block size.
      options: further arguments of `paged_prefill_attention`.

    Raises:
      ValueError: the block size does not divide `chunk`.
    """
    if _is_single_chunk(k_pool, block_tables, chunk):
        return paged_prefill_attention(
            q, k_pool, v_pool, block_tables, context_lens, query_lens, **options
        )
    B, T, H, D = q.shape
    # Number of chunks that T consecutive tokens may belong to (S).
    S = (T + chunk - 2) // chunk + 1
    steps = jnp.arange(T, dtype=jnp.int32)[None]
    first = context_lens - query_lens
    numbers = (first // chunk)[:, None] + jnp.arange(S, dtype=jnp.int32)[None]
    ends = jnp.minimum(context_lens[:, None], (numbers + 1) * chunk)
    # Index of the first query of each chunk in its row, and number of its queries.
    starts = jnp.maximum(numbers * chunk - first[:, None], 0)
    counts = jnp.maximum(ends - first[:, None] - starts, 0)

    rows = jnp.minimum(starts[..., None] + steps[None], T - 1)
    parts = jnp.take_along_axis(q[:, None], rows[..., None, None], axis=2)
    tables = _tables_of_chunks(
        jnp.repeat(block_tables, S, axis=0), numbers.reshape(-1), chunk // k_pool.shape[3]
    )
    lengths = jnp.where(counts > 0, ends - numbers * chunk, 0)
    out = paged_prefill_attention(
        parts.reshape(B * S, T, H, D),
        k_pool,
        v_pool,
        tables,
        lengths.reshape(-1),
        counts.reshape(-1),
        **options,
    )
    # Back to the order of the queries.
    part = (first[:, None] + steps) // chunk - (first // chunk)[:, None]
    step = steps - jnp.take_along_axis(starts, part, axis=1)
    index = jnp.arange(B, dtype=jnp.int32)[:, None]
    return out.reshape(B, S, T, H, -1)[index, part, step]


def _is_single_chunk(k_pool: jax.Array, block_tables: jax.Array, chunk: int) -> bool:
    """Return whether all sequences of the tables are shorter than a chunk."""
    block_size = k_pool.shape[3]
    if chunk % block_size:
        raise ValueError(
            f"chunked_attention: chunk must be a multiple of the block size {block_size}, got "
            f"{chunk}. Use a block_size that divides it."
        )
    return block_tables.shape[1] * block_size <= chunk


def _tables_of_chunks(block_tables: jax.Array, numbers: jax.Array, width: int) -> jax.Array:
    """Return the columns i32 ``[B, width]`` of a chunk of each sequence.

    Args:
      block_tables: i32 ``[B, M]``.
      numbers: i32 ``[B]``, number of the chunk of each sequence.
      width: number of blocks of a chunk.
    """
    columns = numbers[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None]
    # The last chunk may be shorter. No column after the end of a sequence is read.
    columns = jnp.minimum(columns, block_tables.shape[1] - 1)
    return jnp.take_along_axis(block_tables, columns, axis=1)
