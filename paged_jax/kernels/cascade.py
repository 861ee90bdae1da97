# pyright: strict, reportUnknownMemberType=false
"""Cascade attention: blocks that all sequences of a batch share are read once.

Requests with the same system prompt, parallel samples and beams share their leading blocks. The
queries of all sequences attend to these blocks together, as the query heads of a single sequence,
which is a large matmul. Each sequence then attends to its other blocks, and the two results are
merged (Juravsky et al., 2024, "Hydragen"; Ye et al., 2024, "Cascade Inference").
`num_shared_blocks` decides how many blocks are worth reading once.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.arguments import names_arguments
from paged_jax.dims import bind
from paged_jax.kernels.attention import attend
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.checks import (
    as_arrays,
    as_int32,
    as_pools,
    check_sharding,
    default_layer,
    pool_letters,
)
from paged_jax.kernels.kv_dtypes import wider_dtype
from paged_jax.kernels.op_args import AttentionArgs
from paged_jax.kernels.pools import Pools

# Minimum number of token reads that sharing must save. If it saved fewer, it would cost more time
# than it saves, because the shared blocks are read in a second pass, which takes about 0.06 ms
# (measured on 2 CPU cores).
_MIN_SAVED_TOKENS = 512


def is_sharing_possible(batch: int, max_blocks: int, block_size: int) -> bool:
    """Return whether `cascade_attention` can save time for block tables of this size.

    Sharing never saves time if there are few sequences or few blocks.

    Args:
      batch: number of sequences (B).
      max_blocks: number of blocks in a row of the block table (M).
      block_size: number of tokens in a block (C).
    """
    return (batch - 1) * max_blocks * block_size >= _MIN_SAVED_TOKENS


def num_shared_blocks(
    block_tables: jax.Array, context_lens: jax.Array, block_size: int
) -> jax.Array:
    """Count the leading full blocks that all sequences share.

    Args:
      block_tables: integer ``[B, M]``, as for `paged_attention`.
      context_lens: integer ``[B]``; empty sequences are ignored.
      block_size: tokens in a block (C).

    Returns:
      The number of blocks, i32 ``[]``. It is 0 if `cascade_attention` would cost more time than it
      saves, because too few blocks are shared.

    Example:
      >>> tables, lens = jnp.array([[4, 2, 7], [4, 2, 1]]), jnp.array([1000, 1040])
      >>> int(num_shared_blocks(tables, lens, 512))  # 1000 tokens fill block 4, but not block 2
      1
    """
    M = block_tables.shape[1]
    is_used = context_lens > 0
    first = block_tables[jnp.argmax(is_used)][None]
    is_same = jnp.all((block_tables == first) | ~is_used[:, None], axis=0)
    num_full = jnp.min(jnp.where(is_used, context_lens // block_size, M))
    is_shared = is_same & (jnp.arange(M, dtype=jnp.int32) < num_full)
    count = jnp.sum(jnp.cumprod(is_shared.astype(jnp.int32)), dtype=jnp.int32)
    num_saved = (jnp.sum(is_used, dtype=jnp.int32) - 1) * count * block_size
    return jnp.where(num_saved >= _MIN_SAVED_TOKENS, count, 0)


@names_arguments
def cascade_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    block_tables: jax.Array,
    context_lens: jax.Array,
    num_shared: jax.Array,
    *,
    layer: int | jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    backend: str | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Compute `paged_attention`, but read the first `num_shared` blocks once for all sequences.

    The result equals `paged_attention` up to rounding. The last bits of the output of a sequence
    may depend on whether the other sequences share its blocks. It has the arguments of
    `paged_attention`, except:

    - `block_tables`: integer ``[B, M]``. The first `num_shared` columns are full blocks, and are
      the same for all sequences that have tokens.
    - `num_shared`: i32 ``[]``, at most the result of `num_shared_blocks`; may be traced.
    - No `sliding_window`, because windows start at a different token in each sequence.

    Returns:
      ``[B, H, U]`` in the dtype of `q`; 0 for empty sequences.

    Raises:
      ValueError: see `paged_attention`.
      NotImplementedError: see `paged_attention`.

    Example:
      >>> k_pool = v_pool = jnp.ones((1, 4, 2, 8, 16))       # 4 blocks of 8 tokens, 2 KV heads
      >>> tables = jnp.array([[2, 0], [2, 3]])               # block 2 is shared
      >>> out = cascade_attention(jnp.ones((2, 4, 16)), k_pool, v_pool, tables,
      ...                         jnp.array([11, 9]), jnp.int32(1))
      >>> out.shape
      (2, 4, 16)
    """
    letters = {"q": "BHD", "block_tables": "BM", "context_lens": "B"}
    named = as_arrays(
        "cascade_attention",
        q=q, block_tables=block_tables, context_lens=context_lens, k_pool=k_pool,
    )  # fmt: skip
    q = named["q"]
    pools = as_pools(Pools(named["k_pool"], v_pool, k_scale, v_scale))
    shapes = pool_letters(pools, q.shape[-1] if q.ndim else 0, value_dim)
    sizes = bind("cascade_attention", **{x: (named[x], letters[x]) for x in letters}, **shapes)
    check_sharding("cascade_attention", (named, pools))
    block_tables, context_lens = as_int32(
        "cascade_attention",
        block_tables=named["block_tables"], context_lens=named["context_lens"],
    )  # fmt: skip
    layer = default_layer("cascade_attention", pools.k, layer)
    B, K, C, M = (sizes[letter] for letter in "BKCM")
    context_lens = jnp.clip(context_lens, 0, M * C)

    def run(q: jax.Array, tables: jax.Array, lens: jax.Array, sinks: Any = None) -> Any:
        args = AttentionArgs(q, pools, tables, lens, None, sinks, layer)
        return attend(
            "cascade_attention", args, scale, None, soft_cap,
            value_dim=value_dim, backend=backend, interpret=interpret,
        )  # fmt: skip

    is_used = context_lens > 0
    num_shared = jnp.asarray(num_shared, jnp.int32)
    # Clip here, because `checkify.index_checks` would report the columns that `jnp.take` clips.
    columns = jnp.clip(num_shared + jnp.arange(M, dtype=jnp.int32), 0, M - 1)
    suffix_tables = jnp.take(block_tables, columns, axis=1, mode="clip")
    num_own_tokens = jnp.where(is_used, context_lens - num_shared * C, 0)
    own_out, own_lse = run(q, suffix_tables, num_own_tokens, sinks)

    def with_shared(own_out: jax.Array, own_lse: jax.Array) -> jax.Array:
        table, length = block_tables[jnp.argmax(is_used)][None], (num_shared * C)[None]
        out, lse = (_as_batch(x, B, K) for x in run(_as_one_sequence(q, K), table, length))
        out = jnp.where(is_used[:, None, None], out, 0)
        lse = jnp.where(is_used[:, None], lse, -jnp.inf)
        return merge_attention(out, lse, own_out, own_lse)[0]

    # A batch that shares nothing skips the second pass.
    return cast(jax.Array, lax.cond(num_shared > 0, with_shared, _first, own_out, own_lse))


