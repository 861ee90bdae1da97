"""Norms of a layer, and factors of its activations."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.norm_rope import layer_norm, rms_norm
from paged_jax.models.config import LlamaConfig
from paged_jax.models.layer_groups import NOTHING

# Names of a layer's norms, by `norm_placement`. `input_norm` and `post_attention_norm` normalise
# the inputs of attention and of the MLP. `attention_out_norm` and `mlp_out_norm` normalise their
# outputs before they are added to the residual stream.
NORMS = {
    "pre": ("input_norm", "post_attention_norm"),
    "sandwich": ("input_norm", "attention_out_norm", "post_attention_norm", "mlp_out_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "parallel": ("input_norm",),
}
# Further norms of layers with `separate_expert_norms`: of the inputs of the router and of the
# experts, and of the outputs of the experts and of the expert for all tokens.
EXPERT_NORMS = ("router_norm", "expert_input_norm", "expert_out_norm", "shared_out_norm")


def norm_names(config: LlamaConfig) -> tuple[str, ...]:
    """Return the names of a layer's norms.

    A layer without attention has only the norms of its MLP, and a layer without an MLP has only the
    norms of its attention.
    """
    has_tokens, has_mlp = NOTHING not in config.layer_types, NOTHING not in config.mlp_layer_types
    return tuple(
        name
        for name in NORMS[config.norm_placement]
        if (has_tokens if name in ("input_norm", "attention_out_norm") else has_mlp)
    )


def multiply(x: jax.Array, factor: float) -> jax.Array:
    """Return ``x * factor``, or `x` if the factor is 1."""
    return x if factor == 1 else x * factor


def initial_norm_weight(config: LlamaConfig, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Return the initial weight of a norm, which multiplies by 1."""
    return jnp.full(shape, 1 - config.norm_offset, dtype)


def apply_norm(config: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Apply a norm of the model's type to float32 ``x [..., E]`` with a weight ``[E]``."""
    weight = effective_weight(config, weight)
    if config.norm_type == "layer":
        return layer_norm(x, weight, config.rms_norm_eps)
    return rms_norm(x, weight, config.rms_norm_eps)


def effective_weight(config: LlamaConfig, weight: jax.Array) -> jax.Array:
    """Return the factor of a norm: its weight, or float32 ``offset + weight``."""
    return weight.astype(jnp.float32) + config.norm_offset if config.norm_offset else weight
