"""Whether a trainer and the engine compute the same model, asked before training.

A trainer that is given samples of another model than its own says nothing: importance ratios are
wrong, and rewards rise more slowly or not at all. One call finds that, and mostly says why.
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

# What models are known to take where their config says something else.
_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
_EPSILONS = (1e-6, 1e-5)


class Comparison(NamedTuple):
    """How far two forwards are apart.

    Attributes:
      largest: largest difference of log-probabilities, in nats.
      is_close: whether it is within the tolerance.
      explanation: a sentence: what differs, as far as that is known.
      config: the config with which the model computes what the other forward does; None if none
        was found, the model's own if it does already.
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
) -> Comparison:
    """Compare a model with another forward over the same weights.

    Args:
      model: the engine's, such as ``llm.model``.
      logprobs_of: function of tokens i32 [B, T] to the log-probability of each but the first, given
        those before it: f32 [B, T - 1].
      token_ids: i32 [B, T], T at least 3; random ones will do.
      tolerance: largest difference that rounding may make, in nats; 1e-5 was seen in float32.

    Returns:
      The difference, and what explains it: the base of the rotary embedding and the epsilon of the
      norms are tried at the values that models have.

    Raises:
      ValueError: the shapes are others.

    Cost: a forward of both, compiled; of the model, for each value that is tried, once more.

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
            "compare_forwards: logprobs_of must return [B, T - 1] for tokens [B, T] = "
            f"{list(token_ids.shape)}, got {list(theirs.shape)}."
        )
    ours = np.asarray(jax.jit(token_logprobs)(model, token_ids))
    largest = float(np.max(np.abs(ours - theirs)))
    if largest <= tolerance:
        return Comparison(largest, True, "Both compute the same.", model.config)
    for name, value in _variations(model.config):
        config = dataclasses.replace(model.config, **{name: value})
        varied = np.asarray(jax.jit(token_logprobs)(_with_config(model, config), token_ids))
        if float(np.max(np.abs(varied - theirs))) <= tolerance:
            own = getattr(model.config, name)
            why = f"The other forward computes with {name} = {value:g}, the config says {own:g}."
            return Comparison(largest, False, why, config)
    return Comparison(largest, False, _where(np.abs(ours - theirs), tolerance), None)


def token_logprobs(model: Llama, token_ids: jax.Array, temperature: float = 1.0) -> jax.Array:
    """The log-probability of each token but the first, given those before it.

    Args:
      model: the model.
      token_ids: i32 [B, T].
      temperature: divides the logits.

    Returns:
      f32 [B, T - 1]; differentiable in the weights.
    """
    logprobs = jax.nn.log_softmax(model(token_ids)[:, :-1] / temperature)
    return jnp.take_along_axis(logprobs, token_ids[:, 1:, None], axis=2)[..., 0]


def _variations(config: LlamaConfig) -> Iterator[tuple[str, float]]:
    candidates = {"rope_theta": _THETAS, "rms_norm_eps": _EPSILONS}
    for name, values in candidates.items():
        yield from ((name, value) for value in values if value != getattr(config, name))


def _with_config(model: Llama, config: LlamaConfig) -> Llama:
    """The weights in a model of another config, of the same shapes."""
    kind = {"dtype": model.norm.dtype, "scan_layers": model.scan_layers}
    other = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), **kind))
    return nnx.merge(nnx.graphdef(other), nnx.state(model))


def _where(difference: np.ndarray, tolerance: float) -> str:
    """Where forwards part, which hints at why."""
    is_off = difference > tolerance
    if is_off[:, 0].any():
        return (
            "They differ from the first token on, where neither positions nor attention matter: "
            "compare the embeddings, the order of axes in the mapping, the norms and the head."
        )
    first = int(np.argmax(is_off.any(axis=0)))
    return (
        f"They agree for the first {first} tokens and differ then: compare the rotary embedding "
        "(its base, scaling, and order of numbers), the mask, and the window."
    )
