# pyright: strict, reportUnknownMemberType=false
"""Log-probabilities of generated tokens, for the losses of training loops.

`log_probs` computes what an engine and `rollout` report for the tokens that they draw. With exact
numerics, see `PagedModel.with_numerics`, both have the same bits, so the importance ratio of the
first update is exactly 1.

No array ``[B, T, V]`` exists, neither in the forward nor in the backward pass, see `token_scores`.
"""

import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from paged_jax.arguments import ArgumentError, is_int, names_arguments
from paged_jax.dims import bind
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.step_arrays import check_token_ids
from paged_jax.rollouts import (
    Prompts,
    join_sequences,
    read_prompts,
    read_rows,
    repeat_prompts,
)
from paged_jax.token_scores import TokenScores, score_rows


@names_arguments
def log_probs(
    model: PagedModel,
    prompt_token_ids: Prompts,
    num_tokens: ArrayLike | None,
    token_ids: Prompts,
    *,
    num_drawn: ArrayLike | None = None,
    numerics: str | None = None,
    cache_dtype: DTypeLike | None = None,
    temperature: ArrayLike | None = None,
) -> jax.Array:
    """Compute the log-probabilities of generated tokens, given the tokens before them.

    The function is pure and differentiable with respect to the weights.

    Args:
      model: the model, such as ``llm.model``.
      prompt_token_ids: integer [B, T], each row padded at its end; or a list of token ids for each
        prompt. If `token_ids` has several rows for each prompt, they are its samples, in order.
      num_tokens: integer [B], number of tokens in each prompt, 1 to T; None if the prompts are
        lists of their own lengths.
      token_ids: integer [B, N], the generated tokens of each row, padded at its end; or a list of
        token ids for each row.
      num_drawn: integer [B], number of generated tokens in each row, at most N; None for N, or for
        the lengths of lists.
      numerics: ``"fast"`` or ``"exact"``, see `PagedModel.with_numerics`; None for the model's.
        ``llm.model`` has the numerics and the cache dtype of its engine, and a `Rollout` names
        those with which it was drawn.
      cache_dtype: dtype to which keys and values are rounded, as in the cache of an engine; None
        for the model's, see `PagedModel.kv_dtype`.
      temperature: the logits are divided by this number, or by a number for each prompt; None for
        1. An engine and `rollout` report log-probabilities at temperature 1.

    Returns:
      f32 [B, N]; 0 past `num_drawn`.

    Raises:
      ValueError: a shape, dtype or value is wrong, or the model does not support the numerics.
        Traced values are not checked.

    Example:
      >>> from flax import nnx
      >>> from paged_jax import Llama, LlamaConfig
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> scores = log_probs(model, [[3, 7, 5], [4]], None, [[9, 1], [2]])
      >>> scores.shape, float(scores[1, 1])
      ((2, 2), 0.0)
    """
    batch = _read_batch(
        "log_probs", model, prompt_token_ids, num_tokens, token_ids, num_drawn, temperature
    )
    return _score(model.with_numerics(numerics, cache_dtype), batch, 0).logprobs


@names_arguments
def score_tokens(
    model: PagedModel,
    prompt_token_ids: Prompts,
    num_tokens: ArrayLike | None,
    token_ids: Prompts,
    *,
    num_drawn: ArrayLike | None = None,
    numerics: str | None = None,
    cache_dtype: DTypeLike | None = None,
    temperature: ArrayLike | None = None,
    num_top: int = 0,
) -> TokenScores:
    """Compute log-probabilities like `log_probs`, with entropies and the most probable tokens.

    `num_top` is the number of most probable tokens (static). For the other arguments and the
    errors, see `log_probs`.
    """
    if not is_int(num_top) or not 0 <= num_top <= model.config.vocab_size:
        rule = f"must be in 0..{model.config.vocab_size}, the size of the vocabulary, got {num_top}"
        raise ArgumentError("score_tokens", f"{rule}. Pass 0 for none.", "num_top")
    batch = _read_batch(
        "score_tokens", model, prompt_token_ids, num_tokens, token_ids, num_drawn, temperature
    )
    return _score(model.with_numerics(numerics, cache_dtype), batch, num_top)


class _ScoringBatch(NamedTuple):
    """Arguments of `log_probs` as arrays, with a prompt for each row."""

    prompts: jax.Array  # i32 [B, T]
    num_tokens: jax.Array  # i32 [B]
    sampled_ids: jax.Array  # i32 [B, N]
    num_drawn: jax.Array  # i32 [B]
    temperature: jax.Array  # f32 [B]


