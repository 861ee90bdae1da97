# pyright: strict, reportUnknownMemberType=false
"""Interface of the backends: arrays, options and ops.

A `Backend` is an object with a method for each op that it has::

    attend(args, options)           attention of a decode or a prefill, see `AttentionArgs`
    attend_ragged(args, options)    attention of a ragged batch, see `RaggedArgs`
    write(args)                     write K and V of new tokens, see `WriteArgs`
    rope_write(args, options)       normalise, rotate and write, see `RopeWriteArgs`
    copy_blocks(args)               copy blocks in all layers, see `CopyArgs`

    linear(x, w), sum_rows(x)       see `LinearOps`
    quantised_linear(x, w)          multiply by a quantised `Weight` without a copy in floats
    grouped_linear(x, w, sizes)     multiply rows, sorted by group, by the weights of their groups
    advance_rows(step)              advance states of recurrent layers by a token, see `StateStep`

Attention returns ``(out, lse)``, the output and the log-sum-exp. A write or copy returns the new
`Pools`, changed in place if they are donated; `rope_write` returns the queries and the pools.
`Backend.refusal` says which calls of these five ops a backend does not support. The last three ops
have a method with the suffix ``_refusal`` instead, which takes the same arguments. It returns why
the backend has no kernel for them, or None; see `dispatch.run_kernel`.

Backends can rely on arguments that are in range, because the public ops check and clip them. In
attention, ``layer`` is in ``0..L - 1``, ``context_lens`` in ``0..M * C``, and ``query_lens`` in
``0..T`` and at most ``context_lens``. In ragged batches, ``cu_query_lens`` is in ``0..N``.

The arrays of a call and its `Options` determine its result. A backend that is written in Pallas is
a dataclass with a field `interpret`: whether its kernels run in Pallas' interpreter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.formatting import short_repr
from paged_jax.kernels.pool_format import Half, Pages
from paged_jax.kernels.weight_formats import Weight

if TYPE_CHECKING:
    from jax.experimental.pallas.tpu import InterpretParams

Op = Literal["decode", "prefill", "ragged", "write", "rope_write", "copy_blocks"]

ATTENTION: tuple[Op, ...] = ("decode", "prefill", "ragged")

# Whether to run a Pallas kernel in Pallas' interpreter. Kernels for TPUs also take parameters of
# the interpreter.
Interpret: TypeAlias = "bool | InterpretParams"


@short_repr
class Pools(NamedTuple):
    """Keys and values of all blocks and layers, with scales if they are quantised.

    Attributes:
      k: ``[L, P, K, C, D]``, keys; floating point, int8 or float8_e4m3fn.
      v: ``[L, P, K, C, U]``, values, of the same dtype as `k`; U is D in most models. None if the
        values are the first elements of the keys (latent attention).
      k_scale: f32 ``[L, P, K, C]``, factors of the keys of each token and head; None if `k` is not
        quantised.
      v_scale: factors of the values, like `k_scale`; None if `v` is None.
    """

    k: jax.Array
    v: jax.Array | None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether the pools are int8 or fp8 with scales."""
        return self.k_scale is not None

    @property
    def shares_values(self) -> bool:
        """Whether the values are the first elements of the keys."""
        return self.v is None

    @property
    def dtype(self) -> Any:
        """Dtype of keys and values."""
        return self.k.dtype

    @property
    def num_blocks(self) -> int:
        """Number of blocks (P)."""
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads (K)."""
        return self.k.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens in a block (C)."""
        return self.k.shape[3]

    def map(self, function: Callable[[Any], Any]) -> "Pools":
        """Apply a function to `k` and to `v`, but not to the scales."""
        return self._replace(k=function(self.k), v=None if self.v is None else function(self.v))

    def place(self, half: Half, layer: Any, block: Any, head: Any, offset: Any) -> tuple[Any, Any]:
        """Return the pool of keys or of values, and the index of the tokens at `offset` in it."""
        pool = self.v if half == "v" and self.v is not None else self.k
        return pool, (layer, block, head, offset)


