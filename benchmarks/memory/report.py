"""Report of the memory benchmark: tables, goals, and a plot.

A report is the content of the JSON file. "utilisation", "block_sizes", "concurrency", "sharing" and
"saved_by_spread" are lists of records, one per line of a table. "shared_prompt" and "requests" are
single records. The rest describes the run and the machine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.goals import Goal, goal_line
from benchmarks.memory.sharing import BEAMS, SAMPLES

Report = dict[str, Any]
Record = dict[str, Any]

PUBLISHED = {
    (SAMPLES, 2): 0.061,
    (SAMPLES, 4): 0.085,
    (SAMPLES, 6): 0.098,
    (BEAMS, 2): 0.376,
    (BEAMS, 4): 0.531,
    (BEAMS, 6): 0.552,
}
"""Blocks saved on the Alpaca trace by OPT-13B: Kwon et al. 2023, section 6.3 and figure 15."""

# Bytes of a token in Llama-3 8B: K and V, in 32 layers with 8 heads of 128 bfloat16 values.
_LLAMA3_8B_BYTES = 2 * 32 * 8 * 128 * 2


def _total(tokens_of: str, per_block: str) -> Callable[[Report], float]:
    """Return the utilisation over all batches together, counted in the allocator."""

    def figure(report: Report) -> float:
        records = [r for r in report["utilisation"] if r["lengths"] == "uniform"]
        num_blocks = sum(record[tokens_of] for record in records)
        return sum(record["num_tokens"] for record in records) / (num_blocks * report[per_block])

    return figure


def _waste(report: Report) -> float | None:
    found = [r for r in report["block_sizes"] if r["block_size"] == report["block_size"]]
    return found[0]["waste_allocator"] if found else None


def _shared(key: str) -> Callable[[Report], float]:
    return lambda report: report["shared_prompt"][key]


def _ratio(report: Report) -> float | None:
    found = [r for r in report["concurrency"] if r["held_tokens"] == 200]
    return found[0]["ratio"] if found else None


def _largest_difference(report: Report) -> float:
    """Return the largest difference between the allocator and the formulas, over all records."""
    pairs = [(r[f"{k}_allocator"], r[f"{k}_formula"]) for r in report["utilisation"]
             for k in ("contiguous", "paged")]  # fmt: skip
    pairs += [(r["waste_allocator"], r["waste_formula"]) for r in report["block_sizes"]]
    pairs += [(r["paged"], r["paged_formula"]) for r in report["concurrency"]]
    pairs += [(r["saved_allocator"], r["saved_recounted"]) for r in report["sharing"]]
    return max(abs(ours - formula) for ours, formula in pairs)


def _saved(kind: str, width: int) -> Callable[[Report], float | None]:
    def figure(report: Report) -> float | None:
        found = [r for r in report["sharing"] if (r["kind"], r["width"]) == (kind, width)]
        return found[0]["saved_allocator"] if found else None

    return figure


GOALS = (
    # Tolerance for sums in another order.
    Goal("the allocator agrees with the formulas, except for rounding", _largest_difference,
         high=1e-12, form=".1g"),
    Goal("contiguous: 23 to 25% of the memory holds tokens",
         _total("contiguous_blocks", "max_length"), low=0.23, high=0.25, form=".1%"),
    Goal("paged: 98.5%, rounded", _total("paged_blocks", "block_size"), low=0.9845, form=".2%"),
    Goal("paged: at most 4% waste with blocks of 16", _waste, high=0.04, form=".1%"),
    Goal("10 requests with 200 tokens in common: 130 blocks unshared",
         _shared("blocks_unshared"), low=130, high=130, form="d"),
    Goal("shared, 13 blocks", _shared("blocks_shared"), low=13, high=13, form="d"),
    Goal("14 blocks after one of them has written", _shared("blocks_one_diverged"), low=14, high=14,
         form="d"),
    Goal("9x as many sequences as contiguous, each with 200 of 2048 tokens", _ratio, low=9.0,
         form=".2f"),
    *(Goal(f"{kind}, {width}: at least {saved:.1%} of the blocks saved", _saved(kind, width),
           low=saved, form=".1%")
      for (kind, width), saved in PUBLISHED.items()),
)  # fmt: skip
"""Goals, computed from the mean length or published by Kwon et al. (sharing)."""


def goal_lines(report: Report) -> list[str]:
    """Return a line for each goal: met, NOT met, or not measured."""
    return [goal_line(goal, report) for goal in GOALS]


def all_lines(report: Report) -> list[str]:
    """Return every table, with an explanation of its columns."""
    tables = (utilisation_lines, block_size_lines, shared_prompt_lines, concurrency_lines)
    return [line for lines in (*tables, sharing_lines) for line in (*lines(report), "")]


def utilisation_lines(report: Report) -> list[str]:
    """Return the fraction of the memory that holds tokens, by batch."""
    from_contiguous, from_paged = report["implied_mean_lengths"]
    lines = [
        f"Memory that holds tokens. Contiguous: {report['max_length']} tokens reserved for each "
        f"sequence; paged: blocks of {report['block_size']}.",
        f"{'lengths':12s}{'batch':>6s}{'draws':>6s}{'mean':>7s}{'contiguous: formula':>21s}"
        f"{'allocator':>11s}{'paged: expected':>17s}{'formula':>9s}{'allocator':>11s}"
        f"{'worst draw':>12s}",
    ]
    for record in report["utilisation"]:
        lines.append(
            f"{record['lengths']:12s}{record['batch']:6d}{record['num_draws']:6d}"
            f"{record['mean_length']:7.1f}{record['contiguous_formula']:21.2%}"
            f"{record['contiguous_allocator']:11.2%}{record['paged_expected']:17.2%}"
            f"{record['paged_formula']:9.2%}{record['paged_allocator']:11.2%}"
            f"{record['paged_worst_draw']:12.2%}"
        )
    return [
        *lines,
        "Expected: mean / 2048, and mean / (mean + 7.5), for any distribution. Goals of "
        "24% and 98.5%",
        f"both imply a mean length of {from_contiguous:.0f} ({from_contiguous} from the "
        f"first, {from_paged} from the second); uniform lengths are 1 to 983.",
    ]


def block_size_lines(report: Report) -> list[str]:
    """Return the effect of the block size."""
    lines = [
        f"Block size, {report['sizes']['num_slots']} sequences of uniform lengths. "
        "A step appends a token to each; one program makes many steps.",
        f"{'C':>4s}{'waste: expected':>17s}{'formula':>9s}{'allocator':>11s}{'row of table':>14s}"
        f"{'tables':>12s}{'pool':>12s}{'step, median':>14s}{'fastest':>10s}",
    ]
    for record in report["block_sizes"]:
        lines.append(
            f"{record['block_size']:4d}{record['waste_expected']:17.2%}"
            f"{record['waste_formula']:9.2%}{record['waste_allocator']:11.2%}"
            f"{record['table_entries_per_slot']:14d}{record['table_bytes'] / 1024:8.1f} KiB"
            f"{record['pool_bytes'] / 1024:8.0f} KiB{record['step_us']:11.1f} us"
            f"{record['step_us_fastest']:7.1f} us"
        )
    return lines


def shared_prompt_lines(report: Report) -> list[str]:
    """Return the cost of a prompt that many requests share."""
    record = report["shared_prompt"]
    return [
        f"A prompt of {record['num_tokens']} tokens that {record['num_requests']} requests share, "
        f"blocks of {record['block_size']}.",
        f"{'unshared':36s}{record['blocks_unshared']:5d} blocks",
        f"{'shared by fork':36s}{record['blocks_shared']:5d}",
        f"{'after one has written a token':36s}{record['blocks_one_diverged']:5d}"
        f"  ({record['copies_one_diverged']} copied)",
        f"{'after all have written':36s}{record['blocks_all_diverged']:5d}",
    ]


def concurrency_lines(report: Report) -> list[str]:
    """Return the number of sequences that fit into a memory budget."""
    budget = report["concurrency"][0]["budget_tokens"]
    gib = budget * _LLAMA3_8B_BYTES / 2**30
    lines = [
        f"Sequences in a budget of {budget} tokens ({gib:g} GiB of K and V of Llama-3 8B).",
        f"{'tokens held':>12s}{'contiguous':>12s}{'paged: formula':>16s}{'allocator':>11s}"
        f"{'ratio':>9s}",
    ]
    for record in report["concurrency"]:
        lines.append(
            f"{record['held_tokens']:12d}{record['contiguous']:12d}{record['paged_formula']:16d}"
            f"{record['paged']:11d}{record['ratio']:8.2f}x"
        )
    return lines


def sharing_lines(report: Report) -> list[str]:
    """Return the blocks that samples and beams share, and the effect of the length spread."""
    requests = report["requests"]
    lines = [
        "Blocks saved by sharing, relative to blocks without sharing: "
        f"{requests['num_requests']} requests, "
        f"prompts of {requests['mean_prompt']:.1f} tokens on average and outputs of "
        f"{requests['mean_output']:.1f};",
        f"log-normal, sigma {requests['spread_prompt']} and {requests['spread_output']} (assumed). "
        "Beams are from the bundled model, and published beams from OPT-13B.",
        f"{'':20s}{'allocator':>10s}{'recounted':>11s}{'published':>11s}{'blocks':>10s}"
        f"{'unshared':>10s}",
    ]
    for record in report["sharing"]:
        published = PUBLISHED.get((record["kind"], record["width"]))
        lines.append(
            f"{record['kind'] + ', ' + str(record['width']):20s}"
            f"{record['saved_allocator']:10.1%}{record['saved_recounted']:11.1%}"
            f"{'' if published is None else f'{published:.1%}':>11s}"
            f"{record['num_shared']:10d}{record['num_unshared']:10d}"
        )
    width = report["saved_by_spread"][0]["width"]
    spreads = sorted({record["spread_output"] for record in report["saved_by_spread"]})
    lines += [
        f"With other spreads of lengths, {SAMPLES}, {width}, by formula:",
        f"{'prompt':>8s}  output {'  '.join(f'{spread:5.1f}' for spread in spreads)}",
    ]
    for prompt in spreads:
        saved = [r["saved"] for r in report["saved_by_spread"] if r["spread_prompt"] == prompt]
        lines.append(f"{prompt:8.1f}         {'  '.join(f'{s:5.1%}' for s in saved)}")
    return lines


def plot(pyplot: Any, report: Report, path: Path) -> None:
    """Draw the four tables that can be plotted."""
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8.5))
    _plot_utilisation(axes[0, 0], report)
    _plot_block_sizes(axes[0, 1], report)
    _plot_concurrency(axes[1, 0], report)
    _plot_sharing(axes[1, 1], report)
    for each in axes.flat:
        each.set_axisbelow(True)
        each.grid(alpha=0.3)
        each.legend(fontsize="small", loc="center left" if each is axes[0, 1] else "best")
    figure.suptitle("KV memory, counted in the block allocator")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _plot_utilisation(axes: Any, report: Report) -> None:
    records = [r for r in report["utilisation"] if r["lengths"] == "uniform"]
    batches = [record["batch"] for record in records]
    for kind, published in (("paged", 98.5), ("contiguous", 24)):
        values = [100 * record[f"{kind}_allocator"] for record in records]
        (line,) = axes.plot(batches, values, "o-", label=kind)
        axes.axhline(published, color=line.get_color(), linestyle="--", linewidth=1)
    axes.set(title="Memory that holds tokens (dashed: goals)", xlabel="sequences", ylabel="%")
    axes.set_ylim(0, 104)


def _plot_block_sizes(axes: Any, report: Report) -> None:
    records = report["block_sizes"]
    sizes = [record["block_size"] for record in records]
    axes.plot(sizes, [100 * r["waste_expected"] for r in records], "--", label="waste, expected")
    axes.plot(sizes, [100 * r["waste_allocator"] for r in records], "o", label="waste, allocator")
    axes.set_xscale("log", base=2)
    axes.set(title="Block size", xlabel="tokens in a block", ylabel="waste, %")
    times = axes.twinx()
    times.plot(sizes, [r["step_us"] for r in records], "s-", color="gray", alpha=0.6)
    times.set_ylabel("µs for a step of the allocator (gray)")
    times.set_ylim(bottom=0)


def _plot_concurrency(axes: Any, report: Report) -> None:
    records = report["concurrency"]
    held = [record["held_tokens"] for record in records]
    axes.plot(held, [record["paged"] for record in records], "o-", label="paged")
    axes.plot(held, [record["contiguous"] for record in records], "o-", label="contiguous")
    budget = f"Sequences in {records[0]['budget_tokens']} tokens of memory"
    axes.set(xscale="log", yscale="log", title=budget, xlabel="tokens that each holds")
    axes.set_xticks(held, [str(tokens) for tokens in held])
    axes.set_xticks([], minor=True)


def _plot_sharing(axes: Any, report: Report) -> None:
    records = report["sharing"]
    names = [f"{record['kind']}, {record['width']}" for record in records]
    places = range(len(records))
    measured = [100 * record["saved_allocator"] for record in records]
    published = [100 * PUBLISHED.get((r["kind"], r["width"]), 0) for r in records]
    axes.bar([i - 0.2 for i in places], measured, 0.4, label="measured")
    axes.bar([i + 0.2 for i in places], published, 0.4, label="published (OPT-13B)")
    axes.set_xticks(list(places), names, rotation=20, ha="right", fontsize="small")
    axes.set(title="Blocks saved by sharing", ylabel="%")
