# pyright: strict, reportUnknownMemberType=false
"""The public attention ops `paged_attention` (decode) and `paged_prefill_attention`.

`chunked_attention` and `chunked_prefill_attention` call them to restrict attention to chunks of
consecutive tokens.

Both ops compute the following, which `paged_jax.kernels.reference` implements directly::

    out[b, h] = softmax(scale * q[b, h] . k[0:length[b]]) v[0:length[b]]

In latent attention there is no pool of values. Each value vector is the beginning of its key
vector: ``v`` is ``k[:, :value_dim]``, so each key is read only once.

Token ``t`` of sequence ``b`` is in block ``block_tables[b, t // C]`` of the pool, at offset
``t % C``. Query heads ``g * G`` to ``(g + 1) * G - 1`` share KV head ``g``, where G is H // K. The
output of a sequence does not depend on pool contents outside of the sequence, which may be NaN, or
on table entries past its length.

All backends handle arguments that are out of range in the same way. Lengths are clipped: a sequence
has at most M * C tokens, and a chunk at most T queries and at most the tokens of its sequence. If a
traced layer index is out of range, attention treats all sequences as empty, and writes are dropped.
"""

from collections.abc import Mapping
from typing import Literal, TypedDict, Unpack, cast, overload

import jax
import jax.numpy as jnp

from paged_jax import dims
from paged_jax.arguments import names_arguments
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.checks import (
    as_arrays,
    as_int32,
    as_pools,
    check_floating,
    check_pools,
    check_sharding,
    checked_options,
    checked_value_dim,
    default_layer,
    pool_letters,
)
from paged_jax.kernels.gradients import attend_differentiably
from paged_jax.kernels.op import Op
from paged_jax.kernels.op_args import AttentionArgs
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.xla.attention import attend as plain_attend

DECODE = Op("decode", plain_attend, Problem.of_attention, attend_differentiably)
PREFILL = Op("prefill", plain_attend, Problem.of_attention, attend_differentiably)


class AttentionOptions(TypedDict, total=False):
    """Optional arguments of the attention ops, see `paged_attention`."""

    layer: int | jax.Array | None
    scale: float | None
    sliding_window: int | None
    soft_cap: float | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sinks: jax.Array | None
    value_dim: int | None
    backend: str | None
    interpret: Interpret


