# pyright: strict, reportUnknownMemberType=false
"""Attention of ragged batches over interleaved pages.

`ragged_paged_attention` has the signature and the page layout of JAX's kernel for TPUs, which
Levanter, EasyDeL and sglang-jax use. This op also runs on GPUs and CPUs. It reads the pages in
place.

All queries are concatenated in a single array. The queries of a sequence are called a chunk. A
chunk with a single token is a decode. Backends run single queries in their decode kernel, which
splits long contexts. They run longer chunks in another kernel, which has larger matmuls, see
`ragged_chunks.attend_in_parts`::

    q  [N, H, D]    | a a a a | b | c | d d d d d d d | (rows without a sequence) |
    decode  [B, H, D]     -     b   c         -         one row per sequence, empty for a and d
    chunks  [N, H, D]  a a a a  -   -  d d d d d d d    tiles of one sequence each
"""

import dataclasses
import functools
import math
import operator
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import custom_derivatives
from jax.custom_derivatives import SymbolicZero

from paged_jax import dims
from paged_jax.arguments import names_arguments
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.checks import (
    as_arrays,
    as_int32,
    as_scalar,
    check_floating,
    check_sharding,
    checked_options,
    checked_value_dim,
    half_of_pages,
    static,
)
from paged_jax.kernels.derivatives import differentiable_once
from paged_jax.kernels.gradients import attention_gradients
from paged_jax.kernels.kv_dtypes import wider_dtype
from paged_jax.kernels.op import Op, OpCall
from paged_jax.kernels.op_args import RaggedArgs, RaggedOptions
from paged_jax.kernels.opaque_call import put_or_drop, take_or_fill
from paged_jax.kernels.pools import Pages
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.ragged_chunks import cut_into_tiles, find_chunks, find_rows
from paged_jax.kernels.xla import attention as plain

_FUNCTION = "ragged_paged_attention"

# Maximum number of queries in a tile of the backward pass.
_MAX_QUERIES = 128


class RaggedAttentionOptions(TypedDict, total=False):
    """Optional arguments of `ragged_paged_attention`."""

    sm_scale: float | jax.Array
    sliding_window: int | None
    soft_cap: float | None
    mask_value: float | None
    k_scale: float | jax.Array | None
    v_scale: float | jax.Array | None
    sinks: jax.Array | None
    value_dim: int | None
    num_kv_pages_per_block: int | None
    num_queries_per_block: int | None
    vmem_limit_bytes: int | None
    backend: str | None
    interpret: Interpret


@overload
def ragged_paged_attention(
    q: jax.Array, kv_pages: jax.Array, kv_lens: jax.Array, page_indices: jax.Array,
    cu_q_lens: jax.Array, num_seqs: jax.Array, *,
    return_lse: Literal[False] = False, **options: Unpack[RaggedAttentionOptions],
) -> jax.Array: ...  # fmt: skip


