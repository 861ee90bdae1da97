"""Simulation of decode attention with different divisions of the batch. It needs no GPU.

    python -m benchmarks.schedule                                 # three minutes
    python -m benchmarks.schedule --quick                         # seconds
    python -m benchmarks.schedule --json schedule.json --plot schedule.png

The program instances of a decode call of Llama 3 8B run on the SMs of an H200, which share the
memory bandwidth (`Machine`; its constants are estimates). The parts come from the kernel's own
function, `paged_jax.kernels.gpu_device`, and are compared with the previous rule, which used
the width of the table. Mixes of lengths are synthetic, or drawn from traces of production services
if their folder is given or found.

A study of even batches compares vLLM's two kernels (V1 and V2 of its paged attention): when should
sequences be divided into parts of 512 tokens instead of one program instance each? Both are
simulated with the kernel of this library.

A rule determines which tokens each program instance of a KV head reads, in the order of their
start. All heads have the same instances, which start together. The last instance of a sequence
merges its parts, as in the current kernel, or a second launch does, as in the previous kernel and
in vLLM.
"""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.harness import ROOT, Figure, Goal, Report
from benchmarks.serving.workloads import read_trace
from paged_jax.kernels.kv_split import KVSplit, choose_num_parts, find_part

Record = dict[str, Any]

OURS, BEFORE, WHOLE, PARTITIONS = "by lengths", "by table", "whole", "partitions of 512"


# The simulated GPU.


class Machine(NamedTuple):
    """A GPU. SMs share the memory bandwidth, and program instances only read.

    The defaults are estimates for an H200 and the decode kernel in half precision.

    Attributes:
      num_cores: number of SMs.
      programs_per_core: maximum number of program instances on an SM.
      memory_rate: memory bandwidth in bytes per second: nine tenths of the data sheet's 4.8 TB/s.
      core_rate: maximum bytes per second of an SM: 420 instructions of four warps for 32 KB, at
        about 0.65 instructions per cycle of each scheduler and 1.85 GHz.
      program_rate: bytes per second of a program instance that is alone on an SM: two steps of 32
        KB in flight, a microsecond each.
      start: seconds from the start of an instance to its first bytes of K and V. It reads its
        length, its block ids and then K and V.
      search: seconds in which an instance finds its part, if it must.
      idle: seconds of an instance that has nothing to read.
      launch: seconds from the end of a kernel to the start of the next kernel in a CUDA graph.
      count: seconds to make a result visible to the whole device and to count the instance.
      merge_turn: seconds to read some parts in parallel and merge them.
      merge: seconds of a launch that merges up to four parts, plus a turn for each further 32
        parts.
    """

    num_cores: int = 132
    programs_per_core: int = 3
    memory_rate: float = 4.3e12
    core_rate: float = 94e9
    program_rate: float = 64e9
    start: float = 2e-6
    search: float = 0.2e-6
    idle: float = 0.8e-6
    launch: float = 1.5e-6
    count: float = 1e-6
    merge_turn: float = 0.7e-6
    merge: float = 1.5e-6

    @property
    def resident(self) -> int:
        """Number of program instances that run at the same time."""
        return self.num_cores * self.programs_per_core


