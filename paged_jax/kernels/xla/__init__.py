"""The plain form, which XLA compiles for every platform: attention by tiles, writes by scatters.

It is correct anywhere, and takes what kernels leave.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from paged_jax.kernels.backend import (
    AttentionArgs,
    CopyArgs,
    GroupedArgs,
    Options,
    Pools,
    Problem,
    RaggedArgs,
    RaggedOptions,
    RopeWriteArgs,
    Weight,
    WriteArgs,
)
from paged_jax.kernels.ragged_batch import Chunks, attend_in_parts
from paged_jax.kernels.rope import rope_then_write
from paged_jax.kernels.xla.decode import decode
from paged_jax.kernels.xla.linear import grouped_gradients, grouped_linear, linear
from paged_jax.kernels.xla.prefill import prefill
from paged_jax.kernels.xla.ragged import attend_to_chunks
from paged_jax.kernels.xla.writing import copy_blocks, write


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

    def attend_to_chunks(
        self, args: RaggedArgs, chunks: Chunks, options: Options
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with the queries of all chunks."""
        return attend_to_chunks(args, chunks, options)

    def write(self, args: WriteArgs) -> Pools:
        """Scatter new tokens to their places."""
        return write(args)

    def rope_write(self, args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
        """Norm, rotate and write."""
        return rope_then_write(write, args, options)

    def copy_blocks(self, args: CopyArgs) -> Pools:
        """Copy blocks in all layers."""
        return copy_blocks(args)

    def linear(self, x: jax.Array, w: Weight) -> jax.Array:
        """Multiply the last dimension by a weight."""
        return linear(x, w)

    def sum_rows(self, x: jax.Array) -> jax.Array:
        """Sum over the last dimension, in XLA's order."""
        return jnp.sum(x, axis=-1, keepdims=True)

    def grouped_refusal(self, args: GroupedArgs) -> str | None:
        """Nothing is refused."""
        del args
        return None

    def grouped_linear(self, args: GroupedArgs) -> jax.Array:
        """Multiply rows by the weights of their groups, one tile of rows after the other."""
        return grouped_linear(args.x, args.w, args.group_sizes)

    def grouped_gradients(
        self, x: jax.Array, w: jax.Array, group_sizes: jax.Array, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of `grouped_linear` in `x` and `w`."""
        return grouped_gradients(x, w, group_sizes, cotangent)
