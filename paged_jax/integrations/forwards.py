"""Comparison of a trainer's forward pass with the engine's model, before training.

If they differ, training raises no error. But importance ratios are then wrong, and rewards rise
slowly or not at all. `compare_forwards` measures the difference, and often finds its cause.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.dims import bind
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.training import log_probs

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
    config: ModelConfig | None


def compare_forwards(
    model: Decoder,
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
      >>> from paged_jax import Llama, LlamaConfig
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> tokens = jnp.array([[3, 7, 5, 9]])
      >>> def logprobs_of(tokens):             # of the model itself
      ...     return log_probs(model, tokens[:, :1], jnp.ones(1, int), tokens[:, 1:])
      >>> compare_forwards(model, logprobs_of, tokens).is_close
      True
    """
    bind("compare_forwards", token_ids=(token_ids, "BT"))
    theirs = np.asarray(logprobs_of(token_ids))
    if theirs.shape != (token_ids.shape[0], token_ids.shape[1] - 1):
        raise ValueError(
            "compare_forwards: logprobs_of must return an array of shape [B, T - 1] for tokens of "
            f"shape [B, T] = {list(token_ids.shape)}, got shape {list(theirs.shape)}."
        )
    ours = np.asarray(_logprobs(model, token_ids))
    largest = float(np.max(np.abs(ours - theirs)))
    if largest <= tolerance:
        return ForwardComparison(largest, True, "Both compute the same values.", model.config)
    for name, own, value in _variations(model.config):
        config = _replace(model.config, name, own, value)
        varied = np.asarray(_logprobs(_with_config(model, config), token_ids))
        if float(np.max(np.abs(varied - theirs))) <= tolerance:
            why = f"The other forward pass uses {name} = {value:g}, but the config has {own:g}."
            return ForwardComparison(largest, False, why, config)
    return ForwardComparison(largest, False, _where(np.abs(ours - theirs), tolerance), None)


@jax.jit
def _logprobs(model: Decoder, token_ids: jax.Array) -> jax.Array:
    """Return the log-probability of each token of ``[B, T]`` except the first.

    Keys and values are not rounded, because a trainer has no cache.
    """
    model = model.with_numerics("fast", jnp.float32)
    lengths = jnp.ones(token_ids.shape[0], jnp.int32)
    return log_probs(model, token_ids[:, :1], lengths, token_ids[:, 1:])


def _variations(config: ModelConfig) -> Iterator[tuple[str, float, float]]:
    """Yield names of entries of the ``config.json``, with their value and another common value."""
    thetas = {rope.theta for rope in config.ropes if rope is not None}
    candidates = {"rope_theta": (thetas, _THETAS), "rms_norm_eps": ({config.norm.eps}, _EPSILONS)}
    for name, (owns, values) in candidates.items():
        yield from ((name, own, value) for own in sorted(owns) for value in values if value != own)


def _replace(config: ModelConfig, name: str, own: float, value: float) -> ModelConfig:
    """Return a config in which an entry has the value `value` wherever it is `own`."""
    if isinstance(config, LlamaConfig) and getattr(config, name) == own:
        return dataclasses.replace(config, **{name: value})
    field = {"rope_theta": "theta", "rms_norm_eps": "eps"}[name]

    def replace(part: Any) -> Any:
        if isinstance(part, tuple) and not hasattr(part, "_fields"):
            return tuple(map(replace, part))
        if not dataclasses.is_dataclass(part) or isinstance(part, type):
            return part
        fields = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
        fields = {key: replace(each) for key, each in fields.items()}
        if fields.get(field) == own:
            fields[field] = value
        changes = {key: each for key, each in fields.items() if each != getattr(part, key)}
        return dataclasses.replace(part, **changes) if changes else part

    return config.replace(layers=replace(config.layers), norm=replace(config.norm))


def _with_config(model: Decoder, config: ModelConfig) -> Decoder:
    """Return a model with the weights of `model` and the config `config`."""
    kind = {"dtype": model.norm.dtype, "scan_layers": model.scan_layers}
    other = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **kind))
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
