"""The kernels of the backend ``"mosaic_tpu"``."""

import functools

import jax

from paged_jax.kernels.backend import Backend, Interpret, Kernel
from paged_jax.kernels.mosaic_tpu import attention, jax_kernels, recurrent, write
from paged_jax.kernels.mosaic_tpu.device import device_refusal
from paged_jax.kernels.op_args import GroupedLinearArgs, Options, RopeWriteArgs
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.state_rows import StateStep
from paged_jax.kernels.xla.rope import rope_then_write


def _ragged_refusal(problem: Problem, interpret: Interpret = False) -> str | None:
    if interpret:
        return "Pallas' interpreter lacks operations of JAX's kernel for TPUs"
    return jax_kernels.ragged_refusal(problem)


def _states_refusal(step: StateStep, interpret: Interpret = False) -> str | None:
    return (None if interpret else device_refusal()) or recurrent.refusal(step)


def _grouped_refusal(args: GroupedLinearArgs, interpret: Interpret = False) -> str | None:
    """Return why JAX's own kernel does not support these arrays, or None if it does."""
    del interpret
    if args.w.scales is not None:
        return f"weights must be floating point, got {args.w.format.code} with scales"
    return jax_kernels.grouped_refusal(args.w.values)


def _grouped_linear(args: GroupedLinearArgs, interpret: Interpret = False) -> jax.Array:
    return jax_kernels.grouped_linear(args.x, args.w.values, args.sizes, interpret=interpret)


def _rope_write(
    args: RopeWriteArgs, options: Options, interpret: Interpret = False
) -> tuple[jax.Array, Pools]:
    return rope_then_write(args, options, functools.partial(write.write, interpret=interpret))


_attention = Kernel(attention.attend, attention.refusal, can_interpret=True)

MOSAIC_TPU = Backend(
    {
        "decode": _attention,
        "prefill": _attention,
        "ragged": Kernel(jax_kernels.attend_ragged, _ragged_refusal, can_interpret=True),
        "write": Kernel(write.write, write.refusal, can_interpret=True),
        "rope_write": Kernel(_rope_write, write.refusal, can_interpret=True),
        "grouped_linear": Kernel(_grouped_linear, _grouped_refusal, can_interpret=True),
        "advance_rows": Kernel(recurrent.advance_rows, _states_refusal, can_interpret=True),
    },
    platform="tpu",
)
