"""Comparison of a trainer's forward pass with the engine's model, before training.

If they differ, training raises no error. But importance ratios are then wrong, and rewards rise
slowly or not at all. `compare_forwards` measures the difference, and often finds its cause.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.dims import bind
from paged_jax.models.config import LlamaConfig
from paged_jax.models.llama import Llama

# Values that some implementations hard-code instead of reading the model's config.
_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
_EPSILONS = (1e-6, 1e-5)


class ForwardComparison(NamedTuple):
    """Difference between the model's forward pass and another forward pass.

    Attributes:
      largest: largest absolute difference of log-probabilities, in nats.
      is_close: whether `largest` is at most the tolerance.
      explanation: a sentence with the result and, if they differ, the probable cause.
      config: a config that makes the model compute the same as the other forward pass. If
        `is_close`, this is the model's own config. None if no such config was found.
    """

    largest: float
    is_close: bool
    explanation: str
    config: LlamaConfig | None


def compare_forwards(
    model: Llama,
    logprobs_of: Callable[[jax.Array], jax.Array],
    token_ids: jax.Array,
    *,
    tolerance: float = 1e-3,
) -> ForwardComparison:
    """Compare a model with another forward pass that uses the same weights.

    If they differ, the model is also run with other common values of ``rope_theta`` and
    ``rms_norm_eps``, to find the cause. Each value costs one more forward pass of the model.

    Args:
      model: the model of the engine, such as ``llm.model``.
      logprobs_of: the other forward pass. It takes tokens i32 [B, T] and returns f32 [B, T - 1],
        the log-probability of each token except the first, given the tokens before it.
      token_ids: i32 [B, T] with T at least 3; random tokens are sufficient.
      tolerance: largest difference that is attributed to rounding, in nats. Correct float32
        implementations differ by about 1e-5.

    Raises:
      ValueError: `logprobs_of` does not return an array of shape [B, T - 1].

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> tokens = jnp.array([[3, 7, 5, 9]])
      >>> compare_forwards(model, lambda tokens: token_logprobs(model, tokens), tokens).is_close
      True
    """
    bind("compare_forwards", token_ids=(token_ids, "BT"))
    theirs = np.asarray(logprobs_of(token_ids))
    if theirs.shape != (token_ids.shape[0], token_ids.shape[1] - 1):
        raise ValueError(
            "compare_forwards: logprobs_of must return an array of shape [B, T - 1] for tokens of "
            f"shape [B, T] = {list(token_ids.shape)}, got shape {list(theirs.shape)}."
        )
    ours = np.asarray(jax.jit(token_logprobs)(model, token_ids))
    largest = float(np.max(np.abs(ours - theirs)))
    if largest <= tolerance:
        return ForwardComparison(largest, True, "Both compute the same values.", model.config)
    for name, value in _variations(model.config):
        config = dataclasses.replace(model.config, **{name: value})
        varied = np.asarray(jax.jit(token_logprobs)(_with_config(model, config), token_ids))
        if float(np.max(np.abs(varied - theirs))) <= tolerance:
            own = getattr(model.config, name)
            why = f"The other forward pass uses {name} = {value:g}, but the config has {own:g}."
            return ForwardComparison(largest, False, why, config)
    return ForwardComparison(largest, False, _where(np.abs(ours - theirs), tolerance), None)


def token_logprobs(model: Llama, token_ids: jax.Array, temperature: float = 1.0) -> jax.Array:
    """Return the log-probability of each token except the first, given the tokens before it.

    Args:
      model: the model.
      token_ids: i32 [B, T].
      temperature: the logits are divided by this number.

    Returns:
      f32 [B, T - 1], differentiable with respect to the weights.
    """
    logprobs = jax.nn.log_softmax(model(token_ids)[:, :-1] / temperature)
    return jnp.take_along_axis(logprobs, token_ids[:, 1:, None], axis=2)[..., 0]


def _variations(config: LlamaConfig) -> Iterator[tuple[str, float]]:
    candidates = {"rope_theta": _THETAS, "rms_norm_eps": _EPSILONS}
    for name, values in candidates.items():
        yield from ((name, value) for value in values if value != getattr(config, name))


def _with_config(model: Llama, config: LlamaConfig) -> Llama:
    """Return a model with the weights of `model` and the config `config`."""
    kind = {"dtype": model.norm.dtype, "scan_layers": model.scan_layers}
    other = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), **kind))
    return nnx.merge(nnx.graphdef(other), nnx.state(model))


def _where(difference: np.ndarray, tolerance: float) -> str:
    """Return sentences about the first token that differs, and about possible causes.

    Args:
      difference: f32 [B, T - 1], absolute differences of log-probabilities.
      tolerance: largest difference that is attributed to rounding.
    """
    is_off = difference > tolerance
    if is_off[:, 0].any():
        return (
            "They differ from the first token on, which does not depend on positions or attention: "
            "compare the embeddings, the order of axes in the mapping, the norms and the head."
        )
    first = int(np.argmax(is_off.any(axis=0)))
    return (
        f"They agree for the first {first} tokens and differ then: compare the rotary embedding "
        "(base, scaling, and order of channels), the mask, and the window."
    )
