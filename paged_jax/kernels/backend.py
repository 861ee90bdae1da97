"""What a backend takes and gives: the contract that all kernels keep.

A `Backend` is an object with ops: `AttentionOps`, `WritingOps`, `LinearOps`, `GroupedLinearOps`.
Arguments have been checked before a backend sees them, and in attention ``layer`` is in 0..L - 1,
``context_lens`` in 0..M * C, ``query_lens`` in 0..T and at most ``context_lens``; in ragged batches
``cu_query_lens`` is in 0..N.

The arrays of a call and its `Options` define its result. Whether a kernel is compiled or
interpreted is a property of the backend: see `paged_jax.kernels.dispatch.PallasBackend`.
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

if TYPE_CHECKING:
    from jax.experimental.pallas.tpu import InterpretParams

Op = Literal["decode", "prefill", "ragged", "write", "rope_write", "copy_blocks"]

ATTENTION: tuple[Op, ...] = ("decode", "prefill", "ragged")

# Keys or values.
Half = Literal["k", "v"]

# Whether to run a Pallas kernel in Pallas' interpreter; for kernels for TPUs also with parameters.
Interpret: TypeAlias = "bool | InterpretParams"


@short_repr
class Pools(NamedTuple):
    """K and V of every block, with their scales where they are quantised.

    Attributes:
      k: ``[L, P, K, C, D]``, keys: floating point, int8 or float8_e4m3fn.
      v: the values, as the keys.
      k_scale: None, or f32 ``[L, P, K, C]`` where `k` is quantised: one scale for each token and
        head, by which the stored numbers are multiplied.
      v_scale: the same for `v`.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether the pools hold int8 or fp8 numbers and their scales."""
        return self.k_scale is not None

    @property
    def dtype(self) -> Any:
        """Type of the numbers."""
        return self.k.dtype

    @property
    def num_blocks(self) -> int:
        """P."""
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.k.shape[2]

    @property
    def block_size(self) -> int:
        """C."""
        return self.k.shape[3]

    def map(self, function: Callable[[Any], Any]) -> "Pools":
        """The same with another array for the keys and for the values, that a function makes."""
        return self._replace(k=function(self.k), v=function(self.v))

    def place(self, half: Half, layer: Any, block: Any, head: Any, offset: Any) -> tuple[Any, Any]:
        """The array that holds keys or values, and the index of tokens of a head in it."""
        return getattr(self, half), (layer, block, head, offset)


class Pages(NamedTuple):
    """K and V of every block of one layer in one array: the layout of JAX's kernel for TPUs.

    Attributes:
      kv: ``[P, C, 2 * K, D]``, of each token the key of head 0, its value, the key of head 1, ...;
        floating point or int8.
    """

    kv: jax.Array

    @property
    def k_scale(self) -> None:
        """There are no scales of tokens; what all keys are multiplied by is in `Options`."""

    @property
    def v_scale(self) -> None:
        """As `k_scale`."""

    @property
    def is_quantised(self) -> bool:
        """Whether there are scales for each token: never."""
        return False

    @property
    def dtype(self) -> Any:
        """Type of the numbers."""
        return self.kv.dtype

    @property
    def num_blocks(self) -> int:
        """P."""
        return self.kv.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.kv.shape[2] // 2

    @property
    def block_size(self) -> int:
        """C."""
        return self.kv.shape[1]

    def map(self, function: Callable[[Any], Any]) -> "Pages":
        """The same with another array, that a function makes."""
        return Pages(function(self.kv))

    def place(self, half: Half, layer: Any, block: Any, head: Any, offset: Any) -> tuple[Any, Any]:
        """The array, and the index of the keys or values of tokens of a head in it."""
        del layer  # there is one
        return self.kv, (block, offset, 2 * head + (1 if half == "v" else 0))


class AttentionArgs(NamedTuple):
    """The arrays of a decode, one query for each sequence, or of a prefill, a chunk of them.

    Attributes:
      q: ``[B, H, D]`` in decode, ``[B, T, H, D]`` in prefill, floating point.
      pools: the pools of all layers; or the pages of one, where the call is a part of a ragged one.
      block_tables: i32 ``[B, M]``.
      context_lens: i32 ``[B]``, tokens in each sequence.
      query_lens: i32 ``[B]``, tokens in each chunk; None in decode.
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
        """Return the arguments of a decode as a prefill with chunks of one token."""
        return self._replace(q=self.q[:, None], query_lens=jnp.ones_like(self.context_lens))


