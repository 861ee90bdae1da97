"""A ragged batch in parts: what the kernels for single queries and for chunks make of it.

Chunks of any lengths lie in one flat array, those of decode, with one query, among longer ones::

    q  [N, H, D]    | a a a a | b | c | d d d d d d d | (rows of no sequence)
    decode  [B, H, D]      -    b   c        -           a row of each sequence; others are empty
    chunks  [N, H, D] a a a a   -   -  d d d d d d d     tiles of one sequence each

Each has its own best kernel: that of one query divides long contexts, that of chunks has products
of many rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.kernels.backend import AttentionArgs, RaggedArgs
from paged_jax.kernels.opaque_call import take_or_fill


class Chunks(NamedTuple):
    """Where the queries of each sequence are.

    Attributes:
      starts: i32 ``[B]``, row of the first.
      lens: i32 ``[B]``, their number; at most the tokens of the sequence, of which they are the
        last.
    """

    starts: jax.Array
    lens: jax.Array


def find_chunks(args: RaggedArgs) -> Chunks:
    """Where the queries of each sequence are.

    A chunk that is longer than its sequence begins with rows that are no tokens: they are left out.
    """
    ends = args.cu_query_lens[1:]
    lens = jnp.clip(ends - args.cu_query_lens[:-1], 0, args.context_lens)
    return Chunks(ends - lens, lens)


def attend_in_parts(
    decode: Callable[[AttentionArgs], tuple[jax.Array, jax.Array]],
    attend_to_chunks: Callable[[RaggedArgs, Chunks], tuple[jax.Array, jax.Array]],
    args: RaggedArgs,
) -> tuple[jax.Array, jax.Array]:
    """Attend with single queries by one function, and with the other chunks by another.

    Args:
      decode: attends with one query for each sequence, as a backend's decode.
      attend_to_chunks: attends with the queries of the given chunks, and returns ``[N, H, D]`` and
        the log-sum-exp ``[N, H]``. Other rows of its results may hold anything.
      args: the batch.

    Returns:
      ``(out, lse)``: ``[N, H, D]``, 0 in rows that are not queries, and ``[N, H]``, -inf there.
    """
    chunks = find_chunks(args)
    is_single = chunks.lens == 1
    single, single_lse = decode(
        AttentionArgs(
            q=args.q.at[chunks.starts].get(mode="clip"),
            pools=args.pages,
            block_tables=args.block_tables,
            context_lens=jnp.where(is_single, args.context_lens, 0),
            query_lens=None,
            sinks=args.sinks,
            layer=jnp.zeros((), jnp.int32),
        )
    )
    out, lse = attend_to_chunks(args, chunks._replace(lens=jnp.where(is_single, 0, chunks.lens)))
    rows = find_rows(args, chunks)
    is_single_N1 = is_single[rows.sequence][:, None]
    return rows.mask(
        jnp.where(is_single_N1[..., None], single[rows.sequence], out),
        jnp.where(is_single_N1, single_lse[rows.sequence], lse),
    )


class Rows(NamedTuple):
    """What each row of the queries is.

    Attributes:
      sequence: i32 ``[N]``, of which it is a token.
      token: i32 ``[N]``, its place among the queries of the sequence.
      is_query: bool ``[N]``; the others are no token, and their numbers here mean nothing.
    """

    sequence: jax.Array
    token: jax.Array
    is_query: jax.Array

    def mask(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `out` and `lse` with 0 and -inf in rows that are not queries."""
        is_query_N1 = self.is_query[:, None]
        return jnp.where(is_query_N1[..., None], out, 0), jnp.where(is_query_N1, lse, -jnp.inf)


def find_rows(args: RaggedArgs, chunks: Chunks) -> Rows:
    """What each row of the queries is."""
    rows = jnp.arange(args.q.shape[0], dtype=jnp.int32)
    # Of sequences that begin at the same row, all but the last one have no queries.
    starts = args.cu_query_lens[None, :-1]
    sequence = jnp.sum(starts <= rows[:, None], axis=1, dtype=jnp.int32) - 1
    sequence = jnp.maximum(sequence, 0)
    token = rows - chunks.starts[sequence]
    return Rows(sequence, token, (token >= 0) & (token < chunks.lens[sequence]))


def cut_into_tiles(args: RaggedArgs, num_queries: int) -> tuple[AttentionArgs, jax.Array]:
    """The batch as chunks of a few queries each, of one sequence, padded to the same length.

    Args:
      args: the batch.
      num_queries: T, queries of a chunk at most.

    Returns:
      ``(chunks, rows)``: the arguments of a prefill of B' chunks, as many as there can be, and the
      row of each of their queries in the batch, i32 ``[B', T]``, N in padding.
    """
    N = args.q.shape[0]
    whole = find_chunks(args)
    num_tiles = (whole.lens + num_queries - 1) // num_queries
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    index = jnp.arange(N // num_queries + len(ends), dtype=jnp.int32)
    sequence = jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, len(ends) - 1)
    first = (index - (ends - num_tiles)[sequence]) * num_queries
    lens = jnp.clip(whole.lens[sequence] - first, 0, num_queries)
    before = (args.context_lens - whole.lens)[sequence] + first
    token_T = jnp.arange(num_queries, dtype=jnp.int32)
    rows_BT = (whole.starts[sequence] + first)[:, None] + token_T[None]
    rows_BT = jnp.where(token_T[None] < lens[:, None], rows_BT, N)
    tiles = AttentionArgs(
        q=take_or_fill(args.q, rows_BT),
        pools=args.pages,
        block_tables=args.block_tables[sequence],
        context_lens=jnp.where(lens > 0, before + lens, 0),
        query_lens=lens,
        sinks=args.sinks,
        layer=jnp.zeros((), jnp.int32),
    )
    return tiles, rows_BT
