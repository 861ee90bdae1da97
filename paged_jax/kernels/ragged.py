"""Attention of a ragged batch over interleaved pages: the op that others' models call.

JAX's kernel for TPUs has this signature and this layout, and models of levanter and others call it.
Here it runs on GPUs and CPUs too, over the pages where they lie.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from paged_jax import dims
from paged_jax.kernels import xla
from paged_jax.kernels.backend import Pages, Problem, RaggedArgs, RaggedOptions
from paged_jax.kernels.checks import as_arrays, as_int32, check_sharding, checked_options, static
from paged_jax.kernels.dispatch import Dispatch, check_arrays_are_on_its_device
from paged_jax.kernels.gradients import prefill_backward
from paged_jax.kernels.ragged_batch import cut_into_tiles

_FUNCTION = "ragged_paged_attention"


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    backend: str | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attend causally with chunks of any lengths, single tokens among them, in one flat batch.

    The signature and the meaning are those of
    ``jax.experimental.pallas.ops.tpu.ragged_paged_attention``, which runs on TPUs; this runs on
    GPUs and CPUs, too. The queries of sequence ``s`` are rows ``cu_q_lens[s]`` to before
    ``cu_q_lens[s + 1]`` of `q` and the last tokens of the sequence, whose keys and values are
    written already. Differentiable in `q` and floating-point pages, once and in reverse
    (`jax.grad`), which computes the attention once more.

    Args:
      q: ``[N, H, D]`` floating point.
      kv_pages: ``[P, C, 2 * K, D]``, of each token the key of head 0, its value, the key of head 1,
        and so on; floating point or int8. On TPUs JAX's kernel reads them
        where `D` is 128; else XLA does.
      kv_lens: integer ``[S]``, tokens in each sequence, its queries included. What is above M * C
        counts as M * C; where there are fewer tokens than queries, the first queries are none.
      page_indices: integer ``[S, M]``, pages of each sequence in order. Entries past the length may
        hold anything.
      cu_q_lens: integer ``[S + 1]``, ascending from 0 to at most N.
      num_seqs: integer ``[1]``, how many of the S rows are sequences; the rows after them may hold
        anything.
      sm_scale: factor of the scores; 1, not ``D ** -0.5`` (static, as all that follow).
      sliding_window: attend to this many last tokens only, the query's own included.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``.
      mask_value: for the signature's sake: a token that is not seen weighs nothing here.
      k_scale, v_scale: what all keys and all values are multiplied by; None for 1. They are not
        rounded to the type of `q` in between.
      num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: for JAX's kernel on TPUs.
        Ours choose their tiles by themselves.
      backend, interpret: see `paged_attention`.

    Returns:
      ``[N, H, D]`` in the dtype of `q`; 0 in rows of no sequence. Softmax and accumulation are in
      float32.

    Raises:
      ValueError, NotImplementedError: as for `paged_attention`.

    Cost: proportional to the tokens that the queries see, beside a pass over `q`; nothing of the
    size of the pages is copied.

    Example:
      >>> kv_pages = jnp.ones((4, 8, 4, 16))                 # 4 pages of 8 tokens, 2 KV heads
      >>> q = jnp.ones((6, 4, 16))                           # 1 query, 3 queries, 2 rows unused
      >>> out = ragged_paged_attention(q, kv_pages, jnp.array([11, 3]), jnp.array([[2, 0], [1, 9]]),
      ...                              jnp.array([0, 1, 4]), jnp.array([2]), sm_scale=0.25)
      >>> out[:, 0, 0].tolist()
      [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    """
    del mask_value
    args, sizes = _checked(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs)
    key_factor, value_factor = (_factor("k_scale", k_scale), _factor("v_scale", v_scale))
    common = checked_options(_FUNCTION, sm_scale, sliding_window, soft_cap)
    tiles = {
        "num_kv_pages_per_block": num_kv_pages_per_block,
        "num_queries_per_block": num_queries_per_block,
        "vmem_limit_bytes": vmem_limit_bytes,
    }
    options = RaggedOptions(
        scale=common.scale * key_factor,
        sliding_window=common.sliding_window,
        soft_cap=common.soft_cap,
        value_scale=value_factor,
        **{name: static(_FUNCTION, name, x, operator.index) for name, x in tiles.items()},
    )
    ops = Dispatch(
        _FUNCTION,
        Problem.of("ragged", sizes, args.q.dtype, args.pages, options),
        backend,
        interpret,
    )
    if not interpret:
        check_arrays_are_on_its_device(_FUNCTION, backend, args.q)
    if args.q.size == 0 or sizes["B"] == 0 or sizes["M"] == 0:
        return jnp.zeros_like(args.q)
    return _attend(ops, options, args)


def _factor(name: str, scale: float | None) -> float:
    """What keys or values are multiplied by."""
    factor = static(_FUNCTION, name, 1.0 if scale is None else scale, float)
    if not math.isfinite(factor):
        raise ValueError(f"{_FUNCTION}: {name} must be finite, got {factor}.")
    return factor


