"""Fraction of KV memory that holds tokens: formulas, compared with the real allocator.

A contiguous cache is the same allocator with blocks of the maximum length: a sequence takes one
such block when it starts and keeps it. All measurements run `paged_jax.blocks` under jit. Sequences
grow by one token at a time, as in text generation, and the count includes the blocks that have
left the free queue.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.cache import blocks
from paged_jax.cache.blocks import BlockTables, num_blocks_needed

MAX_LENGTH = 2048
"""Number of tokens that a contiguous cache reserves for every sequence."""
MEAN_LENGTH = 492
"""Mean number of tokens of a sequence, an assumption: see `implied_means`."""
BLOCK_SIZE = 16
# Number of tokens added to each sequence in a timed run.
_TIMED_STEPS = 64

Record = dict[str, Any]


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
    seconds: dict[int, list[float]] = {size: [] for size in block_sizes}
    for _ in range(num_rounds):
        for size, tables in served.items():
            seconds[size].append(_time_steps(tables))
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
    start = time.perf_counter()
    jax.block_until_ready(grow(tables, targets))
    return (time.perf_counter() - start) / _TIMED_STEPS


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
