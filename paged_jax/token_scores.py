# pyright: strict, reportUnknownMemberType=false
"""Scores of tokens from hidden states, without an array of all logits.

The forward pass computes the logits of a few tokens at a time, as a decode step does, so that exact
numerics give the same bits. Its chunks have at most _MAX_CHUNK_BYTES for any vocabulary. The
backward pass computes logits again, for more tokens and a slice of the vocabulary at a time::

    for each slice of WIDTH tokens of the vocabulary:
        for each chunk of ROWS hidden states:
            logits [ROWS, WIDTH] -> their gradient -> add to the gradient of the hidden states
                                                   -> add to the gradient of the slice's weights

Gradients are summed in float32, so the gradient of a bfloat16 weight is rounded once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.formatting import short_repr
from paged_jax.kernels.bits import as_bits, from_bits
from paged_jax.kernels.linear import Weight, linear, linear_gradients
from paged_jax.models.paged_model import PagedModel
from paged_jax.sampling.sample import log_sum_exp

# Limits of the chunks of logits in the forward pass: tokens and bytes. A chunk has at least
# _MIN_TOKENS tokens.
_MAX_TOKENS = 64
_MIN_TOKENS = 8
_MAX_CHUNK_BYTES = 16 << 20

# Limits of the chunks of logits in the backward pass. Reading and writing the sums of the gradients
# takes longer with fewer rows, or with a narrower slice of the vocabulary.
_ROWS = 512
_WIDTH = 2048


@short_repr
class TokenScores(NamedTuple):
    """Scores of N generated tokens in each of B rows; 0 past the last token of a row.

    All of them belong to the distribution of the model after the temperature, before filters such
    as top_k.

    Attributes:
      logprobs: f32 [B, N], log-probabilities of the tokens.
      entropy: f32 [B, N], entropy of the distribution from which each token is drawn, in nats.
      top_ids: i32 [B, N, k], the k most probable tokens, the most probable first.
      top_logprobs: f32 [B, N, k], log-probabilities of `top_ids`.
    """

    logprobs: jax.Array
    entropy: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def score_rows(
    model: PagedModel, x: jax.Array, targets: jax.Array, temperature: jax.Array, num_top: int
) -> TokenScores:
    """Score tokens, given the hidden states before them.

    Args:
      model: the model.
      x: f32 [R, E], inputs of `PagedModel.logits`.
      targets: i32 [R], the tokens.
      temperature: f32 [R].
      num_top: number of most probable tokens.

    Returns:
      Scores with a dimension R instead of B and N.
    """
    backend = model.resolve_backend(None)
    factors = 1 / temperature
    head = model.output_head(x)
    if head is not None and head.weight.scales is None:
        static = _Static(backend, head.finish, num_top)
        return _score(static, head.x, head.weight.floats, targets, factors)

    def score(x: jax.Array, targets: jax.Array, factors: jax.Array) -> TokenScores:
        logits = model.logits(x) * factors[:, None]
        return _score_logits(logits, targets, backend, num_top)[0]

    size = _chunk_size(x.shape[0], model.config.vocab_size)
    recomputed = cast(Callable[..., Any], jax.checkpoint(score))
    return _map_chunks(recomputed, (x, targets, factors), size)


class _Static(NamedTuple):
    """Arguments of `_score` that are not arrays; see `OutputHead` for `finish`."""

    backend: str | None
    finish: Callable[[jax.Array], jax.Array]
    num_top: int

    def logits(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Return the results of the matmul, the input of `finish`."""
        return linear(x, Weight(weight), backend=self.backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(
    static: _Static, x: jax.Array, weight: jax.Array, targets: jax.Array, factors: jax.Array
) -> TokenScores:
    return _forward(static, x, weight, targets, factors)[0]


def _forward(
    static: _Static, x: jax.Array, weight: jax.Array, targets: jax.Array, factors: jax.Array
) -> tuple[TokenScores, Any]:
    def score(
        x: jax.Array, targets: jax.Array, factors: jax.Array
    ) -> tuple[TokenScores, jax.Array]:
        logits = static.finish(static.logits(x, weight)) * factors[:, None]
        return _score_logits(logits, targets, static.backend, static.num_top)

    size = _chunk_size(x.shape[0], weight.shape[0])
    scores, denominators = _map_chunks(score, (x, targets, factors), size)
    ids = jnp.concatenate([targets[:, None], scores.top_ids], axis=1)
    return scores, (x, weight, ids, factors, denominators, scores.entropy)


class _Rows(NamedTuple):
    """Rows of the backward pass; K is 1 + `num_top`."""

    x: jax.Array  # f32 [R, E]
    factors: jax.Array  # f32 [R], inverse temperatures
    denominators: jax.Array  # f32 [R, 1], log-sum-exp of the logits
    entropy: jax.Array  # f32 [R]
    ids: jax.Array  # i32 [R, K], the target, and the most probable tokens
    ids_bar: jax.Array  # f32 [R, K], gradients of the log-probabilities of `ids`
    entropy_bar: jax.Array  # f32 [R]


def _backward(
    static: _Static, residuals: Any, scores_bar: TokenScores
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    x, weight, ids, factors, denominators, entropy = residuals
    ids_bar = jnp.concatenate([scores_bar.logprobs[:, None], scores_bar.top_logprobs], axis=1)
    rows = _Rows(x, factors, denominators, entropy, ids, ids_bar, scores_bar.entropy)
    (R, E), V = x.shape, weight.shape[0]
    size, width = min(R, _ROWS), min(V, _WIDTH)
    # Padding has gradients of zero.
    # XLA's CPU backend would convert all elements to float32 to slice or update some of them.
    bits = as_bits(weight)
    chunks = _Rows(*(_divide(array, size) for array in rows))

    def add_slice(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x_bar, factors_bar, weight_bar = sums
        first = index * width
        start = jnp.minimum(first, V - width)  # the last slice ends at the last token
        part = from_bits(lax.dynamic_slice_in_dim(bits, start, width), weight.dtype)
        is_new = start + jnp.arange(width, dtype=jnp.int32) >= first

        def add_rows(part_bar: jax.Array, rows: _Rows) -> tuple[jax.Array, Any]:
            def finish(y: jax.Array, factors: jax.Array) -> jax.Array:
                return static.finish(y) * factors[:, None]

            y = static.logits(rows.x, part)
            logits, transpose = cast(Any, jax.vjp(finish, y, rows.factors))
            logits_bar = jnp.where(is_new, _logits_gradient(rows, logits, start), 0)
            y_bar, factors_bar = transpose(logits_bar)
            x_bar, change = linear_gradients(rows.x, part, y_bar)
            return part_bar + change, (x_bar, factors_bar)

        empty = jnp.zeros((width, E), jnp.float32)
        part_bar, (new, new_factors) = lax.scan(add_rows, empty, chunks)
        old = lax.dynamic_slice_in_dim(weight_bar, start, width)
        part_bar = jnp.where(is_new[:, None], as_bits(part_bar.astype(weight.dtype)), old)
        weight_bar = lax.dynamic_update_slice_in_dim(weight_bar, part_bar, start, 0)
        return x_bar + new, factors_bar + new_factors, weight_bar

    sums = jnp.zeros(chunks.x.shape), jnp.zeros(chunks.factors.shape), jnp.zeros_like(bits)
    sums = cast(Any, lax.fori_loop(0, -(-V // width), add_slice, sums))
    x_bar, factors_bar, weight_bar = sums
    weight_bar = from_bits(weight_bar, weight.dtype)
    return _merge(x_bar, R), weight_bar, None, _merge(factors_bar, R)


_score.defvjp(_forward, _backward)


def _logits_gradient(rows: _Rows, logits: jax.Array, start: jax.Array) -> jax.Array:
    """Return the gradient with respect to the logits from token `start` on, f32 [R, width]."""
    R, width = logits.shape
    log_probs = logits - rows.denominators
    probabilities = jnp.exp(log_probs)
    # The derivative of the log-probability of a token is 1 at this token, minus the probability.
    total = jnp.sum(rows.ids_bar, axis=1, keepdims=True)
    change = rows.entropy_bar[:, None] * (log_probs + rows.entropy[:, None])
    gradient = jnp.where(probabilities > 0, -probabilities * (total + change), 0)
    columns = rows.ids - start
    columns = jnp.where((columns >= 0) & (columns < width), columns, width)
    row_index = jnp.arange(R, dtype=jnp.int32)[:, None]
    return gradient.at[row_index, columns].add(rows.ids_bar, mode="drop")


def _score_logits(
    logits: jax.Array, targets: jax.Array, backend: str | None, num_top: int
) -> tuple[TokenScores, jax.Array]:
    """Return the scores of targets i32 [R] for logits [R, V], and the log-sum-exp f32 [R, 1]."""
    denominators = log_sum_exp(logits, backend=backend)
    target_logits = jnp.take_along_axis(logits, targets[:, None], axis=1)
    all_log_probs = logits - denominators
    weights = jnp.exp(all_log_probs)
    terms = jnp.where(weights > 0, weights * all_log_probs, 0)
    top, ids = lax.top_k(logits, num_top) if num_top else (logits[:, :0], None)
    scores = TokenScores(
        (target_logits - denominators)[:, 0],
        -jnp.sum(terms, axis=1),
        jnp.zeros(top.shape, jnp.int32) if ids is None else ids,
        top - denominators,
    )
    return scores, denominators


def _chunk_size(num_rows: int, vocab_size: int) -> int:
    """Return the number of rows whose logits exist at the same time."""
    max_rows = _MAX_CHUNK_BYTES // (4 * vocab_size)
    return min(num_rows, _MAX_TOKENS, max(_MIN_TOKENS, max_rows))


def _map_chunks(function: Callable[..., Any], rows: tuple[jax.Array, ...], size: int) -> Any:
    """Call a function of rows with `size` rows at a time."""
    merge = functools.partial(_merge, num_rows=rows[0].shape[0])
    chunks = tuple(_divide(array, size) for array in rows)

    def run(chunk: tuple[jax.Array, ...]) -> Any:
        return function(*chunk)

    return jax.tree.map(merge, lax.map(run, chunks))


def _divide(array: jax.Array, size: int) -> jax.Array:
    """Divide rows into chunks of `size` rows; the last chunk is padded with zeros."""
    array = jnp.pad(array, ((0, -array.shape[0] % size), *[(0, 0)] * (array.ndim - 1)))
    return array.reshape(-1, size, *array.shape[1:])


def _merge(chunks: jax.Array, num_rows: int) -> jax.Array:
    """Undo `_divide`."""
    return lax.collapse(chunks, 0, 2)[:num_rows]