def simulate(machine: Machine, num_bytes: np.ndarray) -> float:
    """Return the seconds that a launch takes.

    The simulation advances from event to event: a program instance starts, receives its first
    bytes, or has read its last byte. Between events each instance reads at a constant rate, the
    minimum of three limits: its own maximum, its share of the rate of its SM, and its share of the
    memory bandwidth. Instances that can read faster get a larger share of the bandwidth.

    Args:
      machine: the GPU.
      num_bytes: ``[N]``, bytes that each program instance reads, in the order of their start.

    Example:
      >>> from dataclasses import replace
      >>> alone = Machine(launch=0.0, start=1e-6, program_rate=64e9)
      >>> round(1e6 * simulate(alone, np.array([64e3])), 3)
      2.0
    """
    waiting = np.asarray(num_bytes, np.float64)
    num_slots = min(machine.resident, len(waiting))
    core = np.arange(num_slots) % machine.num_cores  # the first instances each get a separate SM
    left, ready = np.zeros(num_slots), np.full(num_slots, np.inf)
    is_running, num_started, now = np.zeros(num_slots, bool), 0, machine.launch
    while True:
        free = np.flatnonzero(~is_running)[: len(waiting) - num_started]
        if len(free):
            left[free] = waiting[num_started : num_started + len(free)]
            ready[free] = now + np.where(left[free] > 0, machine.start, machine.idle)
            is_running[free] = True
            num_started += len(free)
        if not is_running.any():
            return now
        is_reading = is_running & (ready <= now)
        rates = _rates(machine, core, is_reading)
        ends = np.where(is_running & ~is_reading, ready, np.inf)
        ends[is_reading] = now + left[is_reading] / rates[is_reading]
        # Events within a nanosecond count as one event, because similar instances end together.
        then = ends.min() + 1e-9
        left = np.where(is_reading, np.maximum(left - rates * (then - now), 0), left)
        now = then
        is_running &= (ready > now) | (left > 0)


def _rates(machine: Machine, core: np.ndarray, is_reading: np.ndarray) -> np.ndarray:
    """Return the bytes per second of each instance; 0 for instances that do not read."""
    shared_by = np.bincount(core[is_reading], minlength=machine.num_cores)[core]
    most = np.minimum(machine.program_rate, machine.core_rate / np.maximum(shared_by, 1))
    most = np.where(is_reading, most, 0.0)
    # Instances with the lowest limits reach them; the others share the rest.
    rates, left, num_left = most.copy(), machine.memory_rate, int(is_reading.sum())
    for rate in np.unique(most[is_reading]):
        is_this = is_reading & (most == rate)
        rates[is_this] = min(rate, left / num_left)
        left -= rates[is_this].sum()
        num_left -= int(is_this.sum())
    return rates


# Rules.

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


def call_seconds(call: Call, rule: Rule, machine: Machine) -> float:
    """Return the seconds of a call, including its merge."""
    programs = rule(call, machine)
    # Heads vary fastest, and each instance of a divided sequence writes its result.
    num_bytes = np.repeat(programs.tokens * call.token_bytes, call.kv_heads)
    taken = simulate(machine._replace(start=machine.start + programs.more), num_bytes)
    return taken + programs.merge


def bound_seconds(call: Call, machine: Machine) -> float:
    """Return the seconds that the memory needs for the bytes of K and V."""
    return call.num_bytes / machine.memory_rate


# Batches: synthetic, and from recorded traffic.

LONG, SHORT = 131072, 1024
"""Number of tokens of the long sequence, and of the other sequences."""

TRACES = {
    "Azure 2023": ("azure2023_conv.csv", 16384, (64, 256)),
    "Mooncake": ("mooncake_conversation.jsonl", LONG, (16, 64)),
}
"""File of each trace, maximum number of tokens of a sequence, and batch sizes."""


def made_up() -> dict[str, Call]:
    """Return even batches, and the worst batches for a fixed division of every sequence."""
    ragged = np.linspace(8192, 819, 64).round().astype(int)
    shuffled = np.random.default_rng(0).permutation(ragged)
    one_long = np.full(64, SHORT)
    one_long[32] = LONG
    return {
        "64 of 8K": Call(np.full(64, 8192), 8192),
        "64 of 8K, table for 128K": Call(np.full(64, 8192), LONG),
        "64, longest 8K, shortest 0.8K": Call(shuffled, 8192),
        "one of 128K among 63 of 1K": Call(one_long, LONG),
        "one of 128K": Call(np.array([LONG]), LONG),
    }


