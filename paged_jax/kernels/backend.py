"""Interface of the backends: arrays, options and ops.

A `Backend` is an object with ops: `AttentionOps`, `WritingOps`, `LinearOps`. Backends can rely on
arguments that are in range, because the public ops check and clip them. In attention, ``layer`` is
in ``0..L - 1``, ``context_lens`` in ``0..M * C``, and ``query_lens`` in ``0..T`` and at most
``context_lens``. In ragged batches, ``cu_query_lens`` is in ``0..N``.

A backend may also have kernels for the following ops, see `dispatch.run_kernel`. A method with the
suffix ``_refusal`` takes the same arguments. It returns why the backend has no kernel for them, or
None::

    quantised_linear(x, w)     multiply by a quantised `Weight` without a copy of it in floats
    grouped_linear(args)       multiply rows by the weights of their groups, see `GroupedArgs`
    advance_rows(step)         advance the states of recurrent layers by a token, see `StateStep`

The arrays of a call and its `Options` determine its result. Whether a kernel is compiled or
interpreted is a property of the backend, see `paged_jax.kernels.dispatch.PallasBackend`.
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
from paged_jax.kernels.weight_formats import CODES, WeightArrays, WeightFormat

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


class WriteArgs(NamedTuple):
    """Arrays of a write of K and V of N tokens.

    Attributes:
      pools: the pools of all layers.
      k: ``[N, K, D]``, floating point.
      v: ``[N, K, U]``, floating point; None if the pools have no values.
      blocks: i32 ``[N]``, block of each token. A token is dropped if its block is out of range.
      offsets: i32 ``[N]``, position of each token in its block. A token is dropped if its offset is
        out of range.
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
      cos: f32 ``[N, D / 2]``, cosine of the angle of each pair of the head dimension.
      sin: f32 ``[N, D / 2]``, sine of the same angles.
      norms: floating point weights ``[D]`` of the RMS norms of queries and keys; None for no norms.
      blocks: see `WriteArgs`.
      offsets: see `WriteArgs`.
      layer: see `WriteArgs`.
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


@short_repr
class Stack(NamedTuple):
    """The stacked weights of all layers, for kernels that read one layer of them in place.

    Attributes:
      arrays: the arrays of a `Weight`, each with a first dimension ``L``.
      layer: i32 ``[]``, the layer to read.
    """

    arrays: WeightArrays
    layer: jax.Array | int


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """A weight matrix in any format, see `weight_formats`; or the matrices of experts.

    Attributes:
      values: ``[*out, in]`` floating point, int8 or float8_e4m3fn, or packed 4-bit values uint8
        ``[*out, in / 2]``.
      scales: floating point ``[*out, groups]``; None if the values are the elements.
      mins: floating point ``[*out, groups]``, or None.
      order: i32 ``[in]``, the input of each column, or None.
      stack: the stacked weights of all layers if the other arrays are slices of them, else None.
      code: name of the code of the values (static); None for the dtype of `values`.
      dtype: float dtype of the model (static). Matmuls with quantised values round `x` to it.
    """

    values: jax.Array
    scales: jax.Array | None = None
    mins: jax.Array | None = None
    order: jax.Array | None = None
    stack: Stack | None = None
    code: str | None = field(default=None, metadata={"static": True})
    dtype: Any = field(default=jnp.dtype(jnp.float32), metadata={"static": True})

    @property
    def arrays(self) -> WeightArrays:
        """The arrays of the matrix."""
        return WeightArrays(self.values, self.scales, self.mins, self.order)

    @property
    def format(self) -> WeightFormat:
        """Format of the matrix."""
        code = self.code or jnp.dtype(self.values.dtype).name
        if self.scales is None:
            return WeightFormat(code)
        groups, inputs = self.scales.shape[-1], self.shape[-1]
        return WeightFormat(
            code,
            None if groups == 1 else inputs // groups,
            jnp.dtype(self.scales.dtype).name,
            None if self.mins is None else jnp.dtype(self.mins.dtype).name,
            self.order is not None,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, ``[*out, in]``."""
        *out, columns = self.values.shape
        return *out, columns * (2 if self.code in CODES else 1)


class GroupedArgs(NamedTuple):
    """The arrays of a grouped matmul: rows sorted by group, and the weights of each group.

    Attributes:
      x: floating point ``[R, in]``, with at least one row.
      w: ``[X, out, in]``.
      group_sizes: i32 ``[X]``, number of rows in each group.
    """

    x: jax.Array
    w: Weight
    group_sizes: jax.Array


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
        """Why kernels cannot run the call if both pools must have D elements per token, or None.

        If the values are a part of the keys, they may have fewer elements.
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
class AttentionOps(Protocol):
    """Ops of a backend that computes attention."""

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
    """Ops of a backend that changes the pools, in place if they are donated."""

    def write(self, args: WriteArgs) -> Pools:
        """Write K and V of new tokens, see `paged_write`."""
        ...

    def rope_write(self, args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
        """Normalise, rotate, write keys and values, return queries, see `paged_rope_write`."""
        ...

    def copy_blocks(self, args: CopyArgs) -> Pools:
        """Copy blocks in all layers, see `paged_jax.kernels.copy_blocks`."""
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


def has_op(backend: Backend, op: Op) -> bool:
    """Return whether a backend has an op.

    A backend that lacks some ops of a group lists them in its attribute `missing_ops`.
    """
    has_group = isinstance(backend, AttentionOps if op in ATTENTION else WritingOps)
    return has_group and op not in getattr(backend, "missing_ops", ())
