"""The plain form, which XLA compiles for every platform: attention by tiles, writes by scatters.

It is correct anywhere, and takes what kernels leave.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax

from paged_jax.kernels.backend import (
    AttentionArgs,
    CopyArgs,
    Options,
    Pools,
    Problem,
    WriteArgs,
)
from paged_jax.kernels.xla.decode import decode
from paged_jax.kernels.xla.prefill import prefill
from paged_jax.kernels.xla.writing import copy_blocks, write

__all__ = ["Xla"]


@dataclass(frozen=True)
class Xla:
    """The backend ``"xla"``; it refuses nothing."""

    platform: ClassVar[str | None] = None

    def refusal(self, problem: Problem) -> str | None:
        """Nothing is refused."""
        del problem
        return None

    def decode(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """One query for each sequence."""
        return decode(args, options)

    def prefill(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """A chunk of queries for each sequence."""
        return prefill(args, options)

    def write(self, args: WriteArgs) -> Pools:
        """Scatter new tokens to their places."""
        return write(args)

    def copy_blocks(self, args: CopyArgs) -> Pools:
        """Copy blocks in all layers."""
        return copy_blocks(args)
