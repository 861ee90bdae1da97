r"""Backend ``"mosaic_tpu"``: paged attention on TPUs, in Pallas, compiled by Mosaic.

One kernel serves decode and prefill: a decode is a prefill with chunks of one token. Each grid step
computes one tile of queries. The grid steps run in order, and each step loops over the tiles of
keys that its queries see. While a tile is computed, the next one is fetched, also across grid
steps::

    grid step    0 (sequence 0)    1 (sequence 1)             2 ...
    computes     tile 0   tile 1   tile 0   tile 1   tile 2   tile 0
    fetches      tile 1   tile 0   tile 1   tile 2   tile 0   ...
                          of 1                       of 2

    one layer of the pool, in HBM      buffer in VMEM, two slots
    +----------+                       slot [K, N, lanes]
    | block  7 | --- copy [K, C, lanes] --> tokens 0..C-1    \
    | block 31 | --- copy [K, C, lanes] --> tokens C..2C-1    >  scores [R, N] with q [R, D],
    |   ...    |                              ...            /   one KV head after the other
    +----------+
      block ids from the block table, in scalar memory

A copy is one block with all of its heads, which are contiguous in the pool. The R rows of a query
tile are pairs of a token and a head of the group, so the query heads of a group share one matmul,
and a group may have any size. The online softmax (Milakov and Gimelshein, 2018) is float32.

The kernel gets the whole pool and the layer index. For XLA to pass the pool without a copy, its
last dimension must be a multiple of 128 lanes. Otherwise XLA makes the blocks the innermost
dimension, and copies the whole pool before every call (compilers for v5e and v6e of jax 0.10.2 and
0.12.0). Before the kernel, XLA gathers the scales of quantised pools. For that it may copy the
scales of one layer.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax

from paged_jax.kernels.backend import (
    AttentionArgs,
    Interpret,
    Options,
    Problem,
    RaggedArgs,
    RaggedOptions,
)
from paged_jax.kernels.mosaic_tpu import jax_kernels
from paged_jax.kernels.mosaic_tpu.attention import attend, device_refusal, refusal
from paged_jax.kernels.weight_formats import Weight

__all__ = ["MosaicTpu", "refusal"]


@dataclass(frozen=True)
class MosaicTpu:
    """The backend ``"mosaic_tpu"``. XLA does the writes and copies, in place.

    Attributes:
      interpret: whether to interpret the kernels.
    """

    interpret: Interpret = False

    platform: ClassVar[str | None] = "tpu"

    def refusal(self, problem: Problem) -> str | None:
        """Return why the kernels cannot solve a problem, or None if they can."""
        if problem.op == "ragged":
            return jax_kernels.ragged_refusal(problem)
        return (None if self.interpret else device_refusal()) or refusal(problem)

    def interpreted(self, interpret: Interpret) -> "MosaicTpu":
        """Return the same backend with interpreted kernels."""
        return MosaicTpu(interpret)

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Run a decode or a prefill."""
        return attend(args, options, self.interpret)

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Attend to a ragged batch, with JAX's own kernel."""
        if self.interpret:
            raise NotImplementedError(
                "ragged_paged_attention: interpret must be False with JAX's kernel for TPUs, got "
                "True: Pallas' interpreter lacks operations of the kernel. Interpret 'triton', or "
                "compile for a TPU."
            )
        return jax_kernels.attend_ragged(args, options)

    def grouped_linear_refusal(self, x: jax.Array, w: Weight, sizes: jax.Array) -> str | None:
        """Return why JAX's kernel cannot multiply these arrays, or None if it can."""
        del x, sizes
        if w.scales is not None:
            return f"its weights are floating point, not {w.format.code} with scales"
        return jax_kernels.grouped_refusal(w.values)

    def grouped_linear(self, x: jax.Array, w: Weight, sizes: jax.Array) -> jax.Array:
        """Multiply rows by the weights of their groups, with JAX's own kernel."""
        return jax_kernels.grouped_linear(x, w.values, sizes, interpret=self.interpret)
