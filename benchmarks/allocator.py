"""Benchmark of the block allocator: decode steps, forks, releases, and the prefix cache.

    python -m benchmarks.allocator [--json]

The decode step is the worst case: every slot is at a block boundary and needs a new block. The
prefix is half as long as a slot can be. One call publishes it and another call finds it. The last
rows have block tables for contexts of `LONG_CONTEXT` tokens, which must not slow down a short chat.

The functions donate their input, so each timed call gets a copy of the state, made before the clock
starts. Times are the median and the 90th percentile of `--repeats` calls after `WARMUP_CALLS`
warm-up calls, from the call until its result is ready.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.harness import elapsed, environment
from paged_jax.cache import blocks

WARMUP_CALLS = 20
LONG_CONTEXT = 131_072
CHAT = 320  # tokens


def _copy(tables: blocks.BlockTables) -> blocks.BlockTables:
    return jax.block_until_ready(jax.tree.map(jnp.copy, tables))


def _time(step: Callable, tables: blocks.BlockTables, *arguments: jax.Array, repeats: int) -> dict:
    """Time the donated `step(tables, *arguments)`, always with a copy of `tables`."""
    step = jax.jit(step, donate_argnums=0)

    def once() -> float:
        state = _copy(tables)
        return elapsed(lambda: jax.block_until_ready(step(state, *arguments)))

    seconds = sorted([once() for _ in range(WARMUP_CALLS + repeats)][WARMUP_CALLS:])
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "p90_ms": 1e3 * seconds[int(0.9 * len(seconds))],
    }


def _half_full(num_blocks: int, num_slots: int, block_size: int) -> blocks.BlockTables:
    """Create slots with an equal number of full blocks, half of the pool in total."""
    per_slot = num_blocks // num_slots
    tables = blocks.BlockTables.create(num_blocks, num_slots, per_slot, block_size)
    num_tokens = per_slot // 2 * block_size
    tokens = jnp.full(num_slots, num_tokens, jnp.int32)
    tables, _, ok = blocks.reserve(tables, tokens, max_tokens=num_tokens)
    assert ok, "the prompts fill half of the pool"
    return tables


def run(num_blocks: int, num_slots: int, block_size: int, repeats: int) -> dict:
    """Return the times of each operation, by name."""
    tables = _half_full(num_blocks, num_slots, block_size)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    one_token = jnp.ones(num_slots, jnp.int32)
    stepped, _, ok = blocks.reserve(tables, one_token)
    num_taken = int(tables.pool.num_free - stepped.pool.num_free)
    assert ok and num_taken == num_slots, "every slot crosses a block boundary"

    # The upper half of the slots become copies of the lower half.
    half = num_slots // 2
    to_fork = blocks.release(tables, slots >= half)
    parents = jnp.where(slots >= half, slots - half, -1)
    forked, ok = blocks.fork(to_fork, parents)
    assert ok, "the children are empty"
    # Every slot writes into a shared, partly filled block: half of the slots must copy it.
    to_write, _, _ = blocks.reserve(to_fork, (slots < half).astype(jnp.int32))
    to_write, _ = blocks.fork(to_write, parents)

    everyone = jnp.ones(num_slots, bool)
    # Beam search with four beams: the second beam is duplicated, and the last one is dropped.
    beams = slots // 4 * 4 + jnp.array([0, 1, 1, 2], jnp.int32)[slots % 4]

    entries = _prefix(tables)
    published = blocks.publish(tables, *entries)
    _, _, digests, token_ids = entries
    prefix = digests, token_ids, jnp.int32(len(digests))
    found, num_found = blocks.attach(blocks.release(published, everyone), 0, *prefix)
    assert num_found == len(digests), "all blocks are found"
    unused = blocks.release(found, everyone)

    time_it = partial(_time, repeats=repeats)
    decode = partial(blocks.reserve, max_tokens=1)
    cut = partial(blocks.truncate, max_tokens=8)
    name = f"a prefix of {num_found} blocks"
    return {
        "reserve, all slots cross a boundary": time_it(decode, tables, one_token),
        "reserve, no slot crosses a boundary": time_it(decode, stepped, one_token),
        "reserve, half of the slots copy": time_it(decode, to_write, one_token),
        "fork, half of the slots": time_it(blocks.fork, to_fork, parents),
        "release, all slots": time_it(blocks.release, tables, everyone),
        "release, all slots, shared in pairs": time_it(blocks.release, forked, everyone),
        "reorder, all slots, beams of 4": time_it(blocks.reorder, tables, beams),
        "truncate, all slots by 8 tokens": time_it(cut, tables, tables.lengths - 8),
        f"publish, {name}": time_it(blocks.publish, tables, *entries),
        f"attach, {name}": time_it(blocks.attach, unused, slots[0], *prefix),
        "attach, nothing is found": time_it(
            blocks.attach, blocks.forget(unused), slots[0], *prefix
        ),
        **_run_long_context(num_blocks, num_slots, block_size, time_it),
    }


def _run_long_context(
    num_blocks: int, num_slots: int, block_size: int, time_it: Callable
) -> dict[str, dict]:
    """Time a slot with a prefix of half the pool, next to chats, with wide block tables."""
    width = LONG_CONTEXT // block_size
    tables = blocks.BlockTables.create(num_blocks, num_slots, width, block_size)
    long = min(num_blocks // 2, width) * block_size
    num_tokens = jnp.full(num_slots, CHAT, jnp.int32).at[4:].set(0).at[0].set(long)
    tables, _, ok = blocks.reserve(tables, num_tokens, max_tokens=max(CHAT, long))
    assert ok, "the prefix and the chats fit the pool"
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    entries = _prefix(tables)
    _, _, digests, token_ids = entries
    published = blocks.publish(tables, *entries)
    found, num_found = blocks.attach(published, 4, digests, token_ids, len(digests))
    assert num_found == len(digests), "all blocks are found"
    look_up = slots[4], digests, token_ids
    count = jnp.int32(CHAT // block_size)
    return {
        "release, a chat, wide tables": time_it(blocks.release, tables, slots == 1),
        f"release, {num_found} blocks, wide tables": time_it(blocks.release, tables, slots == 0),
        f"release, {num_found} shared blocks": time_it(blocks.release, found, slots == 4),
        f"publish, {num_found} blocks": time_it(blocks.publish, tables, *entries),
        f"attach, {num_found} blocks": time_it(blocks.attach, published, *look_up, num_found),
        f"attach, {count} of {num_found} blocks": time_it(
            blocks.attach, published, *look_up, count
        ),
    }


def _prefix(
    tables: blocks.BlockTables,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the blocks of the first slot with their digests, as arguments of `publish`."""
    size = int(tables.lengths[0]) // tables.block_size
    columns = jnp.arange(size, dtype=jnp.int32)
    digests = jax.random.bits(jax.random.key(0), (size, 8), jnp.uint32)
    token_ids = jnp.zeros((size, tables.block_size), jnp.int32)
    return jnp.zeros_like(columns), columns, digests, token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the block allocator.")
    parser.add_argument("--num-blocks", type=int, default=8192)
    parser.add_argument("--num-slots", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = vars(parser.parse_args())
    as_json = arguments.pop("json")
    report = {**environment(), **arguments, "times": run(**arguments)}
    if as_json:
        print(json.dumps(report, indent=1))
        return
    for name, value in report.items():
        if name != "times":
            print(f"{name:12} {value}")
    for name, times in report["times"].items():
        print(f"{name:42} {times['median_ms']:7.3f} ms   p90 {times['p90_ms']:7.3f} ms")


if __name__ == "__main__":
    main()
