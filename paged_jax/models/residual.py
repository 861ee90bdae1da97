"""Operations on the residual stream: norms, scaling, and several parallel streams.

In Gemma 3n, each token has n residual streams (AltUp, arXiv 2301.13310). A layer first predicts its
effect on all streams by linear combinations of them. It then computes attention and MLP for one
stream, the active stream, and corrects all streams by the error of the prediction::

    streams [n, E] --> predicted [n, E] --> layer on the active stream --> output [E]
                              |                                              |
                              +--> corrected = predicted + c (output - predicted active stream)

The factors c and the coefficients of the prediction depend on the active stream.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from paged_jax.kernels.linear import Weight, grouped_linear, linear
from paged_jax.kernels.norm_rope import expand, layer_norm, mean_square, rms_norm
from paged_jax.models.config import LlamaConfig
from paged_jax.models.layer_groups import NOTHING, ResidualStreams
from paged_jax.models.matrices import LayerParameters

# Names of a layer's norms, by `norm_placement`. `input_norm` and `post_attention_norm` normalise
# the inputs of attention and of the MLP. `attention_out_norm` and `mlp_out_norm` normalise the
# outputs of attention and of the MLP, before these are added to the residual stream.
NORMS = {
    "pre": ("input_norm", "post_attention_norm"),
    "sandwich": ("input_norm", "attention_out_norm", "post_attention_norm", "mlp_out_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "parallel": ("input_norm",),
}
# Additional norms of layers with `separate_expert_norms`. They normalise the input of the router,
# the input of the experts, the output of the experts, and the output of the shared expert.
EXPERT_NORMS = ("router_norm", "expert_input_norm", "expert_out_norm", "shared_out_norm")
# `_with_mean_square` divides by the mean square of a stream, or by this number if it is larger.
_MIN_MEAN_SQUARE = 1e-5


def norm_names(config: LlamaConfig) -> tuple[str, ...]:
    """Return the names of the norms in a layer, given the config of the layer.

    A layer without attention or mixer has only the norms of its MLP. A layer without an MLP has
    only the other norms.
    """
    has_tokens, has_mlp = NOTHING not in config.layer_types, NOTHING not in config.mlp_layer_types
    return tuple(
        name
        for name in NORMS[config.norm_placement]
        if (has_tokens if name in ("input_norm", "attention_out_norm") else has_mlp)
    )


def multiply(x: jax.Array, factor: float) -> jax.Array:
    """Return ``x * factor``, or `x` itself if the factor is 1."""
    return x if factor == 1 else x * factor


def initial_norm_weight(config: LlamaConfig, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Return the initial weight of a norm. With this weight, the norm multiplies by 1."""
    return jnp.full(shape, 1 - config.norm_offset, dtype)


