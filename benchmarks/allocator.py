"""What the allocator costs: one decode step, a fork and a release of every slot.

    python benchmarks/allocator.py [--json]

The decode step is the worst one: every slot stands at a block boundary, so each of them takes a new
block. Each timed call gets a state of its own, copied before the clock starts, since the functions
donate their input. Times are the median and the 90th percentile of `--repeats` calls, after
`WARMUP_CALLS` others, from the call until its result is ready.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from environment import environment

from paged_jax import blocks

WARMUP_CALLS = 20


def _copy(tables: blocks.BlockTables) -> blocks.BlockTables:
    return jax.block_until_ready(jax.tree.map(jnp.copy, tables))


def _time(step: Callable, tables: blocks.BlockTables, argument: jax.Array, repeats: int) -> dict:
    """Times the donated `step(tables, argument)`, always from the state `tables`."""
    step = jax.jit(step, donate_argnums=0)
    seconds = []
    for _ in range(WARMUP_CALLS + repeats):
        state = _copy(tables)
        start = time.perf_counter()
        jax.block_until_ready(step(state, argument))
        seconds.append(time.perf_counter() - start)
    seconds = sorted(seconds[WARMUP_CALLS:])
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "p90_ms": 1e3 * seconds[int(0.9 * len(seconds))],
    }


def _half_full(num_blocks: int, num_slots: int, block_size: int) -> blocks.BlockTables:
    """Slots that each hold the same number of full blocks, half of the pool in all."""
    per_slot = num_blocks // num_slots
    tables = blocks.BlockTables.create(num_blocks, num_slots, per_slot, block_size)
    num_tokens = per_slot // 2 * block_size
    tokens = jnp.full(num_slots, num_tokens, jnp.int32)
    tables, _, ok = blocks.reserve(tables, tokens, max_tokens=num_tokens)
    assert ok, "the prompts fill half of the pool"
    return tables


def run(num_blocks: int, num_slots: int, block_size: int, repeats: int) -> dict:
    """Returns the times of each operation, by its name."""
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
    # Every holder of a shared, partly filled block writes: half of the slots must copy.
    to_write, _, _ = blocks.reserve(to_fork, (slots < half).astype(jnp.int32))
    to_write, _ = blocks.fork(to_write, parents)

    everyone = jnp.ones(num_slots, bool)
    decode = partial(blocks.reserve, max_tokens=1)
    return {
        "reserve, all slots cross a boundary": _time(decode, tables, one_token, repeats),
        "reserve, no slot crosses a boundary": _time(decode, stepped, one_token, repeats),
        "reserve, half of the slots copy": _time(decode, to_write, one_token, repeats),
        "fork, half of the slots": _time(blocks.fork, to_fork, parents, repeats),
        "release, all slots": _time(blocks.release, tables, everyone, repeats),
        "release, all slots, shared in pairs": _time(blocks.release, forked, everyone, repeats),
    }


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
        print(f"{name:40} {times['median_ms']:7.3f} ms   p90 {times['p90_ms']:7.3f} ms")


if __name__ == "__main__":
    main()
