"""Plots of benchmark results: one PNG for each JSON file.

    python -m benchmarks.plots                       # from results/*.json into plots/
    python -m benchmarks.plots serving.json --out .  # other files

The caption of each figure shows the machine, the commit and the command of the measurement.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory, schedule, step
from benchmarks.attention import __main__ as attention
from benchmarks.harness import Plot, PlotUnavailable, Report, plotter

FOLDER = Path(__file__).resolve().parent
RESULTS, PLOTS = FOLDER / "results", FOLDER / "plots"

OURS, OTHERS = "#4c8dd6", "#b8b8b8"
_COLORS = {"paged_jax": OURS, "transformers": "#e5904a", "llama.cpp": "#57a773"}


def plot_serving(pyplot: Any, report: Report) -> Any:
    """Draw rates and times to the first token of every schedule, and of the peers."""
    figure, axes = pyplot.subplot_mosaic(
        [["rates", "waits"], ["peers", "peers"]],
        figsize=(10, 6),
        layout="constrained",
        width_ratios=(3, 2),
        height_ratios=(2, 1),
    )
    rates, waits, peers = axes["rates"], axes["waits"], axes["peers"]
    labels = [name.replace("naive", "one request at a time") for name in report["results"]]
    colors = [OURS if "paged" in name else OTHERS for name in report["results"]]
    runs = list(report["results"].values())
    _bars(rates, labels, [run["tokens_per_s"] for run in runs], colors)
    rates.set(title="Tokens/s", xlabel="tokens/s")
    _ranges(waits, [(run["ttft_ms_p50"], run["ttft_ms_p99"]) for run in runs], colors)
    waits.set(title="First token: median and p99", xlabel="ms", yticklabels=[])
    labels = [
        f"{name}\n{peer['peak_bytes'] / 1e9:.1f} GB at the peak"
        for name, peer in report["peers"].items()
    ]
    values = [peer["tokens_per_s"] for peer in report["peers"].values()]
    _bars(peers, labels, values, [OURS, *[OTHERS] * (len(values) - 1)])
    peers.set(title="The same requests in another engine", xlabel="tokens/s")
    figure.suptitle("Serving requests that share a prefix")
    return figure


def plot_replay(pyplot: Any, report: Report) -> Any:
    """Draw a replayed trace: rate, time to the first token, time between tokens."""
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 2.6), layout="constrained")
    runs = report["replays"]
    colors = [OURS] * len(runs)
    _bars(axes[0], list(runs), [run["tokens_per_s"] for run in runs.values()], colors)
    axes[0].set(title="Tokens/s", xlabel="tokens/s")
    for each, key, title in (
        (axes[1], "ttft", "First token"),
        (axes[2], "tpot", "Each further token"),
    ):
        spans = [(run[f"{key}_ms_p50"], run[f"{key}_ms_p99"]) for run in runs.values()]
        _ranges(each, spans, colors)
        each.set(title=f"{title}: median and p99", xlabel="ms", yticklabels=[])
    scale = report["length_scale"]
    figure.suptitle(
        f"Replay of {report['trace']}: {report['speed']:g} times as fast, "
        f"prompts {scale['prompt']:.2g} and outputs {scale['new']:.2g} times as long"
    )
    return figure


def plot_generate(pyplot: Any, report: Report) -> Any:
    """Draw decoding and prefill compared with other libraries, a row for each model."""
    shapes = list(dict.fromkeys(result["shape"] for result in report["results"]))
    batches = [decode["batch"] for decode in report["results"][0]["decode"]]
    columns = len(batches) + 1
    figure, axes = pyplot.subplots(
        len(shapes), columns, figsize=(4 * columns, 3 * len(shapes)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for row, shape in zip(axes, shapes, strict=True):
        results = [result for result in report["results"] if result["shape"] == shape]
        dtypes = [result["dtype"] for result in results]
        for place, (batch, each) in enumerate(zip(batches, row[:-1], strict=True)):
            rates = [result["decode"][place]["tokens_per_s"] for result in results]
            _groups(each, dtypes, [_better_caches(rate) for rate in rates])
            each.set(title=f"{shape}, decoding, batch {batch}")
        rates = [_better_caches(result["prefill_tokens_per_s"]) for result in results]
        _groups(row[-1], dtypes, rates)
        row[-1].set(title=f"{shape}, prefill of 512 tokens")
        row[0].set_ylabel("tokens/s")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    figure.suptitle("Text generation (transformers: the better of two caches)", x=0.02, ha="left")
    return figure


def _better_caches(rates: Mapping[str, float]) -> Mapping[str, float]:
    """Return the records with the better of transformers' dynamic and static caches."""
    both = [rates[name] for name in ("transformers", "transformers static") if name in rates]
    return {**rates, "transformers": max(both)}


def plot_allocator(pyplot: Any, report: Report) -> Any:
    """Draw the time of each operation of the block allocator, with its 90th percentile."""
    figure, axes = pyplot.subplots(figsize=(9, 4.6), layout="constrained")
    times = list(report["times"].values())
    spans = [(time["median_ms"], time["p90_ms"]) for time in times]
    _ranges(axes, spans, [OURS] * len(times))
    axes.barh(range(len(times)), [low for low, _ in spans], color=OURS)
    for row, (low, high) in enumerate(spans):
        axes.text(high + 0.02, row, f"{low:.2f}", va="center", fontsize=9)
    axes.set_yticks(range(len(times)), list(report["times"]))
    axes.set(xlabel="ms, median and p90", xlim=(0, 1.1 * max(high for _, high in spans)))
    slots, blocks = report["num_slots"], report["num_blocks"]
    axes.set_title(f"The block allocator: {slots} slots, {blocks} blocks", loc="left")
    return figure


