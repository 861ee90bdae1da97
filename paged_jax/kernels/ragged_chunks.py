"""Chunks of a ragged batch: the rows of queries that belong to each sequence.

Backends use these functions to run a ragged batch in their decode and prefill kernels.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.kernels.op_args import AttentionArgs, RaggedArgs, RaggedOptions
from paged_jax.kernels.opaque_call import take_or_fill


class Chunks(NamedTuple):
    """The rows of queries of each sequence. The queries are the last tokens of the sequence.

    Attributes:
      starts: i32 ``[B]``, row of the first query of each sequence in the array of queries.
      lens: i32 ``[B]``, number of queries of each sequence, at most the length of the sequence.
    """

    starts: jax.Array
    lens: jax.Array


def find_chunks(args: RaggedArgs) -> Chunks:
    """Return the rows of queries of each sequence.

    If a sequence has more queries than tokens, its first queries are left out.
    """
    ends = args.cu_query_lens[1:]
    lens = jnp.clip(ends - args.cu_query_lens[:-1], 0, args.context_lens)
    return Chunks(ends - lens, lens)


def attend_in_parts(
    decode: Callable[..., tuple[jax.Array, jax.Array]],
    attend_to_chunks: Callable[..., tuple[jax.Array, jax.Array]],
    args: RaggedArgs,
    options: RaggedOptions,
) -> tuple[jax.Array, jax.Array]:
    """Attend with single queries by `decode`, and with longer chunks by `attend_to_chunks`.

    Args:
      decode: function of `AttentionArgs` and options that attends with one query per sequence;
        returns ``[B, H, U]`` and ``[B, H]``.
      attend_to_chunks: function of `RaggedArgs`, `Chunks` and options that attends with the queries
        of the chunks; returns ``[N, H, U]`` and ``[N, H]``. Rows outside of the chunks are ignored.
      args: the batch.
      options: options of the call.

    Returns:
      ``(out, lse)``: output ``[N, H, U]`` and log-sum-exp ``[N, H]``; 0 and -inf in rows that are
      not queries.
    """
    chunks = find_chunks(args)
    is_single = chunks.lens == 1
    q = args.q.at[chunks.starts].get(mode="clip")
    single_lens = jnp.where(is_single, args.context_lens, 0)
    one_query = args.as_attention(q, args.block_tables, single_lens)
    single, single_lse = decode(one_query, options=options)
    longer = chunks._replace(lens=jnp.where(is_single, 0, chunks.lens))
    out, lse = attend_to_chunks(args, longer, options=options)
    rows = find_rows(args, chunks)
    is_single_N1 = is_single[rows.sequence][:, None]
    return rows.mask(
        jnp.where(is_single_N1[..., None], single[rows.sequence], out),
        jnp.where(is_single_N1, single_lse[rows.sequence], lse),
    )


class QueryRows(NamedTuple):
    """The sequence and the token that each row of the array of queries belongs to.

    Attributes:
      sequence: i32 ``[N]``, row of the sequence in the block table.
      token: i32 ``[N]``, index of the token among the queries of the sequence.
      is_query: bool ``[N]``, False in rows that belong to no sequence. `sequence` and `token` are
        meaningless there.
    """

    sequence: jax.Array
    token: jax.Array
    is_query: jax.Array

    def mask(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `out` and `lse`, with 0 and -inf in rows that are not queries."""
        is_query_N1 = self.is_query[:, None]
        return jnp.where(is_query_N1[..., None], out, 0), jnp.where(is_query_N1, lse, -jnp.inf)


def find_rows(args: RaggedArgs, chunks: Chunks) -> QueryRows:
    """Return the sequence and the token that each row of the array of queries belongs to."""
    rows = jnp.arange(args.q.shape[0], dtype=jnp.int32)
    # A row belongs to the last sequence that starts at or before it. If several sequences start at
    # the same row, only the last of them has queries.
    starts = args.cu_query_lens[None, :-1]
    sequence = jnp.sum(starts <= rows[:, None], axis=1, dtype=jnp.int32) - 1
    sequence = jnp.maximum(sequence, 0)
    token = rows - chunks.starts[sequence]
    return QueryRows(sequence, token, (token >= 0) & (token < chunks.lens[sequence]))


def cut_into_tiles(args: RaggedArgs, num_queries: int) -> tuple[AttentionArgs, jax.Array]:
    """Cut the chunks into tiles of equal length, which are the rows of a prefill.

    Args:
      args: the ragged batch.
      num_queries: number of queries in a tile (T). The last tile of a chunk is padded.

    Returns:
      ``(tiles, rows)``: the arguments of a prefill with B' sequences, one for each tile; and i32
      ``[B', T]``, the row of each query in ``args.q``, which is N for padding. B' is the maximum
      number of tiles.
    """
    N = args.q.shape[0]
    chunks = find_chunks(args)
    num_tiles = (chunks.lens + num_queries - 1) // num_queries
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    index = jnp.arange(N // num_queries + len(ends), dtype=jnp.int32)
    sequence = jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, len(ends) - 1)
    first = (index - (ends - num_tiles)[sequence]) * num_queries
    lens = jnp.clip(chunks.lens[sequence] - first, 0, num_queries)
    before = (args.context_lens - chunks.lens)[sequence] + first
    token_T = jnp.arange(num_queries, dtype=jnp.int32)
    rows_BT = (chunks.starts[sequence] + first)[:, None] + token_T[None]
    rows_BT = jnp.where(token_T[None] < lens[:, None], rows_BT, N)
    q, tables = take_or_fill(args.q, rows_BT), args.block_tables[sequence]
    return args.as_attention(q, tables, jnp.where(lens > 0, before + lens, 0), lens), rows_BT
