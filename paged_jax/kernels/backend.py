# pyright: strict, reportUnknownMemberType=false
"""Interface of the backends: arrays, options and ops.

A `Backend` is an object with a method for each op that it implements::

    attend(args, options)           attention of a decode or a prefill, see `AttentionArgs`
    attend_ragged(args, options)    attention of a ragged batch, see `RaggedArgs`
    write(args)                     write K and V of new tokens, see `WriteArgs`
    rope_write(args, options)       normalise, rotate and write, see `RopeWriteArgs`
    copy_blocks(args)               copy blocks in all layers, see `CopyArgs`

    linear(x, w), sum_rows(x)       see `LinearOps`
    quantised_linear(x, w)          multiply by a quantised `Weight` without a copy in floats
    grouped_linear(x, w, sizes)     multiply rows, sorted by group, by the weights of their groups
    advance_rows(step)              advance states of recurrent layers by a token, see `StateStep`

    stored_format, layouts          how weights are stored, see `WeightStore`

Attention returns ``(out, lse)``, the output and the log-sum-exp. A write or copy returns the new
`Pools`, changed in place if they are donated; `rope_write` returns the queries and the pools. For
the first five ops, `Backend.refusal` returns why a backend does not support a call, or None. Each
of the last three ops has its own method for this, with the suffix ``_refusal`` and the arguments of
the op, such as ``grouped_linear_refusal``; see `dispatch.run_kernel`.

Backends can rely on arguments that are in range, because the public ops check and clip them. In
attention, ``layer`` is in ``0..L - 1``, ``context_lens`` in ``0..M * C``, and ``query_lens`` in
``0..T`` and at most ``context_lens``. In ragged batches, ``cu_query_lens`` is in ``0..N``.

The arrays of a call and its `Options` determine its result. A backend that is written in Pallas is
a dataclass with a field `interpret`: whether its kernels run in Pallas' interpreter.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
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

from paged_jax.formatting import listed, short_repr
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.weight_formats import Layout, Weight, WeightFormat

if TYPE_CHECKING:
    from jax.experimental.pallas.tpu import InterpretParams

Op = Literal["decode", "prefill", "ragged", "write", "rope_write", "copy_blocks"]

ATTENTION: tuple[Op, ...] = ("decode", "prefill", "ragged")

# Keys or values.
Half = Literal["k", "v"]

# Whether to run a Pallas kernel in Pallas' interpreter. For TPU kernels, the value may also be the
# parameters of the interpreter.
Interpret: TypeAlias = "bool | InterpretParams"


@short_repr
class Pools(NamedTuple):
    """Keys and values of all blocks and layers, with scales if they are quantised.

    Attributes:
      k: ``[L, P, K, C, D]``, keys; floating point, or the dtype of a quantised pool.
      v: ``[L, P, K, C, U]``, values, of the same dtype as `k`; U is D in most models. None if
        each value vector is the beginning of its key vector (latent attention).
      k_scale: f32 ``[L, P, K, C]``, scale of the key of each token and head, which multiplies its
        elements; None if `k` is not quantised.
      v_scale: f32 ``[L, P, K, C]``, scale of the value of each token and head; None if `v` is None
        or the pools are not quantised.
    """

    k: jax.Array
    v: jax.Array | None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether the pools have scales, see `kv_dtypes`."""
        return self.k_scale is not None

    @property
    def shares_values(self) -> bool:
        """Whether each value vector is the beginning of its key vector (latent attention)."""
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
        """Number of tokens in a block (C)."""
        return self.k.shape[3]

    def map(self, function: Callable[[Any], Any]) -> "Pools":
        """Return new pools with a function applied to `k` and `v`, but not to the scales."""
        return self._replace(k=function(self.k), v=None if self.v is None else function(self.v))

    def place(self, half: Half, layer: Any, block: Any, head: Any, offset: Any) -> tuple[Any, Any]:
        """Return the array that stores the keys or values, and the index of tokens in this array.

        `half` is ``"k"`` or ``"v"``. `offset` is an offset in the block, or a range of offsets.
        """
        pool = self.v if half == "v" and self.v is not None else self.k
        return pool, (layer, block, head, offset)