@overload
def ragged_paged_attention(
    q: jax.Array, kv_pages: jax.Array, kv_lens: jax.Array, page_indices: jax.Array,
    cu_q_lens: jax.Array, num_seqs: jax.Array, *,
    return_lse: Literal[True], **options: Unpack[RaggedAttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@names_arguments
def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float | jax.Array = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    return_lse: bool = False,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    backend: str | None = None,
    interpret: Interpret = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend causally with chunks of one or more queries, concatenated in an array.

    This op takes the arguments of ``jax.experimental.pallas.ops.tpu.ragged_paged_attention``, and
    also `sinks`, `value_dim` and `return_lse`. JAX's kernel runs on TPUs only. This op also runs on
    GPUs and CPUs.

    The queries of sequence ``s`` are rows ``cu_q_lens[s]`` to ``cu_q_lens[s + 1] - 1`` of `q`. They
    are the last tokens of the sequence. Their keys and values must already be in the pages, see
    `write_kv_pages`.

    `jax.grad` can differentiate this op once, with respect to `q` and `sinks`, and also `sm_scale`,
    `k_scale` and `v_scale` if they are JAX arrays. It can also differentiate with respect to
    `kv_pages` if their elements have 16 bits or more. The backward pass computes the attention
    again.

    Args:
      q: ``[N, H, D]`` floating point, the queries of all sequences.
      kv_pages: ``[P, C, 2 * K, D]``, floating point or a dtype of `kv_dtypes`, such as int8. Each
        token has the key of head 0, its value, the key of head 1, and so on. On TPUs, JAX's kernel
        requires that `D` is 128. XLA computes other head dimensions. Pages ``[P, C, 1, D]`` have
        keys only: the values are the first `value_dim` elements of the keys.
      kv_lens: integer ``[S]``, number of tokens in each sequence, including its queries. Lengths
        above M * C are clipped to M * C. If a sequence has fewer tokens than queries, its first
        queries are ignored, and their output is 0.
      page_indices: integer ``[S, M]``, page ids of each sequence in order. Entries past the end of
        a sequence may hold anything.
      cu_q_lens: integer ``[S + 1]``, cumulative query lengths: the first row of each sequence in
        `q`, and then the end of the last sequence; ascending from 0 to at most N.
      num_seqs: integer ``[1]`` or ``[]``, number of sequences. Only this number of rows of
        `kv_lens` and `page_indices` is read. Later rows may hold anything.
      sm_scale: factor of the scores; 1 by default, not ``D ** -0.5``. A Python number becomes a
        constant of the program. If it is a JAX array, traced or not, `q` is multiplied by it and
        rounded to the dtype of `q`.
      sliding_window: number of tokens that a query sees, including its own (static); None for all.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)`` (static).
      mask_value: ignored; accepted for compatibility. Tokens that a query does not see have
        weight 0.
      k_scale: factor of all keys, a number or an array like `sm_scale`; None for 1. The keys are
        not rounded after they are scaled.
      v_scale: factor of all values, like `k_scale`.
      sinks: floating point ``[H]``, attention sinks: an additional logit in the softmax denominator
        of each query head, without a value. None for no sinks. On TPUs, XLA computes batches with
        sinks.
      value_dim: number of elements of a value (U) in pages that have keys only; None for D
        (static).
      return_lse: whether to return the log-sum-exp too (static). On TPUs, XLA then computes the
        batch.
      num_kv_pages_per_block: number of pages in a tile of keys of JAX's kernel on TPUs (static).
        Other backends choose their own tiles.
      num_queries_per_block: number of query tokens in a tile of JAX's kernel (static).
      vmem_limit_bytes: bytes of VMEM that JAX's kernel may use (static).
      backend: see `paged_attention`.
      interpret: see `paged_attention`.

    Returns:
      ``[N, H, U]`` in the dtype of `q`; 0 in rows without a sequence. Softmax and accumulation are
      in float32. With `return_lse`, ``(out, lse)``: `lse`, f32 ``[N, H]``, is the natural logarithm
      of the softmax denominator, including sinks; -inf in rows without a sequence.

    Raises:
      ValueError: see `paged_attention`.
      NotImplementedError: see `paged_attention`.

    The cost is proportional to the number of tokens that the queries see, plus one pass over `q`.
    The pages are not copied.

    Example:
      >>> kv_pages = jnp.ones((4, 8, 4, 16))                 # 4 pages of 8 tokens, 2 KV heads
      >>> q = jnp.ones((6, 4, 16))                           # 1 query, 3 queries, 2 unused rows
      >>> out = ragged_paged_attention(q, kv_pages, jnp.array([11, 3]), jnp.array([[2, 0], [1, 9]]),
      ...                              jnp.array([0, 1, 4]), jnp.array([2]), sm_scale=0.25)
      >>> out[:, 0, 0].tolist()
      [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    """
    del mask_value
    args, sizes, value_dim = _checked(
        sinks, value_dim,
        q=q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
    )  # fmt: skip
    factors = {"sm_scale": sm_scale, "k_scale": k_scale, "v_scale": v_scale}
    arrays = {name: x for name, x in factors.items() if isinstance(x, jax.Array)}
    constants = {name: _factor(name, x) for name, x in factors.items() if name not in arrays}
    args = _scale_queries(args, arrays)
    scale = constants.get("sm_scale", 1.0) * constants.get("k_scale", 1.0)
    common = checked_options(_FUNCTION, scale, sliding_window, soft_cap, value_dim)
    tiles = {
        "num_kv_pages_per_block": num_kv_pages_per_block,
        "num_queries_per_block": num_queries_per_block,
        "vmem_limit_bytes": vmem_limit_bytes,
    }
    options = RaggedOptions(
        **(vars(common) | {"value_scale": constants.get("v_scale", 1.0)}),
        return_lse=return_lse,
        **{name: static(_FUNCTION, name, x, operator.index) for name, x in tiles.items()},
    )
    call = RAGGED.bind(
        args, options, function=_FUNCTION, backend=backend, interpret=interpret, array=args.q
    )
    if args.q.size == 0 or sizes["B"] == 0 or sizes["M"] == 0:
        results: Any = _attend_to_no_token(args, options.output_dim(sizes["D"]))
    else:
        results = call(args)
    out, lse = results
    if "v_scale" in arrays:
        out = _multiply(out, "v_scale", arrays["v_scale"])
    return (out, lse) if return_lse else out


def _attend_to_no_token(args: RaggedArgs, value_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return ``(out, lse)`` of a batch without queries, or with tables without columns."""
    rows = args.q.shape[:2]
    return jnp.zeros((*rows, value_dim), args.q.dtype), jnp.full(rows, -jnp.inf, jnp.float32)


def _scale_queries(args: RaggedArgs, factors: dict[str, jax.Array]) -> RaggedArgs:
    """Multiply the queries by `sm_scale` and `k_scale`, if these are JAX arrays."""
    check_sharding(_FUNCTION, factors)
    names = [name for name in ("sm_scale", "k_scale") if name in factors]
    if not names:
        return args
    dtype = wider_dtype(args.q.dtype, jnp.float32)
    factor = math.prod(as_scalar(_FUNCTION, name, factors[name], dtype) for name in names)
    # Set the rows of `q` without a sequence to 0. They may hold NaN, and the gradients with respect
    # to `sm_scale` and `k_scale` would then be NaN.
    is_query = find_rows(args, find_chunks(args)).is_query[:, None, None]
    q = jnp.where(is_query, args.q, 0).astype(dtype) * factor
    return args._replace(q=q.astype(args.q.dtype))


def _multiply(x: jax.Array, name: str, factor: jax.Array) -> jax.Array:
    """Multiply `x` by a scale, and keep its dtype. `name` is the name of the scale in errors."""
    dtype = wider_dtype(x.dtype, jnp.float32)
    factor = as_scalar(_FUNCTION, name, factor, dtype)
    return (x.astype(dtype) * factor).astype(x.dtype)


def _factor(name: str, scale: Any) -> float:
    """Return a static scale as a finite Python float. None means 1."""
    if scale is None and name == "sm_scale":
        raise ValueError(f"{_FUNCTION}: sm_scale must be a number, got None. Pass D ** -0.5.")
    factor = static(_FUNCTION, name, 1.0 if scale is None else scale, float)
    if not math.isfinite(factor):
        raise ValueError(f"{_FUNCTION}: {name} must be finite, got {factor}.")
    return factor


def _checked(
    sinks: Any, value_dim: Any, **arrays: Any
) -> tuple[RaggedArgs, dict[str, int], int | None]:
    """Check the arguments of `ragged_paged_attention`.

    Returns:
      The arguments as arrays, with lengths clipped to their ranges; the size of each dimension
      letter; and `value_dim`, which is None if it equals D.
    """
    named = as_arrays(_FUNCTION, **arrays)
    sinks = None if sinks is None else jnp.asarray(sinks)
    check_sharding(_FUNCTION, (named, sinks))
    q, kv_pages = named.pop("q"), named.pop("kv_pages")
    check_floating(_FUNCTION, q=q, sinks=sinks)
    kv_lens, tables, cu_q_lens, num_seqs = as_int32(_FUNCTION, **named)
    sizes = dims.bind(
        _FUNCTION,
        q=(q, "NHD"),
        kv_pages=(half_of_pages(_FUNCTION, kv_pages), "PCKD"),
        kv_lens=(kv_lens, "B"),
        page_indices=(tables, "BM"),
        **({} if sinks is None else {"sinks": (sinks, "H")}),
    )
    if not sizes["K"] or sizes["H"] % sizes["K"]:
        raise ValueError(
            f"{_FUNCTION}: the number of heads of q must be a multiple of the {sizes['K']} KV "
            f"heads of kv_pages, got {sizes['H']}."
        )
    has_values = kv_pages.shape[2] > 1
    if has_values and value_dim not in (None, sizes["D"]):
        raise ValueError(
            f"{_FUNCTION}: value_dim must be None or {sizes['D']} for pages with keys and values, "
            f"got {value_dim}."
        )
    value_dim = checked_value_dim(_FUNCTION, value_dim, sizes["D"], has_values=has_values)
    if value_dim is not None:
        sizes["U"] = value_dim
    B, N, max_length = sizes["B"], sizes["N"], sizes["M"] * sizes["C"]
    if num_seqs.shape == ():
        num_seqs = num_seqs[None]
    for name, array, shape in (("cu_q_lens", cu_q_lens, (B + 1,)), ("num_seqs", num_seqs, (1,))):
        if array.shape != shape:
            raise ValueError(
                f"{_FUNCTION}: {name} must have shape {list(shape)}, got {list(array.shape)}."
            )
    num_seqs = jnp.clip(num_seqs, 0, B)
    index = jnp.arange(B + 1, dtype=jnp.int32)
    ends = jnp.clip(cu_q_lens[jnp.minimum(index, num_seqs)], 0, N)
    kv_lens = jnp.where(index[:B] < num_seqs, jnp.clip(kv_lens, 0, max_length), 0)
    args = RaggedArgs(q, Pages(kv_pages), tables, kv_lens, ends, num_seqs, sinks)
    return args, sizes, value_dim


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: OpCall, args: RaggedArgs):
    return call.run(args)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("args",), meta_fields=("wants_pages",)
)
@dataclasses.dataclass(frozen=True)
class _RaggedResiduals:
    """Arrays and flags that the forward pass keeps for the backward pass.

    Attributes:
      args: arrays of the call.
      wants_pages: whether a gradient with respect to the pages is requested.
    """

    args: RaggedArgs
    wants_pages: bool


