"""Kernels that JAX ships for TPUs: ragged paged attention and megablox's grouped matmul.

Ragged batches use pages with interleaved keys and values, because JAX's kernel needs this layout.
Reading it efficiently takes special loads, which the authors of that kernel have tuned.
`attend_ragged` works around its defects. The kernel hangs or gives wrong results if a sequence has
no tokens, or if the last sequences have no queries. It also does not initialise output rows without
a sequence.

The grouped matmul is megablox, after MegaBlocks (Gale et al., 2022, arXiv 2211.15841). XLA's own
`jax.lax.ragged_dot` would copy weights with the layout ``[X, out, in]``. With fewer than 8 rows, it
would multiply by the weights of all groups (TPU v5e, jax 0.10.2 and 0.12.0).
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.mosaic_tpu.kernel import MAX_SCALARS, VMEM_BYTES, dtype_refusal
from paged_jax.kernels.op_args import RaggedArgs, RaggedOptions
from paged_jax.kernels.opaque_call import only_on
from paged_jax.kernels.padding import LANES
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.ragged_chunks import find_chunks, find_rows

try:
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_attention
except ImportError:
    jax_attention = None

_gmm: Any = None
try:
    # Import the module `gmm` by its full name, because its package also has a function called
    # `gmm`.
    _gmm = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm").gmm
except (ImportError, AttributeError):
    pass

# Tile sizes of JAX's attention kernel: number of tokens in a tile of queries (the kernel's
# default), and bytes of a tile of keys and values (VMEM holds two such tiles). Always pass the
# sizes to the kernel, because it would otherwise query the local TPU to find its defaults.
_TILE_QUERIES = 32
_TILE_BYTES = 4 << 20

# Tile sizes of the grouped matmul. The number of rows of `x` must be a multiple of 16, because a
# register holds 16 rows of the narrowest dtype. A tile of weights and a tile of `x` have at most 2
# MiB each, because the 16 MiB of VMEM hold two of each.
_GROUPED_ROWS, _MAX_GROUPED_ROWS = 16, 128
_GROUPED_TILE_BYTES = 2 << 20


def ragged_refusal(problem: Problem) -> str | None:
    """Return why JAX's kernel does not support a ragged batch, or None if it does."""
    if jax_attention is None:
        return f"jax {jax.__version__} has no kernel for ragged batches"
    if problem.shares_values:
        return "JAX's kernel needs values that are not a part of the keys"
    if problem.has_sinks:
        return "JAX's kernel has no attention sinks"
    if isinstance(problem.options, RaggedOptions) and problem.options.return_lse:
        return "JAX's kernel does not return the log-sum-exp"
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return "JAX's kernel cannot be traced under jax_enable_x64"
    if problem["D"] != LANES:
        return f"the head dimension must be {LANES}, got {problem['D']}"
    if (reason := dtype_refusal(problem, "float8_e4m3fn", "float8_e5m2")) is not None:
        return reason
    if jnp.dtype(problem.pool_dtype).itemsize > jnp.dtype(problem.q_dtype).itemsize:
        return f"pages of {problem.pool_dtype} would be rounded to {problem.q_dtype}"
    K, packing = problem["K"], 4 // jnp.dtype(problem.pool_dtype).itemsize
    rows = 2 * K // packing
    if 2 * K % packing or not (rows in (1, 2, 4) or rows % 8 == 0):
        return f"keys and values of {K} heads do not fill registers of {problem.pool_dtype}"
    num_scalars = problem["B"] * (problem["M"] + 2)
    if num_scalars > MAX_SCALARS:
        return f"tables must fit scalar memory, {MAX_SCALARS} entries, got {num_scalars}"
    return None


@functools.partial(jax.jit, static_argnames="options")
def attend_ragged(args: RaggedArgs, options: RaggedOptions) -> tuple[jax.Array, jax.Array]:
    """Run a ragged batch in JAX's kernel. It returns no log-sum-exp, so `lse` contains NaN."""
    chunks = find_chunks(args)
    # Work around two defects of JAX's kernel: leave out all sequences after the last sequence with
    # queries, and give each sequence at least one token.
    index = jnp.arange(len(chunks.lens), dtype=jnp.int32)
    num_sequences = jnp.max(jnp.where(chunks.lens > 0, index + 1, 0), keepdims=True)

    context_lens = jnp.maximum(args.context_lens, 1)
    jax_args = args._replace(context_lens=context_lens, num_sequences=num_sequences)
    out = lax.cond(
        num_sequences[0] > 0, lambda: _call_jax(jax_args, options), lambda: jnp.zeros_like(args.q)
    )
    if options.value_scale != 1.0:
        out = (out.astype(jnp.float32) * options.value_scale).astype(out.dtype)
    return find_rows(args, chunks).mask(out, jnp.full(args.q.shape[:2], jnp.nan, jnp.float32))


