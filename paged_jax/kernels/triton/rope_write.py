"""From the projection to the pools in one launch: norm, rotary embedding and write, through Triton.

A program reads one head of a tile of tokens, in two halves, whose numbers with the same index are
a pair that is rotated. What it does with them depends on the head alone::

    qkv [N, K, G + 2, D]
            of each KV head  0 .. G - 1     G                 G + 1
                             queries        the key           the value
                             norm, rotate   norm, rotate
                             |              |                 |
                             v              v                 v
                  q [N, H, D] for the       rows of the pools, see `paged_jax.kernels.triton.write`
                  attention kernel

In a decode step these are small kernels, bound by what it takes to launch one: left to XLA they
are four in each layer, and the projection is read by three of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import Interpret, Options, Pools, RopeWriteArgs
from paged_jax.kernels.dispatch import general_backend
from paged_jax.kernels.pool_format import query_dtype
from paged_jax.kernels.triton.pallas import plgpu
from paged_jax.kernels.triton.write import (
    as_rows,
    call_in_place,
    find_rows,
    from_words,
    store_rows,
)

# Numbers of the projection in a program: 16 tokens of 128, or fewer where there are fewer tokens. A
# decode step of 64 sequences with 32 + 2 * 8 heads is then 192 programs.
_TILE = 2048
_WARPS = 4


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def rope_write(
    args: RopeWriteArgs, options: Options, interpret: Interpret = False
) -> tuple[jax.Array, Pools]:
    """Norm and rotate, write keys and values, return queries; in one launch."""
    return _rope_write(options, interpret, args)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rope_write(
    options: Options, interpret: Interpret, args: RopeWriteArgs
) -> tuple[jax.Array, Pools]:
    pools, (N, K, width, D) = args.pools, args.qkv.shape
    num_heads, H, half_lanes = K * width, K * (width - 2), pl.next_power_of_2(D // 2)
    rows = max(min(_TILE // (2 * half_lanes), pl.next_power_of_2(N)), 1)
    kernel = functools.partial(
        _kernel,
        pool_shape=pools.k.shape,
        pool_dtype=pools.k.dtype,
        group_size=width - 2,
        rows=rows,
        half_lanes=half_lanes,
        norm_eps=options.norm_eps,
        has_norms=args.norms is not None,
    )
    layer, qkv = jnp.reshape(args.layer, 1), args.qkv.reshape(N * num_heads, D)
    q, written = call_in_place(
        kernel,
        "paged_rope_write",
        jax.tree.map(as_rows, pools),
        (layer, args.blocks, args.offsets, qkv, args.cos, args.sin, *(args.norms or ())),
        grid=(num_heads * pl.cdiv(N, rows),),
        num_warps=_WARPS,
        interpret=interpret,
        out=jax.ShapeDtypeStruct((N * H, D), query_dtype(pools.k.dtype)),
    )
    return q.reshape(N, H, D), jax.tree.map(from_words, written, pools)


@_rope_write.defjvp
def _rope_write_jvp(options, interpret, primals, tangents):
    plain = functools.partial(general_backend().rope_write, options=options)
    _, out_dot = jax.jvp(plain, primals, tangents)
    return _rope_write(options, interpret, *primals), out_dot


def _kernel(layer_ref, blocks_ref, offsets_ref, qkv_ref, cos_ref, sin_ref, *refs, pool_shape,
            pool_dtype, group_size, rows, half_lanes, norm_eps, has_norms):  # fmt: skip
    K, G = pool_shape[2], group_size
    (N, half), num_heads, H = cos_ref.shape, K * (G + 2), K * G
    norm_refs, refs = (refs[:2], refs[2:]) if has_norms else ((None, None), refs)
    num_pools = len(refs) // 2
    q_ref, k_pool_ref, v_pool_ref, *scale_refs = refs[num_pools:]  # the outputs
    k_scale_ref, v_scale_ref = scale_refs or (None, None)

    # Programs that run beside each other read heads that lie beside each other.
    head = lax.rem(pl.program_id(0), jnp.int32(num_heads))
    kv_head, place = lax.div(head, jnp.int32(G + 2)), lax.rem(head, jnp.int32(G + 2))
    token = lax.div(pl.program_id(0), jnp.int32(num_heads)) * rows
    token += jnp.arange(rows, dtype=jnp.int32)
    is_token = token < N
    lane = jnp.arange(half_lanes, dtype=jnp.int32)[None]
    mask = is_token[:, None] & (lane < half)

    def load(ref: Any, row: jax.Array, start: int = 0) -> jax.Array:
        numbers = ref.at[row[:, None], start + lane]
        return plgpu.load(numbers, mask=mask, other=0.0).astype(jnp.float32)

    halves = [load(qkv_ref, token * num_heads + head, start) for start in (0, half)]

    def rotated(norm_ref: Any) -> list[jax.Array]:
        first, second = halves
        if norm_ref is not None:
            first, second = _normed(first, second, norm_ref, lane, half, norm_eps)
        cos, sin = load(cos_ref, token), load(sin_ref, token)
        return [first * cos - second * sin, second * cos + first * sin]

    def write(pool_ref: Any, scale_ref: Any, parts: list[jax.Array]) -> None:
        row, is_kept = find_rows(
            layer_ref, blocks_ref, offsets_ref, token, kv_head, is_token, pool_shape
        )
        store_rows(pool_ref, scale_ref, row, is_kept, parts, 2 * half, pool_dtype)

    @pl.when(place < G)
    def _():
        # As for rows of the pool, those that are not written lie past the end.
        row = jnp.where(is_token, token * H + kv_head * G + place, N * H)
        for start, part in zip((0, half), rotated(norm_refs[0]), strict=True):
            numbers = q_ref.at[row[:, None], start + lane]
            plgpu.store(numbers, part.astype(q_ref.dtype), mask=mask)

    @pl.when(place == G)
    def _():
        write(k_pool_ref, k_scale_ref, rotated(norm_refs[1]))

    @pl.when(place == G + 1)
    def _():
        write(v_pool_ref, v_scale_ref, halves)


def _normed(
    first: jax.Array, second: jax.Array, norm_ref: Any, lane: jax.Array, half: int, eps: float
) -> tuple[jax.Array, jax.Array]:
    """As `paged_jax.kernels.rope.rms_norm` of heads in two halves."""
    total = jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)
    # Multiplied by the reciprocal, as in XLA: Triton's division is approximate.
    factor = lax.rsqrt(total * np.float32(1 / (2 * half)) + eps)[:, None]
    w_first, w_second = (
        plgpu.load(norm_ref.at[start + lane], mask=lane < half, other=0.0).astype(jnp.float32)
        for start in (0, half)
    )
    return first * factor * w_first, second * factor * w_second