def _as_one_sequence(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Reshape queries ``[B, H, D]`` to a single sequence with more heads, ``[1, B * H, D]``.

    All queries that read a KV head become one group of query heads.
    """
    (B, H, D), K = q.shape, num_kv_heads
    q_1BKGD = q.reshape(1, B, K, H // K, D)
    return q_1BKGD.transpose(0, 2, 1, 3, 4).reshape(1, B * H, D)


def _as_batch(x: jax.Array, batch: int, num_kv_heads: int) -> jax.Array:
    """Undo `_as_one_sequence` for an output ``[1, B * H, ...]``; return ``[B, H, ...]``."""
    feature_shape = x.shape[2:]
    x = x.reshape(num_kv_heads, batch, -1, *feature_shape)
    return jnp.swapaxes(x, 0, 1).reshape(batch, -1, *feature_shape)


def _first(out: jax.Array, lse: jax.Array) -> jax.Array:
    return out


@names_arguments
def merge_attention(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge the attention of the same queries over two disjoint sets of keys.

    The result is the attention over the union of both sets (Dao et al., 2023, "Flash-Decoding"). If
    the attention has `sinks`, pass them to only one of the two attention calls. The op is
    differentiable.

    Args:
      out_a: ``[..., D]``, output over the first set.
      lse_a: f32 ``[...]``, log-sum-exp over the first set; -inf if the set has no keys.
      out_b: ``[..., D]``, output over the second set.
      lse_b: f32 ``[...]``, log-sum-exp over the second set.

    Returns:
      ``(out, lse)``: ``[..., D]`` in the dtype of `out_a`, and f32 ``[...]``.

    Raises:
      ValueError: the shapes do not match.

    Example:
      >>> ones, zeros, lse = jnp.ones((1, 4)), jnp.zeros((1, 4)), jnp.zeros(1)
      >>> out, lse = merge_attention(ones, lse, zeros, lse)
      >>> out.tolist(), round(float(lse[0]), 4)
      ([[0.5, 0.5, 0.5, 0.5]], 0.6931)
    """
    out_a, lse_a, out_b, lse_b = (jnp.asarray(x) for x in (out_a, lse_a, out_b, lse_b))
    if not (out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]):
        raise ValueError(
            "merge_attention: out_a, lse_a, out_b and lse_b must have shapes [..., D], [...], "
            f"[..., D] and [...], got {list(out_a.shape)}, {list(lse_a.shape)}, "
            f"{list(out_b.shape)} and {list(lse_b.shape)}."
        )
    dtype = wider_dtype(out_a.dtype, jnp.float32)
    peak = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    peak = jnp.where(jnp.isfinite(peak), peak, 0)
    weight_a, weight_b = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
    total = weight_a + weight_b
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    out = (weight_a / total)[..., None] * out_a.astype(dtype)
    out += (weight_b / total)[..., None] * out_b.astype(dtype)
    return out.astype(out_a.dtype), jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
