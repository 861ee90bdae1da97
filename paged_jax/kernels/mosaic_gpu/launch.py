"""Launches of kernels in Pallas' Mosaic GPU backend, compiled or in JAX's simulator of a GPU.

The kernels use bulk copies (TMA), which GPUs have from compute capability 9.0 on. JAX compiles them
for 9.0 (Hopper) and 10.x (Blackwell of data centres).

A thread block has one or more warpgroups of 128 threads. The body of a kernel is written for a
warpgroup: an array is spread over the registers of its threads, and a copy is started by one of
them.

The simulator (`plgpu.InterpretGPUParams`) runs on CPUs. It simulates shared memory, barriers and
bulk copies, and can detect races. It runs one thread block after another.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.gpu_device import KVPart, KVSplit, device
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
    arguments: Sequence[Any],
    updated: Sequence[jax.Array] = (),
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    scratch: Sequence[Any] = (),
    num_warpgroups: int = 1,
    interpret: Interpret = False,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Run a kernel.

    Args:
      kernel: takes refs of `arguments`, `updated`, `outputs` and `scratch`, in this order.
      name: name of the kernel.
      grid: number of thread blocks along each axis, by the name that `jax.lax.axis_index` takes.
      arguments: arrays that the kernel reads, or trees of arrays.
      updated: arrays that the kernel updates in place if the caller donates them.
      outputs: shapes and dtypes of other results.
      scratch: shared memory and barriers.
      num_warpgroups: number of warpgroups in a thread block. If there are several, the body runs
        in each of them, and `jax.lax.axis_index` of ``"warpgroup"`` is different in each.
      interpret: whether to run in the simulator, or its parameters.

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
        # The kernel updates refs, and `run_state` turns them into results. XLA removes these zeros.
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
    """GPU instructions, with an equivalent form for the simulator, which lacks them.

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
        """Return ``a @ b`` in float32 by `wgmma`; `a` has 64 rows."""

        def multiply(total_ref: Any) -> jax.Array:
            plgpu.wgmma(total_ref, a_ref, b_ref)
            return total_ref[...]

        shape = a_ref.shape[0], b_ref.shape[1]
        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def warpgroup_mma_add(
        self, total: jax.Array, a: jax.Array, b_ref: Any, a_ref: Any
    ) -> jax.Array:
        """Return ``total + a @ b`` in float32 by `wgmma`; `a` has 64 rows.

        The simulator multiplies only from memory, so it stores `a` in `a_ref`.
        """
        if self.is_simulated:
            a_ref[...] = a
            plgpu.commit_smem()
            return total + self.warpgroup_mma(a_ref, b_ref)

        def add(total_ref: Any) -> None:
            plgpu.wgmma(total_ref, a, b_ref)

        return pl.run_state(add)(plgpu.ACC.init(total))

    def store(self, tile_ref: Any, target_ref: Any) -> None:
        """Copy a tile of shared memory to memory, and wait until it is stored.

        The simulator does not know that `count` orders bulk copies of a thread block before loads
        of another, so it stores from registers.
        """
        if self.is_simulated:
            target_ref[...] = tile_ref[...]
        else:
            plgpu.copy_smem_to_gmem(tile_ref, target_ref)
            plgpu.wait_smem_to_gmem(0)

    def count(
        self, counts_ref: Any, place: tuple[Any, ...], count_ref: Any, arrival: jax.Array
    ) -> None:
        """Increment a counter in memory by 1, and store its previous value in shared memory.

        All threads then see what other thread blocks stored before they incremented the counter.
        (PTX ISA, Memory Consistency Model, "Causality Order".)

        Args:
          counts_ref: i32 counters in memory.
          place: index of the counter.
          count_ref: i32 ``[1]`` in shared memory.
          arrival: the previous value if thread blocks run in order. The simulator takes it, because
            it runs them in order, and would report a race for an addition that is not atomic.
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

        # Partial results were stored by bulk copies, which the proxy fence orders with the loads of
        # other threads. Thread 0 counts between two barriers, so all threads have stored before the
        # first barrier, and none loads before the second.
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


# Rows of a tile in shared memory with a swizzle of 128 bytes, and 16-bit elements in its lanes.
TILE_ROWS, TILE_LANES = 8, 64

# Columns of an `mma` instruction, and rows of the `mma` instructions of four warps.
MMA_COLUMNS, MMA_ROWS = 8, 64

# Maximum query heads of a thread block.
_MAX_SLICE = 2 * MMA_COLUMNS
# With smaller slices of large groups, most of the columns would be padding.
MIN_SLICE = 4

# Maximum lanes of a piece of keys or values. With larger pieces, wide heads spill registers. The
# queries of wider heads than `WIDE` do not fit the registers.
_PIECE, WIDE = 128, 256

# Bytes of K and V in the tiles of a loop step, and the number of steps in the ring. Two thread
# blocks fit an SM.
_STEP_BYTES = 32 * 1024
_NUM_STAGES = 3


class DecodeSizes(NamedTuple):
    """Static sizes of a launch.

    Attributes:
      split: how the batch is split.
      block_size: tokens in a block (C).
      head_dim: elements of a key (D).
      value_dim: elements of a value (U).
      shares_values: whether values are the first elements of keys.
      num_stages: number of tiles in the ring.
      slice_size: query heads of a thread block, a divisor of the group of a KV head.
    """

    split: KVSplit
    block_size: int
    head_dim: int
    value_dim: int
    shares_values: bool
    num_stages: int
    slice_size: int

    @classmethod
    def choose(
        cls, B: int, M: int, G: int, C: int, D: int, U: int, shares_values: bool, window: int | None
    ) -> "DecodeSizes":
        """Choose the tiles of a call. The batch is not split yet."""
        token_bytes = 2 * (D if shares_values else D + U)
        fitting = 1 << ((_STEP_BYTES // token_bytes).bit_length() - 1)
        # The rows of the first matmul are the tokens of a step.
        step_tokens = max(fitting, MMA_ROWS)
        split = KVSplit(B, 0, step_tokens, M * C, window, min(C, step_tokens))
        stages = _NUM_STAGES if step_tokens * token_bytes <= _STEP_BYTES else 2
        most = MMA_COLUMNS if max(D, U) > WIDE else _MAX_SLICE
        slice_size = max(size for size in range(1, min(G, most) + 1) if G % size == 0)
        return cls(split, C, D, U, shares_values, stages, slice_size)

    @property
    def value_lanes(self) -> list[tuple[int, int]]:
        """Start and size of the pieces of a value, which are copied and multiplied in turn."""
        return cut_lanes(0, self.value_dim)

    @property
    def key_lanes(self) -> list[tuple[int, int]]:
        """Start and size of the pieces of a key. If keys contain values, those come first."""
        if self.shares_values:
            return self.value_lanes + cut_lanes(self.value_dim, self.head_dim)
        return cut_lanes(0, self.head_dim)

    @property
    def step_tokens(self) -> int:
        """Tokens in a loop step (T)."""
        return self.split.step_tokens

    @property
    def copy_rows(self) -> int:
        """Tokens in a bulk copy: a block, or a part of it that fills a tile."""
        return self.split.alignment

    def shared_memory(self) -> int:
        """Return the bytes of shared memory of a thread block."""
        columns = pl.cdiv(self.slice_size, MMA_COLUMNS) * MMA_COLUMNS
        tile = self.step_tokens * (self.head_dim + (0 if self.shares_values else self.value_dim))
        queries = columns * (self.head_dim + self.value_dim + 2 * self.step_tokens)
        return 2 * (self.num_stages * tile + queries) + 4 * columns * (self.value_dim + 1)


def cut_lanes(start: int, end: int) -> list[tuple[int, int]]:
    """Cut a range of lanes into pieces, as start and size."""
    return [(begin, min(_PIECE, end - begin)) for begin in range(start, end, _PIECE)]


class AttentionInputs(NamedTuple):
    """Arrays that an attention kernel reads, or refs of them.

    Attributes:
      work: i32 ``[N, fields]``, what each thread block in the grid computes: the fields of a
        `KVPart` or a `QueryTile`.
      q: ``[tokens, H, D]``.
      pools: the pools, or pages.
      block_tables: i32 ``[B, M]``.
      layer: i32 ``[1]``.
      sinks: ``[H]``, or None.
    """

    work: Any
    q: Any
    pools: Any
    block_tables: Any
    layer: Any
    sinks: Any


class SharedTiles(NamedTuple):
    """Shared memory of a thread block.

    Attributes:
      k: ``[stages, T, size]`` for each piece of the keys, ring of tiles.
      v: ``[stages, T, size]`` for each piece of the values; empty if the keys contain the values.
      is_full: barriers of the tiles in the ring, passed when a tile has been copied.
      q: ``[R, size]`` for each piece of the queries, like the keys.
      weights: ``[2, R, T]``, weights of a step, and their rounding errors.
      sums: f32 ``[R / 8, U, 8]``, the output in the arrangement of registers.
      out: ``[R, size]`` for each piece of the output, like the values.
      rows: f32 ``[R / 8, 8]``, the sink of each query head, and then its log-sum-exp.
      count: i32 ``[1]``, previous value of the counter of the sequence.
      is_loaded: barrier of the queries.
    """

    k: Any
    v: Any
    is_full: Any
    q: Any
    weights: Any
    sums: Any
    out: Any
    rows: Any
    count: Any
    is_loaded: Any


def shared_tiles(sizes: DecodeSizes, num_groups: int, dtype: Any) -> SharedTiles:
    """Describe the shared memory of a thread block, for `launch`."""
    R = num_groups * MMA_COLUMNS
    T, U, stages = sizes.step_tokens, sizes.value_dim, sizes.num_stages
    key_lanes, value_lanes = sizes.key_lanes, [] if sizes.shares_values else sizes.value_lanes
    num_copies = T // sizes.copy_rows * len(key_lanes + value_lanes)
    swizzled = functools.partial(
        plgpu.SMEM,
        dtype=dtype,
        transforms=(
            plgpu.TilingTransform((TILE_ROWS, TILE_LANES)),
            plgpu.SwizzleTransform(2 * TILE_LANES),
        ),
    )
    return SharedTiles(
        k=tuple(swizzled((stages, T, size)) for _, size in key_lanes),
        v=tuple(swizzled((stages, T, size)) for _, size in value_lanes),
        is_full=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        q=tuple(plgpu.SMEM((R, size), dtype) for _, size in key_lanes),
        weights=swizzled((2, R, T)),
        sums=plgpu.SMEM((num_groups, U, MMA_COLUMNS), jnp.float32),
        out=tuple(plgpu.SMEM((R, size), dtype) for _, size in sizes.value_lanes),
        rows=plgpu.SMEM((num_groups, MMA_COLUMNS), jnp.float32),
        count=plgpu.SMEM((1,), jnp.int32),
        is_loaded=plgpu.Barrier(num_arrivals=len(key_lanes)),
    )


class TileCopies(NamedTuple):
    """Bulk copies of the blocks of a part into the ring of a thread block."""

    inputs: AttentionInputs
    part: KVPart
    place: jax.Array
    sizes: DecodeSizes
    shared: SharedTiles

    @property
    def head(self) -> jax.Array:
        """The KV head of the thread block."""
        group = self.inputs.q.shape[1] // self.inputs.pools.num_kv_heads
        return lax.div(self.place, jnp.int32(group // self.sizes.slice_size))

    @property
    def first_query_head(self) -> jax.Array:
        """The first query head of the thread block."""
        return self.place * self.sizes.slice_size

    @property
    def query_heads(self) -> Any:
        """The query heads of the thread block."""
        return pl.ds(self.first_query_head, self.sizes.slice_size)

    def slot(self, step: jax.Array) -> jax.Array:
        """Return the place of a step in the ring."""
        return lax.rem(step - self.part.begin, jnp.int32(self.sizes.num_stages))

    def start_first(self) -> None:
        """Start the copies of the queries, and of the steps that fill the ring."""
        rows, queries = pl.ds(0, self.sizes.slice_size), self.inputs.q
        for lanes, piece in zip(self.sizes.key_lanes, self.shared.q, strict=True):
            plgpu.copy_gmem_to_smem(
                queries.at[self.part.sequence, self.query_heads, pl.ds(*lanes)],
                piece.at[rows],
                self.shared.is_loaded,
            )
        steps = [self.part.begin + turn for turn in range(self.sizes.num_stages)]
        for step, blocks in zip(steps, [self.load_blocks(step) for step in steps], strict=True):
            self.start(step, blocks)

    def load_blocks(self, step: jax.Array) -> list[jax.Array]:
        """Return the blocks of a step, or block 0 past the end of the sequence."""
        tables = self.inputs.block_tables
        blocks = []
        for token in self._tokens(step):
            entry = lax.div(token, jnp.int32(self.sizes.block_size))
            block = tables[self.part.sequence, jnp.minimum(entry, tables.shape[1] - 1)]
            blocks.append(jnp.where(token < self.part.length, block, 0))
        return blocks

    def start(self, step: jax.Array, blocks: list[jax.Array]) -> None:
        """Start the copies of a step, unless it is after the last step of the part."""
        rows, slot, layer = self.sizes.copy_rows, self.slot(step), self.inputs.layer[0]
        rings = [("k", *ring) for ring in zip(self.sizes.key_lanes, self.shared.k, strict=True)]
        # If the keys contain the values, there are no rings of values.
        rings += [("v", *ring) for ring in zip(self.sizes.value_lanes, self.shared.v)]  # noqa: B905

        @pl.when(step < self.part.end)
        def _():
            for turn, (token, block) in enumerate(zip(self._tokens(step), blocks, strict=True)):
                offset: Any = 0
                if rows < self.sizes.block_size:
                    offset = lax.rem(token, jnp.int32(self.sizes.block_size))
                    offset = pl.multiple_of(offset, rows)
                tokens = pl.ds(offset, rows)
                for half, lanes, ring in rings:
                    pool, place = self.inputs.pools.place(half, layer, block, self.head, tokens)
                    plgpu.copy_gmem_to_smem(
                        pool.at[(*place, pl.ds(*lanes))],
                        ring.at[slot, pl.ds(turn * rows, rows)],
                        self.shared.is_full.at[slot],
                    )

    def _tokens(self, step: jax.Array) -> list[jax.Array]:
        """Return the position of the first token of each bulk copy of a loop step."""
        rows = self.sizes.copy_rows
        first = self.part.first + step * self.sizes.step_tokens
        return [first + turn * rows for turn in range(self.sizes.step_tokens // rows)]
