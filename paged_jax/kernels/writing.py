# pyright: strict, reportUnknownMemberType=false
"""The ops that change the pools, with their derivatives: writes of K and V, copies of blocks.

All ops return new pools. If the pools are donated, they are updated in place, without a temporary
copy. Pass whole pools to the ops, because slicing out a layer would copy it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from paged_jax import dims
from paged_jax.arguments import names_arguments
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.checks import (
    as_arrays,
    as_int32,
    as_pools,
    as_scalar,
    check_floating,
    check_pools,
    check_sharding,
    default_layer,
    half_of_pages,
    pool_letters,
)
from paged_jax.kernels.derivatives import without_derivative
from paged_jax.kernels.kv_dtypes import KVDtype, wider_dtype
from paged_jax.kernels.norm_rope import rope_then_write
from paged_jax.kernels.op import Op, OpCall
from paged_jax.kernels.op_args import CopyArgs, Options, RopeWriteArgs, WriteArgs
from paged_jax.kernels.opaque_call import without_index_checks
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.rows import set_rows
from paged_jax.kernels.xla.writes import copy_blocks as plain_copy_blocks
from paged_jax.kernels.xla.writes import write as plain_write

# Maximum number of rows of a pool. It is limited because row indices are int32, including the
# indices past the end that mark dropped tokens.
_MAX_ROWS = 2**31 - 1


@names_arguments
def paged_write(
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    k: jax.Array,
    v: jax.Array | None,
    blocks: jax.Array,
    offsets: jax.Array,
    *,
    layer: int | jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: str | None = None,
    interpret: Interpret = False,
) -> Pools:
    """Write keys and values of N tokens to one layer of the pools.

    Donated pools are updated in place. The op is differentiable with respect to the pools, `k` and
    `v`, unless the pools are quantised.

    Args:
      k_pool: ``[L, P, K, C, D]``, keys. Floating point, or a quantised dtype with scales, such as
        int8 (see `kv_dtypes`). The last dimension may be padded to a multiple of 128. The op leaves
        undefined values in the padding.
      v_pool: ``[L, P, K, C, U]``, values, of the dtype of `k_pool`. None if each value vector is
        the beginning of its key vector. Then `v` must be None too.
      k: ``[N, K, D]`` floating point, cast to the dtype of the pool. For a quantised pool it is
        rounded with one scale per token and head, see `quantise`.
      v: ``[N, K, U]``, like `k`. U is D in most models.
      blocks: integer ``[N]``, block of each token. A token is dropped if its block is not in
        0..P - 1.
      offsets: integer ``[N]``, position of each token in its block. A token is dropped if its
        offset is not in 0..C - 1. Written tokens must have different positions.
      layer: index of the layer to write, a Python int or a traced scalar. Nothing is written if a
        traced index is out of range. None if the pools have one layer.
      k_scale: f32 ``[L, P, K, C]``, scales of a quantised pool of keys; None for other pools.
      v_scale: scales of the values, like `k_scale`.
      backend: ``"triton"`` or ``"mosaic_gpu"`` (GPU), ``"mosaic_tpu"``, ``"xla"``, or None for the
        best backend of the platform that the program is lowered for (static).
      interpret: whether to run the Pallas kernel of `backend` in Pallas' interpreter, on any
        platform (static).

    Returns:
      The new `Pools`.

    Raises:
      ValueError: shapes or dtypes do not match, scales are missing or not allowed, the pool has too
        many rows for int32 indices, arrays are on a mesh with explicit axes, or `backend` is
        unknown or does not run on the device of the arrays.
      NotImplementedError: `backend` does not support the arguments, or a gradient through a
        quantised pool is requested.

    Example:
      >>> k_pool, v_pool = jnp.zeros((2, 2, 4, 1, 8, 16))
      >>> new, blocks, offsets = jnp.ones((2, 1, 16)), jnp.array([3, 4]), jnp.array([7, 0])
      >>> pools = paged_write(k_pool, v_pool, new, new, blocks, offsets, layer=1)  # drops block 4
      >>> float(pools.k.sum()), float(pools.k[1, 3, 0, 7].sum())
      (16.0, 16.0)
    """
    k, blocks, offsets = (jnp.asarray(x) for x in (k, blocks, offsets))
    v = None if v is None else jnp.asarray(v)
    pools = as_pools(Pools(k_pool, v_pool, k_scale, v_scale))
    new, value_dim = _letters_of_new("paged_write", pools, k, v)
    shapes = pool_letters(pools, k.shape[-1] if k.ndim else 0, value_dim)
    sizes = dims.bind("paged_write", **shapes, **new, blocks=(blocks, "N"), offsets=(offsets, "N"))
    layer = default_layer("paged_write", pools.k, layer)
    check_pools("paged_write", pools, layer, has_own_dim=value_dim is not None)
    check_floating("paged_write", k=k, v=v)
    check_sharding("paged_write", (pools, k, v, blocks, offsets))
    check_num_rows("paged_write", pools.k.shape, num_new=sizes["N"] * sizes["K"])
    blocks, offsets = as_int32("paged_write", blocks=blocks, offsets=offsets)
    if pools.is_quantised:
        k = _without_gradient("paged_write", k)
        v = None if v is None else _without_gradient("paged_write", v)

    args = WriteArgs(pools, k, v, blocks, offsets, jnp.asarray(layer, jnp.int32))
    call = WRITE.bind(
        args, function="paged_write", backend=backend, interpret=interpret, array=pools.k
    )
    return call(args) if sizes["N"] else pools


def _letters_of_new(
    function: str, pools: Pools, k: jax.Array, v: jax.Array | None
) -> tuple[dict[str, tuple[jax.Array, str]], int | None]:
    """Return new keys and values with their dimension letters, as `dims.bind` takes them.

    Also return U, or None if it equals D.

    Raises:
      ValueError: there are values but no pool for them, or a pool but no values.
    """
    if (pools.v is None) != (v is None):
        raise ValueError(f"{function}: v and v_pool must both be arrays or both be None.")
    if v is None:
        return {"k": (k, "NKD")}, None
    value_dim = v.shape[-1] if v.ndim and k.shape[-1:] != v.shape[-1:] else None
    return {"k": (k, "NKD"), "v": (v, "NKD" if value_dim is None else "NKU")}, value_dim


@names_arguments
def paged_rope_write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    blocks: jax.Array,
    offsets: jax.Array,
    *,
    layer: int | jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    norm_eps: float = 1e-6,
    backend: str | None = None,
    interpret: Interpret = False,
) -> tuple[jax.Array, Pools]:
    """Rotate the queries and keys of a fused QKV projection, and write its keys and values.

    These are the operations of a Llama layer between the QKV matmul and `paged_attention`. Queries
    and keys are normalised by RMS norms (optional). They are rotated by rotary embeddings
    (RoFormer, section 3.2.2, with the pairs ``x[i], x[i + D / 2]`` of Hugging Face). Keys and
    values are written by `paged_write`. On GPUs this takes one launch, which reads the projection
    once. The op is differentiable with respect to the pools, projection, rotations and norms,
    unless the pools are quantised. It has the arguments of `paged_write`, except:

    - `qkv` instead of `k` and `v`: ``[N, K, G + 2, D]`` floating point, the G queries, the key and
      the value of each KV head. In this order, the projection can be sharded over KV heads. D must
      be even. The op computes in float32.
    - `cos`, `sin`: f32 ``[N, D / 2]``, cosine and sine of the rotation angle of each pair.
    - `q_norm`, `k_norm`: ``[D]``, weights of the RMS norms of queries and keys, as in Qwen3; None
      for no norms.
    - `norm_eps`: constant added to the mean square of a head (static).

    Returns:
      ``(q, pools)``: the queries ``[N, H, D]`` of all tokens, in the dtype of the pools or bfloat16
      if they are quantised; and the new `Pools`.

    Raises:
      ValueError: see `paged_write`.
      NotImplementedError: see `paged_write`.

    Example:
      >>> k_pool, v_pool = jnp.zeros((2, 1, 4, 1, 8, 4))
      >>> qkv, angles = jnp.ones((1, 1, 2 + 2, 4)), jnp.array([[0.0, jnp.pi / 2]])
      >>> blocks, offsets = jnp.array([3]), jnp.array([7])
      >>> q, pools = paged_rope_write(k_pool, v_pool, qkv, jnp.cos(angles), jnp.sin(angles),
      ...                             blocks, offsets)
      >>> q.shape, pools.k[0, 3, 0, 7].round().tolist(), pools.v[0, 3, 0, 7].tolist()
      ((1, 2, 4), [1.0, -1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    """
    function = "paged_rope_write"
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{function}: q_norm and k_norm must both be given, or neither.")
    qkv, cos, sin, blocks, offsets = (jnp.asarray(x) for x in (qkv, cos, sin, blocks, offsets))
    norms = None if q_norm is None or k_norm is None else (jnp.asarray(q_norm), jnp.asarray(k_norm))
    pools = as_pools(Pools(k_pool, v_pool, k_scale, v_scale))
    layer = default_layer(function, pools.k, layer)
    args = RopeWriteArgs(pools, qkv, cos, sin, norms, blocks, offsets, layer)
    sizes = _check_rope_write(function, args)
    blocks, offsets = as_int32(function, blocks=blocks, offsets=offsets)
    if pools.is_quantised:
        qkv = _without_gradient(function, qkv)
    args = args._replace(
        qkv=qkv, blocks=blocks, offsets=offsets, layer=jnp.asarray(layer, jnp.int32)
    )

    options = Options(norm_eps=norm_eps)
    call = ROPE_WRITE.bind(
        args, options, function=function, backend=backend, interpret=interpret, array=pools.k
    )
    if not sizes["N"]:
        return jnp.zeros((0, sizes["H"], sizes["D"]), KVDtype.of(pools.dtype).query_dtype), pools
    return call(args)


@names_arguments
def copy_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    sources: jax.Array,
    targets: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: str | None = None,
    interpret: Interpret = False,
) -> Pools:
    """Copy blocks to other blocks, in all layers.

    Donated pools are updated in place. Each copied block is read and written once. The op is
    differentiable with respect to the pools and scales, to any order, in forward and reverse mode.
    In reverse mode, the gradient of a target is added to the gradient of its source. The pools,
    `k_scale`, `v_scale`, `backend` and `interpret` are as in `paged_write`. The other arguments
    are:

    - `sources`: integer ``[N]``, ids of the blocks to copy.
    - `targets`: integer ``[N]``, ids of the blocks to overwrite. They must be distinct and must not
      occur in `sources`. A pair of a source and a target is ignored if one of them is not in
      0..P - 1.

    Returns:
      The new `Pools`.

    Raises:
      ValueError: see `paged_write`.
      NotImplementedError: see `paged_write`.

    Example:
      >>> k_pool = v_pool = jnp.arange(4.0).reshape(1, 4, 1, 1, 1)
      >>> pools = copy_blocks(k_pool, v_pool, jnp.array([3, 4]), jnp.array([0, 1]))
      >>> pools.k.ravel().tolist()  # there is no block 4
      [3.0, 1.0, 2.0, 3.0]
    """
    sources, targets = jnp.asarray(sources), jnp.asarray(targets)
    pairs = {"sources": (sources, "N"), "targets": (targets, "N")}
    pools = as_pools(Pools(k_pool, v_pool, k_scale, v_scale))
    head_dim, *value_dim = (x.shape[-1] if x.ndim else 0 for x in pools[:2] if x is not None)
    shapes = pool_letters(pools, head_dim, *value_dim)
    sizes = dims.bind("copy_blocks", **shapes, **pairs)
    check_pools("copy_blocks", pools, 0, has_own_dim=True)
    check_sharding("copy_blocks", (pools, sources, targets))
    check_num_rows("copy_blocks", pools.k.shape)
    sources, targets = as_int32("copy_blocks", sources=sources, targets=targets)

    args = CopyArgs(pools, sources, targets)
    call = COPY_BLOCKS.bind(
        args, function="copy_blocks", backend=backend, interpret=interpret, array=pools.k
    )
    return call(args) if sizes["N"] else pools


# Define the derivative of copies here, because JAX cannot differentiate the loops and kernels of
# the backends.
_copy_differentiably = jax.custom_jvp(OpCall.run, nondiff_argnums=(0,))


@_copy_differentiably.defjvp
def _copy_jvp(
    call: OpCall, primals: tuple[CopyArgs], tangents: tuple[CopyArgs]
) -> tuple[Pools, Pools]:
    (args,), (args_dot,) = primals, tangents
    pools, sources, targets = args
    P = pools.num_blocks
    is_copy = (sources >= 0) & (sources < P) & (targets >= 0) & (targets < P)
    sources = jnp.where(is_copy, sources, 0)
    # Ignored pairs of blocks get distinct targets past the end, because JAX transposes a scatter
    # only if its indices are unique.
    targets = jnp.where(is_copy, targets, P + jnp.arange(targets.size, dtype=jnp.int32))

    @without_index_checks
    def copy(dot: jax.Array) -> jax.Array:
        return dot.at[:, targets].set(dot[:, sources], mode="drop", unique_indices=True)

    def copy_tangent(dot: jax.Array) -> jax.Array:
        # Pools of integers have no tangent.
        return dot if dot.dtype == jax.dtypes.float0 else copy(dot)

    return _copy_differentiably(call, args), jax.tree.map(copy_tangent, args_dot.pools)


WRITE = Op("write", plain_write, Problem.of_write)
ROPE_WRITE = Op("rope_write", rope_then_write, Problem.of_rope_write)
COPY_BLOCKS = Op("copy_blocks", plain_copy_blocks, Problem.of_copy, _copy_differentiably)


@names_arguments
def write_kv_pages(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
) -> jax.Array:
    """Write keys and values of N tokens to interleaved pages.

    `ragged_paged_attention` reads these pages. Donated pages are updated in place. If a program has
    one slot number for each token (``page * C + offset``), pass ``*jnp.divmod(slots, C)`` as
    `pages` and `offsets`.

    Args:
      kv_pages: ``[P, C, 2 * K, D]``, see `ragged_paged_attention`.
      k: ``[N, K, D]`` floating point, cast to the dtype of the pages.
      v: ``[N, K, D]`` floating point, cast like `k`. None for pages ``[P, C, 1, D]``, which have
        keys only.
      pages: integer ``[N]``, page of each token. A token is dropped if its page is not in 0..P - 1.
      offsets: integer ``[N]``, position of each token in its page. A token is dropped if its offset
        is not in 0..C - 1. Written tokens must have different positions.
      k_scale: number, or JAX array of one element. `k` is divided by it before the cast. Pass the
        same factor to `ragged_paged_attention`. None for 1.
      v_scale: factor of the values, like `k_scale`.

    Returns:
      The new pages. If the elements of pages have 8 bits, keys and values are clipped to the range
      of the dtype, and rounded to integers if it is an integer dtype. The op is differentiable with
      respect to `kv_pages`, `k` and `v`, unless the elements of pages have 8 bits.

    Raises:
      ValueError: shapes or dtypes do not fit together.
      NotImplementedError: a gradient is taken through pages of 8-bit elements.

    Example:
      >>> kv_pages, k = jnp.zeros((4, 8, 2, 16)), jnp.ones((2, 1, 16))
      >>> kv_pages = write_kv_pages(kv_pages, k, 2 * k, jnp.array([3, -1]), jnp.array([7, 0]))
      >>> kv_pages[3, 7, :, 0].tolist(), float(kv_pages.sum())  # page -1 is dropped
      ([1.0, 2.0], 48.0)
    """
    function = "write_kv_pages"
    named = as_arrays(function, kv_pages=kv_pages, k=k, pages=pages, offsets=offsets)
    new = {"k": (named["k"], k_scale)}
    if v is not None:
        new["v"] = (jnp.asarray(v), v_scale)
    check_sharding(function, (named, new))
    kv_pages, k, pages, offsets = named.values()
    pages, offsets = as_int32(function, pages=pages, offsets=offsets)
    sizes = dims.bind(
        function,
        kv_pages=(half_of_pages(function, kv_pages), "PCKD"),
        **{name: (x, "NKD") for name, (x, _) in new.items()},
        pages=(pages, "N"),
        offsets=(offsets, "N"),
    )
    if (v is None) != (kv_pages.shape[2] == 1):
        raise ValueError(
            f"{function}: v must be None if kv_pages hold only keys (shape [P, C, 1, D]), and an "
            f"array otherwise, got {'None' if v is None else 'an array'} for kv_pages of shape "
            f"{list(kv_pages.shape)}."
        )
    P, C, N = sizes["P"], sizes["C"], sizes["N"]
    check_num_rows(function, (1, P, 1, C, 1), num_new=N)
    parts: list[jax.Array] = []
    for name, (x, scale) in new.items():
        check_floating(function, **{name: x})
        if scale is not None:
            wide = wider_dtype(x.dtype, jnp.float32)
            x = x.astype(wide) / as_scalar(function, f"{name}_scale", scale, wide)
        parts.append(_to_page_dtype(function, x, kv_pages.dtype))
    rows = jnp.stack(parts, axis=2).reshape(N, *kv_pages.shape[2:])
    is_kept = (pages >= 0) & (pages < P) & (offsets >= 0) & (offsets < C)
    # Each dropped token gets its own row index past the end, so that the indices of the scatter are
    # unique.
    past = P * C + jnp.arange(N, dtype=jnp.int32)
    index = jnp.where(is_kept, pages * C + offsets, past)
    return set_rows(kv_pages, index, rows)


def _to_page_dtype(function: str, x: jax.Array, dtype: Any) -> jax.Array:
    """Cast keys or values to the dtype of pages, clipped to the range of 8-bit dtypes."""
    if dtype.itemsize > 1:
        return x.astype(dtype)
    return KVDtype.of(dtype).saturate(_without_gradient(function, x))


def _check_rope_write(function: str, args: RopeWriteArgs) -> dict[str, int]:
    """Check the arguments of `paged_rope_write`; return the size of each dimension letter."""
    qkv, pools = args.qkv, args.pools
    if qkv.ndim != 4 or qkv.shape[2] <= 2:
        raise ValueError(
            f"{function}: qkv must have shape [N, K, G + 2, D], got {list(qkv.shape)}."
        )
    N, K, width, D = qkv.shape
    queries = jax.ShapeDtypeStruct((N, K, width - 2, D), qkv.dtype)
    places = {"blocks": (args.blocks, "N"), "offsets": (args.offsets, "N")}
    norms = dict(zip(("q_norm", "k_norm"), ((x, "D") for x in args.norms or ()), strict=False))
    sizes = dims.bind(function, qkv=(queries, "NKGD"), **pool_letters(pools, D), **places, **norms)
    sizes["H"] = K * sizes.pop("G")
    check_pools(function, pools, args.layer)
    if D % 2:
        raise ValueError(f"{function}: D (head dimension) must be even, got {D}.")
    for name, array in {"cos": args.cos, "sin": args.sin}.items():
        if array.shape != (N, D // 2) or array.dtype != jnp.float32:
            raise ValueError(
                f"{function}: {name} must be f32 [N, D / 2] = {[N, D // 2]}, "
                f"got {array.dtype} {list(array.shape)}."
            )
    check_floating(function, qkv=qkv, **{name: x for name, (x, _) in norms.items()})
    check_sharding(function, args)
    check_num_rows(function, pools.k.shape, num_new=N * sizes["K"])
    return sizes


def _without_gradient(function: str, new: jax.Array) -> jax.Array:
    """Return `new`; raise an error if it is differentiated.

    Rounding has no useful derivative. A derivative of zero would hide this.
    """
    return without_derivative(
        f"{function}: the pools must be floating point to differentiate the written keys and "
        "values, got quantised pools. Stop the gradient with jax.lax.stop_gradient.",
        new,
    )


def check_num_rows(function: str, shape: tuple[int, ...], num_new: int = 0) -> None:
    """Check that int32 can index the rows of a pool ``[L, P, K, C, D]``.

    A row is a token of a KV head in a layer. A write of `num_new` rows needs this number of indices
    past the end of the pool, which mark dropped rows.

    Raises:
      ValueError: the pool has too many rows.
    """
    L, P, K, C, _ = shape
    num_rows = L * P * K * C
    if num_rows + num_new > _MAX_ROWS:
        raise ValueError(
            f"{function}: the pool must have at most {_MAX_ROWS - num_new} rows, that is, "
            f"L * P * K * C, got {num_rows}. Use fewer blocks, or shard the KV heads over devices."
        )
