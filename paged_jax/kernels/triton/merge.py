"""The partial results of the parts of a sequence made one, in the second launch of decode."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.triton import tiles
from paged_jax.kernels.triton.pallas import pallas_call, plgpu

# Parts that a program reads at once: those of most sequences of a large batch, and many of one that
# is alone or much longer than the others.
_FEW, _MANY = 4, 32

# Finite, so that what comes before the first part gives 0 times 0, and not NaN.
_LOWEST = -1e30


def merge(
    out: jax.Array,
    lse: jax.Array,
    partial_out: jax.Array,
    partial_lse: jax.Array,
    places: jax.Array,
    *,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    """Merge the parts of each sequence that has several; the results of the others stay.

    Args:
      out, lse: ``[B, H, D]`` and f32 ``[B, H]``, which are changed in place.
      partial_out, partial_lse: f32 ``[N, H, D]`` and ``[N, H]``.
      places: i32 ``[B, 2]``, the first of the N that is a part of the sequence, and how many are.
      interpret: how to interpret the kernel, if at all.
    """
    B, H, D = out.shape
    # About 64 numbers of the tile in the registers of each of a warp's 32 threads.
    num_warps = max(_MANY * tiles.num_lanes(D) // (32 * 64), 1)
    return pallas_call(
        _merge_kernel,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)),
        grid=(H, B),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )(out, lse, partial_out, partial_lse, places)


def _merge_kernel(
    _before_out_ref: Any,
    _before_lse_ref: Any,
    partial_out_ref: Any,
    partial_lse_ref: Any,
    places_ref: Any,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    head, sequence = pl.program_id(0), pl.program_id(1)
    start, count = places_ref[sequence, 0], places_ref[sequence, 1]

    def merge_by(num_parts: int) -> None:
        refs = (partial_out_ref, partial_lse_ref)
        out, lse = _merge_parts(*refs, head, start, count, num_parts)
        lanes = jnp.arange(out.size, dtype=jnp.int32)
        plgpu.store(
            out_ref.at[sequence, head, lanes],
            out.astype(out_ref.dtype),
            mask=lanes < out_ref.shape[2],
        )
        lse_ref[sequence, head] = lse

    pl.when((count > 1) & (count <= _FEW))(lambda: merge_by(_FEW))
    pl.when(count > _FEW)(lambda: merge_by(_MANY))


def _merge_parts(
    partial_out_ref: Any,
    partial_lse_ref: Any,
    head: jax.Array,
    start: jax.Array,
    count: jax.Array,
    num_parts: int,
) -> tuple[jax.Array, jax.Array]:
    """Read `num_parts` at a time; returns f32 ``[lanes]`` and a scalar."""
    D = partial_out_ref.shape[2]
    lanes = jnp.arange(tiles.num_lanes(D), dtype=jnp.int32)
    turns = jnp.arange(num_parts, dtype=jnp.int32)

    def fold(turn, carry):
        peak, total, out = carry
        index = turn * num_parts + turns
        lse = plgpu.load(
            partial_lse_ref.at[start + index, head], mask=index < count, other=-jnp.inf
        )
        partial = plgpu.load(
            partial_out_ref.at[(start + index)[:, None], head, lanes[None]],
            mask=(index < count)[:, None] & (lanes < D)[None],
            other=0.0,
        )
        new_peak = jnp.maximum(peak, jnp.max(lse))
        decay, weights = jnp.exp(peak - new_peak), jnp.exp(lse - new_peak)
        out = out * decay + jnp.sum(partial * weights[:, None], axis=0)
        return new_peak, total * decay + jnp.sum(weights), out

    nothing = (jnp.float32(_LOWEST), jnp.float32(0), jnp.zeros(lanes.shape, jnp.float32))
    num_turns = tiles.divide(count + num_parts - 1, num_parts)
    peak, total, out = lax.fori_loop(0, num_turns, fold, nothing)
    is_empty = total == 0
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
    return out / jnp.where(is_empty, 1.0, total), lse