class Pages(NamedTuple):
    """Keys and values of a layer in a single array, with the layout of JAX's ragged TPU kernel.

    Attributes:
      kv: ``[P, C, 2 * K, D]``, floating point or a dtype of `kv_dtypes`. Each token has the key of
        head 0, its value, the key of head 1, its value, and so on. Pages ``[P, C, 1, D]`` have the
        keys of a single KV head. Each value vector is then the beginning of its key vector.
    """

    kv: jax.Array

    # Pages have no scales per token. Instead, `ragged_paged_attention` has one factor for all keys,
    # and one factor for all values.
    k_scale = None
    v_scale = None
    is_quantised = False

    @property
    def dtype(self) -> Any:
        """Dtype of keys and values."""
        return self.kv.dtype

    @property
    def num_blocks(self) -> int:
        """Number of pages (P)."""
        return self.kv.shape[0]

    @property
    def shares_values(self) -> bool:
        """Whether each value vector is the beginning of its key vector (latent attention)."""
        return self.kv.shape[2] == 1

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads (K)."""
        return max(self.kv.shape[2] // 2, 1)

    @property
    def block_size(self) -> int:
        """Number of tokens in a page (C)."""
        return self.kv.shape[1]

    def map(self, function: Callable[[Any], Any]) -> "Pages":
        """Return new pages with a function applied to `kv`."""
        return Pages(function(self.kv))

    def place(self, half: Half, layer: Any, block: Any, head: Any, offset: Any) -> tuple[Any, Any]:
        """Return `kv`, and the index in `kv` at which the keys or values of tokens are stored.

        `half` is ``"k"`` or ``"v"``. `offset` is an offset in the page, or a range of offsets.
        """
        del layer  # pages have a single layer
        if self.shares_values:
            return self.kv, (block, offset, head)
        return self.kv, (block, offset, 2 * head + (1 if half == "v" else 0))


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """Recurrent states of a batch, which are entries in a pool.

    Each row of the batch reads its old state from an entry of the pool, and writes its new state to
    an entry. If the sequence owns its state, both entries are the same. After a fork, several rows
    may read the same entry, but no two rows write the same entry::

        sources   [ 3  3  7  P ]      rows 0 and 1 read entry 3, row 3 reads zeros
        entries   [ 5  3  7  P ]      row 0 writes a new entry, row 1 in place, row 3 nothing

    If an entry is both read and written, one of the rows that read it writes it. A kernel can
    therefore update the pool in place: it loads a state once for all rows that read it, and then
    stores their new states.

    Attributes:
      pool: ``[L, P, ...]``, the states by layer and entry, for a group of recurrent layers.
      layer: i32 ``[]``, index of the layer in the pool.
      sources: i32 ``[B]``, the entry that each row reads; P for a state of zeros.
      entries: i32 ``[B]``, the entry that each row writes, all different; P for rows that write
        nothing.
      backend: name of the backend that updates the pool in place, see `dispatch` (static).
    """

    pool: jax.Array
    layer: int | jax.Array
    sources: jax.Array
    entries: jax.Array
    backend: str | None = field(default=None, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch (B)."""
        return self.entries.shape[0]


class ConvolutionStep(NamedTuple):
    """Arguments of `paged_jax.kernels.recurrent.causal_convolution` for one token per row.

    Attributes:
      rows: the states, in a pool ``[L, P, (w - 1) * F]``.
      x: inputs, float32 ``[B, F]``.
      weight: filters of w tokens, floating point ``[F, w]``.
      bias: floating point ``[F]`` or None.
      num_tokens: i32 ``[B]``, 1; or 0 for rows that keep their state.
    """

    rows: StateRows
    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    num_tokens: jax.Array


class DeltaStep(NamedTuple):
    """Arguments of `paged_jax.kernels.recurrent.delta_rule` for one token per row.

    Attributes:
      rows: the states, in a pool ``[L, P, K * G, D, U]``, which may pad D and U.
      q, k: queries and keys, float32 ``[B, K, D]``.
      v: values, float32 ``[B, K, G, U]``.
      log_decay: logarithm of the decay of the state, float32 ``[B, K, G, D]``, or ``[B, K, G, 1]``
        if all elements of a key decay equally.
      beta: step size of the update of the state, float32 ``[B, K, G]``.
    """

    rows: StateRows
    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


class StateSpaceStep(NamedTuple):
    """Arguments of `paged_jax.kernels.recurrent.state_space` for one token per row.

    Attributes:
      rows: the states, in a pool ``[L, P, K * G, U, D]``, which may pad U and D.
      x: inputs, float32 ``[B, K, G, U]``.
      b, c: vectors that write to the state and read from it, float32 ``[B, K, D]``.
      log_decay: logarithm of the decay of the state, float32 ``[B, K, G]``.
    """

    rows: StateRows
    x: jax.Array
    b: jax.Array
    c: jax.Array
    log_decay: jax.Array


StateStep = ConvolutionStep | DeltaStep | StateSpaceStep