def recorded_mixes(folder: Path, num_draws: int) -> dict[str, Call]:
    """Return batches of consecutive requests, each at a random position in its output.

    Args:
      folder: folder of the traces; missing traces are skipped.
      num_draws: number of batches of each size.
    """
    calls = {}
    for name, (file, capacity, batches) in TRACES.items():
        if not (folder / file).is_file():
            continue
        rows = read_trace(folder / file, 10**6)
        random = np.random.default_rng(0)
        for batch in batches:
            if batch > len(rows):
                continue
            for draw in range(num_draws):
                at = random.integers(len(rows) - batch + 1)
                progress = random.uniform(size=batch)
                lengths = [
                    row.prompt_len + int(part * row.new_len)
                    for row, part in zip(rows[at : at + batch], progress, strict=True)
                ]
                call = Call(np.minimum(lengths, capacity), capacity)
                calls[f"{batch} of {name}, draw {draw + 1}"] = call
    return calls


# The report.


def record_line(record: Record) -> str:
    """Return one line: the bound, and the times relative to it."""
    times = "  ".join(f"{name} {ratio:6.3f}x" for name, ratio in record["over_bound"].items())
    return f"{record['name']:32s} {record['mb']:8.1f} MB {record['bound_us']:8.1f} us  {times}"


def _over_bound(report: Report) -> Figure:
    return {record["name"]: record["over_bound"][OURS] for record in report["mixes"]}


def _even_over_before(report: Report) -> Figure:
    records = [record for record in report["mixes"] if record["is_even"]]
    return {r["name"]: r["us"][OURS] / r["us"][BEFORE] for r in records}


GOALS = (
    Goal("every mix of lengths: at most 1.1 times the time for the bytes", _over_bound, high=1.1),
    Goal(
        "even batches: no slower than with division by the table width",
        _even_over_before,
        high=1.01,
    ),
)
"""Goals for the division of a batch; a simulation cannot resolve less than a hundredth."""


def plot(pyplot: Any, report: Report) -> Any:
    """Draw the mixes, and the faster rule by batch and context."""
    records = report["mixes"]
    figure, axes = pyplot.subplots(
        1, 3, figsize=(17, 1.5 + 0.32 * len(records)), layout="constrained", width_ratios=(3, 2, 2)
    )
    for place, (name, color) in enumerate({BEFORE: "#b8b8b8", OURS: "#4c8dd6"}.items()):
        rows = [row + 0.4 * place for row in range(len(records))]
        bars = axes[0].barh(rows, [r["over_bound"][name] for r in records], 0.4, color=color)
        axes[0].bar_label(bars, fmt="{:.2f}", padding=3, fontsize=8)
        bars.set_label(f"parts {name}")
    axes[0].axvline(1, color="black", linewidth=1)
    axes[0].axvline(1.1, color="black", linewidth=1, linestyle="--")
    labels = [f"{record['name']} ({record['bound_us']:.0f} us)" for record in records]
    axes[0].set_yticks([row + 0.2 for row in range(len(records))], labels, fontsize=8)
    axes[0].set_ylim(len(records) - 0.2, -0.6)
    axes[0].set(xlabel="times what the bytes take", title="Mixes of lengths")
    axes[0].spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="lower right")
    _grid(axes[1], report["study"], lambda r: r["us"][PARTITIONS] / r["us"][WHOLE])
    axes[1].set_title("Partitions of 512 tokens,\ntime over that of whole sequences")
    _grid(axes[2], report["study"], lambda r: r["over_better"])
    axes[2].set_title("Parts by lengths,\ntime over the better of both")
    figure.suptitle("Decode attention, simulated: how a batch is divided")
    return figure


def _grid(axes: Any, records: list[Record], figure: Callable[[Record], float]) -> None:
    """Draw ratios by batch and context, in blue below 1."""
    batches = sorted({record["batch"] for record in records})
    contexts = sorted({record["context"] for record in records})
    table = [[float("nan")] * len(batches) for _ in contexts]
    for record in records:
        row, column = contexts.index(record["context"]), batches.index(record["batch"])
        table[row][column] = figure(record)
        axes.text(column, row, f"{figure(record):.2f}", ha="center", va="center", fontsize=8)
    axes.imshow(table, cmap="RdYlBu_r", vmin=0.5, vmax=1.5, aspect="auto", alpha=0.6)
    axes.set_xticks(range(len(batches)), batches)
    axes.set_yticks(range(len(contexts)), [_tokens(context) for context in contexts])
    axes.set(xlabel="sequences", ylabel="tokens of each")


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)


