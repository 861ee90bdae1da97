"""Paged attention on TPUs: Pallas, compiled by Mosaic.

One kernel serves decode and chunks of prompt, since decode is a chunk of one token. The grid is
flat and runs in order, a program for each tile of queries. A program walks over the tiles of keys
that its queries see, and each tile is fetched while the one before it is computed, across programs
too::

    program      0 (sequence 0)    1 (sequence 1)             2 ...
    computes     tile 0   tile 1   tile 0   tile 1   tile 2   tile 0
    meanwhile    tile 1   tile 0   tile 1   tile 2   tile 0   ...
    is fetched            of 1                       of 2

    layer of the pool, in HBM          buffer in VMEM, two slots
    +----------+                       slot [K, N, lanes]
    | block  7 | --- copy [K, C, lanes] --> tokens 0..C-1    \\
    | block 31 | --- copy [K, C, lanes] --> tokens C..2C-1    >  scores [R, N] with q [R, D],
    |   ...    |                              ...            /   one KV head after the other
    +----------+
      block ids from the table, in scalar memory

A copy is one block with all of its heads, which lie together in the pool. The R rows of a query
tile are (token, head of the group) pairs: the query heads of a group share one product, and there
may be any number of them. The running softmax (Milakov and Gimelshein, 2018) is float32.

The pool is handed over whole, with the layer's number, and stays where it is. That takes a last
axis of whole registers, 128 lanes: XLA lays out other arrays with the blocks innermost, and would
copy all of them before every call (so do the compilers for v5e and v6e of jax 0.10.2 and
0.12.0). XLA gathers scales for the kernel, and may lay out those of one layer for that.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax

from paged_jax.kernels.backend import (
    AttentionArgs,
    GroupedArgs,
    Interpret,
    Options,
    Problem,
    RaggedArgs,
    RaggedOptions,
)
from paged_jax.kernels.mosaic_tpu import grouped_linear as _grouped
from paged_jax.kernels.mosaic_tpu import ragged
from paged_jax.kernels.mosaic_tpu.attention import attend, device_refusal, refusal

__all__ = ["MosaicTpu", "refusal"]


@dataclass(frozen=True)
class MosaicTpu:
    """The backend ``"mosaic_tpu"``; writes and copies are left to XLA, which does them in place.

    Attributes:
      interpret: how to interpret the kernel, if at all.
    """

    interpret: Interpret = False

    platform: ClassVar[str | None] = "tpu"

    def refusal(self, problem: Problem) -> str | None:
        """Return why this kernel cannot solve a problem, or None if it can."""
        if problem.op == "ragged":
            return ragged.refusal(problem)
        return (None if self.interpret else device_refusal()) or refusal(problem)

    def interpreted(self, interpret: Interpret) -> "MosaicTpu":
        """The same backend, with its kernel interpreted."""
        return MosaicTpu(interpret)

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Decode or prefill."""
        return attend(args, options, self.interpret)

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with chunks of any lengths, by JAX's own kernel."""
        if self.interpret:
            raise NotImplementedError(
                "ragged_paged_attention: mosaic_tpu cannot be interpreted: JAX's interpreter lacks "
                "what JAX's own kernel does. Interpret 'triton', or compile for a TPU."
            )
        return ragged.attend_ragged(args, options)

    def grouped_refusal(self, args: GroupedArgs) -> str | None:
        """Return why JAX's kernel cannot multiply these arrays, or None if it can."""
        return _grouped.refusal(args.x, args.w)

    def grouped_linear(self, args: GroupedArgs) -> jax.Array:
        """Multiply rows by the weights of their groups, by JAX's own kernel."""
        return _grouped.grouped_linear(args.x, args.w, args.group_sizes, interpret=self.interpret)
