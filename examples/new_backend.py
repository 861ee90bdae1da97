"""Add a backend of attention that the library does not have: a loop over the blocks.

    python examples/new_backend.py "It is a truth universally acknowledged"

Each iteration reads a block of each sequence. The loop keeps the maximum of the scores, the sum of
their exponentials relative to it, and the weighted sum of values (online softmax), so that all
scores of a query are never in memory. Decode and prefill share it. Writes, and calls that it
refuses, use the backends of the library.
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from paged_jax import LLM, SamplingParams
from paged_jax.kernels.backend import (
    AttentionArgs,
    Options,
    Pools,
    Problem,
    RaggedArgs,
    RaggedOptions,
)
from paged_jax.kernels.dispatch import add_backend


@dataclass(frozen=True)
class LoopBackend:
    """Backend that computes attention with a loop over the columns of the block tables."""

    platform: ClassVar[str | None] = None

    def refusal(self, problem: Problem) -> str | None:
        """Return why the backend does not support a call, or None if it does."""
        if problem.op not in ("decode", "prefill"):
            return "it has no loop over ragged batches"
        if not jnp.issubdtype(problem.pool_dtype, jnp.inexact) or problem.pool_dtype.itemsize == 1:
            return "it does not read quantised pools"
        return "it reads keys and values from two pools" if problem.shares_values else None

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Return the outputs and their log-sum-exp. A decode is a prefill of single tokens."""
        if args.query_lens is not None:
            return attend_blocks(args, options)
        out, lse = attend_blocks(args.as_prefill(), options)
        return out[:, 0], lse[:, 0]

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Every ragged call is refused, so this is never called."""
        raise NotImplementedError


def attend_blocks(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Return outputs ``[B, T, H, D]`` and their log-sum-exp ``[B, T, H]``."""
    q, pools, block_tables, context_lens, query_lens, sinks, layer = args
    assert isinstance(pools, Pools) and pools.v is not None and query_lens is not None
    B, T, H, D = q.shape
    K, C, G = pools.num_kv_heads, pools.block_size, H // pools.num_kv_heads
    keys, values = pools.k, pools.v
    q_BTKGD = options.scale * q.astype(jnp.float32).reshape(B, T, K, G, D)
    positions_BT = (context_lens - query_lens)[:, None] + jnp.arange(T)[None]
    is_query_BT = jnp.arange(T)[None] < query_lens[:, None]

    def add_block(state: tuple, column: jax.Array) -> tuple[tuple, None]:
        peak, total, out = state
        blocks_B = jnp.clip(block_tables[:, column], 0, pools.num_blocks - 1)
        keys_C = column * C + jnp.arange(C)
        seen_BTC = is_query_BT[..., None] & (keys_C[None, None] <= positions_BT[..., None])
        if options.sliding_window is not None:
            seen_BTC &= keys_C[None, None] > positions_BT[..., None] - options.sliding_window
        # Places that no query sees may hold NaN.
        is_token = seen_BTC.any(axis=1)[:, None, :, None]
        k_BKCD, v_BKCD = (
            jnp.where(is_token, pool[layer][blocks_B].astype(jnp.float32), 0)
            for pool in (keys, values)
        )
        scores = jnp.einsum("btkgd,bkcd->btkgc", q_BTKGD, k_BKCD, precision="highest")
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(seen_BTC[:, :, None, None], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(-1))
        shift = jnp.where(jnp.isfinite(new_peak), new_peak, 0)
        weights, rescale = jnp.exp(scores - shift[..., None]), jnp.exp(peak - shift)
        added = jnp.einsum("btkgc,bkcd->btkgd", weights, v_BKCD, precision="highest")
        state = total * rescale + weights.sum(-1), out * rescale[..., None] + added
        return (new_peak, *state), None

    peak = jnp.full((B, T, K, G), -jnp.inf)
    if sinks is not None:  # a score without a value
        sinks_TKG = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(K, G), (B, T, K, G))
        peak = jnp.where(is_query_BT[..., None, None], sinks_TKG, -jnp.inf)
    total = jnp.isfinite(peak).astype(jnp.float32)
    state = peak, total, jnp.zeros((B, T, K, G, D))
    (peak, total, out), _ = jax.lax.scan(add_block, state, jnp.arange(block_tables.shape[1]))
    out = options.value_scale * out / jnp.where(total == 0, 1, total)[..., None]
    lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(total))
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(B, T, H)


def main() -> None:
    """Generate text with the backend."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt")
    args = parser.parse_args()
    add_backend("loop", LoopBackend())
    llm = LLM(backend="loop", max_num_seqs=1)
    (output,) = llm.generate([args.prompt], SamplingParams(temperature=0, max_tokens=32))
    print(args.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