def apply_norm(config: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Apply an RMS norm or layer norm with weight ``[E]`` to ``x [..., E]``, float32."""
    weight = effective_weight(config, weight)
    if config.norm_type == "layer":
        return layer_norm(x, weight, config.rms_norm_eps)
    return rms_norm(x, weight, config.rms_norm_eps)


def effective_weight(config: LlamaConfig, weight: jax.Array) -> jax.Array:
    """Return the factor of a norm: ``norm_offset + weight``."""
    return weight.astype(jnp.float32) + config.norm_offset if config.norm_offset else weight


# Function of a stream ``[..., E]`` that returns the gated embedding of the layer ``[..., E]``.
Embed = Callable[[jax.Array], jax.Array]


def add_low_rank(
    config: LlamaConfig, x: jax.Array, normed: jax.Array, weights: LayerParameters
) -> jax.Array:
    """Add the LAuReL branch of Gemma 3n to the residual stream, if the layer has one.

    The branch is the normalised input of attention plus a low-rank projection of this input. The
    sum of residual stream and branch is divided by sqrt(2). ``x [..., E]`` is the residual stream
    after attention, and ``normed [..., E]`` is the normalised input of attention. Both are float32.
    """
    if not config.laurel_rank:
        return x
    out = weights.linear(weights.linear(normed, "laurel_left"), "laurel_right")
    return (x + normed + apply_norm(config, out, weights.vector("laurel_norm"))) * 2**-0.5


def add_stream_weights(layer: Any, count: int, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
    """Add the parameters for n residual streams to a layer. `count` is n.

    - ``stream_norm [E]``: weight of the norm of the active stream.
    - ``stream_router [n, E]``: projection of the active stream to n router outputs.
    - ``stream_predict [n * n, n]``: projection of the router outputs to the coefficients of the
      prediction.
    - ``stream_correct [n, n]``: projection of the router outputs to the factors of the correction.
    - ``stream_factor [E]``: factor of the active stream before it gates the layer's token
      embeddings.
    """
    config: LlamaConfig = layer.config
    E, n = config.hidden_size, count
    normal = nnx.initializers.normal(config.initializer_range)
    for name, shape in {"router": (n, E), "predict": (n * n, n), "correct": (n, n)}.items():
        setattr(layer, f"stream_{name}", nnx.Param(normal(rngs.params(), shape, dtype)))
    layer.stream_norm = nnx.Param(initial_norm_weight(config, (E,), dtype))
    layer.stream_factor = nnx.Param(jnp.ones(E, dtype))


def predict_streams(config: LlamaConfig, x: jax.Array, weights: LayerParameters) -> jax.Array:
    """Predict the streams after a layer from the streams ``x [..., n, E]`` before it."""
    n = x.shape[-2]
    modes = _modes(config, x[..., _streams(config).active, :], weights)
    factors = _multiply(modes, weights.vector("stream_predict")).reshape(*modes.shape[:-1], n, n)
    return x + jnp.matmul(factors, x, precision="highest")


def correct_streams(
    config: LlamaConfig, predicted: jax.Array, out: jax.Array, weights: LayerParameters
) -> jax.Array:
    """Correct the predicted streams by a layer's output; return float32 ``[..., n, E]``.

    `predicted` is the result of `predict_streams`. `out` is float32 ``[..., E]``, the active stream
    after attention and MLP.
    """
    factors = 1 + _multiply(_modes(config, out, weights), weights.vector("stream_correct"))
    error = out - predicted[..., _streams(config).active, :]
    return predicted + factors[..., None] * error[..., None, :]


def add_to_streams(
    config: LlamaConfig, x: jax.Array, weights: LayerParameters, embed: Embed | None
) -> jax.Array:
    """Add the layer's gated token embeddings to all streams ``[..., n, E]`` except the first.

    `embed` computes the gated embeddings from the active stream. If it is None, the model has no
    per-layer embeddings, and nothing is added.
    """
    if embed is None:
        return x
    active = x[..., _streams(config).active, :]
    if _streams(config).scales_active:
        active = active * expand(weights.vector("stream_factor"), active.ndim)
    return x.at[..., 1:, :].add(embed(active)[..., None, :])


def split_streams(x: jax.Array, proj: Weight, backend: str | None) -> jax.Array:
    """Return the first layer's input streams ``[..., n, E]`` for embeddings ``x [..., E]``.

    The embeddings are the first stream. ``proj [n - 1, E, E]`` projects them to the other streams,
    which are scaled to the same mean square.
    """
    others = _with_mean_square(linear(x, proj, backend=backend), mean_square(x)[..., None, :])
    return jnp.concatenate([x[..., None, :], others], axis=-2)


def merge_streams(x: jax.Array, proj: Weight, backend: str | None) -> jax.Array:
    """Merge the streams after the last layer into hidden states ``[..., E]``.

    All streams but the first are projected by ``proj [n - 1, E, E]``, and scaled so that they have
    the same mean square as the first stream. The result is the mean of all streams.
    ``x [..., n, E]`` is float32.
    """
    *rows, n, E = x.shape
    by_stream = jnp.moveaxis(x.reshape(-1, n, E)[:, 1:], 1, 0)
    num_rows = by_stream.shape[1]
    sizes = jnp.full(n - 1, num_rows, jnp.int32)
    others = grouped_linear(by_stream.reshape(-1, E), proj, sizes, backend=backend)
    others = jnp.moveaxis(others.reshape(n - 1, num_rows, E), 0, 1).reshape(*rows, n - 1, E)
    first = x[..., :1, :]
    others = _with_mean_square(others, mean_square(first))
    return (first[..., 0, :] + jnp.sum(others, axis=-2)) / n


def _streams(config: LlamaConfig) -> ResidualStreams:
    assert config.residual_streams is not None
    return config.residual_streams


def _modes(config: LlamaConfig, x: jax.Array, weights: LayerParameters) -> jax.Array:
    """Return the router outputs for a stream ``x [..., E]``, float32 ``[..., n]`` in [-1, 1]."""
    normed = apply_norm(config, x, weights.vector("stream_norm")) / config.hidden_size
    return jnp.tanh(_multiply(normed, weights.vector("stream_router")))


def _multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w.astype(jnp.float32).T, precision="highest")


def _with_mean_square(x: jax.Array, target: jax.Array) -> jax.Array:
    """Scale ``x [..., n, E]`` so that the mean square of each vector is `target`."""
    mean = mean_square(x, num_heads=x.shape[-2])
    return x * jnp.sqrt(target / jnp.maximum(mean, _MIN_MEAN_SQUARE))