def _forward(call: OpCall, primals: Any):
    wants_pages = primals.pages.kv.perturbed
    args: RaggedArgs = custom_derivatives.custom_vjp_primal_tree_values(primals)
    args = differentiable_once(_FUNCTION, args)
    if wants_pages and args.pages.dtype.itemsize == 1:
        raise NotImplementedError(
            f"{_FUNCTION}: kv_pages must have elements of 16 bits or more to be differentiated, "
            f"got {args.pages.dtype}. Stop the gradient with jax.lax.stop_gradient."
        )
    return call.run(args), _RaggedResiduals(args, wants_pages)


def _backward(call: OpCall, residuals: _RaggedResiduals, bars: Any):
    """Compute the gradients, with the queries cut into tiles of equal length.

    The general backend computes the output and the log-sum-exp of each tile again, because JAX's
    kernel for TPUs returns no log-sum-exp.
    """
    residuals, bars = differentiable_once(_FUNCTION, (residuals, bars))
    args, options = residuals.args, call.options
    N, S = args.q.shape[0], len(args.context_lens)
    zeros = jnp.zeros_like(args.q), jnp.zeros(args.q.shape[:2], jnp.float32)
    out_bar, lse_bar = (
        zero if isinstance(bar, SymbolicZero) else bar
        for zero, bar in zip(zeros, bars, strict=True)
    )
    # Use tiles of about the average chunk length, which have few padding rows.
    tiles, rows_BT = cut_into_tiles(args, min(_MAX_QUERIES, 1 << (max(N // S, 1) - 1).bit_length()))
    # The output is `value_scale` times the output of a call without this scale. The gradient with
    # respect to the output of that call is therefore `value_scale * out_bar`.
    unscaled = dataclasses.replace(options, value_scale=1.0)
    bar_BTHD = take_or_fill(out_bar * options.value_scale, rows_BT)
    lse_bar_BTH = take_or_fill(lse_bar, rows_BT)
    out, lse = plain.attend(tiles, unscaled)
    gradients = attention_gradients(
        tiles, unscaled, out, lse, bar_BTHD, lse_bar_BTH, wants_pools=residuals.wants_pages
    )
    q_bar = put_or_drop(jnp.zeros_like(args.q), rows_BT, gradients.q)
    pages_bar = None
    if gradients.k is not None and gradients.v is None:
        kv_bar = jnp.swapaxes(gradients.k, 1, 2)
        pages_bar = Pages(kv_bar.astype(args.pages.dtype))
    elif gradients.k is not None and gradients.v is not None:
        bar_PCKD = (jnp.swapaxes(bar, 1, 2) for bar in (gradients.k, gradients.v))
        kv_bar = jnp.stack(list(bar_PCKD), axis=3).reshape(args.pages.kv.shape)
        pages_bar = Pages(kv_bar.astype(args.pages.dtype))
    args_bar: Any = RaggedArgs(q_bar, pages_bar, None, None, None, None, gradients.sinks)  # type: ignore
    return (args_bar,)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)

RAGGED = Op("ragged", plain.attend_ragged, Problem.of_ragged, _attend)
