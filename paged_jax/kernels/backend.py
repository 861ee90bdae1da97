"""What a backend takes and gives: the arrays and options that every kernel shares.

A backend is a module with these functions, of which it may lack any::

    decode(q, pools, block_tables, context_lens, sinks, layer, options) -> (out, lse)
    prefill(q, pools, block_tables, context_lens, query_lens, sinks, layer, options) -> (out, lse)
    write(pools, k, v, blocks, offsets, layer, options) -> pools
    copy_blocks(pools, sources, targets, options) -> pools

and ``refusal(problem)``, which says in a sentence why the backend cannot do what is asked, or
returns None. Arguments have been checked before a backend sees them, and in attention ``layer`` is
in 0..L - 1, ``context_lens`` in 0..M * C, ``query_lens`` in 0..T and at most ``context_lens``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Pools(NamedTuple):
    """K and V of every block, with their scales where they are quantised.

    Attributes:
      k: ``[L, P, K, C, D]``, keys: floating point, int8 or float8_e4m3fn.
      v: the values, as the keys.
      k_scale: None, or f32 ``[L, P, K, C]`` where `k` is quantised: one scale for each token and
        head, by which the stored numbers are multiplied.
      v_scale: the same for `v`.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether the pools hold int8 or fp8 numbers and their scales."""
        return self.k_scale is not None


@dataclass(frozen=True)
class Options:
    """What shapes the program of an attention kernel; hashable, a static argument of `jax.jit`.

    Attributes:
      scale: of the scores.
      sliding_window: how many last tokens a query sees, its own included; None for all.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None for no cap.
      interpret: run Pallas kernels in the interpreter, on any platform. True, or the
        `jax.experimental.pallas.tpu.InterpretParams` of the TPU backend.
    """

    scale: float = 1.0
    sliding_window: int | None = None
    soft_cap: float | None = None
    interpret: Any = False


@dataclass(frozen=True)
class Problem:
    """The shapes, types and variants of a call: all that a backend needs to know to refuse it."""

    op: str  # "decode", "prefill", "write" or "copy_blocks"
    sizes: tuple[tuple[str, int], ...]  # letters of `paged_jax.dims` and their sizes
    q_dtype: Any  # of the queries, or of the new keys and values
    pool_dtype: Any
    has_sinks: bool
    options: Options
    lanes: int  # last axis of the pools: D, or D padded to a multiple of 128

    @classmethod
    def of(
        cls,
        op: str,
        sizes: Mapping[str, int],
        dtype: DTypeLike,
        pools: Pools,
        options: Options,
        *,
        has_sinks: bool = False,
    ) -> "Problem":
        """A call over some pools, with queries, or new keys and values, of `dtype`."""
        return cls(
            op=op,
            sizes=tuple(sizes.items()),
            q_dtype=jnp.dtype(dtype),
            pool_dtype=pools.k.dtype,
            has_sinks=has_sinks,
            options=options,
            lanes=pools.k.shape[-1],
        )

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]