def _read_batch(
    function: str,
    model: PagedModel,
    prompt_token_ids: Prompts,
    num_tokens: ArrayLike | None,
    token_ids: Prompts,
    num_drawn: ArrayLike | None,
    temperature: ArrayLike | None,
) -> _ScoringBatch:
    """Return the arguments of `log_probs` as arrays. Check them unless they are traced."""
    vocab_size = model.config.vocab_size
    prompts, counts = read_prompts(function, vocab_size, prompt_token_ids, num_tokens)
    if num_drawn is None and hasattr(token_ids, "dtype"):
        num_drawn = np.full(len(cast(Any, token_ids)), cast(Any, token_ids).shape[-1], np.int32)
    sampled_ids, num_drawn = read_rows(function, "token_ids", token_ids, "num_drawn", num_drawn)
    sizes = bind(function, token_ids=(sampled_ids, "BN"), num_drawn=(num_drawn, "B"))
    _check_sampled_ids(function, vocab_size, sampled_ids, num_drawn)
    factors = np.float32(1) if temperature is None else temperature
    factors = _check_temperature(function, factors, len(counts))
    num_samples = sizes["B"] // len(counts)
    prompts, counts = repeat_prompts(function, prompts, counts, sizes["B"])
    if factors.shape:
        factors = jnp.repeat(factors, num_samples)
    return _ScoringBatch(
        prompts,
        counts,
        jnp.asarray(sampled_ids).astype(jnp.int32),
        jnp.clip(jnp.asarray(num_drawn).astype(jnp.int32), 0, sizes["N"]),
        jnp.broadcast_to(factors, sizes["B"]),
    )


def _check_sampled_ids(function: str, vocab_size: int, sampled_ids: Any, num_drawn: Any) -> None:
    """Check generated tokens [B, N] and their number [B]."""
    B, N = sampled_ids.shape
    if not B or not N:
        raise ValueError(
            f"{function}: token_ids must have at least one row and one column, got shape "
            f"[{B}, {N}]. Pass the generated tokens of each row."
        )
    for name, array in {"token_ids": sampled_ids, "num_drawn": num_drawn}.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{function}: {name} must be an integer array, got {array.dtype}.")
    if not isinstance(num_drawn, Tracer):
        counts: list[int] = np.asarray(num_drawn).tolist()
        if invalid := [count for count in counts if not 0 <= count <= N]:
            raise ValueError(
                f"{function}: num_drawn must be in 0..{N}, the number of columns of token_ids, got "
                f"{invalid[0]}."
            )
    check_token_ids(function, vocab_size, sampled_ids, cast(Any, num_drawn))


def _check_temperature(function: str, temperature: ArrayLike, num_prompts: int) -> jax.Array:
    """Return the temperature as float32, one value or a value for each prompt."""
    values = jnp.asarray(temperature, jnp.float32)
    if values.shape not in ((), (num_prompts,)):
        raise ValueError(
            f"{function}: temperature must be one value or have shape [{num_prompts}], one value "
            f"per prompt, got shape {list(values.shape)}."
        )
    if not isinstance(temperature, Tracer):
        temperatures: list[float] = np.asarray(temperature).reshape(-1).tolist()
        if invalid := [number for number in temperatures if not 0 < number < math.inf]:
            raise ValueError(
                f"{function}: temperature must be finite and > 0, got {invalid[0]}. Greedy tokens "
                "have no distribution: leave it out for temperature 1."
            )
    return values


def _score(model: PagedModel, batch: _ScoringBatch, num_top: int) -> TokenScores:
    B, N = batch.sampled_ids.shape
    sequences = join_sequences(batch.prompts, batch.num_tokens, batch.sampled_ids)
    # The last token of a sequence is only a target.
    x = model.final_states(sequences[:, :-1], batch.num_tokens + batch.num_drawn - 1)
    steps = jnp.arange(N, dtype=jnp.int32)[None]
    positions = jnp.minimum(batch.num_tokens[:, None] - 1 + steps, x.shape[1] - 1)
    x = jnp.take_along_axis(x, positions[..., None], axis=1)
    factors = jnp.broadcast_to(batch.temperature[:, None], (B, N))
    scores = score_rows(
        model, x.reshape(B * N, -1), batch.sampled_ids.reshape(-1), factors.reshape(-1), num_top
    )
    is_drawn = steps < batch.num_drawn[:, None]

    def masked(score: jax.Array) -> jax.Array:
        score = score.reshape(B, N, *score.shape[1:])
        mask = is_drawn.reshape(B, N, *(1,) * (score.ndim - 2))
        return jnp.where(mask, score, jnp.zeros_like(score))

    return TokenScores(*map(masked, scores))
