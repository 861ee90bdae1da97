"""Backend in plain JAX, which XLA compiles for every platform.

It has every op. It runs the calls that other backends have no kernels for.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from paged_jax.kernels.backend import (
    AttentionArgs,
    Options,
    Pools,
    Problem,
    RaggedArgs,
    RaggedOptions,
    RopeWriteArgs,
)
from paged_jax.kernels.norm_rope import rope_then_write
from paged_jax.kernels.ragged_chunks import attend_in_parts
from paged_jax.kernels.recurrent import advance_rows
from paged_jax.kernels.xla.attention import attend_to_chunks, decode, prefill
from paged_jax.kernels.xla.linear import grouped_gradients, grouped_linear, linear
from paged_jax.kernels.xla.writing import copy_blocks, write


@dataclass(frozen=True)
class Xla:
    """The backend ``"xla"``. It supports every problem."""

    platform: ClassVar[str | None] = None

    attend_to_chunks = staticmethod(attend_to_chunks)
    write = staticmethod(write)
    copy_blocks = staticmethod(copy_blocks)
    linear = staticmethod(linear)
    grouped_linear = staticmethod(grouped_linear)
    grouped_gradients = staticmethod(grouped_gradients)
    advance_rows = staticmethod(advance_rows)

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

    def rope_write(self, args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
        """Normalise and rotate heads, and write keys and values into the pools."""
        return rope_then_write(write, args, options)

    def sum_rows(self, x: jax.Array) -> jax.Array:
        """Sum over the last dimension, in XLA's order."""
        return jnp.sum(x, axis=-1, keepdims=True)
