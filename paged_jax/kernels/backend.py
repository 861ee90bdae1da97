# pyright: strict, reportUnknownMemberType=false
"""Arguments of the ops, and what a backend is: `Kernel`s by the names of their ops.

Backends can rely on arguments that are in range, because the public ops check and clip them. In
attention, ``layer`` is in ``0..L - 1``, ``context_lens`` in ``0..M * C``, and ``query_lens`` in
``0..T`` and at most ``context_lens``. In ragged batches, ``cu_query_lens`` is in ``0..N``.

Attention returns ``(out, lse)``, the output and the log-sum-exp. A write or copy returns the new
`Pools`, changed in place if they are donated; `rope_write` returns the queries and the pools. The
arrays of a call and its `Options` determine its result.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.formatting import listed, short_repr
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.weight_formats import Weight

if TYPE_CHECKING:
    from jax.experimental.pallas.tpu import InterpretParams

# The ops whose calls a `Problem` describes.
PoolOp = Literal["decode", "prefill", "ragged", "write", "rope_write", "copy_blocks"]

ATTENTION: tuple[PoolOp, ...] = ("decode", "prefill", "ragged")

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

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of a row."""
        return self.rows.pool.shape[2:]


class RecurrentStep(NamedTuple):
    """Arguments of `delta_rule` or `state_space` in `paged_jax.kernels.recurrent`, for one token.

    Attributes:
      rows: the states, in a pool ``[L, P, K * G, D, U]``, or ``[L, P, K * G, U, D]`` without beta.
        The pool may pad D and U.
      q: vectors that read from the state, float32 ``[B, K, D]``.
      k: vectors that write to the state, float32 ``[B, K, D]``.
      v: values to write, float32 ``[B, K, G, U]``.
      log_decay: logarithm of the decay of the state, float32 ``[B, K, G, D]``, or ``[B, K, G, 1]``
        if all elements of a key decay equally.
      beta: step size of the delta rule, float32 ``[B, K, G]``. With None, the value that a key
        reads from the state is not subtracted before `v` is written, as in Mamba-2.
    """

    rows: StateRows
    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None

    @property
    def key_axis(self) -> int:
        """Dimension of keys in the state of a head: 0 for ``[D, U]``, 1 for ``[U, D]``.

        The delta rule reads a state twice, so its sums are over the dimension that is cheaper to
        sum over. Values of Mamba-2 usually have 64 elements, which would fill half of the lanes of
        a TPU.
        """
        return 1 if self.beta is None else 0

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of a row, without the padding in the pool."""
        D, U = self.k.shape[-1], self.v.shape[-1]
        return self.rows.pool.shape[2], *((U, D) if self.key_axis else (D, U))


StateStep = ConvolutionStep | RecurrentStep


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a tuple that calls `function` with the elements of the tuple."""

    @functools.wraps(function)
    def call(args: tuple[Any, ...], **options: Any) -> Any:
        return function(*args, **options)

    return call


