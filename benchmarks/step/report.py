"""Report of the step benchmark: a line per record, the goals, and a plot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.goals import Figure, Goal, goal_lines_on
from benchmarks.step.programs import ENGINE

Record = dict[str, Any]


def record_line(record: Record) -> str:
    """Return one line: time, bound, and the times of variants relative to the engine's."""
    others = "  ".join(f"{name} {ratio:.2f}x" for name, ratio in record["over_engine"].items())
    return (
        f"{record['name']:48s} {record['ms'][ENGINE]:9.3f} ms, {record['of_bound']:4.0%} of the "
        f"bound by {record['bound_by']} ({record['bound_ms']:.3f} ms)  {others}"
    )


def _of(model: str, figure: str, *, batch: int = 1, chunk: int = 0) -> Callable[..., Figure]:
    """Return a function that reads a figure of some cases from a report; see `Goal.figure`.

    It reads the cases in bfloat16 with this model, batch and chunk, from reports of accelerators.
    """

    def figures(report: dict[str, Any]) -> Figure:
        wanted = {"model": model, "batch": batch, "chunk": chunk, "dtype": "bfloat16"}
        records = report["results"] if report["accelerator"] else []
        return {
            record["name"]: record["ms"][ENGINE] if figure == "ms" else record[figure]
            for record in records
            # The goals do not apply to longer contexts or quantised pools.
            if record["case"] | wanted | {"kv_dtype": "auto"} == record["case"]
            and record["case"]["context"] <= 128
        }

    return figures


GOALS = (
    Goal(
        "8B, batch 1: 80% of (weights / copy rate), without K and V",
        _of("8B", "weights_of_memory_rate"),
        low=0.80,
    ),
    Goal(
        "8B, batch 64: 84% of (weights / copy rate), without K and V",
        _of("8B", "weights_of_memory_rate", batch=64),
        low=0.84,
    ),
    Goal("135M, batch 1: a step in 0.45 ms", _of("135M", "ms"), high=0.45),
    Goal(
        "8B, prompt chunks of 2K: 55% of the matmul rate",
        _of("8B", "of_matmul_rate", chunk=2048),
        low=0.55,
    ),
)
"""Goals for whole steps on an H200."""


def goal_lines(report: dict[str, Any]) -> list[str]:
    """Return a line for each goal: met, not met, or not measured (all of them on a CPU)."""
    return goal_lines_on(report["accelerator"], GOALS, report)


def plot(pyplot: Any, report: dict[str, Any], path: Path) -> None:
    """Draw the time of every case relative to its bound, and the variants."""
    records = report["results"]
    varied = [record for record in records if record["over_engine"]]
    height = 1.2 + 0.35 * max(len(records), sum(len(r["over_engine"]) + 1 for r in varied))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, height), layout="constrained")
    rows = range(len(records))
    left.barh(rows, [record["ms"][ENGINE] for record in records], label="a step")
    left.barh(rows, [record["bound_ms"] for record in records], 0.4, label="its bound")
    for row, record in zip(rows, records, strict=True):
        left.text(record["ms"][ENGINE], row, f" {record['of_bound']:.0%}", va="center", fontsize=8)
    left.set_yticks(rows, [record["name"] for record in records], fontsize=8)
    left.set(xscale="log", xlabel="ms", title="Steps, and their bounds by bytes and operations")
    left.set_xlim(
        min(record["bound_ms"] for record in records) / 2,
        max(record["ms"][ENGINE] for record in records) * 2,
    )
    left.invert_yaxis()
    left.legend(fontsize="small")
    bars = [
        (f"{record['name']}: {name}", ratio)
        for record in varied
        for name, ratio in record["over_engine"].items()
    ]
    drawn = right.barh(range(len(bars)), [ratio for _, ratio in bars], color="#b8b8b8")
    right.bar_label(drawn, fmt="{:.2f}", padding=3, fontsize=8)
    right.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    right.axvline(1, color="black", linewidth=1)
    right.set(xlabel="time relative to the engine's default", title="Variants")
    right.margins(x=0.1)
    right.invert_yaxis()
    device = report["accelerator"] or report["device"]
    figure.suptitle(f"Whole steps on {device}, jax {report['versions']['jax']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
