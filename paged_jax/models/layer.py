"""One decoder layer of the Llama family, whatever its attention reads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from paged_jax.models.config import LlamaConfig
from paged_jax.models.linear import linear
from paged_jax.models.rope import rotate

# One layer's attention: (layer index, q, k, v, carry) -> (output, carry). q, k and v are float32,
# the output is in any type. The caller chooses the carry: the K and V pools, or nothing.
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


class Layer(nnx.Module):
    """One decoder layer: attention and gated MLP, each behind an RMS norm and a residual.

    Weights are ``[out, in]``. Queries, keys and values are one matrix, in that order, and so are
    the gate and the up projection: fewer and larger products, one read of the activations.
    """

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
        attention_features = config.num_attention_heads * D
        normal = nnx.initializers.normal(config.initializer_range)
        # Projections into the residual stream start smaller, so that its variance does not grow
        # with depth (GPT-2, section 2.3).
        to_residual = nnx.initializers.normal(
            config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
        )

        def matrix(out_features: int, in_features: int, init=normal) -> nnx.Param:
            return nnx.Param(init(rngs.params(), (out_features, in_features), dtype))

        self.config = config
        self.input_norm = nnx.Param(jnp.ones(E, dtype))
        self.qkv_proj = matrix(config.qkv_features, E)
        self.o_proj = matrix(E, attention_features, to_residual)
        self.post_attention_norm = nnx.Param(jnp.ones(E, dtype))
        self.gate_up_proj = matrix(2 * F, E)
        self.down_proj = matrix(E, F, to_residual)
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros(config.qkv_features, dtype))
        if config.o_bias:
            self.o_bias = nnx.Param(jnp.zeros(E, dtype))
        if config.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(D, dtype))
            self.k_norm = nnx.Param(jnp.ones(D, dtype))

    def __call__(
        self, index: Any, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend, carry: Any
    ) -> tuple[jax.Array, Any]:
        """Run the layer on float32 ``x [..., E]``, whatever the leading dimensions."""
        q, k, v = self._project(rms_norm(x, self.input_norm[...], self.config), cos, sin)
        out, carry = attend(index, q, k, v, carry)
        out = linear(out.reshape(*x.shape[:-1], -1), self.o_proj[...])
        x = x + (_add_bias(out, self.o_bias[...]) if self.config.o_bias else out)
        hidden = linear(
            rms_norm(x, self.post_attention_norm[...], self.config), self.gate_up_proj[...]
        )
        gate, up = jnp.split(hidden, 2, axis=-1)
        return x + linear(jax.nn.silu(gate) * up, self.down_proj[...]), carry

    def _project(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        H, K = config.num_attention_heads, config.num_key_value_heads
        qkv = linear(x, self.qkv_proj[...])
        if config.qkv_bias:
            qkv = _add_bias(qkv, self.qkv_bias[...])
        qkv = qkv.reshape(*x.shape[:-1], H + 2 * K, config.head_dim)
        q, k, v = jnp.split(qkv, (H, H + K), axis=-2)
        if config.qk_norm:
            q = rms_norm(q, self.q_norm[...], config)
            k = rms_norm(k, self.k_norm[...], config)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


def causal_attention(window: int | None) -> Attend:
    """Attention of whole sequences ``[B, T, ...]`` to themselves, without a cache or a carry."""

    def attend(index, q, k, v, carry):
        del index
        local = None if window is None else (window - 1, 0)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)
        return out, carry

    return attend


def rms_norm(x: jax.Array, weight: jax.Array, config: LlamaConfig) -> jax.Array:
    """Scale float32 ``x [..., E]`` to unit root mean square (Zhang and Sennrich, 2019)."""
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + config.rms_norm_eps) * _last_axis(weight, x)


def _add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + _last_axis(bias, x)


def _last_axis(vector: jax.Array, x: jax.Array) -> jax.Array:
    return vector.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
