"""The two public attention ops, for decode and for chunks of prompt, whatever the backend.

Both mean the same thing, defined by `paged_jax.kernels.reference`::

    out[b, h] = softmax(scale * q[b, h] . k[0:length[b]]) v[0:length[b]]

with K and V of sequence ``b`` read through ``block_tables[b]``: token ``t`` lies in block
``block_tables[b, t // C]`` of the pool, at offset ``t % C``. Query heads ``h`` in
``[g * G, (g + 1) * G)`` share the KV head ``g``. Bytes of the pool that belong to no token of a
sequence, and table entries past its length, never reach its output, whatever they hold.
"""

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax import dims
from paged_jax.kernels import reference, xla

BACKENDS: Mapping[str, ModuleType] = {"xla": xla, "reference": reference}


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    layer: int | jax.Array = 0,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Attend with one query token per sequence over its blocks (decode).

    Args:
      q: ``[B, H, D]`` floating point, the query of the last token of each sequence.
      k_pool: ``[L, P, K, C, D]`` floating point, keys; the last token's own is already written.
      v_pool: the values, as the keys.
      block_tables: i32 ``[B, M]``, block ids of each sequence in order. Entries past the length
        may hold anything.
      context_lens: i32 ``[B]``, tokens in each sequence, the last included. Where it is 0 the
        output is 0.
      layer: which layer of the pools to read; a Python int or a traced scalar.
      scale: of the scores, ``D ** -0.5`` if None.
      sliding_window: attend to this many last tokens only, the query's own included.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)`` (Gemma 2, section 2).
      backend: ``"xla"``, ``"reference"``, or None for the best one of the platform.

    Returns:
      ``[B, H, D]`` in the dtype of ``q``. Softmax and accumulation are in float32.

    Raises:
      ValueError: shapes or dtypes do not fit together, or the backend's name is unknown.

    Cost: proportional to the tokens in the batch, whatever the width of the table.

    Example:
      >>> k_pool = v_pool = jnp.ones((1, 4, 2, 8, 16))       # 4 blocks of 8 tokens, 2 KV heads
      >>> out = paged_attention(jnp.ones((1, 4, 16)), k_pool, v_pool,
      ...                       jnp.array([[2, 0]]), jnp.array([11]))
      >>> out.shape
      (1, 4, 16)
    """
    q, k_pool, v_pool, block_tables, context_lens = map(
        jnp.asarray, (q, k_pool, v_pool, block_tables, context_lens)
    )
    sizes = dims.bind(
        "paged_attention",
        q=(q, "BHD"),
        k_pool=(k_pool, "LPKCD"),
        v_pool=(v_pool, "LPKCD"),
        block_tables=(block_tables, "BM"),
        context_lens=(context_lens, "B"),
    )
    _check(
        "paged_attention", sizes, q, k_pool, v_pool, layer, sliding_window, soft_cap,
        block_tables=block_tables, context_lens=context_lens,
    )  # fmt: skip
    block_tables, context_lens = _as_int32(block_tables, context_lens)
    return _backend("paged_attention", backend).decode(
        q,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        layer=layer,
        scale=_scale("paged_attention", scale, sizes["D"]),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def paged_prefill_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    layer: int | jax.Array = 0,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Attend with a chunk of prompt tokens per sequence, causally, over context and chunk.

    The chunk is the end of its sequence: query ``i`` of sequence ``b`` is token
    ``context_lens[b] - query_lens[b] + i`` and sees the tokens up to itself. Chunks of different
    lengths share a batch, padded to ``T`` rows; the padding is not computed.

    Args:
      q: ``[B, T, H, D]`` floating point.
      k_pool: ``[L, P, K, C, D]``, keys; those of the chunk are already written.
      v_pool: the values, as the keys.
      block_tables: i32 ``[B, M]``.
      context_lens: i32 ``[B]``, tokens in each sequence, the chunk included.
      query_lens: i32 ``[B]``, tokens in each chunk, 0 to T and at most ``context_lens``.
      layer, scale, sliding_window, soft_cap, backend: as for `paged_attention`.

    Returns:
      ``[B, T, H, D]`` in the dtype of ``q``; rows past ``query_lens`` are 0.

    Raises:
      ValueError: as for `paged_attention`.

    Example:
      >>> k_pool = v_pool = jnp.ones((1, 4, 2, 8, 16))
      >>> out = paged_prefill_attention(jnp.ones((1, 3, 4, 16)), k_pool, v_pool,
      ...                               jnp.array([[2, 0]]), jnp.array([11]), jnp.array([3]))
      >>> out.shape
      (1, 3, 4, 16)
    """
    function = "paged_prefill_attention"
    q, k_pool, v_pool, block_tables, context_lens, query_lens = map(
        jnp.asarray, (q, k_pool, v_pool, block_tables, context_lens, query_lens)
    )
    sizes = dims.bind(
        function,
        q=(q, "BTHD"),
        k_pool=(k_pool, "LPKCD"),
        v_pool=(v_pool, "LPKCD"),
        block_tables=(block_tables, "BM"),
        context_lens=(context_lens, "B"),
        query_lens=(query_lens, "B"),
    )
    _check(
        function, sizes, q, k_pool, v_pool, layer, sliding_window, soft_cap,
        block_tables=block_tables, context_lens=context_lens, query_lens=query_lens,
    )  # fmt: skip
    block_tables, context_lens, query_lens = _as_int32(block_tables, context_lens, query_lens)
    return _backend(function, backend).prefill(
        q,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        query_lens,
        layer=layer,
        scale=_scale(function, scale, sizes["D"]),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def _check(
    function: str,
    sizes: Mapping[str, int],
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: Any,
    sliding_window: int | None,
    soft_cap: float | None,
    **integers: jax.Array,
) -> None:
    if sizes["H"] % sizes["K"]:
        raise ValueError(
            f"{function}: q must have a multiple of the pool's {sizes['K']} KV heads, "
            f"got {sizes['H']} heads."
        )
    for name, array in {"q": q, "k_pool": k_pool, "v_pool": v_pool}.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{function}: {name} must be floating point, got {array.dtype}.")
    if k_pool.dtype != v_pool.dtype:
        raise ValueError(
            f"{function}: v_pool must have the dtype of k_pool, {k_pool.dtype}, got {v_pool.dtype}."
        )
    for name, array in integers.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{function}: {name} must be an integer array, got {array.dtype}.")
    if isinstance(layer, int) and not 0 <= layer < sizes["L"]:
        raise ValueError(f"{function}: layer must be in 0..{sizes['L'] - 1}, got {layer}.")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"{function}: sliding_window must be at least 1 or None, got {sliding_window}."
        )
    if soft_cap is not None and not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"{function}: soft_cap must be positive or None, got {soft_cap}.")


def _as_int32(*integers: jax.Array) -> tuple[jax.Array, ...]:
    # Row numbers of the pool are made from them, which a narrower type could not hold.
    return tuple(array.astype(jnp.int32) for array in integers)


def _scale(function: str, scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if not math.isfinite(scale):
        raise ValueError(f"{function}: scale must be finite, got {scale}.")
    return scale


def _backend(function: str, name: str | None) -> ModuleType:
    if name is None:
        # One backend serves every platform so far.
        return xla
    if name not in BACKENDS:
        raise ValueError(
            f"{function}: backend must be None or one of {', '.join(sorted(map(repr, BACKENDS)))}, "
            f"got {name!r}."
        )
    return BACKENDS[name]