class AttentionArgs(NamedTuple):
    """Arrays of a decode (one query per sequence) or a prefill (a chunk of queries per sequence).

    Attributes:
      q: floating point ``[B, H, D]`` in a decode, ``[B, T, H, D]`` in a prefill.
      pools: the pools of all layers; or pages, if the call is a part of a ragged batch.
      block_tables: i32 ``[B, M]``, block ids of each sequence in order.
      context_lens: i32 ``[B]``, tokens in each sequence.
      query_lens: i32 ``[B]``, tokens in each chunk; None in a decode.
      sinks: floating point ``[H]``, or None.
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
        """The op that these arrays are for."""
        return "decode" if self.query_lens is None else "prefill"

    def as_prefill(self) -> "AttentionArgs":
        """Return the arguments of a decode as a prefill with single-token chunks."""
        return self._replace(q=self.q[:, None], query_lens=jnp.ones_like(self.context_lens))


class RaggedArgs(NamedTuple):
    """Arrays of a ragged batch: chunks of any lengths, concatenated.

    Attributes:
      q: ``[N, H, D]``, floating point.
      pages: keys and values.
      block_tables: i32 ``[B, M]``, page ids of each sequence in order.
      context_lens: i32 ``[B]``, tokens in each sequence; 0 in unused rows.
      cu_query_lens: i32 ``[B + 1]``, row of `q` at which each chunk starts, and the end of the last
        chunk. Elements from index `num_sequences` on are equal to that end.
      num_sequences: i32 ``[1]``, number of sequences, in 0..B.
      sinks: floating point ``[H]``, or None.
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
        """Return the arguments of a decode or prefill over the same pages."""
        layer = jnp.zeros((), jnp.int32)  # pages have a single layer
        return AttentionArgs(q, self.pages, tables, context_lens, query_lens, self.sinks, layer)


class WriteArgs(NamedTuple):
    """Arrays of a write of K and V of N tokens.

    Attributes:
      pools: the pools of all layers.
      k: ``[N, K, D]``, floating point.
      v: ``[N, K, U]``, floating point; None if the pools have no values.
      blocks: i32 ``[N]``, block of each token.
      offsets: i32 ``[N]``, position of each token in its block. A token is dropped if its block or
        its offset is out of range.
      layer: i32 ``[]``; nothing is written if it is out of range.
    """

    pools: Pools
    k: jax.Array
    v: jax.Array | None
    blocks: jax.Array
    offsets: jax.Array
    layer: int | jax.Array


class RopeWriteArgs(NamedTuple):
    """Arrays of a write from a QKV projection of N tokens, see `paged_rope_write`.

    Attributes:
      pools: the pools of all layers.
      qkv: ``[N, K, G + 2, D]``, floating point: the G queries, the key and the value of each KV
        head.
      cos, sin: f32 ``[N, D / 2]``, of the angle of each pair of elements of a head.
      norms: floating point weights ``[D]`` of the RMS norms of queries and keys; None for no norms.
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """States of the rows of a batch in the pool of a group of recurrent layers.

    A row reads an entry of the pool and writes an entry. Both ids are equal while a sequence owns
    its state. Several rows may read an entry, after a fork, but no two rows write the same entry::

        sources   [ 3  3  7  P ]      rows 0 and 1 read entry 3, row 3 reads zeros
        entries   [ 5  3  7  P ]      row 0 writes a new entry, row 1 in place, row 3 nothing

    If a row writes an entry, only rows with the same source read that entry. A kernel that works in
    place therefore loads a state once for all rows that read it, before it stores their new states.

    Attributes:
      pool: ``[L, P, ...]``: layer, entry, and the shape for a sequence.
      layer: i32 ``[]``, index of the layer in the pool.
      sources: i32 ``[B]``, the entry that each row reads; P for zeros.
      entries: i32 ``[B]``, the entry that each row writes, distinct; P for rows that write nothing.
      backend: backend of the ops that update the pool in place, see `dispatch` (static).
    """

    pool: jax.Array
    layer: int | jax.Array
    sources: jax.Array
    entries: jax.Array
    backend: str | None = field(default=None, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Number of rows (B)."""
        return self.entries.shape[0]


class ConvolutionStep(NamedTuple):
    """Arrays of a step of `paged_jax.kernels.recurrent.causal_convolution`.

    Attributes:
      rows: the states, in a pool ``[L, P, (w - 1) * F]``.
      x: float32 ``[B, F]``.
      weight: floating point ``[F, w]``.
      bias: floating point ``[F]`` or None.
      num_tokens: i32 ``[B]``, 1; or 0 for rows whose state does not change.
    """

    rows: StateRows
    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    num_tokens: jax.Array


class DeltaStep(NamedTuple):
    """Arrays of a step of `paged_jax.kernels.recurrent.delta_rule`.

    Attributes:
      rows: the states, in a pool ``[L, P, K * G, D, U]``.
      q, k: float32 ``[B, K, D]``.
      v: float32 ``[B, K, G, U]``.
      log_decay: float32 ``[B, K, G, D]``, or ``[B, K, G, 1]`` if all elements of a key decay
        equally.
      beta: float32 ``[B, K, G]``.
    """

    rows: StateRows
    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