@overload
def paged_attention(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array | None, block_tables: jax.Array,
    context_lens: jax.Array, *,
    return_lse: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> jax.Array: ...  # fmt: skip


@overload
def paged_attention(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array | None, block_tables: jax.Array,
    context_lens: jax.Array, *,
    return_lse: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@names_arguments
def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    layer: int | jax.Array | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    interpret: Interpret = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend with a single query token per sequence (decode).

    `jax.grad` can differentiate this op once, with respect to `q`, `sinks` and floating-point
    pools.

    Args:
      q: ``[B, H, D]`` floating point, the query of the last token of each sequence.
      k_pool: ``[L, P, K, C, D]``, keys, including the key of the last token. Floating point, or
        a quantised dtype with scales, such as int8 (see `kv_dtypes`). The last dimension may be
        padded to a multiple of 128, which TPUs need. The padding may hold anything.
      v_pool: ``[L, P, K, C, U]``, values, of the dtype of `k_pool` and padded like it. U is D in
        most models. None if the values are the first `value_dim` elements of the keys, as in latent
        attention (DeepSeek-V2, section 2.1).
      block_tables: integer ``[B, M]``, block ids of each sequence in order. Entries past the end of
        a sequence may hold anything.
      context_lens: integer ``[B]``, tokens in each sequence, including the query's token. The
        output of an empty sequence is 0.
      layer: index of the layer to read, a Python int or a traced scalar. None if the pools have one
        layer.
      scale: factor of the scores, ``D ** -0.5`` if None (static).
      sliding_window: number of tokens that a query sees, including its own; None for all (static).
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)`` (Gemma 2, section 2; static).
      k_scale: f32 ``[L, P, K, C]``, scales that the keys of a quantised pool are multiplied by;
        None for other pools.
      v_scale: scales of the values, like `k_scale`. None if `v_pool` is None, because the values
        then have the scales of the keys.
      sinks: floating point ``[H]``, attention sinks: an additional logit in the softmax denominator
        of each query head, without a value. `scale` and `soft_cap` do not apply to it (gpt-oss
        model card, section 2.2). None for no sinks.
      value_dim: number of elements of a value, and of the output of a head (U); None for D. It must
        be given if `v_pool` is None. Otherwise the last dimension of `v_pool` must be U (static).
      return_lse: also return the log-sum-exp (static), see `merge_attention`.
      backend: a name in `paged_jax.kernels.BACKENDS`, such as ``"triton"`` (GPU) or ``"xla"``; None
        for the best backend of the platform that the program is lowered for (static).
      interpret: whether to run the Pallas kernel of `backend` in Pallas' interpreter, on any
        platform (static).

    Returns:
      ``[B, H, U]`` in the dtype of `q`. Softmax and accumulation are in float32. With
      `return_lse`, ``(out, lse)``: `lse`, f32 ``[B, H]``, is the natural logarithm of the softmax
      denominator, including sinks; -inf if the denominator is 0.

    Raises:
      ValueError: shapes or dtypes do not match, scales are missing or not allowed, a static
        argument is traced, arrays are on a mesh with explicit axes, or `backend` is unknown or does
        not run on the device of the arrays.
      NotImplementedError: `backend` does not support the arguments; the message says why.

    The cost is proportional to the number of tokens in the batch, not to the number of columns of
    the block table.

    Example:
      >>> k_pool = v_pool = jnp.ones((1, 4, 2, 8, 16))       # 4 blocks of 8 tokens, 2 KV heads
      >>> out = paged_attention(jnp.ones((1, 4, 16)), k_pool, v_pool,
      ...                       jnp.array([[2, 0]]), jnp.array([11]))
      >>> out.shape
      (1, 4, 16)
    """
    pools = Pools(k_pool, v_pool, k_scale, v_scale)
    layer = default_layer("paged_attention", k_pool, layer)
    args = AttentionArgs(q, pools, block_tables, context_lens, None, sinks, layer)
    out, lse = attend(
        "paged_attention",
        args,
        scale,
        sliding_window,
        soft_cap,
        value_dim=value_dim,
        backend=backend,
        interpret=interpret,
    )
    return (out, lse) if return_lse else out


@overload
def paged_prefill_attention(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array | None, block_tables: jax.Array,
    context_lens: jax.Array, query_lens: jax.Array, *,
    return_lse: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> jax.Array: ...  # fmt: skip


@overload
def paged_prefill_attention(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array | None, block_tables: jax.Array,
    context_lens: jax.Array, query_lens: jax.Array, *,
    return_lse: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@names_arguments
def paged_prefill_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    layer: int | jax.Array | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    interpret: Interpret = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend causally with a chunk of tokens per sequence (prefill).

    The chunk has the last tokens of its sequence: query ``i`` of sequence ``b`` is token
    ``context_lens[b] - query_lens[b] + i``, and attends to this token and all tokens before it.
    Shorter chunks are padded to ``T`` rows, and nothing is computed for the padding. The op is
    differentiable like `paged_attention`, and has the same arguments, except:

    - `q`: ``[B, T, H, D]`` floating point.
    - `k_pool` and `v_pool` must already contain the keys and values of the chunk.
    - `context_lens`: integer ``[B]``, tokens in each sequence, including the chunk.
    - `query_lens`: integer ``[B]``, tokens in each chunk, at most T and at most `context_lens`.

    Returns:
      ``[B, T, H, U]`` in the dtype of `q`; 0 in rows past `query_lens`. With `return_lse`,
      ``(out, lse)``: `lse` is f32 ``[B, T, H]``, and -inf in rows past `query_lens`.

    Raises:
      ValueError: see `paged_attention`.
      NotImplementedError: see `paged_attention`.

    Example:
      >>> k_pool = v_pool = jnp.ones((1, 4, 2, 8, 16))
      >>> out = paged_prefill_attention(jnp.ones((1, 3, 4, 16)), k_pool, v_pool,
      ...                               jnp.array([[2, 0]]), jnp.array([11]), jnp.array([3]))
      >>> out.shape
      (1, 3, 4, 16)
    """
    # Reject None as `query_lens`, because `attend` would then run a decode instead of a prefill.
    lens = as_arrays("paged_prefill_attention", query_lens=query_lens)["query_lens"]
    pools = Pools(k_pool, v_pool, k_scale, v_scale)
    layer = default_layer("paged_prefill_attention", k_pool, layer)
    args = AttentionArgs(q, pools, block_tables, context_lens, lens, sinks, layer)
    out, lse = attend(
        "paged_prefill_attention",
        args,
        scale,
        sliding_window,
        soft_cap,
        value_dim=value_dim,
        backend=backend,
        interpret=interpret,
    )
    return (out, lse) if return_lse else out


def attend(
    function: str,
    args: AttentionArgs,
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    *,
    value_dim: int | None,
    backend: str | None,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    """Check the arguments of an attention op, choose a backend, run it, and return ``(out, lse)``.

    `function` is the name of the op in error messages. The other arguments are the arguments of
    `paged_attention`. If ``args.query_lens`` is None, the op is a decode, else a prefill.
    """
    args, sizes, value_dim = _checked(function, args, value_dim)
    default_scale: float = sizes["D"] ** -0.5
    options = checked_options(
        function, default_scale if scale is None else scale, sliding_window, soft_cap, value_dim
    )
    args = _bounded(args, sizes)

    op = DECODE if args.query_lens is None else PREFILL
    call = op.bind(
        args, options, function=function, backend=backend, interpret=interpret, array=args.q
    )
    if args.q.size == 0 or sizes["M"] == 0:
        return _attend_to_nothing(args, options.output_dim(sizes["D"]))
    return call(args._replace(layer=jnp.clip(args.layer, 0, sizes["L"] - 1)))


def _checked(
    function: str, args: AttentionArgs, value_dim: int | None
) -> tuple[AttentionArgs, dict[str, int], int | None]:
    """Check the arguments of an attention op.

    Returns:
      The arguments as arrays, with integers converted to int32; the size of each dimension letter;
      and `value_dim`, which is None if it equals D.
    """
    is_decode = args.query_lens is None
    letters = {"q": "BHD" if is_decode else "BTHD", "block_tables": "BM", "context_lens": "B"}
    if not is_decode:
        letters["query_lens"] = "B"
    named = as_arrays(function, **{name: getattr(args, name) for name in letters})
    pools = as_pools(cast(Pools, args.pools))
    sinks = None if args.sinks is None else jnp.asarray(args.sinks)
    q = named["q"]
    shapes = {name: (array, letters[name]) for name, array in named.items()}
    head_dim = q.shape[-1] if q.ndim else 0
    has_values = pools.v is not None
    value_dim = checked_value_dim(function, value_dim, head_dim, has_values=has_values)
    shapes |= pool_letters(pools, head_dim, value_dim)
    if sinks is not None:
        shapes["sinks"] = (sinks, "H")
    sizes = dims.bind(function, **shapes)
    if value_dim is not None and sizes.setdefault("U", value_dim) != value_dim:
        raise ValueError(
            f"{function}: v_pool must have a last dimension of value_dim = {value_dim} elements, "
            f"got {sizes['U']}."
        )
    if sizes["H"] % sizes["K"]:
        raise ValueError(
            f"{function}: the number of heads of q must be a multiple of the {sizes['K']} KV heads "
            f"of the pools, got {sizes['H']}."
        )
    check_floating(function, q=q, sinks=sinks)
    check_pools(function, pools, args.layer, has_own_dim=value_dim is not None)
    check_sharding(function, (named, pools, sinks))
    del named["q"]
    block_tables, context_lens, *query_lens = as_int32(function, **named)
    layer = jnp.asarray(args.layer, jnp.int32)
    checked = AttentionArgs(
        q, pools, block_tables, context_lens, query_lens[0] if query_lens else None, sinks, layer
    )
    return checked, sizes, value_dim


def _bounded(args: AttentionArgs, sizes: Mapping[str, int]) -> AttentionArgs:
    """Clip the lengths of sequences to the block table, and the query lengths to the chunk.

    If the layer is out of range, all lengths become 0.
    """
    is_layer = (args.layer >= 0) & (args.layer < sizes["L"])
    longest = jnp.where(is_layer, sizes["M"] * sizes["C"], 0)
    context_lens = jnp.clip(args.context_lens, 0, longest)
    query_lens = args.query_lens
    if query_lens is not None:
        query_lens = jnp.clip(query_lens, 0, jnp.minimum(context_lens, sizes["T"]))
    return args._replace(context_lens=context_lens, query_lens=query_lens)


def _attend_to_nothing(args: AttentionArgs, value_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return ``(out, lse)`` of a call without queries, or with block tables without columns."""
    lse = jnp.full(args.q.shape[:-1], -jnp.inf, jnp.float32)
    if args.query_lens is None and args.sinks is not None:
        lse = jnp.broadcast_to(args.sinks.astype(lse.dtype)[None], lse.shape)
    return jnp.zeros((*args.q.shape[:-1], value_dim), args.q.dtype), lse


def chunked_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    chunk: int,
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """Attend with one query per sequence to the tokens of the query's own chunk (decode).

    A sequence is divided into chunks of `chunk` consecutive tokens. A query attends to the tokens
    of its chunk, up to its own token. A chunk consists of whole blocks, so this is full attention
    over some columns of the block table. Kernels need no additional mask::

        chunks of 4 blocks      b0 b1 b2 b3 | b4 b5 b6 b7 | b8 b9
        a query in block b6                   b4 b5 b6             blocks that it attends to
        a query in block b9                                 b8 b9

    It has the arguments of `paged_attention`, and `chunk`: the number of tokens in a chunk, a
    multiple of the block size.

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
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """Attend with the last tokens of each sequence, each token to its own chunk (prefill).

    The queries of a sequence may belong to several chunks, see `chunked_attention`. The row of such
    a sequence is replaced by several rows, one for each chunk, with the queries of this chunk::

        queries of a row        6 7 8 9           chunks of 8 tokens
        new rows                6 7 . .           attend to the first chunk
                                8 9 . .           attend to the second chunk

    It has the arguments of `paged_prefill_attention`, and `chunk`: the number of tokens in a chunk,
    a multiple of the block size.

    Raises:
      ValueError: the block size does not divide `chunk`.
    """
    if _is_single_chunk(k_pool, block_tables, chunk):
        return paged_prefill_attention(
            q, k_pool, v_pool, block_tables, context_lens, query_lens, **options
        )
    B, T, H, D = q.shape
    # S is the maximum number of chunks into which T consecutive tokens can fall.
    S = (T + chunk - 2) // chunk + 1
    steps = jnp.arange(T, dtype=jnp.int32)[None]
    first = context_lens - query_lens
    numbers = (first // chunk)[:, None] + jnp.arange(S, dtype=jnp.int32)[None]
    ends = jnp.minimum(context_lens[:, None], (numbers + 1) * chunk)
    # Compute, for each chunk, the index of its first query in the row and the number of its
    # queries.
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
    # Gather the outputs in the order of the queries.
    part = (first[:, None] + steps) // chunk - (first // chunk)[:, None]
    step = steps - jnp.take_along_axis(starts, part, axis=1)
    index = jnp.arange(B, dtype=jnp.int32)[:, None]
    return out.reshape(B, S, T, H, -1)[index, part, step]


def _is_single_chunk(k_pool: jax.Array, block_tables: jax.Array, chunk: int) -> bool:
    """Return whether the block tables have columns for at most one chunk."""
    block_size = k_pool.shape[3]
    if chunk % block_size:
        raise ValueError(
            f"chunked_attention: chunk must be a multiple of the block size {block_size}, got "
            f"{chunk}. Use a block size that divides chunk."
        )
    return block_tables.shape[1] * block_size <= chunk


def _tables_of_chunks(block_tables: jax.Array, numbers: jax.Array, width: int) -> jax.Array:
    """Return the part of each block table that belongs to one chunk, i32 ``[B, width]``.

    ``numbers[b]`` is the index of the chunk of sequence b. A chunk has `width` blocks.
    """
    columns = numbers[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None]
    # The last chunk may have fewer columns than the others, so clip the columns. No column after
    # the end of a sequence is read.
    columns = jnp.minimum(columns, block_tables.shape[1] - 1)
    return jnp.take_along_axis(block_tables, columns, axis=1)
