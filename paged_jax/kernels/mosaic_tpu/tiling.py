"""How large the tiles of queries and keys are, chosen from shapes alone."""

from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl

from paged_jax.kernels.pool_format import LANES

# The smallest VMEM of the chips from v5e to 7x is 64 MiB; the compiler uses 16 MiB by default.
VMEM_BYTES = 48 << 20

# Bytes of keys, and as many of values, that are in flight while a tile is computed: each is about
# what 1.6 TB/s (v6e) bring in half a microsecond, and copies take about one to arrive.
_TILE_BYTES = 1 << 20
# Most tokens in a tile of keys: longer ones waste more on short contexts.
_MAX_KEYS = 512
# Most rows in a tile of queries. A byte of a bfloat16 pool gives as many operations as there are
# rows, and in the time it takes to read one v6e can do 560 and v5e 240.
_MAX_ROWS = 512
# Most bytes of float32 outputs in a tile of queries. The tile, its outputs, those of the program
# that comes next and the sums lie in VMEM beside the keys.
_ACCUMULATOR_BYTES = 2 << 20


@dataclass(frozen=True)
class Tiling:
    """The static sizes of a kernel, by the letters of `paged_jax.dims`.

    Attributes:
      queries: tokens in a tile of queries.
      num_query_tiles: tiles that cover the T query tokens of a sequence.
      blocks: blocks in a tile of keys.
    """

    queries: int
    num_query_tiles: int
    blocks: int
    G: int
    C: int
    M: int

    @property
    def rows(self) -> int:
        """R, rows in a tile of queries: (token, head of the group) pairs."""
        return self.queries * self.G

    @property
    def keys(self) -> int:
        """N, tokens in a tile of keys: a multiple of 128."""
        return self.blocks * self.C


def choose_tiling(T: int, G: int, M: int, k_pool: Any) -> Tiling:
    """Tiles that fit VMEM and make few, large copies.

    Args:
      T: query tokens of a sequence.
      G: query heads in a group.
      M: blocks in a row of the table.
      k_pool: ``[L, P, K, C, lanes]``, of which only shape and dtype matter.
    """
    *_, K, C, lanes = k_pool.shape
    rows = min(_MAX_ROWS, _ACCUMULATOR_BYTES // (K * lanes * 4))
    # By 16, so that the rows fill the registers of bfloat16.
    queries = min(T, max(rows // G // 16, 1) * 16)
    keys = _TILE_BYTES // (K * lanes * k_pool.dtype.itemsize)
    keys = min(keys, _MAX_KEYS, M * C + LANES - 1) // LANES * LANES
    return Tiling(
        queries=queries,
        num_query_tiles=pl.cdiv(T, queries),
        blocks=max(keys, LANES, C) // C,
        G=G,
        C=C,
        M=M,
    )
