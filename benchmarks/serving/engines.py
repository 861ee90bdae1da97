"""Engines in this process: continuous batching, and baselines without paging or scheduling.

The baselines serve sequential requests or static batches. They are plain jitted JAX functions over
the layers of the model. K and V of a batch are contiguous for each layer, ``[B, K, N, D]``, with
the final length of the longest sequence of the batch::

    prefill   all prompts of the batch, padded at the right                one program for each T, N
    decode    one token for every row, until the longest row is complete   one program for each N

The host dispatches a step without waiting for the previous step: tokens decide nothing, because
the number of tokens of every request is known. This is the best case for these baselines.
"""

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.serving.workloads import Outcome, Request
from paged_jax import Engine, Llama, SamplingParams

# Maximum number of prompt tokens of a sequence in a step.
_MAX_CHUNK = 512
# Number of tokens that warm-up requests generate.
_WARMUP_TOKENS = 12


class EngineSizes(NamedTuple):
    """Common sizes of all engines of a comparison.

    Attributes:
      max_num_seqs: maximum number of running sequences.
      max_model_len: maximum length of a sequence.
      pool_tokens: number of tokens that fit into the pools, independent of the block size.
      block_size: number of tokens in a block, for paged K and V.
      max_num_batched_tokens: maximum number of tokens of an engine step; None is the default.
      steps_per_dispatch: number of decode steps per dispatch.
    """

    max_num_seqs: int
    max_model_len: int
    pool_tokens: int
    block_size: int
    max_num_batched_tokens: int | None
    steps_per_dispatch: int


# Kinds of caches (is paged, has a prefix cache), by their names in the tables.
VARIANTS: dict[str, tuple[bool, bool]] = {
    "paged, prefix cache": (True, True),
    "paged": (True, False),
    "contiguous": (False, False),
}


def make_engine(model: Llama, sizes: EngineSizes, variant: str) -> Engine:
    """Create an engine for one of the VARIANTS, without compiling.

    "contiguous" is the same engine with blocks of `max_model_len` tokens: every sequence has one
    block, reserved when it is admitted, and attention reads the whole block.
    """
    is_paged, has_prefix_cache = VARIANTS[variant]
    block_size = sizes.block_size if is_paged else sizes.max_model_len
    num_blocks, max_num_seqs = sizes.pool_tokens // block_size, sizes.max_num_seqs
    if not is_paged:
        max_num_seqs = min(max_num_seqs, num_blocks)
        # The scheduler reserves one more block for each running sequence, although a second block
        # is never needed here. Without these additional blocks, only half as many sequences would
        # run.
        num_blocks += max_num_seqs
    optional = {}
    if sizes.max_num_batched_tokens is not None:
        optional["max_num_batched_tokens"] = sizes.max_num_batched_tokens
    return Engine(
        model,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=sizes.max_model_len,
        max_chunk=min(_MAX_CHUNK, sizes.max_model_len),
        steps_per_dispatch=sizes.steps_per_dispatch,
        enable_prefix_caching=has_prefix_cache,
        **optional,
    )


def warm_up(engine: Engine, requests: list[Request]) -> None:
    """Compile the programs for such requests, by serving 1, 2, 4, ... shortened requests.

    `Engine.warmup` would compile all programs, which takes several times as long.
    """
    short = [
        dataclasses.replace(request, num_new=min(request.num_new, _WARMUP_TOKENS))
        for request in requests
    ]
    first, count = 0, 1
    while first < len(short):
        serve(engine, short[first : first + count])
        first, count = first + count, 2 * count


def serve(engine: Engine, requests: list[Request]) -> Outcome:
    """Serve requests, each added at its arrival time, until all are complete.

    `Outcome.details` has the increments of the engine's totals, and its peaks since it was created.
    """
    before = _numbers(engine.stats)
    indices: dict[str, int] = {}
    token_ids: list[list[int]] = [[] for _ in requests]
    token_times: list[list[float]] = [[] for _ in requests]
    step_seconds = []
    order = sorted(range(len(requests)), key=lambda i: requests[i].arrival)
    num_added = 0
    start = time.perf_counter()
    while num_added < len(order) or engine.has_unfinished:
        now = time.perf_counter() - start
        while num_added < len(order) and requests[order[num_added]].arrival <= now:
            index = order[num_added]
            indices[_add(engine, requests[index])] = index
            num_added += 1
        if not engine.has_unfinished:
            time.sleep(requests[order[num_added]].arrival - now)
            continue
        step_start = time.perf_counter()
        outputs = engine.step()
        step_end = time.perf_counter()
        step_seconds.append(step_end - step_start)
        for output in outputs:
            index = indices[output.request_id]
            token_ids[index] = output.outputs[0].token_ids
            num_more = len(token_ids[index]) - len(token_times[index])
            token_times[index] += [step_end - start] * num_more
    seconds = time.perf_counter() - start
    after = _numbers(engine.stats)
    return Outcome(
        seconds=seconds,
        token_ids=token_ids,
        arrivals=[request.arrival for request in requests],
        token_times=token_times,
        step_seconds=step_seconds,
        details={
            name: value if name.startswith("peak_") else value - before[name]
            for name, value in after.items()
        },
    )


def _add(engine: Engine, request: Request) -> str:
    params = SamplingParams(temperature=0, max_tokens=request.num_new, ignore_eos=True)
    return engine.add_request({"prompt_token_ids": request.prompt_token_ids}, params)


def _numbers(stats: Any) -> dict[str, float]:
    return {
        field.name: value
        for field in dataclasses.fields(stats)
        if isinstance(value := getattr(stats, field.name), int | float)
        # Differences of these two have no meaning: a time of the first request, and a ratio.
        and field.name not in ("first_token_seconds", "sharing")
    }


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
