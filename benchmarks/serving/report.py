"""Report of the serving benchmark: tables, ratios within a round, and goals.

A report is the content of the JSON file::

    sizes, settings     settings of the run
    results             name -> figures of `outcome.median_summary`, "details", "rounds"
    ratios_to_naive     name -> generation rate relative to "naive", median over rounds
    peers               name -> record of `peers.measure`, without its tokens
    replays             name -> figures of a trace
"""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.common.goals import Goal, goal_line
from benchmarks.serving.peers import OURS, PEERS

NAIVE = "naive"
STATIC = "static batches"
OFFLINE = "offline, "
ONLINE = "online, "
BEST = "paged, prefix cache"

Report = dict[str, Any]


def _over_naive(name: str) -> Callable[[Report], float | None]:
    return lambda report: report["ratios_to_naive"].get(name)


def _over_peer(key: str) -> Callable[[Report], float | None]:
    def figure(report: Report) -> float | None:
        ours, theirs = (report["peers"].get(name) for name in (OURS, PEERS[0]))
        return ours[key] / theirs[key] if ours and theirs else None

    return figure


GOALS = (
    Goal("offline: 5.3x the rate of one request at a time", _over_naive(OFFLINE + BEST), low=5.3),
    Goal("online: 4.0x the rate of one request at a time", _over_naive(ONLINE + BEST), low=4.0),
    Goal("4x the rate of transformers' continuous batching", _over_peer("tokens_per_s"), low=4.0),
    Goal(
        "at most a tenth of the peak memory of transformers' continuous batching",
        _over_peer("peak_bytes"),
        high=0.1,
    ),
)
"""Goals of the engine for the workload with a shared prefix."""


def goal_lines(report: Report) -> list[str]:
    """Return a line for each goal: met, NOT met, or not measured."""
    return [goal_line(goal, report) for goal in GOALS]


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Return for each name the median over rounds of its rate relative to NAIVE in the same round.

    Example:
      >>> ratios({"naive": [10.0, 20.0, 10.0], "other": [20.0, 60.0, 50.0]})
      {'naive': 1.0, 'other': 3.0}
    """
    naive = rates.get(NAIVE)
    if naive is None:
        return {}
    return {
        name: round(statistics.median(a / b for a, b in zip(each, naive, strict=True)), 3)
        for name, each in rates.items()
    }


def result_lines(report: Report) -> list[str]:
    """Return a table of all engines: rate, ratio, steps, and the latency for users."""
    if not report["results"]:
        return []
    lines = [
        f"{'':30s}{'tokens/s':>9s}{'x naive':>8s}{'ms/token':>9s}{'ms/step':>8s}{'mean':>8s}"
        f"{'first token, ms p50':>20s}{'p99':>8s}{'next, ms p50':>13s}{'p99':>8s}"
        f"{'same tokens':>13s}"
    ]
    for name, figures in report["results"].items():
        ratio = report["ratios_to_naive"].get(name)
        same = figures.get("same_tokens")
        lines.append(
            f"{name:30s}{figures['tokens_per_s']:9.0f}{_cell(ratio, 8, 2)}"
            f"{figures['ms_per_token']:9.3f}{_cell(figures.get('step_ms_p50'), 8, 2)}"
            f"{_cell(figures.get('step_ms_mean'), 8, 2)}{_cell(figures['ttft_ms_p50'], 20, 1)}"
            f"{_cell(figures['ttft_ms_p99'], 8, 0)}{_cell(figures.get('tpot_ms_p50'), 13, 2)}"
            f"{_cell(figures.get('tpot_ms_p99'), 8, 2)}"
            f"{'' if same is None else f'{same:.0%}':>13s}"
        )
    return [
        *lines,
        "A step of an engine is a dispatch: prompts, and several tokens for each sequence.",
    ]


def time_lines(report: Report) -> list[str]:
    """Return the parts of an engine's time, and its counts, by name."""
    lines = []
    for name, figures in (report["results"] | report["replays"]).items():
        details = figures.get("details", {})
        seconds = {key: value for key, value in details.items() if key.endswith("_seconds")}
        if not seconds:
            continue
        shares = "  ".join(
            f"{key.removesuffix('_seconds')} {value / figures['details_wall_seconds']:.1%}"
            for key, value in seconds.items()
        )
        counts = "  ".join(
            f"{key.removeprefix('num_')} {value:g}"
            for key, value in details.items()
            if value and key not in seconds
        )
        lines += [f"{name}: {shares}", f"{'':4s}{counts}"]
    return lines


def peer_lines(report: Report) -> list[str]:
    """Return a line for each engine that ran in a separate process."""
    ours = report["peers"].get(OURS)
    lines = []
    for name, record in report["peers"].items():
        peak, imports = record["peak_bytes"] / 1e6, record["imports_bytes"] / 1e6
        line = f"{name:30s}{record['tokens_per_s']:9.0f} tokens/s{peak:9.0f} MB peak"
        line += f" ({imports:.0f} after imports), {record['cpu_seconds']:.1f} s of CPU time"
        if ours and name != OURS:
            line += (
                f"; paged_jax has {ours['tokens_per_s'] / record['tokens_per_s']:.2f}x the rate in "
            )
            line += f"{ours['peak_bytes'] / record['peak_bytes']:.3f} of the memory"
            if "same_tokens" in record:
                line += f", {record['same_tokens']:.0%} of the requests have the same tokens"
        lines.append(line)
    return lines


def replay_lines(report: Report) -> list[str]:
    """Return a table of the engine's variants on a trace."""
    if not report["replays"]:
        return []
    lines = [
        f"{'':30s}{'tokens/s':>9s}{'seconds':>8s}{'first token, ms p50':>20s}{'p99':>8s}"
        f"{'next, ms p50':>13s}{'p99':>8s}{'preemptions':>12s}{'hit rate':>9s}"
    ]
    for name, figures in report["replays"].items():
        lines.append(
            f"{name:30s}{figures['tokens_per_s']:9.0f}{figures['seconds']:8.1f}"
            f"{figures['ttft_ms_p50']:20.1f}{figures['ttft_ms_p99']:8.0f}"
            f"{_cell(figures.get('tpot_ms_p50'), 13, 2)}{_cell(figures.get('tpot_ms_p99'), 8, 2)}"
            f"{figures['num_preemptions']:12.0f}{figures['hit_rate']:9.1%}"
        )
    return lines


def _cell(figure: float | None, width: int, digits: int) -> str:
    return " " * width if figure is None else f"{figure:{width}.{digits}f}"
