"""Launches of kernels in Pallas' Mosaic GPU backend, compiled or in JAX's simulator of a GPU.

The kernels use bulk copies (TMA), which GPUs have since compute capability 9.0. JAX compiles them
for 9.0 (Hopper) and 10.x (data-centre GPUs of the Blackwell generation).

A thread block has one or more warpgroups of 128 threads. The body of a kernel describes the work of
a whole warpgroup. An array is spread over the registers of the threads of the warpgroup, and one of
the threads starts a copy.

The simulator (`plgpu.InterpretGPUParams`) runs on CPUs. It simulates shared memory, barriers and
bulk copies, and can detect races. It runs one thread block after another.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from paged_jax.formatting import listed
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.gpu_device import device
from paged_jax.kernels.opaque_call import only_on
from paged_jax.kernels.problem import Problem

plgpu: Any = None
try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:
    pass

# The kernels are compiled for compute capabilities with these major versions.
_MAJOR_VERSIONS = (9, 10)

# Maximum bytes of shared memory that a kernel can use per thread block. The rest of the shared
# memory is left to Pallas.
MAX_SHARED_MEMORY = 220 * 1024

# A bulk copy moves a box, that is, a rectangular part of an array. A box has at most `MAX_BOX`
# elements in each dimension. The number of bytes in its rows, and between the starts of two rows in
# memory, must be a multiple of `ROW_BYTES`.
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
        capability = ".".join(map(str, gpu.compute_capability))
        name = gpu.kind or "the GPU"
        return f"it is for GPUs of compute capability 9.0 and 10.x, and {name} has {capability}"
    return None


def launch(
    kernel: Callable[..., None],
    name: str,
    *,
    grid: Mapping[str, int],
    arguments: Sequence[Any],
    updated: Sequence[jax.Array] = (),
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    scratch: Sequence[Any] = (),
    num_warpgroups: int = 1,
    interpret: Interpret = False,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Run a Pallas kernel on the GPU, or in JAX's GPU simulator.

    Args:
      kernel: takes refs of `arguments`, `updated`, `outputs` and `scratch`, in this order.
      name: name of the kernel.
      grid: number of thread blocks along each axis. The keys are the names for
        `jax.lax.axis_index`.
      arguments: arrays that the kernel reads, or trees of arrays.
      updated: arrays that the kernel updates in place if the caller donates them.
      outputs: shapes and dtypes of the other results.
      scratch: descriptions of the arrays and barriers in shared memory, or trees of them.
      num_warpgroups: number of warpgroups in a thread block. If there are several, each of them
        runs the body, and ``jax.lax.axis_index("warpgroup")`` is its index.
      interpret: whether to run in the simulator; or parameters of the simulator.

    Returns:
      The outputs, and the new values of `updated`.
    """
    simulator = plgpu.InterpretGPUParams() if interpret is True else interpret or None

    is_single = num_warpgroups == 1
    axis = None if is_single else "warpgroup"

    def body(*refs: Any) -> None:
        scoped = {} if axis is None else {"collective_axes": axis}
        pl.run_scoped(lambda *scratch: kernel(*refs, *scratch), *scratch, **scoped)

    call: Any = pl.kernel(
        body,
        tuple(outputs),
        mesh=plgpu.Mesh(
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=None if is_single else num_warpgroups,
            thread_name=axis,
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=simulator,
        name=name,
    )

    def run(arguments: Sequence[jax.Array], updated: Sequence[jax.Array]) -> Any:
        # The kernel writes its outputs to refs, which need initial values. `run_state` returns the
        # final values of the refs. XLA removes these zeros from the program.
        blank = [jnp.zeros(out.shape, out.dtype) for out in outputs]

        def update(refs: tuple[Sequence[Any], Sequence[Any]]) -> None:
            output_refs, updated_refs = refs
            results = call(*arguments, *updated_refs)
            for ref, result in zip(output_refs, results, strict=True):
                ref[...] = result

        return pl.run_state(update)((blank, list(updated)))

    if interpret:
        return run(list(arguments), list(updated))
    return only_on("cuda", run, list(arguments), list(updated))


class GpuInstructions(NamedTuple):
    """GPU instructions that JAX's simulator cannot run, or cannot check for races.

    Each method also has a form for the simulator. The simulator has `wgmma`, but does not detect
    when a copy overwrites operands that `wgmma` still reads from shared memory. In the simulator,
    the methods therefore load the operands, and multiply the loaded arrays. Unlike `wgmma`, these
    loads need a fence before a bulk copy to the same memory.

    Attributes:
      is_simulated: whether the kernel runs in the simulator.
    """

    is_simulated: bool

    def mma(self, total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return ``total + a @ b`` in float32."""
        if self.is_simulated:
            return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(total, a, b)

    def warpgroup_mma(self, a_ref: Any, b_ref: Any) -> jax.Array:
        """Return ``a @ b`` in float32, computed by `wgmma`; `a` has 64 rows."""
        if self.is_simulated:
            return self._multiply(a_ref[...], b_ref[...])

        def multiply(total_ref: Any) -> jax.Array:
            plgpu.wgmma(total_ref, a_ref, b_ref)
            return total_ref[...]

        shape = a_ref.shape[0], b_ref.shape[1]
        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def warpgroup_mma_add(self, total: jax.Array, a: jax.Array, b_ref: Any) -> jax.Array:
        """Return ``total + a @ b`` in float32, computed by `wgmma`; `a` has 64 rows."""
        if self.is_simulated:
            return total + self._multiply(a, b_ref[...])

        def add(total_ref: Any) -> None:
            plgpu.wgmma(total_ref, a, b_ref)

        return pl.run_state(add)(plgpu.ACC.init(total))

    def _multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return the product of arrays that were loaded in the simulator."""
        plgpu.commit_smem()
        return jnp.dot(a, b, preferred_element_type=jnp.float32)

    def store(self, tile_ref: Any, target_ref: Any) -> None:
        """Copy a tile from shared memory to GPU memory, and wait until it is stored.

        In the simulator, the tile is stored from registers. For a bulk copy, the simulator would
        report a race, because it does not know that `count` orders the bulk copies of one thread
        block before the loads of another.
        """
        if self.is_simulated:
            target_ref[...] = tile_ref[...]
        else:
            plgpu.copy_smem_to_gmem(tile_ref, target_ref)
            plgpu.wait_smem_to_gmem(0)

    def count(
        self, counts_ref: Any, place: tuple[Any, ...], count_ref: Any, arrival: jax.Array
    ) -> None:
        """Increment a counter in GPU memory by 1, and store its previous value in shared memory.

        After the call, all threads see what other thread blocks had stored before they incremented
        the counter (PTX ISA, Memory Consistency Model, "Causality Order").

        Args:
          counts_ref: i32 counters in GPU memory.
          place: index of the counter.
          count_ref: i32 ``[1]`` in shared memory, set to the previous value.
          arrival: the previous value in the simulator, which runs the thread blocks in order. The
            simulator does not increment the counter, because it would report a race for an addition
            that is not atomic.
        """
        if self.is_simulated:
            count_ref[0] = arrival
        else:
            _count(counts_ref.at[place], count_ref)


def _count(counter_ref: Any, count_ref: Any) -> None:
    types = (plgpu.RefType(), plgpu.RefType())

    @plgpu.inline_mgpu(arg_types=types)
    def count(_, counter: Any, previous: Any) -> None:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        # The first barrier waits until all threads have stored their partial results, by bulk
        # copies. Then thread 0 runs a proxy fence, which makes the copies visible to the loads of
        # other threads, and increments the counter. The second barrier ensures that no thread
        # loads results before that.
        utils.warpgroup_barrier()
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [utils.memref_ptr(counter), utils.memref_ptr(previous)],
            "{ .reg .pred first; .reg .u32 thread, old; mov.u32 thread, %tid.x;"
            " setp.eq.u32 first, thread, 0;"
            " @first fence.proxy.async;"
            " @first atom.acq_rel.gpu.global.add.u32 old, [$0], 1;"
            " @first st.shared.u32 [$1], old; }",
            "l,r,~{memory}",
            has_side_effects=True,
        )
        utils.warpgroup_barrier()

    count(counter_ref, count_ref)


# A 128-byte swizzle permutes units of an array in shared memory. A unit has `TILE_ROWS` rows with
# `TILE_LANES` 16-bit elements each.
TILE_ROWS, TILE_LANES = 8, 64


# Maps the dtypes of 8-bit pools that the kernels support to the 16-bit dtypes to which GPUs convert
# them in few instructions. Any other pair of dtypes takes two steps.
WIDER = {"int8": jnp.bfloat16, "float8_e4m3fn": jnp.float16}


def is_narrow(dtype: DTypeLike) -> bool:
    """Return whether the elements of pools or pages of this dtype have 8 bits."""
    return jnp.dtype(dtype).name in WIDER


def attention_refusal(problem: Problem) -> str | None:
    """Return why attention does not support the dtypes or the block size, or None if it does."""
    dtype, q_dtype, C = jnp.dtype(problem.pool_dtype), jnp.dtype(problem.q_dtype), problem["C"]
    if q_dtype not in (jnp.bfloat16, jnp.float16) or dtype.name not in (q_dtype.name, *WIDER):
        pools = listed("of the same dtype", *WIDER)
        return f"queries must be bfloat16 or float16, and pools {pools}, got {q_dtype} and {dtype}"
    if C % TILE_ROWS or C & (C - 1):
        return f"the block size must be a power of two of at least {TILE_ROWS}, got {C}"
    return None


def swizzled(shape: tuple[int, ...], dtype: Any, lanes: int = TILE_LANES) -> Any:
    """Describe an array in shared memory whose rows are swizzled in units of `lanes` elements."""
    transforms = (
        plgpu.TilingTransform((TILE_ROWS, lanes)),
        plgpu.SwizzleTransform(lanes * jnp.dtype(dtype).itemsize),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def widen(x: jax.Array, dtype: Any) -> jax.Array:
    """Convert elements of 8-bit pools to bfloat16 or float16, which represent them exactly."""
    near = WIDER[x.dtype.name]
    x = x.astype(near)
    return x if dtype == near else x.astype(jnp.float32).astype(dtype)


def compute_tanh(x: jax.Array) -> jax.Array:
    """Compute tanh in f32; the GPU's instruction for it is less precise.

    Near 0, ``1 - 2 / (exp(2 * x) + 1)`` would cancel, so the result is an odd polynomial there,
    whose coefficients minimise the largest relative error.
    """
    square = x * x
    factor = square * np.float32(1.724149095e-2) - np.float32(5.304549400e-2)
    for coefficient in (1.332587895e-1, -3.333314390e-1):
        factor = factor * square + np.float32(coefficient)
    far = 1 - 2 / (jnp.exp2(x * np.float32(2 / math.log(2))) + 1)
    return jnp.where(square < 0.25, factor * square * x + x, far)


class AttentionInputs(NamedTuple):
    """Arrays that an attention kernel reads, or refs of them.

    Attributes:
      work: i32 ``[N, fields]``, the work of each thread block in the grid: the fields of a `KVPart`
        or of a `QueryTile`.
      q: ``[tokens, H, D]``, the queries.
      pools: the `Pools`, or the `Pages` of a ragged batch.
      block_tables: i32 ``[B, M]``, block ids of each sequence.
      layer: i32 ``[1]``, index of the layer to read.
      sinks: ``[H]``, attention sinks, or None.
    """

    work: Any
    q: Any
    pools: Any
    block_tables: Any
    layer: Any
    sinks: Any
