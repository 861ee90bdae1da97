"""Attention on CPUs: a decode by `native/source/decode.cc`, a prefill by `prefill.cc`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.native.kernels import ELEMENTS, NativeKernel, attention_attributes
from paged_jax.kernels.native.library import call, load
from paged_jax.kernels.op_args import AttentionArgs, Options, RaggedArgs, RaggedOptions
from paged_jax.kernels.pools import Pages
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.ragged_chunks import attend_in_parts
from paged_jax.kernels.rounding import round_to
from paged_jax.kernels.xla.attention import attend as plain_attend
from paged_jax.kernels.xla.attention import attend_to_chunks

# Maximum number of elements of a value. The attention kernels have arrays of this size on the stack
# (MAX_U in `source/decode.cc`).
_MAX_VALUE_DIM = 512


def refusal(problem: Problem) -> str | None:
    """Return why the kernels do not support `problem`, or None if they do."""
    if problem.value_dim > _MAX_VALUE_DIM:
        return f"values must have at most {_MAX_VALUE_DIM} elements, got {problem.value_dim}"
    return problem.pool_dtype_refusal(*(dtype.name for dtype in ELEMENTS))


def unavailable(problem: Problem) -> str | None:
    """Compile the kernel for a call; return why that failed, or None if it succeeded."""
    # Ragged batches use the kernel of a decode.
    op = "prefill" if problem.op == "prefill" else "decode"
    return load(NativeKernel(op, jnp.dtype(problem.pool_dtype))).reason


@functools.partial(jax.jit, static_argnames=("options", "is_exact"))
def attend(
    args: AttentionArgs, options: Options, is_exact: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Run a decode by `source/decode.cc`, or a prefill by `source/prefill.cc`.

    If `is_exact` is set, a prefill gives the bits of a decode.
    """
    pools, sinks = args.pools, args.sinks
    is_interleaved = isinstance(pools, Pages)
    keys = pools.kv if isinstance(pools, Pages) else pools.k
    values = keys if isinstance(pools, Pages) or pools.v is None else pools.v
    operands = [args.q.astype(jnp.float32), keys, values, args.block_tables, args.context_lens]
    operands.append(jnp.asarray(args.layer, jnp.int32))
    if pools.k_scale is not None:
        operands += [pools.k_scale, pools.k_scale if pools.v_scale is None else pools.v_scale]
    if sinks is not None:
        operands.append(sinks.astype(jnp.float32))
    if args.query_lens is not None:
        operands.append(args.query_lens)
    attributes = attention_attributes(
        options,
        pools.is_quantised,
        sinks is not None,
        is_interleaved,
        pools.shares_values,
        has_bfloat16_queries=args.q.dtype == jnp.bfloat16,
    )
    if is_exact and args.op == "prefill":
        attributes["is_exact"] = np.int32(1)
    out, lse = call(
        NativeKernel(args.op, pools.dtype),
        tuple(operands),
        plain_attend,
        (args._replace(q=operands[0]),),
        attributes=tuple(attributes.items()),
        options=dataclasses.replace(options, value_scale=1.0),
    )
    out = out * options.value_scale
    # XLA might remove a cast to bfloat16 and back in one program, and not in another.
    out = round_to(out, args.q.dtype) if is_exact else out
    return out.astype(args.q.dtype), lse


def attend_ragged(args: RaggedArgs, options: RaggedOptions) -> tuple[jax.Array, jax.Array]:
    """Attend with single queries by the kernel, and with longer chunks by XLA."""
    return attend_in_parts(attend, attend_to_chunks, args, options)
