"""The plain form, which XLA compiles for every platform: attention by tiles, writes by scatters.

It is correct anywhere, and takes what kernels leave.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax

from paged_jax.kernels.backend import (
    AttentionArgs,
    CopyArgs,
    Options,
    Pools,
    Problem,
    RaggedArgs,
    RaggedOptions,
    WriteArgs,
)
from paged_jax.kernels.ragged_batch import attend_in_parts
from paged_jax.kernels.xla.decode import decode
from paged_jax.kernels.xla.prefill import QUERIES, prefill
from paged_jax.kernels.xla.ragged import attend_to_chunks
from paged_jax.kernels.xla.writing import copy_blocks, write

__all__ = ["QUERIES", "Xla", "attend_to_chunks", "decode", "prefill"]


@dataclass(frozen=True)
class Xla:
    """The backend ``"xla"``; it refuses nothing."""

    platform: ClassVar[str | None] = None

    def refusal(self, problem: Problem) -> str | None:
        """Nothing is refused."""
        del problem
        return None

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Decode or prefill."""
        return (decode if args.query_lens is None else prefill)(args, options)

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with chunks of any lengths."""
        return attend_in_parts(
            functools.partial(decode, options=options),
            functools.partial(attend_to_chunks, options=options),
            args,
        )

    def write(self, args: WriteArgs) -> Pools:
        """Scatter new tokens to their places."""
        return write(args)

    def copy_blocks(self, args: CopyArgs) -> Pools:
        """Copy blocks in all layers."""
        return copy_blocks(args)
