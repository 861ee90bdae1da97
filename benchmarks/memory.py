"""Benchmark of KV memory that holds tokens: contiguous and paged, by formula and in the allocator.

    python -m benchmarks.memory                                  # a few minutes
    python -m benchmarks.memory --quick                          # less than a minute
    python -m benchmarks.memory --json memory.json --plot memory.png

It measures the fraction of the memory that holds tokens, the effect of the block size, the cost of
a shared prompt, the number of sequences in a memory budget, and the blocks that samples and beams
of a prompt share. A full run reports whether each goal is met. Only the times depend on the
machine: counts depend only on the seed. (Beams come from a model, so rounding on another device may
lead to other beams.)

All measurements run `paged_jax.blocks` under jit. A contiguous cache is the same allocator with
blocks of the maximum length: a sequence takes one such block when it starts and keeps it. Sequences
grow by one token at a time, as in text generation, and the count includes the blocks that have left
the free queue.

The metric of sharing is from Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention" (SOSP 2023), section 6.3: saved blocks relative to blocks without
sharing. Both are counted in every decode step, after the step has allocated blocks for its tokens,
and summed over all steps of all requests. All requests start in the first step, and leave when they
are complete. Samples share the blocks that `fork` shares, until they write. Beams come from a real
beam search with a model and a paged cache: in every step `reorder` makes each beam a continuation
of one of the best beams, and `decode` copies on write. Every request generates a given number of
tokens; the end token is never chosen.

In a report, "utilisation", "block_sizes", "concurrency", "sharing" and "saved_by_spread" are lists
of records, one per line of a table. "shared_prompt" and "requests" are single records. The rest
describes the run and the machine.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import harness
from benchmarks.harness import Column, Goal, Report
from paged_jax.cache import blocks, paged_cache
from paged_jax.cache.blocks import BlockTables, num_blocks_needed
from paged_jax.models.decoder import Decoder
from paged_jax.rollouts import rollout

Record = dict[str, Any]

# Utilisation, by formula and in the allocator.

MAX_LENGTH = 2048
"""Number of tokens that a contiguous cache reserves for every sequence."""
MEAN_LENGTH = 492
"""Mean number of tokens of a sequence, an assumption: see `implied_means`."""
BLOCK_SIZE = 16
# Number of tokens added to each sequence in a timed run.
_TIMED_STEPS = 64


class Held(NamedTuple):
    """Number of blocks and tokens of sequences, counted in the allocator."""

    num_tokens: int
    num_blocks: int
    block_size: int

    @property
    def utilisation(self) -> float:
        """Fraction of the blocks that holds tokens."""
        return self.num_tokens / (self.num_blocks * self.block_size)

    @classmethod
    def from_tables(cls, tables: BlockTables) -> "Held":
        """Count the tokens, and the blocks that have left the free queue."""
        num_held = tables.num_blocks - int(tables.pool.num_free)
        return cls(int(tables.lengths.sum()), num_held, tables.block_size)


def uniform_lengths(num_sequences: int, seed: int | list[int]) -> np.ndarray:
    """Return uniform integers from 1 to 2 * MEAN_LENGTH - 1, i64[N]."""
    return np.random.default_rng(seed).integers(1, 2 * MEAN_LENGTH, num_sequences)


def lognormal_lengths(num_sequences: int, seed: int | list[int]) -> np.ndarray:
    """Return log-normal lengths (sigma 0.6, mean about MEAN_LENGTH, at most MAX_LENGTH), i64[N]."""
    sigma = 0.6
    center = np.log(MEAN_LENGTH) - sigma**2 / 2
    drawn = np.random.default_rng(seed).lognormal(center, sigma, num_sequences)
    return np.clip(np.rint(drawn), 1, MAX_LENGTH).astype(np.int64)


def expected_utilisation(mean_length: float, block_size: int) -> float:
    """Return the expected utilisation if the last blocks hold 1 to C tokens with equal probability.

    Only the mean length matters: a sequence wastes (C - 1) / 2 tokens on average.

    Example:
      >>> round(expected_utilisation(492, 16), 3)
      0.985
    """
    return mean_length / (mean_length + (block_size - 1) / 2)


def exact_utilisation(lengths: np.ndarray, block_size: int) -> float:
    """Return the utilisation of paged sequences of `lengths` tokens."""
    return float(lengths.sum() / (num_blocks_needed(lengths, block_size).sum() * block_size))


def implied_means(contiguous: float, paged: float) -> tuple[float, float]:
    """Return the mean lengths that a contiguous and a paged utilisation imply.

    Example:
      >>> implied_means(0.24, 0.985)
      (491.52, 492.5)
    """
    waste = (BLOCK_SIZE - 1) / 2
    return round(contiguous * MAX_LENGTH, 2), round(waste * paged / (1 - paged), 2)


@partial(jax.jit, donate_argnums=0)
def grow(tables: BlockTables, lengths: jax.Array) -> tuple[BlockTables, jax.Array]:
    """Append tokens to slots, one at a time, until every slot has `lengths` tokens, i32[S].

    The tables are donated. Returns the tables and ok, bool[]: whether there were enough blocks.
    """

    def step(state):
        tables, _ = state
        tables, _, ok = blocks.reserve(tables, (tables.lengths < lengths).astype(jnp.int32))
        return tables, ok

    def is_growing(state):
        tables, ok = state
        return ok & jnp.any(tables.lengths < lengths)

    return lax.while_loop(is_growing, step, (tables, jnp.array(True)))


_reserve = jax.jit(blocks.reserve, static_argnames="max_tokens")
_fork = jax.jit(blocks.fork)


def serve(lengths: np.ndarray, num_slots: int, block_size: int) -> BlockTables:
    """Fill one slot per entry of `lengths`: half of the tokens as a prompt, then one at a time.

    The pool has room for MAX_LENGTH tokens in every slot, as a contiguous cache does.

    Raises:
      RuntimeError: there were not enough blocks.
    """
    per_slot = num_blocks_needed(MAX_LENGTH, block_size)
    tables = BlockTables.create(num_slots * per_slot, num_slots, per_slot, block_size)
    targets = np.zeros(num_slots, np.int32)
    targets[: len(lengths)] = lengths
    tables, _, has_prompts = _reserve(tables, jnp.asarray(targets // 2), max_tokens=MAX_LENGTH)
    tables, ok = grow(tables, jnp.asarray(targets))
    if not (has_prompts and ok):
        raise RuntimeError(
            f"serve: {len(lengths)} sequences do not fit into {tables.num_blocks} blocks"
        )
    return tables


def measure_utilisation(batches: tuple[int, ...], num_draws: int, seed: int) -> list[Record]:
    """Return contiguous and paged utilisation of batches, by formula and in the allocator.

    Every batch is drawn `num_draws` times, and figures are for all draws together. The last record
    has log-normal lengths: another distribution with about the same mean.
    """
    largest = batches[-1]
    cases = [("uniform", uniform_lengths, batch) for batch in batches]
    cases.append(("log-normal", lognormal_lengths, largest))
    return [
        _measure_batch(name, draw, batch, largest, num_draws, seed) for name, draw, batch in cases
    ]


def _measure_batch(
    name: str, draw: Callable, batch: int, num_slots: int, num_draws: int, seed: int
) -> Record:
    """Return a record. All batches share a program for `num_slots`, the largest batch size."""
    draws = [draw(batch, [seed, batch, i]) for i in range(num_draws)]
    paged = [Held.from_tables(serve(lengths, num_slots, BLOCK_SIZE)) for lengths in draws]
    contiguous = [Held.from_tables(serve(lengths, num_slots, MAX_LENGTH)) for lengths in draws]
    lengths = np.concatenate(draws)
    mean = float(lengths.mean())
    return {
        "lengths": name,
        "batch": batch,
        "num_draws": num_draws,
        "mean_length": mean,
        "contiguous_formula": mean / MAX_LENGTH,
        "contiguous_allocator": _sum(contiguous).utilisation,
        "paged_expected": expected_utilisation(mean, BLOCK_SIZE),
        "paged_formula": exact_utilisation(lengths, BLOCK_SIZE),
        "paged_allocator": _sum(paged).utilisation,
        "paged_worst_draw": min(held.utilisation for held in paged),
        "num_tokens": _sum(paged).num_tokens,
        "contiguous_blocks": _sum(contiguous).num_blocks,
        "paged_blocks": _sum(paged).num_blocks,
    }


def _sum(draws: list[Held]) -> Held:
    tokens, num_blocks, sizes = zip(*draws, strict=True)
    return Held(sum(tokens), sum(num_blocks), sizes[0])


def measure_block_sizes(
    block_sizes: tuple[int, ...], num_slots: int, num_rounds: int, seed: int
) -> list[Record]:
    """Return waste, table size and time of a decode step by block size; sizes run in turns."""
    lengths = uniform_lengths(num_slots, seed)
    mean = float(lengths.mean())
    served = {size: serve(lengths, num_slots, size) for size in block_sizes}
    # Timed steps start with these lengths. Every slot gets one token in each step, and lengths
    # differ, so about one slot in C begins a block in every step.
    runs = {size: partial(_time_steps, tables) for size, tables in served.items()}
    seconds = harness.take_turns(runs, num_rounds)
    records = []
    for size, tables in served.items():
        held = Held.from_tables(tables)
        records.append(
            {
                "block_size": size,
                "waste_expected": 1 - expected_utilisation(mean, size),
                "waste_formula": 1 - exact_utilisation(lengths, size),
                "waste_allocator": 1 - held.utilisation,
                "table_entries_per_slot": tables.max_blocks_per_slot,
                "table_bytes": tables.block_tables.nbytes,
                "pool_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(tables.pool)),
                "step_us": 1e6 * statistics.median(seconds[size]),
                "step_us_fastest": 1e6 * min(seconds[size]),
            }
        )
    return records


def _time_steps(tables: BlockTables) -> float:
    """Return the seconds to append one token to every slot, averaged over many steps of one run."""
    targets = tables.lengths + _TIMED_STEPS
    # A copy of the state, made before the clock starts, because the state is donated.
    tables, targets = jax.block_until_ready((jax.tree.map(jnp.copy, tables), targets))
    return harness.elapsed(lambda: jax.block_until_ready(grow(tables, targets))) / _TIMED_STEPS


def measure_shared_prompt(num_requests: int = 10, num_tokens: int = 200) -> Record:
    """Count blocks of requests that share a prompt by `fork`, before and after they write."""
    per_slot = num_blocks_needed(num_tokens, BLOCK_SIZE) + 1
    tables = BlockTables.create(num_requests * per_slot, num_requests, per_slot, BLOCK_SIZE)
    slots = np.arange(num_requests)
    prompts = jnp.full(num_requests, num_tokens, jnp.int32)
    first = jnp.asarray(np.where(slots == 0, 1, 0), jnp.int32)

    alone, _, ok_alone = _reserve(tables, prompts, max_tokens=num_tokens)
    shared, _, ok_first = _reserve(tables, prompts * first, max_tokens=num_tokens)
    shared, ok_fork = _fork(shared, jnp.asarray(np.where(slots == 0, -1, 0)))
    one, copies, ok_one = _reserve(shared, first, max_tokens=1)
    everyone, _, ok_all = _reserve(one, 1 - first, max_tokens=1)
    if not (ok_alone and ok_first and ok_fork and ok_one and ok_all):
        raise RuntimeError("measure_shared_prompt: an operation of the allocator failed")
    return {
        "num_requests": num_requests,
        "num_tokens": num_tokens,
        "block_size": BLOCK_SIZE,
        "blocks_unshared": Held.from_tables(alone).num_blocks,
        "blocks_shared": Held.from_tables(shared).num_blocks,
        "blocks_one_diverged": Held.from_tables(one).num_blocks,
        "copies_one_diverged": int(jnp.sum(copies.source < one.num_blocks)),
        "blocks_all_diverged": Held.from_tables(everyone).num_blocks,
    }


def measure_concurrency(num_contiguous: int, held_tokens: tuple[int, ...]) -> list[Record]:
    """Return the number of sequences that fit into the memory of contiguous sequences.

    Sequences are admitted one at a time until the allocator has no more blocks.
    """
    budget = num_contiguous * MAX_LENGTH
    records = []
    for held in held_tokens:
        paged = _admit(budget, held, BLOCK_SIZE)
        contiguous = _admit(budget, held, MAX_LENGTH)
        records.append(
            {
                "budget_tokens": budget,
                "held_tokens": held,
                "contiguous": contiguous,
                "paged": paged,
                "paged_formula": budget // BLOCK_SIZE // num_blocks_needed(held, BLOCK_SIZE),
                "ratio": paged / contiguous,
            }
        )
    return records


def _admit(budget: int, held: int, block_size: int) -> int:
    """Return how many sequences of `held` tokens a pool of `budget` tokens admits."""
    num_blocks = budget // block_size
    # One slot more than can be filled, so that the number of blocks is the limit.
    num_slots = num_blocks // num_blocks_needed(held, block_size) + 1
    per_slot = num_blocks_needed(MAX_LENGTH, block_size)
    slots = jnp.arange(num_slots, dtype=jnp.int32)

    def admit(state):
        tables, num_admitted, _ = state
        wanted = jnp.where(slots == num_admitted, held, 0).astype(jnp.int32)
        tables, _, ok = blocks.reserve(tables, wanted, max_tokens=held)
        return tables, num_admitted + ok, ok

    @jax.jit
    def admit_all(tables):
        start = tables, jnp.int32(0), jnp.array(True)
        return lax.while_loop(lambda state: state[2] & (state[1] < num_slots), admit, start)[1]

    return int(admit_all(BlockTables.create(num_blocks, num_slots, per_slot, block_size)))


# Blocks saved by sharing.

# Means of the Alpaca trace, section 6.1 of the paper. The paper does not state the spread of
# lengths; these values are assumptions, see `saved_by_spread`.
MEAN_PROMPT, MEAN_OUTPUT = 19.31, 58.45
SPREAD_PROMPT, SPREAD_OUTPUT = 0.6, 0.8

SAMPLES, BEAMS = "samples", "beams"


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


def measure_sharing(
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


# The report.

PUBLISHED = {
    (SAMPLES, 2): 0.061,
    (SAMPLES, 4): 0.085,
    (SAMPLES, 6): 0.098,
    (BEAMS, 2): 0.376,
    (BEAMS, 4): 0.531,
    (BEAMS, 6): 0.552,
}
"""Blocks saved on the Alpaca trace by OPT-13B: Kwon et al. 2023, section 6.3 and figure 15."""

# Bytes of a token in Llama-3 8B: K and V, in 32 layers with 8 heads of 128 bfloat16 values.
_LLAMA3_8B_BYTES = 2 * 32 * 8 * 128 * 2


def _total(tokens_of: str, per_block: str) -> Callable[[Report], float]:
    """Return the utilisation over all batches together, counted in the allocator."""

    def figure(report: Report) -> float:
        records = [r for r in report["utilisation"] if r["lengths"] == "uniform"]
        num_blocks = sum(record[tokens_of] for record in records)
        return sum(record["num_tokens"] for record in records) / (num_blocks * report[per_block])

    return figure


def _waste(report: Report) -> float | None:
    found = [r for r in report["block_sizes"] if r["block_size"] == report["block_size"]]
    return found[0]["waste_allocator"] if found else None


def _shared(key: str) -> Callable[[Report], float]:
    return lambda report: report["shared_prompt"][key]


def _ratio(report: Report) -> float | None:
    found = [r for r in report["concurrency"] if r["held_tokens"] == 200]
    return found[0]["ratio"] if found else None


def _largest_difference(report: Report) -> float:
    """Return the largest difference between the allocator and the formulas, over all records."""
    pairs = [(r[f"{k}_allocator"], r[f"{k}_formula"]) for r in report["utilisation"]
             for k in ("contiguous", "paged")]  # fmt: skip
    pairs += [(r["waste_allocator"], r["waste_formula"]) for r in report["block_sizes"]]
    pairs += [(r["paged"], r["paged_formula"]) for r in report["concurrency"]]
    pairs += [(r["saved_allocator"], r["saved_recounted"]) for r in report["sharing"]]
    return max(abs(ours - formula) for ours, formula in pairs)


def _saved(kind: str, width: int) -> Callable[[Report], float | None]:
    def figure(report: Report) -> float | None:
        found = [r for r in report["sharing"] if (r["kind"], r["width"]) == (kind, width)]
        return found[0]["saved_allocator"] if found else None

    return figure


GOALS = (
    # Tolerance for sums in another order.
    Goal("the allocator agrees with the formulas, except for rounding", _largest_difference,
         high=1e-12, form=".1g"),
    Goal("contiguous: 23 to 25% of the memory holds tokens",
         _total("contiguous_blocks", "max_length"), low=0.23, high=0.25, form=".1%"),
    Goal("paged: 98.5%, rounded", _total("paged_blocks", "block_size"), low=0.9845, form=".2%"),
    Goal("paged: at most 4% waste with blocks of 16", _waste, high=0.04, form=".1%"),
    Goal("10 requests with 200 tokens in common: 130 blocks unshared",
         _shared("blocks_unshared"), low=130, high=130, form="d"),
    Goal("shared, 13 blocks", _shared("blocks_shared"), low=13, high=13, form="d"),
    Goal("14 blocks after one of them has written", _shared("blocks_one_diverged"), low=14, high=14,
         form="d"),
    Goal("9x as many sequences as contiguous, each with 200 of 2048 tokens", _ratio, low=9.0,
         form=".2f"),
    *(Goal(f"{kind}, {width}: at least {saved:.1%} of the blocks saved", _saved(kind, width),
           low=saved, form=".1%")
      for (kind, width), saved in PUBLISHED.items()),
)  # fmt: skip
"""Goals, computed from the mean length or published by Kwon et al. (sharing)."""


def all_lines(report: Report) -> list[str]:
    """Return every table, with an explanation of its columns."""
    tables = (utilisation_lines, block_size_lines, shared_prompt_lines, concurrency_lines)
    return [line for lines in (*tables, sharing_lines) for line in (*lines(report), "")]


def utilisation_lines(report: Report) -> list[str]:
    """Return the fraction of the memory that holds tokens, by batch."""
    from_contiguous, from_paged = report["implied_mean_lengths"]
    columns = (
        Column("lengths", -12, "lengths"),
        Column("batch", 6, "batch"),
        Column("draws", 6, "num_draws"),
        Column("mean", 7, "mean_length", "{:.1f}"),
        Column("contiguous: formula", 21, "contiguous_formula", "{:.2%}"),
        Column("allocator", 11, "contiguous_allocator", "{:.2%}"),
        Column("paged: expected", 17, "paged_expected", "{:.2%}"),
        Column("formula", 9, "paged_formula", "{:.2%}"),
        Column("allocator", 11, "paged_allocator", "{:.2%}"),
        Column("worst draw", 12, "paged_worst_draw", "{:.2%}"),
    )
    return [
        f"Memory that holds tokens. Contiguous: {report['max_length']} tokens reserved for each "
        f"sequence; paged: blocks of {report['block_size']}.",
        *harness.table(columns, report["utilisation"]),
        "Expected: mean / 2048, and mean / (mean + 7.5), for any distribution. Goals of "
        "24% and 98.5%",
        f"both imply a mean length of {from_contiguous:.0f} ({from_contiguous} from the "
        f"first, {from_paged} from the second); uniform lengths are 1 to 983.",
    ]


def block_size_lines(report: Report) -> list[str]:
    """Return the effect of the block size."""
    columns = (
        Column("C", 4, "block_size"),
        Column("waste: expected", 17, "waste_expected", "{:.2%}"),
        Column("formula", 9, "waste_formula", "{:.2%}"),
        Column("allocator", 11, "waste_allocator", "{:.2%}"),
        Column("row of table", 14, "table_entries_per_slot"),
        Column("tables", 12, lambda record: record["table_bytes"] / 1024, "{:.1f} KiB"),
        Column("pool", 12, lambda record: record["pool_bytes"] / 1024, "{:.0f} KiB"),
        Column("step, median", 14, "step_us", "{:.1f} us"),
        Column("fastest", 10, "step_us_fastest", "{:.1f} us"),
    )
    return [
        f"Block size, {report['sizes']['num_slots']} sequences of uniform lengths. "
        "A step appends a token to each; one program makes many steps.",
        *harness.table(columns, report["block_sizes"]),
    ]


def shared_prompt_lines(report: Report) -> list[str]:
    """Return the cost of a prompt that many requests share."""
    record = report["shared_prompt"]
    return [
        f"A prompt of {record['num_tokens']} tokens that {record['num_requests']} requests share, "
        f"blocks of {record['block_size']}.",
        f"{'unshared':36s}{record['blocks_unshared']:5d} blocks",
        f"{'shared by fork':36s}{record['blocks_shared']:5d}",
        f"{'after one has written a token':36s}{record['blocks_one_diverged']:5d}"
        f"  ({record['copies_one_diverged']} copied)",
        f"{'after all have written':36s}{record['blocks_all_diverged']:5d}",
    ]


def concurrency_lines(report: Report) -> list[str]:
    """Return the number of sequences that fit into a memory budget."""
    budget = report["concurrency"][0]["budget_tokens"]
    gib = budget * _LLAMA3_8B_BYTES / 2**30
    columns = (
        Column("tokens held", 12, "held_tokens"),
        Column("contiguous", 12, "contiguous"),
        Column("paged: formula", 16, "paged_formula"),
        Column("allocator", 11, "paged"),
        Column("ratio", 9, "ratio", "{:.2f}x"),
    )
    return [
        f"Sequences in a budget of {budget} tokens ({gib:g} GiB of K and V of Llama-3 8B).",
        *harness.table(columns, report["concurrency"]),
    ]


def sharing_lines(report: Report) -> list[str]:
    """Return the blocks that samples and beams share, and the effect of the length spread."""
    requests = report["requests"]
    columns = (
        Column("", -20, _name),
        Column("allocator", 10, "saved_allocator", "{:.1%}"),
        Column("recounted", 11, "saved_recounted", "{:.1%}"),
        Column("published", 11, lambda r: PUBLISHED.get((r["kind"], r["width"])), "{:.1%}"),
        Column("blocks", 10, "num_shared"),
        Column("unshared", 10, "num_unshared"),
    )
    lines = [
        "Blocks saved by sharing, relative to blocks without sharing: "
        f"{requests['num_requests']} requests, "
        f"prompts of {requests['mean_prompt']:.1f} tokens on average and outputs of "
        f"{requests['mean_output']:.1f};",
        f"log-normal, sigma {requests['spread_prompt']} and {requests['spread_output']} (assumed). "
        "Beams are from the bundled model, and published beams from OPT-13B.",
        *harness.table(columns, report["sharing"]),
    ]
    width = report["saved_by_spread"][0]["width"]
    spreads = sorted({record["spread_output"] for record in report["saved_by_spread"]})
    lines += [
        f"With other spreads of lengths, {SAMPLES}, {width}, by formula:",
        f"{'prompt':>8s}  output {'  '.join(f'{spread:5.1f}' for spread in spreads)}",
    ]
    for prompt in spreads:
        saved = [r["saved"] for r in report["saved_by_spread"] if r["spread_prompt"] == prompt]
        lines.append(f"{prompt:8.1f}         {'  '.join(f'{s:5.1%}' for s in saved)}")
    return lines


def _name(record: Record) -> str:
    return f"{record['kind']}, {record['width']}"


def plot(pyplot: Any, report: Report) -> Any:
    """Draw the four tables that can be plotted."""
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8.5))
    _plot_utilisation(axes[0, 0], report)
    _plot_block_sizes(axes[0, 1], report)
    _plot_concurrency(axes[1, 0], report)
    _plot_sharing(axes[1, 1], report)
    for each in axes.flat:
        each.set_axisbelow(True)
        each.grid(alpha=0.3)
        each.legend(fontsize="small", loc="center left" if each is axes[0, 1] else "best")
    figure.suptitle("KV memory, counted in the block allocator")
    figure.tight_layout()
    return figure


def _plot_utilisation(axes: Any, report: Report) -> None:
    records = [r for r in report["utilisation"] if r["lengths"] == "uniform"]
    batches = [record["batch"] for record in records]
    for kind, published in (("paged", 98.5), ("contiguous", 24)):
        values = [100 * record[f"{kind}_allocator"] for record in records]
        (line,) = axes.plot(batches, values, "o-", label=kind)
        axes.axhline(published, color=line.get_color(), linestyle="--", linewidth=1)
    axes.set(title="Memory that holds tokens (dashed: goals)", xlabel="sequences", ylabel="%")
    axes.set_ylim(0, 104)


def _plot_block_sizes(axes: Any, report: Report) -> None:
    records = report["block_sizes"]
    sizes = [record["block_size"] for record in records]
    axes.plot(sizes, [100 * r["waste_expected"] for r in records], "--", label="waste, expected")
    axes.plot(sizes, [100 * r["waste_allocator"] for r in records], "o", label="waste, allocator")
    axes.set_xscale("log", base=2)
    axes.set(title="Block size", xlabel="tokens in a block", ylabel="waste, %")
    times = axes.twinx()
    times.plot(sizes, [r["step_us"] for r in records], "s-", color="gray", alpha=0.6)
    times.set_ylabel("µs for a step of the allocator (gray)")
    times.set_ylim(bottom=0)


def _plot_concurrency(axes: Any, report: Report) -> None:
    records = report["concurrency"]
    held = [record["held_tokens"] for record in records]
    axes.plot(held, [record["paged"] for record in records], "o-", label="paged")
    axes.plot(held, [record["contiguous"] for record in records], "o-", label="contiguous")
    budget = f"Sequences in {records[0]['budget_tokens']} tokens of memory"
    axes.set(xscale="log", yscale="log", title=budget, xlabel="tokens that each holds")
    axes.set_xticks(held, [str(tokens) for tokens in held])
    axes.set_xticks([], minor=True)


def _plot_sharing(axes: Any, report: Report) -> None:
    records = report["sharing"]
    names = [_name(record) for record in records]
    places = range(len(records))
    measured = [100 * record["saved_allocator"] for record in records]
    published = [100 * PUBLISHED.get((r["kind"], r["width"]), 0) for r in records]
    axes.bar([i - 0.2 for i in places], measured, 0.4, label="measured")
    axes.bar([i + 0.2 for i in places], published, 0.4, label="published (OPT-13B)")
    axes.set_xticks(list(places), names, rotation=20, ha="right", fontsize="small")
    axes.set(title="Blocks saved by sharing", ylabel="%")


# The run.


class Sizes(NamedTuple):
    """Sizes of the measurements.

    Attributes:
      batches: numbers of concurrent sequences, ascending.
      num_draws: number of draws of each batch.
      block_sizes: block sizes to compare.
      num_slots: number of slots in the comparison of block sizes.
      num_rounds: number of timing rounds.
      num_contiguous: number of contiguous sequences that fit into the fixed budget.
      held_tokens: numbers of tokens of each sequence in the budget.
      widths: numbers of samples of a prompt, and of beams.
      num_requests: number of requests for sampling and beam search.
      group_size: number of requests in one beam search.
      max_length: maximum number of tokens of such a request.
    """

    batches: tuple[int, ...] = (10, 20, 50, 100, 150, 200)
    num_draws: int = 10
    block_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    num_slots: int = 64
    num_rounds: int = 9
    num_contiguous: int = 16
    held_tokens: tuple[int, ...] = (50, 100, 200, 500, 1000, 2048)
    widths: tuple[int, ...] = (2, 4, 6)
    num_requests: int = 64
    group_size: int = 8
    max_length: int = 512


FULL = Sizes()
QUICK = Sizes(
    batches=(2, 10),
    num_draws=1,
    block_sizes=(16, 256),
    num_slots=4,
    num_rounds=1,
    num_contiguous=2,
    held_tokens=(200,),
    widths=(2,),
    num_requests=4,
    group_size=4,
    max_length=64,
)


def run(sizes: Sizes, model: Decoder, seed: int) -> Report:
    """Measure everything, and return the report without its goals."""
    max_length = min(sizes.max_length, model.config.max_position_embeddings)
    requests = draw_requests(sizes.num_requests, max_length, seed)
    return {
        **harness.environment(),
        "seed": seed,
        "sizes": sizes._asdict(),
        "max_length": MAX_LENGTH,
        "block_size": BLOCK_SIZE,
        "implied_mean_lengths": implied_means(0.24, 0.985),
        "utilisation": measure_utilisation(sizes.batches, sizes.num_draws, seed),
        "block_sizes": measure_block_sizes(
            sizes.block_sizes, sizes.num_slots, sizes.num_rounds, seed
        ),
        "shared_prompt": measure_shared_prompt(),
        "concurrency": measure_concurrency(sizes.num_contiguous, sizes.held_tokens),
        "requests": {
            "mean_prompt": float(requests.num_prompt.mean()),
            "mean_output": float(requests.num_output.mean()),
            "spread_prompt": SPREAD_PROMPT,
            "spread_output": SPREAD_OUTPUT,
            "num_requests": sizes.num_requests,
            "max_length": max_length,
        },
        "sharing": measure_sharing(
            model, requests, sizes.widths, BLOCK_SIZE, sizes.group_size, seed
        ),
        "saved_by_spread": saved_by_spread(
            (0.4, 0.6, 0.8, 1.0), max(sizes.widths), BLOCK_SIZE, seed
        ),
    }


def load_model() -> Decoder:
    """Load the bundled model in float32, which is the fastest dtype on CPUs."""
    return Decoder.from_pretrained(dtype="float32")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and optionally write JSON and a plot."""
    parser = harness.command_line(
        "Measure how much KV memory holds tokens, contiguous and paged.", plot=True
    )
    parser.add_argument("--quick", action="store_true", help="run small sizes, without goals")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random values; default: 0")
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed must not be negative, got {options.seed}.")
    report = run(QUICK if options.quick else FULL, load_model(), options.seed)
    # A few small sequences cannot be compared with the published figures for many sequences.
    report["goals"] = [] if options.quick else harness.goal_lines(GOALS, report)
    harness.finish(options, report, [*all_lines(report), *report["goals"]], plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
