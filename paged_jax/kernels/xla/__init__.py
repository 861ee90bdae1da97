"""Backend in plain JAX, which XLA compiles for every platform.

It has every op. Other backends leave it the calls for which they have no kernel.
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
from paged_jax.kernels.ragged import Chunks, attend_in_parts
from paged_jax.kernels.rope import rope_then_write
from paged_jax.kernels.xla.attention import attend_to_chunks, decode, prefill
from paged_jax.kernels.xla.linear import grouped_gradients, grouped_linear, linear
from paged_jax.kernels.xla.writing import copy_blocks, write


@dataclass(frozen=True)
class Xla:
    """The backend ``"xla"``. It refuses nothing."""

    platform: ClassVar[str | None] = None

    def refusal(self, problem: Problem) -> str | None:
        """Return None, because every problem is supported."""
        del problem
        return None

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Run a decode or prefill."""
        return (decode if args.query_lens is None else prefill)(args, options)

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with the chunks of a ragged batch."""
        return attend_in_parts(
            functools.partial(decode, options=options),
            functools.partial(attend_to_chunks, options=options),
            args,
        )

    def attend_to_chunks(
        self, args: RaggedArgs, chunks: Chunks, options: Options
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with the queries of the given chunks of a ragged batch."""
        return attend_to_chunks(args, chunks, options)

    def write(self, args: WriteArgs) -> Pools:
        """Write new tokens into the pools."""
        return write(args)

    def rope_write(self, args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
        """Normalise and rotate heads, and write keys and values into the pools."""
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
        """Return None, because every problem is supported."""
        del args
        return None

    def grouped_linear(self, args: GroupedArgs) -> jax.Array:
        """Multiply rows by the weights of their groups, in a loop over tiles of rows."""
        return grouped_linear(args.x, args.w, args.group_sizes)

    def grouped_gradients(
        self, x: jax.Array, w: jax.Array, group_sizes: jax.Array, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of `grouped_linear` in `x` and `w`."""
        return grouped_gradients(x, w, group_sizes, cotangent)
