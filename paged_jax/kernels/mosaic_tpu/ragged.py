"""Ragged batches on TPUs: by the kernel that JAX has for their layout.

Keys and values in turn along an axis of 8 or 16 rows of a register want loads of their own, which
that kernel has and which its authors tune. Here is what it must be kept from: it starts a copy for
each sequence up to their number, and hangs on, or mistakes, those without tokens and those at the
end without queries; and it leaves rows of no sequence as they were.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh

from paged_jax.kernels.backend import Problem, RaggedArgs, RaggedOptions
from paged_jax.kernels.mosaic_tpu.kernel import VMEM_BYTES
from paged_jax.kernels.opaque_call import only_on
from paged_jax.kernels.pool_format import LANES
from paged_jax.kernels.ragged_batch import find_chunks, find_rows

try:
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_kernel
except ImportError:
    jax_kernel = None

_Q_DTYPES = ("bfloat16", "float32")
_PAGE_DTYPES = (*_Q_DTYPES, "float8_e4m3fn", "float8_e5m2")

# Words of scalar memory that tables and lengths have, of the 2**18 that there are.
_MAX_SCALARS = (1 << 18) - (1 << 13)

# Its own choice asks which TPU this process has. Tokens of a tile of queries: what it takes where
# it knows no better. Bytes of a tile of keys and values, of which two are in VMEM.
_TILE_QUERIES = 32
_TILE_BYTES = 4 << 20


def refusal(problem: Problem) -> str | None:
    """Why JAX's kernel cannot do what is asked, in a sentence; None where it can."""
    if jax_kernel is None:
        return f"jax {jax.__version__} has no kernel for ragged batches"
    if problem.has_sinks:
        return "JAX's kernel has no attention sinks"
    if isinstance(problem.options, RaggedOptions) and problem.options.return_lse:
        return "JAX's kernel does not return the log-sum-exp"
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return "JAX's kernel cannot be traced where numbers have 64 bits"
    if problem["D"] != LANES:
        return f"the head dimension must be {LANES}, got {problem['D']}"
    for name, dtype, known in (
        ("queries", problem.q_dtype, _Q_DTYPES),
        ("pages", problem.pool_dtype, _PAGE_DTYPES),
    ):
        if jnp.dtype(dtype).name not in known:
            return f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {dtype}"
    if jnp.dtype(problem.pool_dtype).itemsize > jnp.dtype(problem.q_dtype).itemsize:
        return f"pages of {problem.pool_dtype} would be rounded to {problem.q_dtype}"
    K, packing = problem["K"], 4 // jnp.dtype(problem.pool_dtype).itemsize
    rows = 2 * K // packing
    if 2 * K % packing or not (rows in (1, 2, 4) or rows % 8 == 0):
        return f"keys and values of {K} heads do not fill registers of {problem.pool_dtype}"
    num_scalars = problem["B"] * (problem["M"] + 2)
    if num_scalars > _MAX_SCALARS:
        return f"tables must fit scalar memory, {_MAX_SCALARS} entries, got {num_scalars}"
    return None


@functools.partial(jax.jit, static_argnames="options")
def attend_ragged(args: RaggedArgs, options: RaggedOptions) -> tuple[jax.Array, jax.Array]:
    """Attend with chunks of any lengths. The log-sum-exp is NaN: see `refusal`."""
    chunks = find_chunks(args)
    # Those behind the last sequence with queries are left out, and none is without tokens.
    index = jnp.arange(len(chunks.lens), dtype=jnp.int32)
    num_sequences = jnp.max(jnp.where(chunks.lens > 0, index + 1, 0), keepdims=True)

    context_lens = jnp.maximum(args.context_lens, 1)
    whole = args._replace(context_lens=context_lens, num_sequences=num_sequences)
    out = lax.cond(
        num_sequences[0] > 0, lambda: _call_jax(whole, options), lambda: jnp.zeros_like(args.q)
    )
    if options.value_scale != 1.0:
        out = (out.astype(jnp.float32) * options.value_scale).astype(out.dtype)
    return find_rows(args, chunks).mask(out, jnp.full(args.q.shape[:2], jnp.nan, jnp.float32))


def _call_jax(args: RaggedArgs, options: RaggedOptions) -> jax.Array:
    assert jax_kernel is not None
    pages = args.pages.kv
    _, C, K2, D = pages.shape
    M = args.block_tables.shape[1]
    num_blocks = options.num_kv_pages_per_block
    if num_blocks is None:
        num_blocks = max(_TILE_BYTES // (C * K2 * D * pages.dtype.itemsize), 1)
    # With a scale it converts what it reads to the type of the queries.
    convert = None if pages.dtype == args.q.dtype else 1.0
    attend = functools.partial(
        jax_kernel.ragged_paged_attention,
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
    """Return `function` under a mesh that names a TPU, if neither JAX nor the mesh has one.

    Pallas needs the TPU generation when it lowers the kernel. "TPU v5 lite" is the oldest supported
    generation, and the kernel uses no feature that it lacks.
    """
    mesh = get_abstract_mesh()
    if jax.default_backend() == "tpu" or not mesh.empty or mesh.abstract_device is not None:
        return function
    tpu = AbstractMesh((), (), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))

    def named(*args: jax.Array) -> jax.Array:
        with use_abstract_mesh(tpu):
            return function(*args)

    return named
