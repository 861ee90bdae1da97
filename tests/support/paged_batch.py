"""Sequences of random keys and values in a poisoned pool, and the expected attention.

Everything except the op is NumPy, which compiles nothing. The op is compiled once for all batches
with the same shapes and options.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels import Pools, paged_attention, paged_prefill_attention
from paged_jax.kernels.kv_dtypes import KVDtype
from tests.support import oracles

OUT_OF_RANGE = 10**6
LAYER = 1

# Backends of attention with their arguments on this machine: kernels for GPUs and TPUs run on them
# if there are any, otherwise in Pallas' interpreter.
BACKENDS: dict[str, dict[str, Any]] = {
    "cpu": {"backend": "cpu"},
    "reference": {"backend": "reference"},
    "xla": {"backend": "xla"},
    "triton": {"backend": "triton", "interpret": jax.default_backend() != "gpu"},
    "mosaic_tpu": {"backend": "mosaic_tpu", "interpret": jax.default_backend() != "tpu"},
}


def lanes_for(backend: dict[str, Any], D: int) -> int:
    """Return the last dimension of the pools; TPU kernels pad it to whole registers."""
    return -(-D // 128) * 128 if backend["backend"] == "mosaic_tpu" else D


@dataclasses.dataclass
class PagedBatch:
    """Sequences of given lengths in a pool of two layers; only `LAYER` contains them.

    Tables are shuffled, entries after the end of a sequence are out of range, and every value of
    the pool outside the tokens is NaN, or the largest integer with a scale of NaN.
    """

    k: list[np.ndarray]  # each [length, K, D], the values after rounding to the dtype of the pool
    v: list[np.ndarray]
    pools: Pools
    block_tables: np.ndarray
    lengths: np.ndarray
    value_dim: int | None = None

    @classmethod
    def random(
        cls,
        lengths,
        *,
        K: int = 2,
        C: int = 8,
        D: int = 16,
        extra_width: int = 3,
        dtype: Any = np.float32,
        lanes: int | None = None,
        value_dim: int | None = None,
        seed: int = 0,
    ) -> "PagedBatch":
        """Lay out random sequences. `lanes` pads the last dimension of the pools beyond D.

        With `value_dim` there is no pool of values: they are the first elements of the keys.
        """
        rng = np.random.default_rng(seed)
        lengths = np.asarray(lengths, np.int32)
        counts = -(-lengths // C)
        P = int(counts.sum()) + 5
        M = max(int(counts.max()), 1) + extra_width
        tables = np.full((len(lengths), M), OUT_OF_RANGE, np.int32)
        # No sequence has the first or last block, because clipped entries would point there.
        free = 1 + rng.permutation(P - 2)
        for b, first in enumerate(np.cumsum(counts) - counts):
            tables[b, : counts[b]] = free[first : first + counts[b]]

        pools, values = [], []
        for _ in range(2 if value_dim is None else 1):
            tokens = [rng.normal(size=(n, K, D)).astype(np.float32) for n in lengths]
            pool, scale = _poisoned((2, P, K, C, lanes or D), dtype)
            for b, token in enumerate(tokens):
                stored, scales = _stored(token, dtype)
                places = np.arange(len(token))
                blocks = tables[b, places // C]
                pool[LAYER, blocks, :, places % C, :D] = stored
                if scale is not None:
                    scale[LAYER, blocks, :, places % C] = scales
                tokens[b] = stored.astype(np.float64) * scales[..., None]
            values.append(tokens)
            pools.append((pool, scale))
        if value_dim is not None:
            values.append([k[..., :value_dim] for k in values[0]])
            pools.append((None, None))
        (k, k_scale), (v, v_scale) = pools
        return cls(*values, Pools(k, v, k_scale, v_scale), tables, lengths, value_dim)

    def rows(self, rows: np.ndarray) -> "PagedBatch":
        """Return some of the sequences, in the same pool."""
        return dataclasses.replace(
            self,
            k=[self.k[row] for row in rows],
            v=[self.v[row] for row in rows],
            block_tables=self.block_tables[rows],
            lengths=self.lengths[rows],
        )

    def sharing(self, num_blocks: int) -> "PagedBatch":
        """Return a batch with a common prefix: the first blocks of the longest sequence."""
        tables, n = self.block_tables.copy(), num_blocks * self.pools.k.shape[3]
        first = int(np.argmax(self.lengths))
        used = np.flatnonzero(self.lengths)
        assert self.lengths[used].min(initial=n) >= n, "a shared block must be full"
        tables[used, :num_blocks] = tables[first, :num_blocks]
        k, v = (
            [np.concatenate([values[first][:n], x[n:]]) if len(x) else x for x in values]
            for values in (self.k, self.v)
        )
        return dataclasses.replace(self, k=k, v=v, block_tables=tables)

    def slid(self, window: int | None, query_lens: Any = 1) -> "PagedBatch":
        """Return the batch with the blocks outside the windows of all queries freed and poisoned.

        Their table entries are out of range, as in a cache that keeps only a window.
        """
        if window is None:
            return self
        C = self.pools.k.shape[3]
        tables = self.block_tables.copy()
        lengths = np.minimum(self.lengths, tables.shape[1] * C)
        starts = lengths - np.clip(query_lens, 1, lengths.max()) + 1 - window
        tables[np.arange(tables.shape[1])[None] < (starts // C)[:, None]] = OUT_OF_RANGE
        is_left = np.isin(np.arange(self.pools.k.shape[1]), tables, invert=True)

        def spoil(pool: np.ndarray) -> np.ndarray:
            poison = 127 if jnp.issubdtype(pool.dtype, jnp.integer) else np.nan
            pool = pool.copy()
            pool[:, is_left] = poison
            return pool

        pools = Pools(*(pool if pool is None else spoil(pool) for pool in self.pools))
        return dataclasses.replace(self, pools=pools, block_tables=tables)

    def decode(self, q: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
        """Run `paged_attention` on ``q [B, H, D]``, and return ``(out, lse)``."""
        return self._run(_decode, q, (), **options)

    def prefill(self, q: np.ndarray, query_lens, **options) -> tuple[np.ndarray, np.ndarray]:
        """Run `paged_prefill_attention` on ``q [B, T, H, D]``, and return ``(out, lse)``."""
        return self._run(_prefill, q, (np.asarray(query_lens, np.int32),), **options)

    def attend(self, q: np.ndarray, query_lens, **options):
        """Run `decode` with the first queries and `prefill` in one program; return both results."""
        return self._run(_attend, q, (np.asarray(query_lens, np.int32),), **options)

    def _run(self, function: Callable[..., Any], q, query_lens, layer=LAYER, sinks=None, **static):
        run, static = _program(function), static | {"value_dim": self.value_dim}
        batch = self.slid(static.get("sliding_window"), *query_lens)
        arrays = batch.pools, batch.block_tables, batch.lengths, *query_lens
        return jax.tree.map(np.asarray, run(q, *arrays, np.int32(layer), sinks, **static))

    def expected_decode(self, q: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected result of `decode`, in float64."""
        out, lse = self._empty(q)
        for b, n in enumerate(self.lengths):
            if n:
                row, row_lse = oracles.attention_and_lse(
                    q[b][None], self.k[b], self.v[b], **options
                )
                out[b], lse[b] = row[0], row_lse[0]
            elif options.get("sinks") is not None:
                lse[b] = options["sinks"]
        return out, lse

    def expected_prefill(self, q: np.ndarray, query_lens, **options):
        """Return the expected result of `prefill`, in float64."""
        out, lse = self._empty(q)
        for b, n in enumerate(query_lens):
            if n:
                out[b, :n], lse[b, :n] = oracles.attention_and_lse(
                    q[b, :n], self.k[b], self.v[b], **options
                )
        return out, lse

    def _empty(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        *rows, D = q.shape
        return np.zeros((*rows, self.value_dim or D)), np.full(rows, -np.inf)

    def expected(self, q: np.ndarray, query_lens, **options):
        """Return the expected result of `attend`, in float64."""
        return (
            self.expected_decode(q[:, 0], **options),
            self.expected_prefill(q, query_lens, **options),
        )


def _decode(q, pools: Pools, tables, lengths, layer, sinks, **static):
    return paged_attention(
        q, pools.k, pools.v, tables, lengths, k_scale=pools.k_scale, v_scale=pools.v_scale,
        layer=layer, sinks=sinks, return_lse=True, **static,
    )  # fmt: skip


def _prefill(q, pools: Pools, tables, lengths, query_lens, layer, sinks, **static):
    return paged_prefill_attention(
        q, pools.k, pools.v, tables, lengths, query_lens, k_scale=pools.k_scale,
        v_scale=pools.v_scale, layer=layer, sinks=sinks, return_lse=True, **static,
    )  # fmt: skip


def _attend(q, pools: Pools, tables, lengths, query_lens, *arrays, **static):
    return (
        _decode(q[:, 0], pools, tables, lengths, *arrays, **static),
        _prefill(q, pools, tables, lengths, query_lens, *arrays, **static),
    )


@functools.cache
def _program(function: Callable[..., Any]) -> Callable[..., Any]:
    static = ("scale", "sliding_window", "soft_cap", "value_dim", "backend", "interpret")
    return jax.jit(function, static_argnames=static)


def queries(shape, dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
    """Return random queries."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def _poisoned(shape, dtype) -> tuple[np.ndarray, np.ndarray | None]:
    if not KVDtype.of(dtype).has_scales:
        return np.full(shape, np.nan, dtype), None
    poison = 127 if jnp.issubdtype(dtype, jnp.integer) else np.nan
    return np.full(shape, poison, dtype), np.full(shape[:4], np.nan, np.float32)


def _stored(tokens: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return ``[N, K, D]`` as the pool stores it, and the scales ``[N, K]``."""
    if not KVDtype.of(dtype).has_scales:
        return tokens.astype(dtype), np.ones(tokens.shape[:2], np.float32)
    largest = KVDtype.of(dtype).largest
    scales = np.abs(tokens).max(axis=-1) / np.float32(largest)
    scaled = np.clip(tokens / scales[..., None], -largest, largest)
    return (np.rint(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled).astype(dtype), scales
