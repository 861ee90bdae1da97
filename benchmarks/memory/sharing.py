"""Blocks saved by sharing: several samples of one prompt, and beam search.

The metric is from Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), section 6.3: saved blocks relative to blocks without sharing. Both are
counted in every decode step, after the step has allocated blocks for its tokens, and summed over
all steps of all requests. All requests start in the first step, and leave when they are complete.

Samples share the blocks that `fork` shares, until they write. Beams come from a real beam search
with a model and a paged cache: in every step `reorder` makes each beam a continuation of one of the
best beams, and `decode` copies on write. Every request generates a given number of tokens; the end
token is never chosen.
"""

from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.cache import blocks, paged_cache
from paged_jax.cache.blocks import BlockTables, num_blocks_needed
from paged_jax.models.decoder import Decoder
from paged_jax.rollouts import rollout

# Means of the Alpaca trace, section 6.1 of the paper. The paper does not state the spread of
# lengths; these values are assumptions, see `saved_by_spread`.
MEAN_PROMPT, MEAN_OUTPUT = 19.31, 58.45
SPREAD_PROMPT, SPREAD_OUTPUT = 0.6, 0.8

SAMPLES, BEAMS = "samples", "beams"

Record = dict[str, Any]


class Requests(NamedTuple):
    """Lengths in tokens, i64[R] each. Outputs have at least 2 tokens; the last is not cached."""

    num_prompt: np.ndarray
    num_output: np.ndarray


class Usage(NamedTuple):
    """Number of blocks in every decode step, i64[N] each; 0 after all requests are complete."""

    shared: np.ndarray
    unshared: np.ndarray

    @property
    def saved(self) -> float:
        """Saved blocks relative to blocks without sharing, over all steps."""
        return float(1 - self.shared.sum() / self.unshared.sum())