def state_shape(step: StateStep) -> tuple[int, ...]:
    """Return the shape of the state of a row, without the padding in the pool."""
    shape = step.rows.pool.shape[2:]
    if isinstance(step, DeltaStep):
        return shape[0], step.k.shape[-1], step.v.shape[-1]
    if isinstance(step, StateSpaceStep):
        return shape[0], step.x.shape[-1], step.b.shape[-1]
    return shape


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


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and options of a call, which determine the backends that support the call.

    Attributes:
      op: the op.
      sizes: pairs of a dimension letter and its size, see `paged_jax.dims`.
      q_dtype: dtype of the queries (attention), of the new keys and values (write), of `qkv`
        (rope_write), or of the pools (copy_blocks).
      pool_dtype: dtype of the pools.
      has_sinks: whether there are attention sinks.
      options: options of the op.
      lanes: size of the last dimension of the pool of keys: D, or D padded to a multiple of 128.
      shares_values: whether each value vector is the beginning of its key vector.
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
        """Describe a call. `dtype` becomes the attribute `q_dtype`."""
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
        """Number of elements of a value: U, or D if `sizes` has no U."""
        return dict(self.sizes).get("U", self["D"])

    @property
    def kv(self) -> KVDtype:
        """The rules for storing keys and values in the dtype of the pools."""
        return KVDtype.of(self.pool_dtype)

    def pool_dtype_refusal(self, *supported: str) -> str | None:
        """Return why kernels for pools of these dtypes do not support the call, or None."""
        name = jnp.dtype(self.pool_dtype).name
        if name in supported:
            return None
        pools = "pages" if self.op == "ragged" else "pools"
        return f"{pools} must be {listed(*supported)}, got {name}"

    @property
    def separate_values_refusal(self) -> str | None:
        """Reason why kernels that need values of D elements do not support the call, or None.

        Such kernels support shorter values only if each value vector is the beginning of its key
        vector.
        """
        if self.shares_values or "U" not in dict(self.sizes) or self.value_dim == self["D"]:
            return None
        return (
            f"it reads a pool of values only if values have {self['D']} elements like keys, got "
            f"{self.value_dim}"
        )

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]


class Backend(Protocol):
    """Interface of a backend. Instances are hashable, and equal if they behave the same.

    Attributes:
      platform: JAX's name of the only platform that the backend supports; None if it supports all
        platforms. On its platform, a backend is preferred to the backends for all platforms.
    """

    platform: ClassVar[str | None]

    def refusal(self, problem: Problem) -> str | None:
        """Return why the backend does not support `problem`, as a phrase; None if it does."""
        ...


class ExactBackend(Backend, Protocol):
    """Interface of a backend that gives each row the same bits in any program and batch.

    Attributes:
      is_exact: True.
    """

    is_exact: ClassVar[bool]

    def unavailable_for(
        self, codes: Collection[str], dtype: DTypeLike, pool_dtype: DTypeLike
    ) -> str | None:
        """Return why the backend cannot run a model on this machine, or None if it can.

        Args:
          codes: codes of the model's matrices, see `WeightFormat`.
          dtype: float dtype of the model.
          pool_dtype: dtype of the cache.
        """
        ...


@runtime_checkable
class LinearOps(Protocol):
    """Ops of a backend that multiplies matrices."""

    def linear(self, x: jax.Array, w: Weight) -> jax.Array:
        """Multiply the last dimension of `x` by a weight, see `paged_jax.kernels.linear.linear`."""
        ...

    def sum_rows(self, x: jax.Array) -> jax.Array:
        """Sum float32 ``[..., N]`` over the last dimension, to ``[..., 1]``."""
        ...


class WeightStore(Protocol):
    """Methods of a backend that choose how the weights of a model are stored.

    A format determines the arrays of a matrix, and so the memory of the model. A layout only
    permutes their elements. Loading, replacing and returning weights call the `Layout`; models and
    plans know nothing of it.
    """

    def stored_format(self, format: WeightFormat, num_devices: int) -> WeightFormat:
        """Return the format in which matrices of a plain format are stored, without rounding.

        Args:
          format: a format of the files of a model.
          num_devices: number of devices over which the model is divided.
        """
        ...

    def layouts(
        self, matrices: Sequence[tuple[WeightFormat, tuple[int, ...]]], dtype: DTypeLike
    ) -> list[Layout | None]:
        """Return the layout that kernels read fastest for each matrix; None for the plain layout.

        Args:
          matrices: stored format and shape ``[*out, in]`` of each matrix of a model.
          dtype: float dtype of the model.
        """
        ...
