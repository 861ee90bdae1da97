"""Attention and products on CPUs, compiled from C++ on the machine that runs them.

XLA's CPU backend has no product that takes rows by index, so it copies K and V of every tile out of
the pool, and it reads few rows of bfloat16 at a third of the memory's speed. The kernels here read
both where they lie, on XLA's own threads, through its foreign function interface. They are compiled
when a program is lowered that needs them, see `library`; where that cannot be, XLA does the work.
"""

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import jax
from jax.typing import DTypeLike

from paged_jax.kernels.backend import (
    AttentionArgs,
    GroupedArgs,
    Options,
    Problem,
    RaggedArgs,
    RaggedOptions,
    Weight,
)
from paged_jax.kernels.cpu import attention, calls, library, linear
from paged_jax.kernels.dispatch import general_backend
from paged_jax.kernels.ragged_batch import attend_in_parts


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
            functools.partial(general_backend().attend_to_chunks, options=options),
            args,
        )

    def linear(self, x: jax.Array, w: Weight) -> jax.Array:
        """Few rows, and weights that XLA would copy, by the kernel; others by XLA."""
        return linear.linear(x, w)

    def sum_rows(self, x: jax.Array) -> jax.Array:
        """Sum in an order that does not depend on the number of rows."""
        return linear.sum_rows(x)

    def grouped_refusal(self, args: GroupedArgs) -> str | None:
        """Nothing is refused: where the kernel is unavailable, XLA does the work."""
        del args
        return None

    def grouped_linear(self, args: GroupedArgs) -> jax.Array:
        """Multiply rows by the weights of their groups, which are read in the stack."""
        return linear.grouped_linear(args)

    def is_available(self) -> bool:
        """Return whether this machine has the kernels, or a compiler for them."""
        return linear.is_available()

    def copies_weights(self, dtype: DTypeLike) -> bool:
        """Return whether `linear` copies all weights of this type to float32 on this machine."""
        return linear.copies_weights(dtype)

    def copies_expert_weights(self, dtype: DTypeLike) -> bool:
        """Return whether `grouped_linear` copies all weights of this type to float32 here."""
        return linear.copies_expert_weights(dtype)

    def targets(self) -> list[str]:
        """Return the names by which programs call the kernels of this machine."""
        return library.targets()

    def exporting_for_here(self) -> AbstractContextManager[None]:
        """Return a context in which exported programs call kernels that only this machine has."""
        return calls.exporting_for_here()

    def load_called(self, program: bytes) -> str | None:
        """Load the kernels that a program calls; return the target of one that is unavailable."""
        return library.load_called(program)

    def is_any_missing(self) -> bool:
        """Return whether a kernel that a program of this process would call is unavailable."""
        return library.is_any_missing()