def draw_requests(
    num_requests: int,
    max_length: int,
    seed: int,
    *,
    spread_prompt: float = SPREAD_PROMPT,
    spread_output: float = SPREAD_OUTPUT,
) -> Requests:
    """Draw lengths similar to Alpaca: two independent log-normals, with the published means.

    The draw takes one value per quantile, in random order, so that few requests represent many.

    Args:
      num_requests: R.
      max_length: maximum number of tokens in prompt and output together; outputs are cut.
      seed: seed of the order.
      spread_prompt: standard deviation of the logarithm of prompt lengths.
      spread_output: standard deviation of the logarithm of output lengths.
    """
    rng = np.random.default_rng(seed)
    prompts, outputs = (
        np.maximum(np.rint(rng.permutation(_quantiles(mean, spread, num_requests))), least)
        for mean, spread, least in (
            (MEAN_PROMPT, spread_prompt, 1),
            (MEAN_OUTPUT, spread_output, 2),
        )
    )
    prompts = np.minimum(prompts, max_length // 2).astype(np.int64)
    return Requests(prompts, np.minimum(outputs, max_length - prompts).astype(np.int64))


def _quantiles(mean: float, spread: float, num: int) -> np.ndarray:
    """Return `num` quantiles of the log-normal with this mean, scaled to have exactly this mean."""
    normal = NormalDist()
    values = np.exp([spread * normal.inv_cdf((i + 0.5) / num) for i in range(num)])
    return mean * values / values.mean()


def sample_in_parallel(requests: Requests, num_samples: int, block_size: int) -> Usage:
    """Decode `num_samples` samples of every request in the allocator.

    Raises:
      RuntimeError: an operation of the allocator failed.
    """
    longest = int((requests.num_prompt + requests.num_output).max())
    per_slot = num_blocks_needed(longest, block_size)
    num_slots = num_samples * len(requests.num_prompt)
    tables = BlockTables.create(num_slots * per_slot, num_slots, per_slot, block_size)
    usage, ok = _sample(
        tables,
        *(jnp.asarray(lengths, jnp.int32) for lengths in requests),
        num_samples=num_samples,
        max_prompt=int(requests.num_prompt.max()),
        num_steps=int(requests.num_output.max()) - 1,
    )
    if not ok:
        raise RuntimeError("sample_in_parallel: an operation of the allocator failed")
    return Usage(*(np.asarray(num, np.int64) for num in usage))


@partial(jax.jit, static_argnames=("num_samples", "max_prompt", "num_steps"))
def _sample(tables, num_prompt, num_output, *, num_samples: int, max_prompt: int, num_steps: int):
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    firsts = _first_slots(slots, num_samples)
    num_output = jnp.repeat(num_output, num_samples)
    prompts = jnp.where(slots == firsts, jnp.repeat(num_prompt, num_samples), 0)
    tables, _, has_prompts = blocks.reserve(tables, prompts, max_tokens=max_prompt)
    tables, is_forked = blocks.fork(tables, jnp.where(slots == firsts, -1, firsts))

    def step(tables, t):
        tables, _, ok = blocks.reserve(tables, (t < num_output).astype(jnp.int32))
        counts = _count(tables)
        is_done = t + 1 == num_output
        tables = lax.cond(jnp.any(is_done), lambda: blocks.release(tables, is_done), lambda: tables)
        return tables, (counts, ok)

    steps = jnp.arange(1, num_steps + 1, dtype=jnp.int32)
    _, (usage, ok) = lax.scan(step, tables, steps)
    return usage, has_prompts & is_forked & jnp.all(ok)


def _first_slots(slots: jax.Array, width: int) -> jax.Array:
    """Return the first slot of the request of each slot, i32[S]. The first slot gets the prompt."""
    return slots // width * width


def _count(tables: BlockTables) -> tuple[jax.Array, jax.Array]:
    """Return the number of allocated blocks, and the number without sharing, i32[] each."""
    held = tables.num_blocks - tables.pool.num_free
    unshared = jnp.sum(num_blocks_needed(tables.lengths, tables.block_size), dtype=jnp.int32)
    return held, unshared


class Beams(NamedTuple):
    """Result of a beam search over R requests with W beams each; S = R * W, N steps."""

    scores: jax.Array  # f32[R, W], log-probabilities of the outputs, in descending order
    usage: tuple[jax.Array, jax.Array]  # i32[N] each, as in `Usage`
    # i32[N, S], for each step and beam, the index in its request of the beam that it continues
    parents: jax.Array
    ok: jax.Array  # bool[], whether there were enough blocks


@partial(jax.jit, static_argnames=("width", "block_size", "num_blocks", "max_length", "num_steps"))
def search_beams(
    model: Decoder,
    token_ids: jax.Array,
    num_prompt: jax.Array,
    num_output: jax.Array,
    *,
    width: int,
    block_size: int,
    num_blocks: int,
    max_length: int,
    num_steps: int,
) -> Beams:
    """Search for the most probable outputs of a batch of prompts, in one program.

    Args:
      model: model that gives the log-probabilities.
      token_ids: i32[R, T], prompts, each row padded at its end.
      num_prompt: i32[R], number of tokens in each prompt.
      num_output: i32[R], number of tokens to generate, at least 2.
      width: W, the number of beams (static).
      block_size: block size of the cache (static).
      num_blocks: number of blocks of the cache (static).
      max_length: maximum number of tokens of a request, prompt and output (static).
      num_steps: N, at least the largest `num_output` minus 1 (static).
    """
    num_requests, num_slots = len(num_prompt), len(num_prompt) * width
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    firsts = _first_slots(slots, width)
    cache = model.create_cache(
        num_slots=num_slots, max_length=max_length, num_blocks=num_blocks, block_size=block_size
    )
    logits, cache, has_prompts = model.prefill(cache, token_ids, slots[::width], num_prompt)
    cache, is_forked = paged_cache.fork(cache, jnp.where(slots == firsts, -1, firsts))
    scores, inputs = lax.top_k(_log_probs(model, logits), width)

    def step(state):
        t, cache, scores, inputs, beams, ok = state
        is_running = t < num_output
        rows = jnp.where(jnp.repeat(is_running, width), slots, -1)
        logits, cache, has_room = model.decode(cache, inputs.reshape(-1), rows)
        shared, unshared = _count(cache.tables)
        scored, from_beam, inputs = _best(scores, _log_probs(model, logits))
        scores = jnp.where(is_running[:, None], scored, scores)

        is_done = jnp.repeat(is_running & (t + 1 >= num_output), width)
        cache = paged_cache.release(cache, is_done)
        parents = jnp.where((rows >= 0) & ~is_done, firsts + from_beam.reshape(-1), -1)
        cache, is_reordered = paged_cache.reorder(cache, parents)
        beams = beams._replace(
            usage=(beams.usage[0].at[t - 1].set(shared), beams.usage[1].at[t - 1].set(unshared)),
            parents=beams.parents.at[t - 1].set(from_beam.reshape(-1)),
        )
        return t + 1, cache, scores, inputs, beams, ok & has_room & is_reordered

    def is_going_on(state):
        return state[-1] & jnp.any(state[0] < num_output)

    nothing = jnp.zeros(num_steps, jnp.int32)
    parents = jnp.zeros((num_steps, num_slots), jnp.int32)
    beams = Beams(jnp.zeros((num_requests, width)), (nothing, nothing), parents, is_forked)
    state = jnp.int32(1), cache, scores, inputs, beams, has_prompts & is_forked
    _, _, scores, _, beams, ok = lax.while_loop(is_going_on, step, state)
    return beams._replace(scores=scores, ok=ok)


def _log_probs(model: Decoder, logits: jax.Array) -> jax.Array:
    """Return log-probabilities, f32[B, V]; minus infinity for tokens that would end the text."""
    log_probs = jax.nn.log_softmax(logits)
    return log_probs.at[:, jnp.array(model.config.eos_token_ids, jnp.int32)].set(-jnp.inf)


def _best(scores: jax.Array, log_probs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the best W continuations of W beams f32[R, W]: scores, continued beams, tokens."""
    num_requests, width = scores.shape
    vocab_size = log_probs.shape[-1]
    continued = scores[:, :, None] + log_probs.reshape(num_requests, width, vocab_size)
    scores, places = lax.top_k(continued.reshape(num_requests, -1), width)
    return scores, places // vocab_size, places % vocab_size


def write_prompts(model: Decoder, num_prompt: np.ndarray, seed: int) -> jax.Array:
    """Return texts generated by the model, i32[R, T], as long as the longest prompt."""
    start = min(model.config.bos_token_id or 0, model.config.vocab_size - 1)
    first = jnp.full((len(num_prompt), 1), start, jnp.int32)
    run = jax.jit(rollout, static_argnames="max_tokens")
    num_tokens = jnp.ones(len(num_prompt), jnp.int32)
    written = run(model, first, num_tokens, max_tokens=int(num_prompt.max()), seed=np.uint32(seed))
    return jnp.concatenate([first, written.token_ids], axis=1)[:, : int(num_prompt.max())]


def search_in_groups(
    model: Decoder,
    token_ids: jax.Array,
    requests: Requests,
    width: int,
    block_size: int,
    *,
    group_size: int,
) -> tuple[Usage, Usage]:
    """Run beam search over all requests in groups of `group_size` requests of similar length.

    Args:
      model: model that gives the log-probabilities.
      token_ids: i32[R, T], prompts, as long as `requests` says.
      requests: lengths of the requests.
      width: number of beams.
      block_size: block size of the cache.
      group_size: number of requests per group.

    Returns:
      The blocks counted in the allocator, and the blocks counted from the parents of the beams.

    Raises:
      RuntimeError: an operation of the allocator failed.
    """
    order = np.argsort(requests.num_output, kind="stable")
    groups = np.split(order, range(group_size, len(order), group_size))
    lengths = requests.num_prompt + requests.num_output
    # One program serves all groups, with as many blocks as any of them could need without sharing.
    sizes = {
        "width": width,
        "block_size": block_size,
        "num_blocks": max(width * num_blocks_needed(lengths[g], block_size).sum() for g in groups),
        "max_length": int(lengths.max()),
        "num_steps": int(requests.num_output.max()) - 1,
    }
    sizes["num_blocks"] = int(sizes["num_blocks"])
    used, recounted = [], []
    for group in groups:
        part = Requests(requests.num_prompt[group], requests.num_output[group])
        num_tokens = (jnp.asarray(num, jnp.int32) for num in part)
        beams = search_beams(model, token_ids[group], *num_tokens, **sizes)
        if not beams.ok:
            raise RuntimeError("search_in_groups: an operation of the allocator failed")
        used.append(Usage(*(np.asarray(num, np.int64) for num in beams.usage)))
        parents = np.asarray(beams.parents).reshape(sizes["num_steps"], len(group), width)
        recounted.append(recount(part, parents, block_size))
    return _add_up(used), _add_up(recounted)


def _add_up(usages: list[Usage]) -> Usage:
    return Usage(*(np.sum(steps, axis=0) for steps in zip(*usages, strict=True)))


def recount(requests: Requests, parents: np.ndarray, block_size: int) -> Usage:
    """Count blocks without an allocator, only from `parents` i32[N, R, W].

    A beam that writes into a block becomes its only owner. So each written block gets a new name,
    beams that continue another beam inherit its names, and the count is the number of different
    names.
    """
    num_steps, num_requests, width = parents.shape
    shared, unshared = np.zeros((2, num_steps), np.int64)
    for request in range(num_requests):
        prompt, output = (int(lengths[request]) for lengths in requests)
        names = np.tile(np.arange(num_blocks_needed(prompt + output, block_size)), (width, 1))
        for t in range(1, output):
            written = (prompt + t - 1) // block_size
            names[:, written] = names.max() + 1 + np.arange(width)
            shared[t - 1] += len(np.unique(names[:, : written + 1]))
            unshared[t - 1] += width * (written + 1)
            names = names[parents[t - 1, request]]
    return Usage(shared, unshared)


def saved_by_samples(requests: Requests, num_samples: int, block_size: int) -> float:
    """Return the expected savings: n - 1 of n samples save the full prompt blocks.

    Example:
      >>> two = Requests(np.array([32]), np.array([2]))
      >>> saved_by_samples(two, 2, block_size=16)     # 2 of 6 blocks in the only step
      0.3333333333333333
    """
    num_steps = requests.num_output - 1
    saved = (num_samples - 1) * (requests.num_prompt // block_size) * num_steps
    unshared = sum(
        num_samples * num_blocks_needed(prompt + np.arange(1, steps + 1), block_size).sum()
        for prompt, steps in zip(requests.num_prompt, num_steps, strict=True)
    )
    return float(saved.sum() / unshared)


def saved_by_spread(
    spreads: tuple[float, ...], num_samples: int, block_size: int, seed: int
) -> list[Record]:
    """Return by formula the savings of samples with other spreads of lengths than assumed."""
    records = []
    for prompt in spreads:
        for output in spreads:
            requests = draw_requests(1024, 2048, seed, spread_prompt=prompt, spread_output=output)
            saved = saved_by_samples(requests, num_samples, block_size)
            spread = {"spread_prompt": prompt, "spread_output": output}
            records.append({"width": num_samples, **spread, "saved": saved})
    return records


def measure(
    model: Decoder,
    requests: Requests,
    widths: tuple[int, ...],
    block_size: int,
    group_size: int,
    seed: int,
) -> list[Record]:
    """Return the savings of samples and of beams for the same requests, by their number."""
    token_ids = write_prompts(model, requests.num_prompt, seed)
    records = []
    for width in widths:
        usage = sample_in_parallel(requests, width, block_size)
        records.append(
            _record(SAMPLES, width, usage, saved_by_samples(requests, width, block_size))
        )
    for width in widths:
        usage, recounted = search_in_groups(
            model, token_ids, requests, width, block_size, group_size=group_size
        )
        records.append(_record(BEAMS, width, usage, recounted.saved))
    return records


def _record(kind: str, width: int, usage: Usage, recounted: float) -> Record:
    return {
        "kind": kind,
        "width": width,
        "saved_allocator": usage.saved,
        "saved_recounted": recounted,
        "num_shared": int(usage.shared.sum()),
        "num_unshared": int(usage.unshared.sum()),
    }