def plot_kv_dtype(pyplot: Any, report: Report) -> Any:
    """Draw the savings and the costs of quantised caches."""
    figure, (size, loss) = pyplot.subplots(1, 2, figsize=(10, 3), layout="constrained")
    rows, colors = report["rows"], [OURS] * len(report["rows"])
    _bars(size, [row["kv_dtype"] for row in rows], [row["bytes_per_token"] for row in rows], colors)
    size.set(title="Bytes of K and V per token", xlabel="bytes")
    changes = [1e3 * row["loss_change"] for row in rows]
    _bars(loss, [row["kv_dtype"] for row in rows], changes, colors, "{:+.2f}")
    loss.set(title="Change of the loss", xlabel="10⁻³ nats per token")
    loss.axvline(0, color="black", linewidth=1)
    figure.suptitle(f"The bundled model on {report['num_tokens']} tokens of text")
    return figure


# Functions that draw a plot, by the start of the file name.
DRAWN_BY: dict[str, Plot] = {
    "allocator": plot_allocator,
    "decode-attention": attention.plot,
    "generate": plot_generate,
    "kv-dtype": plot_kv_dtype,
    "memory": memory.plot,
    "replay": plot_replay,
    "schedule": schedule.plot,
    "serving": plot_serving,
    "step": step.plot,
}


def plot_of(file: Path) -> Plot | None:
    """Return the function that draws a file of results, or None."""
    return next((plot for start, plot in DRAWN_BY.items() if file.name.startswith(start)), None)


def draw(pyplot: Any, file: Path, folder: Path) -> Path | None:
    """Draw a file of results into a folder, and return the path, or None if it has no plot."""
    plot = plot_of(file)
    if plot is None:
        return None
    report = json.loads(file.read_text())
    figure = plot(pyplot, report)
    # Below the figure, whatever its height: "tight" makes room for it.
    figure.text(0.01, -0.02, _origin(report), fontsize=8, color="#606060", va="top")
    path = folder / f"{file.stem}.png"
    folder.mkdir(parents=True, exist_ok=True)
    # Without the version of matplotlib, which would change the file but not the picture.
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)
    return path


def _origin(report: Report) -> str:
    # Name files outside of the repository without their folders.
    command = re.sub(r"(?<=\s)(/|\.\./)\S*/", "", report["command"])
    device = report.get("accelerator") or report["device"]
    lines = textwrap.wrap(command, 140)
    return "\n".join(
        [*lines, f"commit {report['commit']}, {device}, jax {report['versions']['jax']}"]
    )


def _bars(
    axes: Any,
    labels: Sequence[str],
    values: Sequence[float],
    colors: Sequence[str],
    form: str = "{:.0f}",
) -> None:
    """Draw horizontal bars from the top, with their values."""
    places = range(len(labels))
    axes.bar_label(axes.barh(places, values, color=colors), fmt=form, padding=3, fontsize=9)
    axes.set_yticks(places, labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.margins(x=0.15)
    _clear(axes)


def _ranges(axes: Any, spans: Sequence[tuple[float, float]], colors: Sequence[str]) -> None:
    """Draw ranges from a median to a high percentile, a row each, from the top."""
    for place, ((low, high), color) in enumerate(zip(spans, colors, strict=True)):
        axes.plot([low, high], [place, place], color=color, linewidth=2)
        axes.plot(low, place, "o", color=color)
        axes.plot(high, place, "|", color=color, markersize=12)
    axes.set_yticks(range(len(spans)))
    axes.set_ylim(len(spans) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    _clear(axes)


def _groups(axes: Any, labels: Sequence[str], values: Sequence[Mapping[str, float]]) -> None:
    """Draw a group of vertical bars for each label, with one bar for each library."""
    width = 0.8 / len(_COLORS)
    for place, (name, color) in enumerate(_COLORS.items()):
        at = [i + (place - 1) * width for i in range(len(labels))]
        bars = axes.bar(at, [value[name] for value in values], width, color=color, label=name)
        axes.bar_label(bars, fmt="{:.0f}", padding=2, fontsize=8)
    axes.set_xticks(range(len(labels)), labels)
    axes.margins(y=0.15)
    _clear(axes)


def _clear(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments: list[str] | None = None) -> int:
    """Draw the files, and print the names of the pictures."""
    parser = argparse.ArgumentParser(description="Draw the results of the benchmarks.")
    parser.add_argument("files", nargs="*", type=Path, help="JSON (default: benchmarks/results)")
    parser.add_argument(
        "--out", type=Path, default=PLOTS, help="folder (default: benchmarks/plots)"
    )
    options = parser.parse_args(arguments)
    missing = [file for file in options.files if not file.is_file()]
    if missing:
        parser.error(f"no such file: {missing[0]}")
    try:
        pyplot = plotter()
    except PlotUnavailable:
        print("plots: this needs matplotlib. Run `pip install matplotlib`.", file=sys.stderr)
        return 2
    for file in options.files or sorted(RESULTS.glob("*.json")):
        print(draw(pyplot, file, options.out) or f"{file.name}: there is no plot for this file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
