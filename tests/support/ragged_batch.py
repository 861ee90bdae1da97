"""Ragged batch over poisoned interleaved pages, and the expected attention."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels import ragged_paged_attention
from tests.support import oracles

OUT_OF_RANGE = 10**6
STATIC = (
    "sm_scale", "sliding_window", "soft_cap", "mask_value", "k_scale", "v_scale", "backend",
    "value_dim", "return_lse", "interpret",
)  # fmt: skip
attend = jax.jit(ragged_paged_attention, static_argnames=STATIC)


@dataclasses.dataclass
class RaggedBatch:
    """Sequences in shuffled pages, followed by rows without a sequence.

    Table entries after the end of a sequence are out of range, lengths of rows without a sequence
    are invalid, and their queries are NaN. All values of the pages outside the tokens are NaN, or
    99.
    """

    q: np.ndarray
    kv_pages: np.ndarray
    kv_lens: np.ndarray
    page_indices: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray
    value_dim: int | None = None

    @classmethod
    def random(
        cls,
        lengths,  # for each sequence: number of queries, number of tokens
        *,
        K: int = 2,
        G: int = 3,
        C: int = 8,
        D: int = 16,
        q_dtype: Any = np.float32,
        dtype: Any = np.float32,
        extra_rows: int = 5,
        extra_width: int = 2,
        extra_sequences: int = 2,
        value_dim: int | None = None,
        seed: int = 0,
    ) -> "RaggedBatch":
        """Create random sequences, followed by rows of q and sequences without content.

        With `value_dim`, pages have keys of one head only: values are their first elements.
        """
        heads = 2 * K if value_dim is None else 1
        rng = np.random.default_rng(seed)
        num_rows = sum(queries for queries, _ in lengths)
        H = K * G if value_dim is None else G
        q = rng.normal(size=(num_rows + extra_rows, H, D)).astype(q_dtype)
        q[num_rows:] = np.nan
        counts = [-(-tokens // C) for _, tokens in lengths]
        S, P = len(lengths) + extra_sequences, sum(counts) + 3
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        pages = np.full((P, C, heads, D), 99 if is_integer else np.nan, dtype)
        tables = np.full((S, max(counts) + extra_width), OUT_OF_RANGE, np.int32)
        kv_lens, cu_q_lens = np.full(S, 2**31 - 1, np.int32), np.full(S + 1, -7, np.int32)
        # No sequence has the first or last page, because clipped entries would point there.
        cu_q_lens[0], free = 0, 1 + rng.permutation(P - 2)
        for s, (queries, tokens) in enumerate(lengths):
            mine, free = free[: counts[s]], free[counts[s] :]
            tables[s, : counts[s]] = mine
            kv_lens[s], cu_q_lens[s + 1] = tokens, cu_q_lens[s] + queries
            values = rng.normal(size=(tokens, heads, D)) * (20 if is_integer else 1)
            places = np.arange(tokens)
            pages[mine[places // C], places % C] = values.astype(dtype)
        num_seqs = np.array([len(lengths)], np.int32)
        return cls(q, pages, kv_lens, tables, cu_q_lens, num_seqs, value_dim)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arguments, in order."""
        names = [field.name for field in dataclasses.fields(self)]
        return tuple(getattr(self, name) for name in names if name != "value_dim")

    @property
    def num_rows(self) -> int:
        """Number of rows of sequences."""
        return int(self.cu_q_lens[self.num_seqs[0]])

    def attend(self, **options) -> Any:
        """Run the op, and return its results as NumPy arrays."""
        batch = self.slid(options.get("sliding_window"))
        out = attend(*batch.arrays, value_dim=self.value_dim, **options)
        return jax.tree.map(np.asarray, out)

    def slid(self, window: int | None) -> "RaggedBatch":
        """Return the batch with the pages outside the windows poisoned, see `PagedBatch.slid`."""
        if window is None:
            return self
        pages, tables, C = self.kv_pages.copy(), self.page_indices.copy(), self.kv_pages.shape[1]
        for s in range(self.num_seqs[0]):
            first = self.kv_lens[s] - (self.cu_q_lens[s + 1] - self.cu_q_lens[s]) + 1 - window
            left = tables[s, : max(first, 0) // C].copy()
            tables[s, : len(left)] = OUT_OF_RANGE
            pages[left] = 99 if jnp.issubdtype(pages.dtype, jnp.integer) else np.nan
        return dataclasses.replace(self, kv_pages=pages, page_indices=tables)

    def sequence(self, s: int) -> tuple[slice, np.ndarray, np.ndarray]:
        """Return the query rows of a sequence, and its keys and values, in float64."""
        end, tokens = int(self.cu_q_lens[s + 1]), int(self.kv_lens[s])
        rows = slice(end - min(end - int(self.cu_q_lens[s]), tokens), end)
        places, C = np.arange(tokens), self.kv_pages.shape[1]
        kv = self.kv_pages[self.page_indices[s, places // C], places % C].astype(np.float64)
        if self.value_dim is not None:
            return rows, kv, kv[..., : self.value_dim]
        return rows, kv[:, 0::2], kv[:, 1::2]

    def expected(self, **options) -> np.ndarray:
        """Return the expected result of the op, in float64."""
        return self.expected_with_lse(**options)[0]

    def expected_with_lse(
        self, *, sm_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0, **options
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected result of the op and the log-sum-exp, in float64."""
        *num_rows, D = self.q.shape
        out, lse = np.zeros((*num_rows, self.value_dim or D)), np.full(num_rows, -np.inf)
        for s in range(self.num_seqs[0]):
            rows, k, v = self.sequence(s)
            attention = functools.partial(oracles.attention_and_lse, scale=sm_scale, **options)
            out[rows], lse[rows] = attention(self.q[rows], k * k_scale, v * v_scale)
        return out, lse
