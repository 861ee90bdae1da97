"""Launches of kernels in Pallas' Mosaic GPU backend, compiled or in JAX's simulator of a GPU.

The kernels use bulk copies (TMA), which GPUs have from compute capability 9.0 on. JAX compiles them
for 9.0 (Hopper) and 10.x (Blackwell of data centres).

A thread block is one warpgroup of 128 threads. The body of a kernel is written for the whole
thread block: an array is spread over the registers of its threads, and a copy is started by one of
them.

The simulator (`plgpu.InterpretGPUParams`) runs on CPUs. It simulates shared memory, barriers and
bulk copies, and can detect races. It runs one thread block after another.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.gpu_device import device
from paged_jax.kernels.opaque_call import only_on

plgpu: Any = None
try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:
    pass

# Major versions of the compute capabilities that the kernels are compiled for.
_MAJOR_VERSIONS = (9, 10)

# Shared memory of a thread block on these GPUs, without the part that Pallas uses.
MAX_SHARED_MEMORY = 220 * 1024

# A bulk copy moves a box of at most this many elements in each dimension. The rows of the box, and
# their distance in memory, are multiples of this many bytes.
MAX_BOX = 256
ROW_BYTES = 16


def refusal(interpret: Interpret) -> str | None:
    """Return why the kernels cannot be compiled here, or None if they can.

    Args:
      interpret: whether the kernels run in the simulator, which needs no GPU.
    """
    if not (hasattr(plgpu, "mma") and hasattr(plgpu, "InterpretGPUParams")):
        return f"it needs Pallas' Mosaic GPU backend of jax 0.11.2 or later, got {jax.__version__}"
    gpu = device()
    if not interpret and gpu.compute_capability[0] not in _MAJOR_VERSIONS:
        found = ".".join(map(str, gpu.compute_capability))
        name = gpu.kind or "the GPU"
        return f"it is for GPUs of compute capability 9.0 and 10.x, and {name} has {found}"
    return None


def launch(
    kernel: Callable[..., None],
    name: str,
    *,
    grid: Mapping[str, int],
    arguments: Sequence[jax.Array],
    updated: Sequence[jax.Array] = (),
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    scratch: Sequence[Any] = (),
    interpret: Interpret = False,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Run a kernel.

    Args:
      kernel: takes refs of `arguments`, `updated`, `outputs` and `scratch`, in this order.
      name: name of the kernel.
      grid: number of thread blocks along each axis, by the name that `jax.lax.axis_index` takes.
      arguments: arrays that the kernel reads.
      updated: arrays that the kernel updates in place if the caller donates them.
      outputs: shapes and dtypes of other results.
      scratch: shared memory and barriers.
      interpret: whether to run in the simulator, or its parameters.

    Returns:
      The outputs, and the new values of `updated`.
    """
    simulator = plgpu.InterpretGPUParams() if interpret is True else interpret or None

    def body(*refs: Any) -> None:
        pl.run_scoped(lambda *scoped: kernel(*refs, *scoped), *scratch)

    call: Any = pl.kernel(
        body,
        tuple(outputs),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=simulator,
        name=name,
    )

    def run(arguments: Sequence[jax.Array], updated: Sequence[jax.Array]) -> Any:
        # The kernel updates refs, and `run_state` turns them into results. XLA removes these zeros.
        blank = [jax.numpy.zeros(out.shape, out.dtype) for out in outputs]

        def update(refs: tuple[Sequence[Any], Sequence[Any]]) -> None:
            output_refs, updated_refs = refs
            results = call(*arguments, *updated_refs)
            for ref, result in zip(output_refs, results, strict=True):
                ref[...] = result

        return pl.run_state(update)((blank, list(updated)))

    if interpret:
        return run(list(arguments), list(updated))
    return only_on("cuda", run, list(arguments), list(updated))