def _checked(
    q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any
) -> tuple[RaggedArgs, dict[str, int]]:
    """The arguments as arrays, lengths within what there is, and the sizes of their letters."""
    named = as_arrays(
        _FUNCTION,
        q=q, kv_pages=kv_pages, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
    )  # fmt: skip
    check_sharding(_FUNCTION, named)
    q, kv_pages = named.pop("q"), named.pop("kv_pages")
    for name, array in {"q": q, "kv_pages": kv_pages}.items():
        is_int8 = name == "kv_pages" and array.dtype == jnp.int8
        if not (jnp.issubdtype(array.dtype, jnp.floating) or is_int8):
            allowed = "floating point or int8" if name == "kv_pages" else "floating point"
            raise ValueError(f"{_FUNCTION}: {name} must be {allowed}, got {array.dtype}.")
    if kv_pages.ndim != 4 or kv_pages.shape[2] % 2:
        raise ValueError(
            f"{_FUNCTION}: kv_pages must have shape [P, C, 2 * K, D], of keys and values in turn, "
            f"got {list(kv_pages.shape)}."
        )
    P, C, K2, D = kv_pages.shape
    one_part: Any = jax.ShapeDtypeStruct((P, C, K2 // 2, D), kv_pages.dtype)
    kv_lens, tables, cu_q_lens, num_seqs = as_int32(_FUNCTION, **named)
    sizes = dims.bind(
        _FUNCTION,
        q=(q, "NHD"),
        kv_pages=(one_part, "PCKD"),
        kv_lens=(kv_lens, "B"),
        page_indices=(tables, "BM"),
    )
    if not sizes["K"] or sizes["H"] % sizes["K"]:
        raise ValueError(
            f"{_FUNCTION}: q must have a multiple of the {sizes['K']} KV heads of kv_pages, "
            f"got {sizes['H']} heads."
        )
    B, N, longest = sizes["B"], sizes["N"], sizes["M"] * C
    for name, array, shape in (("cu_q_lens", cu_q_lens, (B + 1,)), ("num_seqs", num_seqs, (1,))):
        if array.shape != shape:
            raise ValueError(
                f"{_FUNCTION}: {name} must have shape {list(shape)}, got {list(array.shape)}."
            )
    num_seqs = jnp.clip(num_seqs, 0, B)
    index = jnp.arange(B + 1, dtype=jnp.int32)
    ends = jnp.clip(cu_q_lens[jnp.minimum(index, num_seqs)], 0, N)
    kv_lens = jnp.where(index[:B] < num_seqs, jnp.clip(kv_lens, 0, longest), 0)
    return RaggedArgs(q, Pages(kv_pages), tables, kv_lens, ends, num_seqs), sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(ops: Dispatch, options: RaggedOptions, args: RaggedArgs) -> jax.Array:
    return ops.ragged(args, options)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("args",), meta_fields=("wants_pages",)
)
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What the backward pass needs: the arguments, and whether the pages have a gradient."""

    args: RaggedArgs
    wants_pages: bool


def _forward(ops: Dispatch, options: RaggedOptions, primals: Any):
    wants_pages = primals.pages.kv.perturbed
    args: RaggedArgs = custom_vjp_primal_tree_values(primals)
    if wants_pages and args.pages.dtype.itemsize == 1:
        raise NotImplementedError(
            f"{_FUNCTION}: kv_pages must have 16 bits or more for a gradient in them, got "
            f"{args.pages.dtype}. Stop it with jax.lax.stop_gradient."
        )
    return ops.ragged(args, options), _Residuals(args, wants_pages)


def _backward(ops: Dispatch, options: RaggedOptions, residuals: _Residuals, out_bar: Any):
    """Through chunks of equal lengths, whose results are computed once more.

    So no backend needs to keep a log-sum-exp, which JAX's kernel for TPUs does not give.
    """
    del ops
    args = residuals.args
    N, S = args.q.shape[0], len(args.context_lens)
    if isinstance(out_bar, SymbolicZero):
        out_bar = jnp.zeros_like(args.q)
    # As long as chunks are on average, so that little is padding.
    tiles, rows_BT = cut_into_tiles(args, min(xla.QUERIES, 1 << (max(N // S, 1) - 1).bit_length()))
    # What values are multiplied by is the result's factor, and so the gradient's.
    unscaled = dataclasses.replace(options, value_scale=1.0)
    bar_BTHD = (out_bar * options.value_scale).at[rows_BT].get(mode="fill", fill_value=0)
    out, lse = xla.prefill(tiles, unscaled)
    gradients = prefill_backward(
        tiles, unscaled, out, lse, bar_BTHD, jnp.zeros_like(lse), wants_pools=residuals.wants_pages
    )
    q_bar = jnp.zeros_like(args.q).at[rows_BT].set(gradients.q, mode="drop")
    pages_bar = None
    if gradients.k is not None and gradients.v is not None:
        bar_PCKD = (jnp.swapaxes(bar, 1, 2) for bar in (gradients.k, gradients.v))
        kv_bar = jnp.stack(list(bar_PCKD), axis=3).reshape(args.pages.kv.shape)
        pages_bar = Pages(kv_bar.astype(args.pages.dtype))
    args_bar: Any = RaggedArgs(q_bar, pages_bar, None, None, None, None)  # type: ignore
    return (args_bar,)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)
