"""What the records of `decode_attention.py` say: a line each, goals met or not, and a plot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

OURS = "paged_jax"
Record = dict[str, Any]

_JAX_KERNEL = "jax pallas"
# Bytes of K and V from which memory alone bounds a call.
_LARGE = 5 * 10**8
# Batches up to this size are small ones.
_SMALL_BATCH = 8


class PlotUnavailable(RuntimeError):
    """Matplotlib is not installed."""


def record_line(record: Record) -> str:
    """One line: time, bytes, rates, and the other kernels' times over ours."""
    if record["op"] == "prefill":
        rate = f"{record['tflop_s']:7.2f} TFLOP/s {record['of_matmul_rate']:4.0%} of matmul"
    else:
        rate = f"{record['gb_s']:7.1f} GB/s    {record['of_memory_rate']:4.0%} of memory"
    peers = "  ".join(f"{peer} {x:.2f}x" for peer, x in record["speedup_over"].items())
    time = f"{record['us'][OURS]:9.1f} us {record['bytes'] / 1e6:9.1f} MB"
    return f"{record['name']} {time} {rate}  {peers}"


class Goal(NamedTuple):
    """A figure to reach in every case that it applies to.

    Attributes:
      text: what is asked.
      bound: the figure.
      is_most: whether `bound` is the largest allowed figure, not the smallest.
      figure: what a record gives, looking at all records where it must; None: not its case.
    """

    text: str
    bound: float
    is_most: bool
    figure: Callable[[Record, list[Record]], float | None]


def _is_plain(record: Record) -> bool:
    """Whether goals for bandwidth are about a record like this."""
    case = record["case"]
    kind = (record["op"], case["pool_dtype"], case["head_dim"], case["block_size"])
    return kind == ("decode", "bfloat16", 128, 16)


def _large_even(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and record["kv_bytes"] >= _LARGE and not case["is_ragged"]
    return record["of_memory_rate"] if applies and case["batch"] > 1 else None


def _large_ragged(record: Record, _: list[Record]) -> float | None:
    applies = _is_plain(record) and record["kv_bytes"] >= _LARGE and record["case"]["is_ragged"]
    return record["of_memory_rate"] if applies else None


def _one_long(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and (case["batch"], case["context"]) == (1, 131072)
    return record["of_memory_rate"] if applies else None


def _one_short(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and (case["batch"], case["context"]) == (1, 1024)
    return record["us"][OURS] if applies else None


def _is_small_or_ragged(record: Record) -> bool:
    return record["case"]["is_ragged"] or record["case"]["batch"] <= _SMALL_BATCH


def _over_jax(record: Record, _: list[Record]) -> float | None:
    return None if _is_small_or_ragged(record) else record["speedup_over"].get(_JAX_KERNEL)


def _over_jax_small(record: Record, _: list[Record]) -> float | None:
    return record["speedup_over"].get(_JAX_KERNEL) if _is_small_or_ragged(record) else None


def _quantised(record: Record, records: list[Record]) -> float | None:
    """How much faster than the same case over bfloat16 pools, where those are large."""
    case = record["case"]
    if record["op"] != "decode" or case["pool_dtype"] not in ("int8", "float8_e4m3fn"):
        return None
    for other in records:
        is_same = other["case"] == case | {"pool_dtype": "bfloat16"}
        if is_same and other["kv_bytes"] >= _LARGE:
            return other["us"][OURS] / record["us"][OURS]
    return None


def _chunks(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = (case["chunk"], case["pool_dtype"]) == (2048, "bfloat16")
    return record["of_matmul_rate"] if applies else None


GOALS = (
    Goal("decode, K and V of 0.5 GB or more: 92% of the copy rate", 0.92, False, _large_even),
    Goal("the same, ragged batches (10:1): 85% of the copy rate", 0.85, False, _large_ragged),
    Goal("batch 1 at 128K tokens: 80% of the copy rate", 0.80, False, _one_long),
    Goal("batch 1 at 1K tokens: at most 10 us", 10.0, True, _one_short),
    Goal("1.5x JAX's own kernel at its best setting", 1.5, False, _over_jax),
    Goal("3x JAX's own kernel, small (up to 8) or ragged batches", 3.0, False, _over_jax_small),
    Goal("int8 and fp8 pools: 1.7x bfloat16 of 0.5 GB or more", 1.7, False, _quantised),
    Goal("chunks of 2K tokens: 60% of the matrix product's rate", 0.60, False, _chunks),
)
"""What a data-centre GPU is to reach; bandwidths are for bfloat16, D 128 and C 16."""


def goal_lines(report: dict[str, Any]) -> list[str]:
    """A line for each goal: met, not met, or not measured; of a CPU's report, all the last."""
    records = report["results"] if report["accelerator"] else []
    return [_goal_line(goal, records) for goal in GOALS]


def _goal_line(goal: Goal, records: list[Record]) -> str:
    found = [(goal.figure(record, records), record["name"]) for record in records]
    figures = sorted((figure, name) for figure, name in found if figure is not None)
    if not figures:
        return f"not measured  {goal.text}"
    worst, name = figures[-1] if goal.is_most else figures[0]
    met = sum((f <= goal.bound) if goal.is_most else (f >= goal.bound) for f, _ in figures)
    answer = "met" if met == len(figures) else "NOT met"
    return f"{answer:12s}  {goal.text}; {met} of {len(figures)} cases, worst {worst:.3g} in {name}"


def plotter() -> Any:
    """Matplotlib, drawing into files.

    Raises:
      PlotUnavailable: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise PlotUnavailable(
            "decode_attention: --plot needs matplotlib. Run `pip install matplotlib`."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(pyplot: Any, report: dict[str, Any], path: Path) -> None:
    """Draw rate over bytes: on the left our kernel and the others, on the right ours by pool."""
    decode = [record for record in report["results"] if record["op"] == "decode"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), sharex=True, sharey=True)
    names = dict.fromkeys(name for record in decode for name in record["us"])
    for name in names:
        timed = [r for r in decode if name in r["us"]]
        rates = [r["bytes"] / r["us"][name] / 1e3 for r in timed]
        left.plot([r["bytes"] for r in timed], rates, "o", alpha=0.7, label=name)
    kinds = dict.fromkeys((r["case"]["pool_dtype"], r["case"]["is_ragged"]) for r in decode)
    for dtype, is_ragged in kinds:
        ours = [
            r
            for r in decode
            if (r["case"]["pool_dtype"], r["case"]["is_ragged"]) == (dtype, is_ragged)
        ]
        marker, label = ("^", f"{dtype}, ragged") if is_ragged else ("o", dtype)
        right.plot(
            [r["bytes"] for r in ours], [r["gb_s"] for r in ours], marker, alpha=0.7, label=label
        )
    for axes, title in ((left, "Kernels, all cases"), (right, f"{OURS}, by type of the pool")):
        axes.axhline(report["memory_gb_s"], color="black", linewidth=1, linestyle="--")
        axes.set(xscale="log", yscale="log", title=title, xlabel="bytes that a call must move")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    left.set_ylabel("GB/s (10⁹ bytes)")
    device = report["accelerator"] or report["device"]
    figure.suptitle(
        f"Decode attention on {device}, jax {report['versions']['jax']}; "
        f"dashed: {report['memory_gb_s_is']}"
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