def _call_jax(args: RaggedArgs, options: RaggedOptions) -> jax.Array:
    assert jax_attention is not None
    pages = args.pages.kv
    _, C, K2, D = pages.shape
    M = args.block_tables.shape[1]
    num_blocks = options.num_kv_pages_per_block
    if num_blocks is None:
        num_blocks = max(_TILE_BYTES // (C * K2 * D * pages.dtype.itemsize), 1)
    # JAX's kernel converts the pages to the dtype of the queries only if it gets a scale.
    convert = None if pages.dtype == args.q.dtype else 1.0
    attend = functools.partial(
        jax_attention.ragged_paged_attention,
        sm_scale=options.scale,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
        k_scale=convert,
        v_scale=convert,
        num_kv_pages_per_block=min(num_blocks, M),
        num_queries_per_block=options.num_queries_per_block or _TILE_QUERIES,
        vmem_limit_bytes=options.vmem_limit_bytes or VMEM_BYTES,
    )
    operands = args.q, pages, args.context_lens, args.block_tables, args.cu_query_lens
    return only_on("tpu", _on_some_tpu(attend), *operands, args.num_sequences)


def _on_some_tpu(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wrap `function` so that it runs under a mesh that names a TPU, if there is no TPU.

    Pallas needs the TPU generation when it lowers the kernel. "TPU v5 lite" is the oldest supported
    generation, and the kernel uses no feature that this generation lacks.
    """
    mesh = get_abstract_mesh()
    if jax.default_backend() == "tpu" or not mesh.empty or mesh.abstract_device is not None:
        return function
    tpu = AbstractMesh((), (), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))

    def named(*args: jax.Array) -> jax.Array:
        with use_abstract_mesh(tpu):
            return function(*args)

    return named


def grouped_refusal(w: Any) -> str | None:
    """Return why megablox does not support weights ``[X, out, in]``, or None if it does."""
    if _gmm is None:
        return f"jax {jax.__version__} has no megablox"
    if w.dtype not in (jnp.float32, jnp.bfloat16):
        return f"weights must be float32 or bfloat16, got {w.dtype}"
    return None


def grouped_linear(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, interpret: Interpret = False
) -> jax.Array:
    """Multiply rows by the weights of their groups, see `paged_jax.kernels.grouped_linear`."""
    R, (_, N, K) = x.shape[0], w.shape
    tiling = choose_grouped_tiling(R, K, N, w.dtype)
    padding = -R % tiling[0]
    # Use the highest precision for float32. By default, TPUs round float32 operands to bfloat16.
    with jax.default_matmul_precision("highest" if w.dtype == jnp.float32 else "default"):
        multiply = functools.partial(
            _gmm,
            preferred_element_type=jnp.float32,
            tiling=tiling,
            transpose_rhs=True,
            interpret=bool(interpret),
        )
        if not interpret:
            multiply = functools.partial(only_on, "tpu", multiply)
        out = multiply(jnp.pad(x.astype(w.dtype), ((0, padding), (0, 0))), w, group_sizes)
    # The kernel does not initialise rows without a group.
    is_of_group = jnp.arange(R, dtype=jnp.int32) < jnp.sum(group_sizes)
    return jnp.where(is_of_group[:, None], out[:R], 0)


def choose_grouped_tiling(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: Any
) -> tuple[int, int, int]:
    """Choose the tile of a grid step: number of rows of `x`, of inputs, and of outputs.

    For each tile of outputs, the grid steps of a group are consecutive. If a tile has all inputs,
    the weights of a group are therefore copied to VMEM only once. Otherwise they are copied for
    each tile of rows of `x`. Weights of groups without rows are never copied.

    Example:
      >>> choose_grouped_tiling(64, 2880, 5760, jnp.bfloat16)  # all inputs fit
      (64, 2880, 256)
      >>> choose_grouped_tiling(512, 14336, 4096, jnp.bfloat16)
      (128, 1024, 1024)
    """
    tile_rows = min(_MAX_GROUPED_ROWS, math.ceil(num_rows / _GROUPED_ROWS) * _GROUPED_ROWS)
    elements = _GROUPED_TILE_BYTES // jnp.dtype(dtype).itemsize
    outputs_of_whole_rows = elements // num_inputs // LANES * LANES
    if outputs_of_whole_rows and tile_rows * num_inputs <= elements:
        return tile_rows, num_inputs, min(num_outputs, outputs_of_whole_rows)
    side = math.isqrt(elements) // LANES * LANES
    return tile_rows, min(num_inputs, side), min(num_outputs, side)
