"""Add a backend of attention that the library does not have: a loop over the blocks.

    python examples/new_backend.py "It is a truth universally acknowledged"

Each iteration reads a block of each sequence. Online softmax keeps the maximum of the scores, and
sums relative to it, so that all scores are never in memory. Calls that the backend refuses raise an
error; ops that it does not have, such as writes, run on the backends of the library.
"""

import argparse

import jax
import jax.numpy as jnp

from paged_jax import LLM, SamplingParams
from paged_jax.kernels.backend import Backend, Kernel
from paged_jax.kernels.op import add_backend
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem


def refusal(problem: Problem) -> str | None:
    """Return why the backend does not support a call, or None if it does."""
    if problem.shares_values or problem.pool_dtype.itemsize == 1:
        return "it reads keys and values from two pools that are not quantised"
    if problem.has_sinks or problem.options != Options(problem.options.scale):
        return "it has no windows, soft caps or sinks"
    return None


def decode(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Attend with one query per sequence: a prompt of single tokens."""
    out, lse = attend_blocks(args.as_prefill(), options)
    return out[:, 0], lse[:, 0]


def attend_blocks(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Return outputs ``[B, T, H, D]`` and their log-sum-exp ``[B, T, H]``."""
    q, pools, block_tables, context_lens, query_lens, _, layer = args
    assert isinstance(pools, Pools) and pools.v is not None and query_lens is not None
    B, T, H, D = q.shape
    K, C = pools.num_kv_heads, pools.block_size
    keys, values = pools.k, pools.v
    q_BTKGD = options.scale * q.astype(jnp.float32).reshape(B, T, K, H // K, D)
    # Number of tokens that each query sees; 0 for padding.
    steps = jnp.arange(T)[None]
    num_seen_BT = (context_lens - query_lens)[:, None] + steps + 1
    num_seen_BT = jnp.where(steps < query_lens[:, None], num_seen_BT, 0)

    def add_block(state: tuple, column: jax.Array) -> tuple[tuple, None]:
        peak, total, out = state
        blocks = jnp.clip(block_tables[:, column], 0, pools.num_blocks - 1)
        places = (column * C + jnp.arange(C))[None]
        # Places after the end of a sequence may hold NaN.
        is_token = (places < context_lens[:, None])[:, None, :, None]
        k, v = (
            jnp.where(is_token, pool[layer][blocks].astype(jnp.float32), 0)
            for pool in (keys, values)
        )
        scores = jnp.einsum("btkgd,bkcd->btkgc", q_BTKGD, k, precision="highest")
        is_seen_BTC = places[None] < num_seen_BT[..., None]
        scores = jnp.where(is_seen_BTC[:, :, None, None], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(-1))
        shift = jnp.where(jnp.isfinite(new_peak), new_peak, 0)
        weights, rescale = jnp.exp(scores - shift[..., None]), jnp.exp(peak - shift)
        added = jnp.einsum("btkgc,bkcd->btkgd", weights, v, precision="highest")
        state = total * rescale + weights.sum(-1), out * rescale[..., None] + added
        return (new_peak, *state), None

    zeros = jnp.zeros_like(q_BTKGD)
    state = zeros[..., 0] - jnp.inf, zeros[..., 0], zeros
    (peak, total, out), _ = jax.lax.scan(add_block, state, jnp.arange(block_tables.shape[1]))
    out = out / jnp.where(total == 0, 1, total)[..., None]
    return out.reshape(q.shape).astype(q.dtype), (peak + jnp.log(total)).reshape(B, T, H)


LOOP = Backend({"decode": Kernel(decode, refusal), "prefill": Kernel(attend_blocks, refusal)})


def main() -> None:
    """Generate text with the backend."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt")
    args = parser.parse_args()
    add_backend("loop", LOOP)
    llm = LLM(backend="loop", max_num_seqs=1)
    (output,) = llm.generate([args.prompt], SamplingParams(temperature=0, max_tokens=32))
    print(args.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