def supports_all(*call: Any) -> None:
    """Return None: every call is supported. It is the `Kernel.refusal` of kernels in plain JAX."""
    del call


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

    op: PoolOp
    sizes: tuple[tuple[str, int], ...]
    q_dtype: Any
    pool_dtype: Any
    has_sinks: bool
    options: Options
    lanes: int
    shares_values: bool = False

    @classmethod
    def of_attention(cls, args: AttentionArgs, options: Options) -> Self:
        """Describe a decode or a prefill."""
        *batch, H, D = args.q.shape
        sizes = dict(zip("BT", batch, strict=False)) | {"H": H, "D": D}
        sizes["M"] = args.block_tables.shape[1]
        return cls._of_pools(args.op, args.q.dtype, args.pools, options, sizes, args.sinks)

    @classmethod
    def of_ragged(cls, args: RaggedArgs, options: Options) -> Self:
        """Describe a ragged batch."""
        N, H, D = args.q.shape
        B, M = args.block_tables.shape
        sizes = {"N": N, "H": H, "D": D, "B": B, "M": M}
        return cls._of_pools("ragged", args.q.dtype, args.pages, options, sizes, args.sinks)

    @classmethod
    def of_write(cls, args: WriteArgs, options: None = None) -> Self:
        """Describe a write."""
        N, _, D = args.k.shape
        del options
        value_dim = None if args.v is None or args.v.shape[-1] == D else args.v.shape[-1]
        own, sizes = Options(value_dim=value_dim), {"N": N, "D": D}
        return cls._of_pools("write", args.k.dtype, args.pools, own, sizes)

    @classmethod
    def of_rope_write(cls, args: RopeWriteArgs, options: Options) -> Self:
        """Describe a write of a rotated projection."""
        N, K, width, D = args.qkv.shape
        sizes = {"N": N, "D": D, "H": K * (width - 2)}
        return cls._of_pools("rope_write", args.qkv.dtype, args.pools, options, sizes)

    @classmethod
    def of_copy(cls, args: CopyArgs, options: None = None) -> Self:
        """Describe a copy of blocks."""
        del options
        pools, D = args.pools, args.pools.k.shape[-1]
        value_dim = None if pools.v is None or pools.v.shape[-1] == D else pools.v.shape[-1]
        own, sizes = Options(value_dim=value_dim), {"N": args.sources.size, "D": D}
        return cls._of_pools("copy_blocks", pools.k.dtype, pools, own, sizes)

    @classmethod
    def _of_pools(
        cls,
        op: PoolOp,
        dtype: DTypeLike,
        pools: Pools | Pages,
        options: Options,
        sizes: dict[str, int],
        sinks: jax.Array | None = None,
    ) -> Self:
        sizes |= {"P": pools.num_blocks, "K": pools.num_kv_heads, "C": pools.block_size}
        if isinstance(pools, Pools):
            sizes["L"] = pools.k.shape[0]
        if options.value_dim is not None:
            sizes["U"] = options.value_dim
        return cls(
            op=op,
            sizes=tuple(sizes.items()),
            q_dtype=jnp.dtype(dtype),
            pool_dtype=pools.dtype,
            has_sinks=sinks is not None,
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


@dataclass(frozen=True, eq=False)
class Kernel:
    """A backend's implementation of an op.

    Attributes:
      run: function of the arguments of the op (a tree of arrays), and of `options` if the op has
        any. It returns what the op's plain meaning returns. The arguments are in range, because the
        public ops check and clip them.
      refusal: function of what `Op.describe` returns for a call, a `Problem` in most ops. It
        returns why the kernel does not support the call, as a phrase, or None if it does.
      unavailable: function like `refusal`, which compiles the kernel on this machine, and returns
        why that failed. None if nothing must be compiled before a program is lowered.
      can_interpret: whether the kernel is written in Pallas. `run` and `refusal` then have the
        keyword argument `interpret`: whether to run in Pallas' interpreter.
      is_differentiable: whether JAX can differentiate `run` itself, as often as the op promises.
      runs_anywhere: whether a program for another platform may contain the kernel, because it
        becomes plain JAX when it is lowered for another platform, or is plain JAX.
      interpret: whether it runs in Pallas' interpreter, see `interpreted`.
    """

    run: Callable[..., Any]
    refusal: Callable[..., str | None] = supports_all
    unavailable: Callable[[Any], str | None] | None = None
    can_interpret: bool = False
    is_differentiable: bool = False
    runs_anywhere: bool = False
    interpret: Interpret = False

    def refuses(self, call: Any) -> str | None:
        """Return `refusal` of a call."""
        return self.refusal(call)

    def interpreted(self, interpret: Interpret) -> "Kernel":
        """Return the kernel in Pallas' interpreter, if it is written in Pallas."""
        return _interpreted(self, interpret) if self.can_interpret else self


@functools.cache
def _interpreted(kernel: Kernel, interpret: Interpret) -> Kernel:
    run, refusal = (functools.partial(x, interpret=interpret) for x in (kernel.run, kernel.refusal))
    return replace(kernel, run=run, refusal=refusal, can_interpret=False, interpret=interpret)


@dataclass(frozen=True, eq=False)
class Backend:
    """Kernels for some ops. All other ops run on the best backend for the platform.

    Attributes:
      kernels: the kernels by the names of their ops (`paged_jax.kernels.ops`).
      platform: JAX's name of the only platform that the backend supports; None if it supports all
        platforms. On its platform, a backend is preferred to the backends for all platforms.
      missing_ops: function that returns the ops for which this device lacks what the kernels need.
        Models run them on other backends.
      preference: function of a `Problem` that returns why measurements prefer this backend to
        others of its platform for the call; None if they do not, or if nothing was measured.
      is_plain: whether ops run their plain meaning, which is then all that the backend has.
      is_exact: whether each row has the same bits in any program and batch.
      unavailable_for: function of the codes of a model's matrices (see `WeightFormat`), its float
        dtype and the dtype of its cache. It returns why the backend cannot run the model on this
        machine, or None if it can.
    """

    kernels: Mapping[str, Kernel]
    platform: str | None = None
    missing_ops: Callable[[], Collection[str]] = tuple
    preference: Callable[[Problem], str | None] | None = None
    is_plain: bool = False
    is_exact: bool = False
    unavailable_for: Callable[[Collection[str], DTypeLike, DTypeLike], str | None] = supports_all

    @property
    def can_interpret(self) -> bool:
        """Whether the backend is written in Pallas, so that it can be interpreted."""
        return any(kernel.can_interpret for kernel in self.kernels.values())

    def has_op(self, op: str) -> bool:
        """Return whether the backend has a kernel for an op that this device can run."""
        return self.is_plain or (op in self.kernels and op not in self.missing_ops())

    def interpreted(self, interpret: Interpret = True) -> "Backend":
        """Return the backend with all of its Pallas kernels in Pallas' interpreter."""
        kernels = {op: kernel.interpreted(interpret) for op, kernel in self.kernels.items()}
        return replace(self, kernels=kernels, missing_ops=tuple)
