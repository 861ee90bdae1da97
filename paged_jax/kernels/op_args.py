# pyright: strict, reportUnknownMemberType=false
"""Arrays and options of the ops. Public functions bind them, and kernels take them.

Kernels can rely on arguments that are in range, because the public functions check and clip them.
In attention, ``layer`` is in ``0..L - 1``, ``context_lens`` in ``0..M * C``, and ``query_lens`` in
``0..T`` and at most ``context_lens``. In ragged batches, ``cu_query_lens`` is in ``0..N``.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.kernels.pools import Pages, Pools
from paged_jax.kernels.weight_formats import Weight


class AttentionArgs(NamedTuple):
    """Arrays of a decode (one query per sequence) or a prefill (a chunk of queries per sequence).

    Attributes:
      q: queries, floating point: ``[B, H, D]`` in a decode, ``[B, T, H, D]`` in a prefill.
      pools: the pools of all layers; or the pages, if the call is a part of a ragged batch.
      block_tables: i32 ``[B, M]``, block ids of each sequence in order.
      context_lens: i32 ``[B]``, number of tokens in each sequence.
      query_lens: i32 ``[B]``, number of tokens in each chunk; None in a decode.
      sinks: attention sinks, floating point ``[H]``, or None.
      layer: i32 ``[]``, the layer to read.
    """

    q: jax.Array
    pools: Pools | Pages
    block_tables: jax.Array
    context_lens: jax.Array
    query_lens: jax.Array | None
    sinks: jax.Array | None
    layer: int | jax.Array

    @property
    def op(self) -> Literal["decode", "prefill"]:
        """Name of the op that takes these arrays."""
        return "decode" if self.query_lens is None else "prefill"

    def as_prefill(self) -> "AttentionArgs":
        """Return the arguments of a decode as a prefill with single-token chunks."""
        return self._replace(q=self.q[:, None], query_lens=jnp.ones_like(self.context_lens))


class RaggedArgs(NamedTuple):
    """Arrays of a ragged batch: chunks of different lengths, concatenated without padding.

    Attributes:
      q: queries of all sequences, floating point ``[N, H, D]``.
      pages: the keys and values of one layer.
      block_tables: i32 ``[B, M]``, page ids of each sequence in order.
      context_lens: i32 ``[B]``, number of tokens in each sequence; 0 in unused rows.
      cu_query_lens: i32 ``[B + 1]``, cumulative query lengths. Element b is the row of `q` at which
        chunk b starts. All elements from index `num_sequences` on are the row after the last chunk.
      num_sequences: i32 ``[1]``, number of sequences, in 0..B.
      sinks: attention sinks, floating point ``[H]``, or None.
    """

    q: jax.Array
    pages: Pages
    block_tables: jax.Array
    context_lens: jax.Array
    cu_query_lens: jax.Array
    num_sequences: jax.Array
    sinks: jax.Array | None = None

    def as_attention(
        self,
        q: jax.Array,
        tables: jax.Array,
        context_lens: jax.Array,
        query_lens: jax.Array | None = None,
    ) -> AttentionArgs:
        """Return the arguments of a decode or prefill of queries `q` over the pages of this batch.

        It is a decode if `query_lens` is None.
        """
        layer = jnp.zeros((), jnp.int32)  # pages have a single layer
        return AttentionArgs(q, self.pages, tables, context_lens, query_lens, self.sinks, layer)


class WriteArgs(NamedTuple):
    """Arrays of a write: keys and values of N tokens, and their places in the pools.

    Attributes:
      pools: the pools of all layers.
      k: new keys, floating point ``[N, K, D]``.
      v: new values, floating point ``[N, K, U]``; None if the pools have no values.
      blocks: i32 ``[N]``, block id of each token.
      offsets: i32 ``[N]``, position of each token in its block. A token is dropped if its block or
        its offset is out of range.
      layer: i32 ``[]``, the layer to write; nothing is written if it is out of range.
    """

    pools: Pools
    k: jax.Array
    v: jax.Array | None
    blocks: jax.Array
    offsets: jax.Array
    layer: int | jax.Array


class RopeWriteArgs(NamedTuple):
    """Arrays of `paged_rope_write`: a fused QKV projection of N tokens, and their places.

    Attributes:
      pools: the pools of all layers.
      qkv: ``[N, K, G + 2, D]``, floating point: the G queries, the key and the value of each KV
        head.
      cos, sin: f32 ``[N, D / 2]``, cosine and sine of the rotation angle of each pair of elements.
      norms: weights of the RMS norms of queries and of keys, floating point ``[D]``; None for no
        norms.
      blocks, offsets, layer: see `WriteArgs`.
    """

    pools: Pools
    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    norms: tuple[jax.Array, jax.Array] | None
    blocks: jax.Array
    offsets: jax.Array
    layer: int | jax.Array


class CopyArgs(NamedTuple):
    """Arrays of a copy of N blocks, in all layers.

    Attributes:
      pools: the pools of all layers.
      sources: i32 ``[N]``, blocks to copy.
      targets: i32 ``[N]``, distinct blocks that are overwritten; none is also a source. A pair of a
        source and a target is ignored if either block is out of range.
    """

    pools: Pools
    sources: jax.Array
    targets: jax.Array


class LinearArgs(NamedTuple):
    """Arrays of a matmul with a weight, see `paged_jax.kernels.linear.linear`.

    Attributes:
      x: floating point ``[..., in]``.
      w: the weight, ``[*out, in]``.
    """

    x: jax.Array
    w: Weight


class GroupedLinearArgs(NamedTuple):
    """Arrays of a matmul with the weights of groups, see `paged_jax.kernels.grouped_linear`.

    Attributes:
      x: floating point ``[R, in]``, sorted by group.
      w: the weights, ``[X, out, in]``.
      sizes: i32 ``[X]``, number of rows in each group.
    """

    x: jax.Array
    w: Weight
    sizes: jax.Array


@dataclass(frozen=True)
class Options:
    """Options of an op. They are hashable, so `jax.jit` can treat them as static.

    Attributes:
      scale: factor of the scores.
      sliding_window: number of tokens that a query sees, including its own; None for all.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None for no cap.
      norm_eps: constant that RMS norms add to the mean square of a head.
      value_scale: factor that all values are multiplied by.
      value_dim: number of elements of a value and of the output (U) if it differs from D; None for
        D.
    """

    scale: float = 1.0
    sliding_window: int | None = None
    soft_cap: float | None = None
    norm_eps: float = 0.0
    value_scale: float = 1.0
    value_dim: int | None = None

    def output_dim(self, head_dim: int) -> int:
        """Return U, the last dimension of values and outputs; by default it is `head_dim`."""
        return self.value_dim or head_dim


@dataclass(frozen=True)
class RaggedOptions(Options):
    """Options of ragged attention, with tile sizes for the TPU kernel that JAX ships.

    Attributes:
      return_lse: whether the caller uses the log-sum-exp; if not, it may be NaN.
      num_kv_pages_per_block: number of pages in a tile of keys of JAX's kernel; None for our
        default.
      num_queries_per_block: number of query tokens in a tile of JAX's kernel; None for our default.
      vmem_limit_bytes: bytes of VMEM that JAX's kernel may use; None for our default.
    """

    return_lse: bool = False
    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    vmem_limit_bytes: int | None = None
