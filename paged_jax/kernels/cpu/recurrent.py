"""Steps of recurrent layers on CPUs, in place in their pool: `native/source/*_step.cc`."""

import jax
import jax.numpy as jnp

from paged_jax.kernels.native.kernels import STATE_DTYPES, FloatOp, NativeKernel
from paged_jax.kernels.native.library import Arrays, call
from paged_jax.kernels.state_rows import ConvolutionStep, RecurrentStep, StateStep
from paged_jax.kernels.xla.recurrent import advance_rows as plain_advance_rows

# Maximum number of elements of a key. The kernel has arrays of this size on the stack (MAX_D in
# `native/source/recurrent_step.cc`).
_MAX_KEY_DIM = 1024


def _state_op(step: StateStep) -> FloatOp:
    """Return the op of the kernel for a step of recurrent layers."""
    return "convolution_step" if isinstance(step, ConvolutionStep) else "recurrent_step"


def refusal(step: StateStep) -> str | None:
    """Return why the kernels do not support a step of recurrent layers, or None if they do."""
    dtype = step.rows.pool.dtype
    if dtype not in STATE_DTYPES[_state_op(step)]:
        return f"states must be float32, or any float dtype for convolutions, got {dtype}"
    if step.rows.pool.shape[2:] != step.state_shape:
        return "states must not be padded"
    if isinstance(step, RecurrentStep) and step.k.shape[-1] > _MAX_KEY_DIM:
        return f"keys must have at most {_MAX_KEY_DIM} elements, got {step.k.shape[-1]}"
    return None


def advance_rows(step: StateStep) -> tuple[jax.Array, jax.Array]:
    """Run a step of recurrent layers by `source/*_step.cc`, which updates the pool in place."""
    rows, pool = step.rows, step.rows.pool
    if isinstance(step, ConvolutionStep):
        F = step.x.shape[1]
        bias = jnp.zeros(F, jnp.float32) if step.bias is None else step.bias
        filters = step.weight.astype(jnp.float32).T
        x = step.x.astype(pool.dtype)
        arrays: Arrays = (x, filters, bias.astype(jnp.float32), step.num_tokens)
    else:
        arrays = tuple(x for x in step[1:] if x is not None)
    operands = (pool, jnp.asarray(rows.layer, jnp.int32), rows.sources, rows.entries, *arrays)
    kernel = NativeKernel(_state_op(step), pool.dtype)
    pool, out = call(kernel, operands, _plain_step, (step,), is_in_place=True)
    return out, pool


def _plain_step(step: StateStep) -> tuple[jax.Array, jax.Array]:
    out, pool = plain_advance_rows(step)
    return pool, out
