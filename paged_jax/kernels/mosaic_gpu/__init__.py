"""Backend ``"mosaic_gpu"`` for NVIDIA GPUs: Pallas kernels, compiled through Mosaic GPU.

JAX deprecated Pallas' Triton backend in 0.11, and this backend takes its place when it is removed.
As long as the Triton backend exists, it is preferred.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax

from paged_jax.kernels.backend import (
    ATTENTION,
    AttentionArgs,
    CopyArgs,
    Op,
    Options,
    Pools,
    Problem,
    RaggedArgs,
    RaggedOptions,
    RopeWriteArgs,
    WriteArgs,
)
from paged_jax.kernels.dispatch import PallasBackend
from paged_jax.kernels.mosaic_gpu import flash_decode, flash_prefill, launch, pool_updates
from paged_jax.kernels.mosaic_gpu.flash_decode import decode
from paged_jax.kernels.mosaic_gpu.flash_prefill import attend_to_chunks, prefill
from paged_jax.kernels.mosaic_gpu.pool_updates import copy_blocks, rope_write, write
from paged_jax.kernels.ragged_chunks import attend_in_parts

__all__ = ["MosaicGpu", "copy_blocks", "decode", "prefill", "rope_write", "write"]


@dataclass(frozen=True)
class MosaicGpu(PallasBackend):
    """The backend ``"mosaic_gpu"``. JAX's simulator of a GPU interprets its kernels."""

    platform: ClassVar[str | None] = "cuda"

    @property
    def missing_ops(self) -> tuple[Op, ...]:
        """The ops that models run on another backend on this GPU."""
        has_prompts = flash_prefill.gpu_refusal(self.interpret) is None
        return () if has_prompts else ("prefill", "ragged")

    def refusal(self, problem: Problem) -> str | None:
        """Return why the kernels cannot solve a problem, or None if they can."""
        if (why_not := launch.refusal(self.interpret)) is not None:
            return why_not
        if problem.op not in ATTENTION:
            return pool_updates.refusal(problem)
        if problem.op != "decode":
            why_not = flash_prefill.refusal(problem, self.interpret)
            if problem.op == "prefill" or why_not is not None:
                return why_not
        return flash_decode.refusal(problem)

    def attend(self, args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
        """Run a decode or a prefill, in one launch."""
        kernel = decode if args.query_lens is None else prefill
        return kernel(args, options, interpret=self.interpret)

    def attend_ragged(
        self, args: RaggedArgs, options: RaggedOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Run single queries in the decode kernel, and longer chunks in the prefill kernel."""
        return attend_in_parts(
            functools.partial(decode, options=options, interpret=self.interpret),
            functools.partial(attend_to_chunks, options=options, interpret=self.interpret),
            args,
        )

    def write(self, args: WriteArgs) -> Pools:
        """Write new tokens, in one launch."""
        return write(args, self.interpret)

    def rope_write(self, args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
        """Normalise, rotate and write, in one launch."""
        return rope_write(args, options, self.interpret)

    def copy_blocks(self, args: CopyArgs) -> Pools:
        """Copy blocks, in one launch."""
        return copy_blocks(args, self.interpret)
