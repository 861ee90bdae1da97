# pyright: strict, reportUnknownMemberType=false
"""Attention of whole sequences without a cache, by the op that an engine uses for prompts.

Keys and values are rounded to the dtype of the engine's cache, and passed to the op as pools with
the blocks of each sequence in order. With an exact backend, the result therefore has the bits of
the same tokens in an engine. It is differentiable. `CausalAttention` instead uses attention of
JAX, which rounds and sums differently.
"""

import functools
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from paged_jax.kernels.attention import chunked_prefill_attention, paged_prefill_attention
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op import backend_for, is_exact
from paged_jax.models.config import ModelConfig
from paged_jax.models.layer_attention import Heads, LayerInputs, Projection, Reach, Recurrence

# Keys and values of a layer, ``[B, T, K, D]``. The values are None if they are a part of the keys.
_KeysAndValues = tuple[jax.Array, jax.Array | None]

# Carry of the layers: the keys and values that later layers read, with the layers that made them.
_Carry = tuple[tuple[int, _KeysAndValues], ...]


@dataclass(frozen=True)
class SequenceAttention:
    """Attention of whole sequences, which start at position 0, see `layer_attention.Attend`.

    The inputs of layers are ``[B, T, ...]``, or ``[B * T, ...]``. The first layer gets the empty
    tuple as carry.

    Attributes:
      config: configuration of the model.
      num_tokens: i32 ``[B]``, number of tokens in each row, at most T. The output of padding is 0.
      cache_dtype: dtype to which keys and values are rounded, see `KVDtype`. Gradients ignore this
        rounding.
      backend: backend of the attention, see `paged_attention`.
    """

    config: ModelConfig
    num_tokens: jax.Array
    cache_dtype: DTypeLike
    backend: str | None

    def __call__(
        self, layer: int | jax.Array, inputs: LayerInputs, carry: _Carry
    ) -> tuple[jax.Array, _Carry]:
        """Run the attention or the recurrence of a layer."""
        num_tokens, backend, kv_dtype = self.num_tokens, self.backend, KVDtype.of(self.cache_dtype)
        B = num_tokens.shape[0]
        if isinstance(inputs, Recurrence):
            states = inputs.initial_states(B, kv_dtype.query_dtype)
            if is_exact(backend):
                return inputs.run_in_order(states, num_tokens, backend)[0], carry
            return inputs.run(states, num_tokens)[0], carry
        if isinstance(inputs, Heads) and inputs.k is None:
            assert isinstance(layer, int)
            q, (k, v) = inputs.q, dict(carry)[self.config.kv_sources[layer]]
        else:
            q, k, v = inputs.split(backend)
            k, v = _rows(k, B), None if inputs.value_dim else _rows(v, B)
            if isinstance(layer, int) and self.config.is_read_by_others(layer):
                carry = *carry, (layer, (k, v))
        out = _attend(
            _rows(q, B).astype(kv_dtype.query_dtype),
            (k, v),
            inputs.sinks,
            num_tokens,
            (kv_dtype, self.config.reach(layer), _options(inputs, backend)),
        )
        return out.reshape(*q.shape[:-1], out.shape[-1]), carry


def _rows(x: jax.Array, batch_size: int) -> jax.Array:
    """Return heads ``[B, T, H, D]``, from the same or from ``[B * T, H, D]``."""
    return x.reshape(batch_size, -1, *x.shape[-2:])


def _options(heads: Projection | Heads, backend: str | None) -> tuple[tuple[str, Any], ...]:
    """Return the keyword arguments of the attention op that are not arrays, hashable."""
    return (
        ("scale", heads.scale),
        ("soft_cap", heads.soft_cap),
        ("value_dim", heads.value_dim),
        ("backend", backend_for("prefill", backend)),
    )


_Static = tuple[KVDtype, Reach, tuple[tuple[str, Any], ...]]


def _attend(
    q: jax.Array,
    kv: _KeysAndValues,
    sinks: jax.Array | None,
    num_tokens: jax.Array,
    static: _Static,
) -> jax.Array:
    if static[0].has_scales:
        return _attend_to_quantised(static, q, kv, sinks, num_tokens)
    return _attend_to(static, q, kv, sinks, num_tokens, (None, None))


def _attend_to(
    static: _Static,
    q: jax.Array,
    kv: _KeysAndValues,
    sinks: jax.Array | None,
    num_tokens: jax.Array,
    scales: tuple[jax.Array | None, jax.Array | None],
) -> jax.Array:
    """Attend to keys and values ``[B, T, K, D]`` with scales ``[B, T, K]``, or without scales."""
    kv_dtype, reach, options = static
    B, T = q.shape[:2]
    block_size = T if reach.chunk is None else min(T, reach.chunk)
    num_blocks = -(-T // block_size)

    def pool(x: jax.Array | None) -> jax.Array | None:
        """Return the blocks of all sequences, ``[1, B * num_blocks, K, block_size, ...]``."""
        if x is None:
            return None
        head_shape = x.shape[2:]
        x = jnp.pad(x, ((0, 0), (0, num_blocks * block_size - T), *[(0, 0)] * len(head_shape)))
        x = x.reshape(B * num_blocks, block_size, *head_shape)
        return jnp.swapaxes(x, 1, 2)[None]

    k, v = (None if x is None else x.astype(kv_dtype.values) for x in kv)
    k_scale, v_scale = map(pool, scales)
    tables = jnp.arange(B * num_blocks, dtype=jnp.int32).reshape(B, num_blocks)
    k_pool = pool(k)
    assert k_pool is not None
    arrays = q, k_pool, pool(v), tables, num_tokens, num_tokens
    named: Any = dict(options) | {"k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
    if reach.chunk is not None:
        return chunked_prefill_attention(*arrays, chunk=reach.chunk, **named)
    window = reach.sliding_window
    return cast(jax.Array, paged_prefill_attention(*arrays, sliding_window=window, **named))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_to_quantised(
    static: _Static,
    q: jax.Array,
    kv: _KeysAndValues,
    sinks: jax.Array | None,
    num_tokens: jax.Array,
) -> jax.Array:
    """Attend to keys and values that are rounded to a quantised dtype.

    The gradient is that of attention to the rounded values, as if rounding were the identity.
    """
    (k, k_scale), (v, v_scale) = _quantised(static, kv)
    assert k is not None
    return _attend_to(static, q, (k, v), sinks, num_tokens, (k_scale, v_scale))


def _quantised(
    static: _Static, kv: _KeysAndValues
) -> tuple[tuple[jax.Array | None, jax.Array | None], ...]:
    """Return the values and scales of the keys, and of the values."""
    return tuple((None, None) if x is None else static[0].quantise(x) for x in kv)


def _forward(static: _Static, *args: Any) -> tuple[jax.Array, Any]:
    return _attend_to_quantised(static, *args), args


def _backward(static: _Static, args: Any, out_bar: jax.Array) -> Any:
    q, kv, sinks, num_tokens = args
    rounded = tuple(
        None if x is None else static[0].dequantise(x, scale) for x, scale in _quantised(static, kv)
    )
    floats = KVDtype.of(jnp.float32), *static[1:]

    def attend(q: jax.Array, kv: Any, sinks: jax.Array | None) -> jax.Array:
        return _attend_to(floats, q, kv, sinks, num_tokens, (None, None))

    result = cast(Any, jax.vjp(attend, q, lax.stop_gradient(rounded), sinks))
    return *result[1](out_bar), None


_attend_to_quantised.defvjp(_forward, _backward)
