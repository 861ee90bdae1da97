"""The gated MLP of a dense layer, or the shared one beside experts."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from paged_jax.models.config import LlamaConfig

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def add_mlp(config: LlamaConfig, matrix: Callable[..., None], to_residual: Any) -> None:
    """Give a layer the weights of its MLP.

    Args:
      config: sizes.
      matrix: function of a name, a shape and perhaps an initialiser, which adds a parameter.
      to_residual: the initialiser of what projects into the residual stream.
    """
    E, F = config.hidden_size, config.dense_intermediate_size
    matrix("gate_up_proj", 2, F, E)
    matrix("down_proj", E, F, init=to_residual)


def mlp(
    config: LlamaConfig, apply: Callable[[str, jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """Run the MLP on ``x [..., E]``: float32 ``[..., E]``.

    Args:
      config: sizes and switches.
      apply: function of a parameter's name and what it is applied to.
      x: float32 ``[..., E]``, normed.
    """
    hidden = apply("gate_up_proj", x)
    gate, up = hidden[..., 0, :], hidden[..., 1, :]
    out = apply("down_proj", ACTIVATIONS[config.hidden_act](gate) * up)
    return out * jax.nn.sigmoid(apply("shared_expert_gate", x)) if config.num_experts else out
