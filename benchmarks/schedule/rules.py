"""Rules that divide a batch of sequences among the program instances of a call.

A rule determines which tokens each program instance of a KV head reads, in the order of their
start. All heads have the same instances, which start together. The last instance of a sequence
merges its parts, as in the current kernel, or a second launch does, as in the previous kernel and
in vLLM.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.schedule.machine import Machine, simulate
from paged_jax.kernels.kv_split import KVSplit, choose_num_parts, find_part

STEP_TOKENS = 64
"""Number of tokens of a loop step of the kernel in half precision, for head dimension 128."""

MERGED_AT_ONCE = 16
"""Number of parts that the kernel reads together to merge them, for 4 heads of dimension 128."""

PARTITION = 512
"""Number of tokens in a part of vLLM's second kernel (csrc/attention, `PARTITION_SIZE`)."""


class Call(NamedTuple):
    """The batch of a decode call.

    Attributes:
      lengths: number of tokens of each sequence, ``[B]``.
      capacity: number of tokens that a row of the block table can hold.
      kv_heads: K.
      group: G.
      head_dim: D; K and V have 2 bytes per element.
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
        """Number of loop steps over the longest sequence that the table can hold."""
        return math.ceil(self.capacity / STEP_TOKENS)


class Programs(NamedTuple):
    """The program instances of a KV head.

    Attributes:
      tokens: number of tokens of each instance, in order; 0 for an instance without a part.
      more: additional seconds of each instance.
      merge: seconds from the end of the last instance to the end of the call.
    """

    tokens: np.ndarray
    more: float = 0.0
    merge: float = 0.0


Rule = Callable[[Call, Machine], Programs]


def by_lengths(call: Call, machine: Machine) -> Programs:
    """Return the current rule of the kernel: parts follow from the lengths."""
    num_parts = choose_num_parts(len(call.lengths), call.kv_heads, call.max_steps, machine.resident)
    if num_parts == 0:
        return whole(call, machine)
    split = KVSplit(len(call.lengths), num_parts, STEP_TOKENS, call.capacity)
    lengths = jnp.asarray(call.lengths, jnp.int32)
    programs = jnp.arange(split.num_programs, dtype=jnp.int32)
    parts = jax.jit(jax.vmap(lambda n: find_part(split, lengths, n)))(programs)
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
    """Return the previous rule: the table width gives the number of parts per sequence."""
    num_splits = _num_splits(len(call.lengths), call.kv_heads, call.max_steps, machine.num_cores)
    # The first parts of all sequences start first, then the second parts, and so on.
    cuts = [_cut(call.lengths, turn, num_splits) for turn in range(num_splits + 1)]
    tokens = np.stack(cuts[1:]) - np.stack(cuts[:-1])
    return Programs(tokens.T.reshape(-1), merge=_launched_merge(num_splits, machine))


def whole(call: Call, machine: Machine) -> Programs:
    """Return one program instance for each sequence, like vLLM's first kernel."""
    return Programs(np.asarray(call.lengths))


def partitions(call: Call, machine: Machine) -> Programs:
    """Return parts of a fixed size for a whole table row, like vLLM's second kernel."""
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
    """Return the number of splits of the previous rule, with two program instances per SM."""
    ragged = (1 + 0.25 * (batch - 1)) / batch

    def time(splits: int, fill: float) -> float:
        work = batch * kv_heads * (fill * max_steps + 2.0 * splits)
        return max(work / (2 * num_cores), math.ceil(max_steps / splits) + 2.0)

    def cost(splits: int) -> float:
        return (time(splits, 1.0) + time(splits, ragged)) / 2 + (2.0 if splits > 1 else 0.0)

    return min(range(1, min(max(max_steps, 1), 128) + 1), key=cost)


def seconds(call: Call, rule: Rule, machine: Machine) -> float:
    """Return the seconds of a call, including its merge."""
    programs = rule(call, machine)
    # Heads vary fastest, and each instance of a divided sequence writes its result.
    num_bytes = np.repeat(programs.tokens * call.token_bytes, call.kv_heads)
    taken = simulate(machine._replace(start=machine.start + programs.more), num_bytes)
    return taken + programs.merge


def bound(call: Call, machine: Machine) -> float:
    """Return the seconds that the memory needs for the bytes of K and V."""
    return call.num_bytes / machine.memory_rate
