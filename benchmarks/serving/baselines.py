"""Serving without paging or scheduling: sequential requests, or static batches.

These are plain jitted JAX functions over the layers of the model. K and V of a batch are contiguous
for each layer, ``[B, K, N, D]``, with the final length of the longest sequence of the batch::

    prefill   all prompts of the batch, padded at the right                one program for each T, N
    decode    one token for every row, until the longest row is complete   one program for each N

The host dispatches a step without waiting for the previous step: tokens decide nothing, because
the number of tokens of every request is known. This is the best case for these baselines.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.serving.outcome import Outcome
from benchmarks.serving.workloads import Request
from paged_jax import Llama

# Prompts and caches are padded to multiples of these, so that few programs serve all lengths.
_PROMPT_STEP = 64
_CACHE_STEP = 128

Cache = list[tuple[jax.Array, jax.Array]]
# Cache, number of cached tokens i32[B], next tokens i32[B].
State = tuple[Cache, jax.Array, jax.Array]


class ContiguousBatches:
    """Greedy generation in static batches, over contiguous K and V.

    Args:
      model: the model.
      batch: number of rows of a batch; 1 means sequential requests.
    """

    def __init__(self, model: Llama, *, batch: int):
        graphdef, state = nnx.split(model)
        self._weights, treedef = jax.tree.flatten(state)
        self._batch = batch

        def bound(function):
            def call(weights, *arguments):
                return function(
                    nnx.merge(graphdef, jax.tree.unflatten(treedef, weights)), *arguments
                )

            return call

        self._prefill = jax.jit(bound(prefill), static_argnums=3)
        self._decode = jax.jit(bound(decode), donate_argnums=1)

    def warm_up(self, requests: list[Request]) -> None:
        """Compile every program that a run over these requests calls."""
        shapes = {self._shape(rows): rows for rows in self._batches(requests)}
        for shape, rows in shapes.items():
            state = self._start(rows, shape)
            jax.block_until_ready(self._decode(self._weights, *state))

    def run(self, requests: list[Request]) -> Outcome:
        """Generate for all requests, in their order. All of them must have arrived."""
        token_ids, token_times, step_seconds = [], [], []
        start = time.perf_counter()
        for rows in self._batches(requests):
            tokens, first_time, end_time = self._generate(rows)
            num_steps = tokens.shape[0] - 1
            if num_steps:
                step_seconds.append((end_time - first_time) / num_steps)
            for row, request in enumerate(rows):
                num_later = request.num_new - 1
                token_ids.append(tokens[: request.num_new, row].tolist())
                token_times.append([first_time - start] + [end_time - start] * num_later)
        seconds = time.perf_counter() - start
        return Outcome(seconds, token_ids, [0.0] * len(requests), token_times, step_seconds)

    def _batches(self, requests: list[Request]) -> list[list[Request]]:
        return [requests[i : i + self._batch] for i in range(0, len(requests), self._batch)]

    def _shape(self, rows: list[Request]) -> tuple[int, int]:
        """Return the padded prompt length T and the cache length N of a batch."""
        T = _round_up(max(len(request.prompt_token_ids) for request in rows), _PROMPT_STEP)
        N = _round_up(max(request.num_tokens for request in rows), _CACHE_STEP)
        return T, max(T, N)

    def _start(self, rows: list[Request], shape: tuple[int, int]) -> State:
        """Read the prompts and generate the first tokens."""
        T, N = shape
        token_ids = np.zeros((self._batch, T), np.int32)
        # Missing rows of the last batch are prompts of one token.
        lengths = np.ones(self._batch, np.int32)
        for row, request in enumerate(rows):
            lengths[row] = len(request.prompt_token_ids)
            token_ids[row, : lengths[row]] = request.prompt_token_ids
        tokens, cache = self._prefill(self._weights, token_ids, lengths, N)
        return cache, jnp.asarray(lengths), tokens

    def _generate(self, rows: list[Request]) -> tuple[np.ndarray, float, float]:
        """Return tokens i32[steps, B], and the times of the first and of the last tokens."""
        state = self._start(rows, self._shape(rows))
        drawn = [jax.block_until_ready(state[2])]
        first_time = time.perf_counter()
        for _ in range(max(request.num_new for request in rows) - 1):
            state = self._decode(self._weights, *state)
            drawn.append(state[2])
        tokens = np.stack([np.asarray(step) for step in drawn])
        return tokens, first_time, time.perf_counter()


def prefill(
    model: Llama, token_ids: jax.Array, num_tokens: jax.Array, cache_len: int
) -> tuple[jax.Array, Cache]:
    """Read prompts i32 ``[B, T]``, padded at the right to T, into a new cache of N = `cache_len`.

    Returns:
      The most probable next tokens, i32 ``[B]``, and K and V of each layer, ``[B, K, N, D]``.
    """
    B, T = token_ids.shape
    windows = model.config.sliding_windows

    def attend(layer, projection, cache):
        q, k, v = projection.split()
        padding = ((0, 0), (0, 0), (0, cache_len - T), (0, 0))
        pieces = tuple(jnp.pad(x.swapaxes(1, 2), padding) for x in (k, v))
        window = windows[layer]
        local = None if window is None else (window - 1, 0)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)
        return out, [*cache, pieces]

    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    x, cache = model.hidden_states(token_ids, positions, attend, [])
    return _most_probable(model, x[jnp.arange(B), num_tokens - 1]), cache


def decode(
    model: Llama, cache: Cache, lengths: jax.Array, tokens: jax.Array
) -> tuple[Cache, jax.Array, jax.Array]:
    """Decode one step for every row, without gathering, with attention over all N positions.

    Args:
      model: the model.
      cache: K and V of each layer, ``[B, K, N, D]``; donate them.
      lengths: i32 ``[B]``, number of cached tokens of each row.
      tokens: i32 ``[B]``, the next tokens.

    Returns:
      The new cache, lengths and next tokens.
    """
    rows = jnp.arange(tokens.shape[0])
    windows = model.config.sliding_windows

    def attend(layer, projection, cache):
        q, k, v = projection.split()
        keys, values = (
            piece.at[rows, :, lengths].set(new)
            for piece, new in zip(cache[layer], (k, v), strict=True)
        )
        B, K, N, D = keys.shape
        places = jnp.arange(N, dtype=jnp.int32)[None]
        seen = places <= lengths[:, None]
        if (window := windows[layer]) is not None:
            seen &= places > lengths[:, None] - window
        scores = jnp.einsum("bkgd,bknd->bkgn", q.reshape(B, K, -1, D) * D**-0.5, keys)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bkgn,bknd->bkgd", weights, values)
        return out.reshape(B, -1, D), [*cache[:layer], (keys, values), *cache[layer + 1 :]]

    x, cache = model.hidden_states(tokens, lengths, attend, cache)
    return cache, lengths + 1, _most_probable(model, x)


def _most_probable(model: Llama, x: jax.Array) -> jax.Array:
    return jnp.argmax(model.logits(x), axis=-1).astype(jnp.int32)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
