"""Attention by the kernels of `source/decode.cc` and `source/prefill.cc`."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from paged_jax.kernels.backend import AttentionArgs, Options, Pages, Pools, Problem
from paged_jax.kernels.cpu.calls import call
from paged_jax.kernels.cpu.library import ELEMENTS, Kernel, load
from paged_jax.kernels.cpu.self_test import attributes_of
from paged_jax.kernels.dispatch import general_backend

# What the kernels have room for on their stack (MAX_D).
_MAX_HEAD_DIM = 512


def refusal(problem: Problem) -> str | None:
    """Why the kernels cannot do what is asked, or None if they can."""
    if problem["D"] > _MAX_HEAD_DIM:
        return f"its head dimension is at most {_MAX_HEAD_DIM}, not {problem['D']}"
    dtype = jnp.dtype(problem.pool_dtype)
    if dtype not in ELEMENTS:
        return f"its pools are {', '.join(each.name for each in ELEMENTS)}, not {dtype}"
    return None


def unavailable(problem: Problem) -> str | None:
    """Why the kernel cannot be had in this process; it is compiled now if it can."""
    op = "prefill" if problem.op == "prefill" else "decode"
    return load(Kernel(op, jnp.dtype(problem.pool_dtype))).why_not


@functools.partial(jax.jit, static_argnames="options")
def attend(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Decode or prefill."""
    pools, sinks = args.pools, args.sinks
    # Of pages, keys and values are one array.
    arrays = (pools.kv, pools.kv) if isinstance(pools, Pages) else (pools.k, pools.v)
    operands = [args.q.astype(jnp.float32), *arrays, args.block_tables, args.context_lens]
    operands.append(jnp.asarray(args.layer, jnp.int32))
    if pools.k_scale is not None and pools.v_scale is not None:
        operands += [pools.k_scale, pools.v_scale]
    if sinks is not None:
        operands.append(sinks.astype(jnp.float32))
    if args.query_lens is not None:
        operands.append(args.query_lens)
    is_interleaved = isinstance(pools, Pages)
    plain = _Plain(args.op, options, pools.is_quantised, sinks is not None, is_interleaved)
    out, lse = call(Kernel(args.op, pools.dtype), plain, tuple(operands), plain.attributes())
    return (out * options.value_scale).astype(args.q.dtype), lse


@dataclass(frozen=True)
class _Plain:
    """The same over a kernel's operands, in plain JAX."""

    op: Literal["decode", "prefill"]
    options: Options
    has_scales: bool
    has_sinks: bool
    is_interleaved: bool

    def attributes(self):
        """The static numbers of the kernel."""
        options = self.options
        return attributes_of(
            options.scale,
            options.sliding_window,
            options.soft_cap,
            self.has_scales,
            self.has_sinks,
            self.is_interleaved,
        )

    def __call__(self, q, k, v, block_tables, context_lens, layer, *rest):
        rest = list(rest)
        scales = (rest.pop(0), rest.pop(0)) if self.has_scales else (None, None)
        sinks = rest.pop(0) if self.has_sinks else None
        query_lens = rest.pop(0) if self.op == "prefill" else None
        pools = Pages(k) if self.is_interleaved else Pools(k, v, *scales)
        args = AttentionArgs(q, pools, block_tables, context_lens, query_lens, sinks, layer)
        return general_backend().attend(args, dataclasses.replace(self.options, value_scale=1.0))
