"""Report of the simulation: a line per record, the goals, and a plot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.goals import Figure, Goal, goal_line

Report = dict[str, Any]
Record = dict[str, Any]

OURS, BEFORE, WHOLE, PARTITIONS = "by lengths", "by table", "whole", "partitions of 512"


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


def goal_lines(report: Report) -> list[str]:
    """Return a line for each goal: met or NOT met."""
    return [goal_line(goal, report) for goal in GOALS]


def plot(pyplot: Any, report: Report, path: Path) -> None:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


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
