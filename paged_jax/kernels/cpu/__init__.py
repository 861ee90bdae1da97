"""Backend for CPUs: C++ kernels that are compiled on the machine that runs them.

XLA's CPU backend has no matmul that takes rows by index, so it copies K and V of each tile out of
the pool. It reads few rows of bfloat16 at a third of the memory's speed. The kernels read both in
place, on XLA's own threads, through its foreign function interface. They are compiled when a
program that needs them is lowered, see `library`. If that fails, XLA does the work.
"""

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
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
from paged_jax.kernels.cpu import library, ops
from paged_jax.kernels.dispatch import general_backend
from paged_jax.kernels.ragged import attend_in_parts


@dataclass(frozen=True)
class Cpu:
    """The backend ``"cpu"``. It leaves writes and copies of blocks to XLA."""

    platform: ClassVar[str | None] = "cpu"

    def refusal(self, problem: Problem) -> str | None:
        """Return why the kernels cannot solve a problem, or None if they can."""
        return ops.attention_refusal(problem)

    def unavailable(self, problem: Problem) -> str | None:
        """Compile the kernel for a problem, or return why this machine cannot."""
        op = "prefill" if problem.op == "prefill" else "decode"
        return library.load(library.Kernel(op, jnp.dtype(problem.pool_dtype))).why_not

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Run a decode or prefill."""
        return ops.attend(args, options)

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with single queries by the kernel, and with longer chunks by XLA."""
        return attend_in_parts(
            functools.partial(ops.attend, options=options),
            functools.partial(general_backend().attend_to_chunks, options=options),
            args,
        )

    def linear(self, x: jax.Array, w: Weight) -> jax.Array:
        """Multiply the last dimension by a weight. Many rows are left to XLA if it is faster."""
        return ops.linear(x, w)

    def sum_rows(self, x: jax.Array) -> jax.Array:
        """Sum over the last dimension, in an order that does not depend on the other rows."""
        return ops.sum_rows(x)

    def grouped_refusal(self, args: GroupedArgs) -> str | None:
        """Return None, because the kernel supports all arrays."""
        del args
        return None

    def grouped_linear(self, args: GroupedArgs) -> jax.Array:
        """Multiply rows by the weights of their groups, which are read from the stack."""
        return ops.grouped_linear(args)

    def is_available(self) -> bool:
        """Return whether this machine has the kernels, or a compiler for them."""
        return library.load(library.Kernel("linear", jnp.dtype(jnp.float32))).target is not None

    def copies_weights(self, dtype: DTypeLike) -> bool:
        """Return whether `linear` converts all weights of this type to float32 first."""
        return ops.copies_weights(dtype)

    def copies_expert_weights(self, dtype: DTypeLike) -> bool:
        """Return whether `grouped_linear` converts all weights of this type to float32 first."""
        return ops.copies_expert_weights(dtype)

    def targets(self) -> list[str]:
        """Return the FFI targets of all kernels of this machine."""
        return library.targets()

    def exporting_for_here(self) -> AbstractContextManager[None]:
        """Let programs exported in this context call kernels, which only this machine has."""
        return ops.exporting_for_here()

    def load_called(self, program: bytes) -> str | None:
        """Load the kernels that a program calls; return the target of an unavailable kernel."""
        return library.load_called(program)

    def is_any_missing(self) -> bool:
        """Return whether a kernel that a program of this process would call is unavailable."""
        return library.is_any_missing()
