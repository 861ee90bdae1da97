"""Attention and products on CPUs, compiled from C++ on the machine that runs them.

XLA's CPU backend has no product that takes rows by index, so it copies K and V of every tile out of
the pool, and it reads few rows of bfloat16 at a third of the memory's speed. The kernels here read
both where they lie, on XLA's own threads, through its foreign function interface. They are compiled
when a program is lowered that needs them, see `library`; where that cannot be, XLA does the work.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax

from paged_jax.kernels import xla
from paged_jax.kernels.backend import (
    AttentionArgs,
    Options,
    Problem,
    RaggedArgs,
    RaggedOptions,
)
from paged_jax.kernels.cpu import attention
from paged_jax.kernels.cpu.grouped_linear import copies_groups, grouped_linear
from paged_jax.kernels.cpu.library import load_cpu_kernels
from paged_jax.kernels.cpu.linear import (
    copies_weights,
    is_available,
    is_few,
    linear,
    sum_rows,
    takes,
)
from paged_jax.kernels.ragged_batch import attend_in_parts

__all__ = [
    "Cpu",
    "copies_groups",
    "copies_weights",
    "grouped_linear",
    "is_available",
    "is_few",
    "linear",
    "load_cpu_kernels",
    "sum_rows",
    "takes",
]


@dataclass(frozen=True)
class Cpu:
    """The backend ``"cpu"``; writes and copies are left to XLA."""

    platform: ClassVar[str | None] = "cpu"

    def refusal(self, problem: Problem) -> str | None:
        """Why the kernel cannot do what is asked, or None if it can."""
        return attention.refusal(problem)

    def unavailable(self, problem: Problem) -> str | None:
        """Why the kernel cannot be had on this machine; it is compiled now if it can."""
        return attention.unavailable(problem)

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Decode or prefill."""
        return attention.attend(args, options)

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with single queries by the kernel, with chunks by XLA."""
        return attend_in_parts(
            functools.partial(attention.attend, options=options),
            functools.partial(xla.attend_to_chunks, options=options),
            args,
        )
