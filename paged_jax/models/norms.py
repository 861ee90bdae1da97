"""The norms of a layer: where they lie, and what they compute."""

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.linear import sum_rows
from paged_jax.kernels.rope import rms_norm
from paged_jax.models.config import LlamaConfig

# The norms that a layer has: before attention and the MLP, and after each of them, before what they
# give is added to the residual stream.
NORMS = {
    "pre": ("input_norm", "post_attention_norm"),
    "sandwich": ("input_norm", "attention_out_norm", "post_attention_norm", "mlp_out_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "parallel": ("input_norm",),
}


def initial_weight(config: LlamaConfig, shape: tuple[int, ...], dtype: jax.typing.DTypeLike):
    """The weight of a norm that only normalises."""
    return jnp.full(shape, 1 - config.norm_offset, dtype)


def effective_weight(config: LlamaConfig, weight: jax.Array) -> jax.Array:
    """What a norm multiplies by: its weight, or float32 ``offset + weight``."""
    return weight.astype(jnp.float32) + config.norm_offset if config.norm_offset else weight


def norm(config: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The norm of a model, of float32 ``x [..., E]`` with a weight ``[E]``."""
    weight = effective_weight(config, weight)
    if config.norm_type == "layer":
        return layer_norm(x, weight, config.rms_norm_eps)
    return rms_norm(x, weight, config.rms_norm_eps)


def layer_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Bring float32 ``x [..., E]`` to mean 0 and variance 1 (Ba et al., 2016), without a bias.

    Args:
      x: float32 ``[..., E]``.
      weight: floating point ``[E]``.
      eps: added to the variance.

    Example:
      >>> layer_norm(jnp.array([[1.0, 3.0]]), jnp.array([1.0, 2.0]), 0.0)
      Array([[-1.,  2.]], dtype=float32)
    """
    centred = x - _mean(x)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return centred * lax.rsqrt(_mean(jnp.square(centred)) + eps) * weight


def _mean(x: jax.Array) -> jax.Array:
    return sum_rows(x) / x.shape[-1]