# The run.

_MIX_RULES: dict[str, Rule] = {BEFORE: by_table, OURS: by_lengths}
_STUDY_RULES: dict[str, Rule] = {
    WHOLE: whole,
    PARTITIONS: partitions,
    OURS: by_lengths,
}

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# Bytes for K and V of 32 layers on an H200, after the weights of 8B.
_MOST_TOKENS = 900_000


def simulate_call(
    name: str, call: Call, chosen: dict[str, Rule], machine: Machine
) -> dict[str, Any]:
    """Return the record of a call under some rules."""
    bound = bound_seconds(call, machine)
    seconds = {rule: call_seconds(call, divide, machine) for rule, divide in chosen.items()}
    return {
        "name": name,
        "batch": len(call.lengths),
        "is_even": bool(np.all(call.lengths == call.lengths[0])),
        "mb": round(call.num_bytes / 1e6, 1),
        "bound_us": round(1e6 * bound, 2),
        "us": {rule: round(1e6 * taken, 2) for rule, taken in seconds.items()},
        "over_bound": {rule: round(taken / bound, 4) for rule, taken in seconds.items()},
    }


def simulate_even(batch: int, context: int, machine: Machine) -> dict[str, Any]:
    """Return the record of an even batch in the study."""
    call = Call(np.full(batch, context), context)
    record = simulate_call(f"{batch} x {context}", call, _STUDY_RULES, machine)
    us = record["us"]
    better = min(us[WHOLE], us[PARTITIONS])
    return record | {"context": context, "over_better": round(us[OURS] / better, 4)}


def run(traces: Path, machine: Machine, num_draws: int, max_tokens: int) -> Report:
    """Simulate everything, and print the results.

    Args:
      traces: folder of recorded traces.
      machine: the simulated GPU.
      num_draws: number of draws of each trace and batch.
      max_tokens: maximum number of tokens of a batch in the study.
    """
    recorded = recorded_mixes(traces, num_draws)
    if not recorded:
        print(f"no traces in {traces}")
    report: Report = {
        **harness.environment(),
        "accelerator": "simulated NVIDIA H200",
        "machine": machine._asdict(),
        "mixes": [],
        "study": [],
    }
    print(f"simulated: {machine}")
    for name, call in (made_up() | recorded).items():
        report["mixes"].append(simulate_call(name, call, _MIX_RULES, machine))
        print(record_line(report["mixes"][-1]), flush=True)
    for batch in _BATCHES:
        for context in _CONTEXTS:
            if batch * context <= max_tokens:
                report["study"].append(simulate_even(batch, context, machine))
                print(record_line(report["study"][-1]), flush=True)
    return report | {"goals": harness.goal_lines(GOALS, report)}


def _default_traces() -> Path:
    folder = os.environ.get("PAGED_JAX_TEST_DATA", ROOT.parent / "shared" / "data")
    return Path(folder) / "traces"


def main(arguments: list[str] | None = None) -> int:
    """Simulate, print, and optionally write JSON and a plot."""
    parser = harness.command_line(
        "Simulate decode attention with different divisions of a batch.", plot=True
    )
    parser.add_argument("--quick", action="store_true", help="few batches")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", default=_default_traces(),
        help="folder of recorded traces; default: traces in PAGED_JAX_TEST_DATA",
    )  # fmt: skip
    parser.add_argument("--memory-rate", type=float, default=Machine().memory_rate / 1e9,
                        metavar="GB/S", help="memory bandwidth; default: %(default)g")  # fmt: skip
    options = parser.parse_args(arguments)
    machine = Machine(memory_rate=1e9 * options.memory_rate)
    num_draws, max_tokens = (1, 4096) if options.quick else (3, _MOST_TOKENS)
    report = run(options.traces, machine, num_draws, max_tokens)
    harness.finish(options, report, report["goals"], plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