class RaggedArgs(NamedTuple):
    """The arrays of a ragged batch: chunks of any lengths, one behind the other.

    Attributes:
      q: ``[N, H, D]``, floating point.
      pages: keys and values.
      block_tables: i32 ``[B, M]``.
      context_lens: i32 ``[B]``, tokens in each sequence; 0 in rows that are no sequence.
      cu_query_lens: i32 ``[B + 1]``, row of `q` where each chunk begins, and where the last one
        ends; from the number of sequences on all the same.
      num_sequences: i32 ``[1]``, rows that are sequences, in 0..B.
      sinks: floating point ``[H]``, or None.
    """

    q: jax.Array
    pages: Pages
    block_tables: jax.Array
    context_lens: jax.Array
    cu_query_lens: jax.Array
    num_sequences: jax.Array
    sinks: jax.Array | None = None


class WriteArgs(NamedTuple):
    """The arrays of a write: K and V of N tokens, and their places.

    Attributes:
      pools: the pools of all layers.
      k: ``[N, K, D]``, floating point.
      v: the values, as the keys.
      blocks: i32 ``[N]``; a token whose block is no block is dropped.
      offsets: i32 ``[N]``, the place of each token in its block.
      layer: i32 ``[]``; nothing is written where it is no layer.
    """

    pools: Pools
    k: jax.Array
    v: jax.Array
    blocks: jax.Array
    offsets: jax.Array
    layer: int | jax.Array


class RopeWriteArgs(NamedTuple):
    """The arrays of a write from one projection of N tokens, whose heads are normed and rotated.

    Attributes:
      pools: the pools of all layers.
      qkv: ``[N, K, G + 2, D]``, floating point: for each KV head its G queries, its key, its
        value.
      cos: f32 ``[N, D / 2]``, of the angle of each pair of the head dimension.
      sin: f32 ``[N, D / 2]``.
      norms: None, or the weights ``[D]`` of the RMS norms of queries and of keys, floating point.
      blocks: i32 ``[N]``; the keys and values of a token whose block is no block are dropped.
      offsets: i32 ``[N]``, the place of each token in its block.
      layer: i32 ``[]``; nothing is written where it is no layer.
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
    """The arrays of a copy of N blocks, in all layers.

    Attributes:
      pools: the pools of all layers.
      sources: i32 ``[N]``.
      targets: i32 ``[N]``, distinct, none of them a source; pairs of which either is no block are
        left out.
    """

    pools: Pools
    sources: jax.Array
    targets: jax.Array


@short_repr
class Stack(NamedTuple):
    """The stacked weights of all layers, for kernels that read one layer of them in place.

    Attributes:
      values: ``[L, *out, in]``.
      scales: None, or float32 ``[L, *out]``.
      layer: i32 ``[]``, the layer to read.
    """

    values: jax.Array
    scales: jax.Array | None
    layer: jax.Array | int


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A matrix: ``values``, or ``values * scales[..., None]`` if it is int8.

    Attributes:
      values: ``[*out, in]``, floating point or int8.
      scales: None, or float32 ``[*out]`` of an int8 matrix.
      stack: None, or the stacked weights that `values` and `scales` are a slice of.
      dtype: type in which GPUs and TPUs multiply int8: the type of the model's floats.
    """

    values: jax.Array
    scales: jax.Array | None = None
    stack: Stack | None = None
    dtype: Any = field(default=jnp.dtype(jnp.float32), metadata={"static": True})


class GroupedArgs(NamedTuple):
    """The arrays of a grouped matmul: rows sorted by group, and the weights of each group.

    Attributes:
      x: floating point ``[R, in]``, with at least one row.
      w: float32, bfloat16 or float16 ``[X, out, in]``.
      group_sizes: i32 ``[X]``, number of rows in each group.
      stack: ``[L, X, out, in]`` and i32 ``[]``: the stacked weights, and the index of `w` in them.
    """

    x: jax.Array
    w: jax.Array
    group_sizes: jax.Array
    stack: tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Options:
    """What an op means besides its arrays; hashable, a static argument of `jax.jit`.

    Attributes:
      scale: factor of the scores.
      sliding_window: how many last tokens a query sees, its own included; None for all.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None for no cap.
      norm_eps: added to the mean square of a head that is normed.
      value_scale: what all values are multiplied by.
    """

    scale: float = 1.0
    sliding_window: int | None = None
    soft_cap: float | None = None
    norm_eps: float = 0.0
    value_scale: float = 1.0