class StateSpaceStep(NamedTuple):
    """Arrays of a step of `paged_jax.kernels.recurrent.state_space`.

    Attributes:
      rows: the states, in a pool ``[L, P, K * G, U, D]``.
      x: float32 ``[B, K, G, U]``.
      b, c: float32 ``[B, K, D]``.
      log_decay: float32 ``[B, K, G]``.
    """

    rows: StateRows
    x: jax.Array
    b: jax.Array
    c: jax.Array
    log_decay: jax.Array


StateStep = ConvolutionStep | DeltaStep | StateSpaceStep


@dataclass(frozen=True)
class Options:
    """Options of an op. They are hashable, and a static argument of `jax.jit`.

    Attributes:
      scale: factor of the scores.
      sliding_window: number of tokens that a query sees, including its own; None for all.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None for no cap.
      norm_eps: added to the mean square of a head by RMS norms.
      value_scale: factor of all values.
      value_dim: elements of a value and of the output (U) if they differ from D; None for D.
    """

    scale: float = 1.0
    sliding_window: int | None = None
    soft_cap: float | None = None
    norm_eps: float = 0.0
    value_scale: float = 1.0
    value_dim: int | None = None

    def output_dim(self, head_dim: int) -> int:
        """Return the number of elements of a value and of the output for keys of `head_dim`."""
        return self.value_dim or head_dim


@dataclass(frozen=True)
class RaggedOptions(Options):
    """Options of a ragged op, and tile sizes for JAX's kernel for TPUs.

    Attributes:
      return_lse: whether the caller uses the log-sum-exp; if not, it may be NaN.
      num_kv_pages_per_block: pages in a tile of keys of JAX's kernel; None for our default.
      num_queries_per_block: query tokens in a tile of JAX's kernel; None for our default.
      vmem_limit_bytes: bytes of VMEM that JAX's kernel may use; None for our default.
    """

    return_lse: bool = False
    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    vmem_limit_bytes: int | None = None


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and options of a call, which determine the backends that support it.

    Attributes:
      op: the op.
      sizes: pairs of a dimension letter and its size, see `paged_jax.dims`.
      q_dtype: dtype of the queries, of the new keys and values, or of the projection.
      pool_dtype: dtype of the pools.
      has_sinks: whether there are attention sinks.
      options: options of the op.
      lanes: last dimension of the pool of keys: D, or D padded to a multiple of 128.
      shares_values: whether the values are the first elements of the keys.
    """

    op: Op
    sizes: tuple[tuple[str, int], ...]
    q_dtype: Any
    pool_dtype: Any
    has_sinks: bool
    options: Options
    lanes: int
    shares_values: bool = False

    @classmethod
    def build(
        cls,
        op: Op,
        sizes: Mapping[str, int],
        dtype: DTypeLike,
        pools: Pools | Pages,
        options: Options,
        *,
        has_sinks: bool = False,
    ) -> Self:
        """Describe a call; `dtype` is the dtype of queries, of new keys and values, or of `qkv`."""
        return cls(
            op=op,
            sizes=tuple(sizes.items()),
            q_dtype=jnp.dtype(dtype),
            pool_dtype=pools.dtype,
            has_sinks=has_sinks,
            options=options,
            lanes=pools[0].shape[-1],
            shares_values=pools.shares_values,
        )

    @property
    def value_dim(self) -> int:
        """Elements of a value: U, or D if the sizes have no U."""
        return dict(self.sizes).get("U", self["D"])

    @property
    def separate_values_refusal(self) -> str | None:
        """Refusal of kernels whose values must be as long as keys (D elements), or None.

        Such kernels accept shorter values only if these are a part of the keys.
        """
        if self.shares_values or "U" not in dict(self.sizes) or self.value_dim == self["D"]:
            return None
        return (
            f"its values have a pool of their own only if they have {self['D']} elements like "
            f"keys, not {self.value_dim}"
        )

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]


class Backend(Protocol):
    """A backend. Instances are hashable, and equal if they behave the same.

    Attributes:
      platform: JAX's name of the only platform that the backend supports, where it is preferred to
        other backends; None if it supports all platforms.
    """

    platform: ClassVar[str | None]

    def refusal(self, problem: Problem) -> str | None:
        """Return a phrase that says why the problem is not supported, or None if it is."""
        ...


@runtime_checkable
class LinearOps(Protocol):
    """Ops of a backend that multiplies matrices."""

    def linear(self, x: jax.Array, w: Weight) -> jax.Array:
        """Multiply the last dimension by a weight, as `paged_jax.kernels.linear.linear`."""
        ...

    def sum_rows(self, x: jax.Array) -> jax.Array:
        """Sum float32 ``[..., N]`` over the last dimension, to ``[..., 1]``."""
        ...
