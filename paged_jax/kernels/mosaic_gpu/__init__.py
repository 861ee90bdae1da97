"""Backend ``"mosaic_gpu"`` for NVIDIA GPUs: Pallas kernels, compiled through Mosaic GPU.

JAX deprecated Pallas' Triton backend in 0.11. As long as JAX has it, paged_jax prefers ``"triton"``
on GPUs, except for calls for which ``"mosaic_gpu"`` was measured to be at least as fast, see
`paged_jax.kernels.gpu_defaults`. When JAX removes it, ``"mosaic_gpu"`` becomes the default for
GPUs.
"""

from dataclasses import dataclass
from typing import ClassVar

from paged_jax.kernels.backend import ATTENTION, Op, Problem
from paged_jax.kernels.gpu_device import GpuBackend
from paged_jax.kernels.mosaic_gpu import (
    flash_decode,
    flash_prefill,
    launch,
    pool_updates,
    rope_update,
)
from paged_jax.kernels.mosaic_gpu.flash_decode import decode
from paged_jax.kernels.mosaic_gpu.flash_prefill import attend_to_chunks, prefill
from paged_jax.kernels.mosaic_gpu.pool_updates import copy_blocks, write
from paged_jax.kernels.mosaic_gpu.rope_update import rope_write

__all__ = ["MosaicGpu", "copy_blocks", "decode", "prefill", "rope_write", "write"]


@dataclass(frozen=True)
class MosaicGpu(GpuBackend):
    """The backend ``"mosaic_gpu"``. With `interpret`, its kernels run in JAX's GPU simulator."""

    name: ClassVar = "mosaic_gpu"
    kernels: ClassVar = {
        "decode": decode,
        "prefill": prefill,
        "attend_to_chunks": attend_to_chunks,
        "write": write,
        "rope_write": rope_write,
        "copy_blocks": copy_blocks,
    }

    @property
    def missing_ops(self) -> tuple[Op, ...]:
        """Ops that the kernels do not support on this GPU. Models run them on other backends."""
        has_prompts = flash_prefill.gpu_refusal(self.interpret) is None
        return () if has_prompts else ("prefill", "ragged")

    def refusal(self, problem: Problem) -> str | None:
        """Return why the kernels do not support `problem`, or None if they do."""
        if (why_not := launch.refusal(self.interpret)) is not None:
            return why_not
        if problem.op == "rope_write":
            return rope_update.refusal(problem)
        if problem.op not in ATTENTION:
            return pool_updates.refusal(problem)
        if problem.op != "decode":
            why_not = flash_prefill.refusal(problem, self.interpret)
            if problem.op == "prefill" or why_not is not None:
                return why_not
        return flash_decode.refusal(problem)