@dataclass(frozen=True)
class RaggedOptions(Options):
    """Options of a ragged op, and tile sizes for JAX's kernel for TPUs.

    Attributes:
      return_lse: whether the caller uses the log-sum-exp; if not, a backend may return NaN for it.
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
    """The shapes, types and variants of a call: all that a backend needs to know to refuse it.

    Attributes:
      op: the op that is called.
      sizes: letters of `paged_jax.dims` with their sizes.
      q_dtype: type of the queries, of the new keys and values, or of the projection.
      pool_dtype: type of the pools.
      has_sinks: whether attention sinks are given.
      options: the options of the op.
      lanes: last axis of the pools: D, or D padded to a multiple of 128.
    """

    op: Op
    sizes: tuple[tuple[str, int], ...]
    q_dtype: Any
    pool_dtype: Any
    has_sinks: bool
    options: Options
    lanes: int

    @classmethod
    def of(
        cls,
        op: Op,
        sizes: Mapping[str, int],
        dtype: DTypeLike,
        pools: Pools | Pages,
        options: Options,
        *,
        has_sinks: bool = False,
    ) -> Self:
        """A call over some pools, with queries, or new keys and values, of `dtype`."""
        return cls(
            op=op,
            sizes=tuple(sizes.items()),
            q_dtype=jnp.dtype(dtype),
            pool_dtype=pools.dtype,
            has_sinks=has_sinks,
            options=options,
            lanes=pools[0].shape[-1],
        )

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]


class Backend(Protocol):
    """What all backends have; hashable, and equal where they do the same.

    Attributes:
      platform: the only platform that its programs can be compiled for, as JAX names it, where it
        is the first choice; None for any.
    """

    platform: ClassVar[str | None]

    def refusal(self, problem: Problem) -> str | None:
        """Say in a sentence why the problem cannot be done; None where it can."""
        ...


@runtime_checkable
class AttentionOps(Protocol):
    """The ops of a backend that attends."""

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Return ``(out, lse)`` of `paged_attention`, or of `paged_prefill_attention`.

        It is a decode if ``args.query_lens`` is None, else a prefill.
        """
        ...

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Return ``(out, lse)`` of `ragged_paged_attention`."""
        ...


@runtime_checkable
class WritingOps(Protocol):
    """The ops of a backend that changes the pools, in place where they are donated."""

    def write(self, args: WriteArgs) -> Pools:
        """Write new tokens to their places, as `paged_write`."""
        ...

    def rope_write(self, args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
        """Norm and rotate, write keys and values, return queries, as `paged_rope_write`."""
        ...

    def copy_blocks(self, args: CopyArgs) -> Pools:
        """Copy blocks in all layers, as `paged_jax.kernels.copy_blocks`."""
        ...


@runtime_checkable
class LinearOps(Protocol):
    """The ops of a backend that multiplies matrices."""

    def linear(self, x: jax.Array, w: Weight) -> jax.Array:
        """Multiply the last dimension by a weight, as `paged_jax.kernels.linear.linear`."""
        ...

    def sum_rows(self, x: jax.Array) -> jax.Array:
        """Sum float32 ``[..., N]`` over the last dimension, to ``[..., 1]``."""
        ...


@runtime_checkable
class GroupedLinearOps(Protocol):
    """The op of a backend that multiplies groups of rows by their own weights."""

    def grouped_refusal(self, args: GroupedArgs) -> str | None:
        """Return why the backend cannot multiply these arrays, or None if it can."""
        ...

    def grouped_linear(self, args: GroupedArgs) -> jax.Array:
        """Multiply rows by the weights of their groups, as `paged_jax.kernels.grouped_linear`."""
        ...


def has_op(backend: Backend, op: Op) -> bool:
    """Whether a backend has an op."""
    return isinstance(backend, AttentionOps if op in ATTENTION else WritingOps)
