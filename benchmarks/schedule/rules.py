"""Rules that divide a batch of sequences into the programs of a call.

A rule says which tokens each program of one KV head reads, in the order in which programs start.
All heads have the same programs, which start together. Parts of a sequence are merged by the last
program of it, as the kernel does, or by a launch of its own, as it did before and vLLM's does.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.schedule.machine import Machine, simulate
from paged_jax.kernels.triton.schedule import Schedule, choose_num_parts, find_part

STEP_TOKENS = 64
"""Tokens of a loop step of the kernel in half precision, at 128 lanes."""

MERGED_AT_ONCE = 16
"""Parts that the kernel reads at once to merge them, of 4 heads of 128 lanes."""

PARTITION = 512
"""Tokens of a part of vLLM's second kernel (csrc/attention, `PARTITION_SIZE`)."""


class Call(NamedTuple):
    """A batch of one decode call.

    Attributes:
      lengths: tokens of each sequence, ``[B]``.
      capacity: tokens that a row of the block table holds.
      kv_heads, group, head_dim: K, G and D; K and V are of 2 bytes.
    """

    lengths: np.ndarray
    capacity: int
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token of one head."""
        return 2 * self.head_dim * 2

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V of all sequences."""
        return int(np.sum(self.lengths, dtype=np.int64)) * self.kv_heads * self.token_bytes

    @property
    def max_steps(self) -> int:
        """Loop steps over the longest sequence that the table holds."""
        return math.ceil(self.capacity / STEP_TOKENS)


class Programs(NamedTuple):
    """The programs of one KV head.

    Attributes:
      tokens: of each program, in their order; 0 of one that finds nothing to read.
      more: seconds that each takes besides.
      merge: seconds from the end of the last one to that of the call.
    """

    tokens: np.ndarray
    more: float = 0.0
    merge: float = 0.0


Rule = Callable[[Call, Machine], Programs]


def by_lengths(call: Call, machine: Machine) -> Programs:
    """The kernel's own parts: they follow from the lengths."""
    num_parts = choose_num_parts(len(call.lengths), call.kv_heads, call.max_steps, machine.resident)
    if num_parts == 0:
        return whole(call, machine)
    schedule = Schedule(len(call.lengths), num_parts, STEP_TOKENS, call.capacity)
    lengths = jnp.asarray(call.lengths, jnp.int32)
    programs = jnp.arange(schedule.num_programs, dtype=jnp.int32)
    parts = jax.jit(jax.vmap(lambda n: find_part(schedule, lengths, n)))(programs)
    begin, end = (np.asarray(x) * STEP_TOKENS for x in (parts.begin, parts.end))
    tokens = np.minimum(end, np.asarray(parts.length)) - begin
    is_there = np.asarray(parts.is_there)
    tokens = np.where(is_there, tokens, 0)
    most_parts = int(np.max(parts.count, where=is_there, initial=1))
    if most_parts == 1:
        return Programs(tokens, machine.search)
    num_turns = math.ceil(most_parts / MERGED_AT_ONCE)
    return Programs(tokens, machine.search + machine.count, num_turns * machine.merge_turn)


def by_table(call: Call, machine: Machine) -> Programs:
    """The kernel's parts before: each sequence in as many, which follow from the table's width."""
    num_splits = _num_splits(len(call.lengths), call.kv_heads, call.max_steps, machine.num_cores)
    # All first parts start first.
    cuts = [_cut(call.lengths, turn, num_splits) for turn in range(num_splits + 1)]
    tokens = np.stack(cuts[1:]) - np.stack(cuts[:-1])
    return Programs(tokens.T.reshape(-1), merge=_launched_merge(num_splits, machine))


def whole(call: Call, machine: Machine) -> Programs:
    """One program for each sequence, as vLLM's first kernel."""
    return Programs(np.asarray(call.lengths))


def partitions(call: Call, machine: Machine) -> Programs:
    """Parts of one size, as many as a row of the table holds: vLLM's second kernel."""
    num_parts = math.ceil(call.capacity / PARTITION)
    starts = PARTITION * np.arange(num_parts)
    tokens = np.clip(np.asarray(call.lengths)[:, None] - starts, 0, PARTITION)
    return Programs(tokens.reshape(-1), merge=_launched_merge(num_parts, machine))


def _launched_merge(most_parts: int, machine: Machine) -> float:
    if most_parts == 1:
        return 0.0
    turns = max(math.ceil((most_parts - 4) / 32), 0)
    return machine.launch + machine.merge + turns * machine.merge_turn


def _cut(lengths: np.ndarray, turn: int, num_splits: int) -> np.ndarray:
    steps = -(-np.asarray(lengths) // STEP_TOKENS)
    return np.minimum(steps * turn // num_splits * STEP_TOKENS, lengths)


def _num_splits(batch: int, kv_heads: int, max_steps: int, num_cores: int) -> int:
    """What the kernel chose before, with two programs on a multiprocessor."""
    ragged = (1 + 0.25 * (batch - 1)) / batch

    def time(splits: int, fill: float) -> float:
        work = batch * kv_heads * (fill * max_steps + 2.0 * splits)
        return max(work / (2 * num_cores), math.ceil(max_steps / splits) + 2.0)

    def cost(splits: int) -> float:
        return (time(splits, 1.0) + time(splits, ragged)) / 2 + (2.0 if splits > 1 else 0.0)

    return min(range(1, min(max(max_steps, 1), 128) + 1), key=cost)


def seconds(call: Call, rule: Rule, machine: Machine) -> float:
    """What a call takes, with its merge."""
    programs = rule(call, machine)
    # Heads change fastest, and each program writes its result where it is divided.
    num_bytes = np.repeat(programs.tokens * call.token_bytes, call.kv_heads)
    taken = simulate(machine._replace(start=machine.start + programs.more), num_bytes)
    return taken + programs.merge


def bound(call: Call, machine: Machine) -> float:
    """Seconds that the memory needs for the bytes of K and V."""
    return call.num_bytes / machine.memory_rate
