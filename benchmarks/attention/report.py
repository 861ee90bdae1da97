"""Reports of attention benchmarks: a line per record, the goals, and a plot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.goals import Figure, Goal, goal_lines_on

OURS = "paged_jax"
Record = dict[str, Any]

_JAX_KERNEL = "jax pallas"
# Bytes of K and V above which only memory bandwidth limits a call.
_LARGE = 5 * 10**8
_QUANTISED = ("int8", "float8_e4m3fn")


def record_line(record: Record) -> str:
    """Return one line: time, bytes, rates, and the relative times of other kernels."""
    if record["op"] == "prefill":
        rate = f"{record['tflop_s']:7.2f} TFLOP/s {record['of_matmul_rate']:4.0%} of matmul"
    else:
        rate = f"{record['gb_s']:7.1f} GB/s    {record['of_memory_rate']:4.0%} of memory"
    peers = "  ".join(f"{peer} {x:.2f}x" for peer, x in record["speedup_over"].items())
    time = f"{record['us'][OURS]:9.1f} us {record['bytes'] / 1e6:9.1f} MB"
    return f"{record['name']} {time} {rate}  {peers}"


def _is_plain(record: Record) -> bool:
    """Return whether the bandwidth goals apply to a record."""
    case = record["case"]
    kind = (record["op"], case["pool_dtype"], case["head_dim"], case["block_size"])
    return kind == ("decode", "bfloat16", 128, 16)


def _is_even(record: Record) -> bool:
    case = record["case"]
    return not (case["is_ragged"] or case.get("is_skewed"))  # older reports have no skewed records


def _large_even(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and record["kv_bytes"] >= _LARGE and _is_even(record)
    return record["of_memory_rate"] if applies and case["batch"] > 1 else None


def _large_ragged(record: Record, _: list[Record]) -> float | None:
    applies = _is_plain(record) and record["kv_bytes"] >= _LARGE and record["case"]["is_ragged"]
    return record["of_memory_rate"] if applies else None


def _large_skewed(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and record["kv_bytes"] >= _LARGE and case.get("is_skewed")
    return record["of_memory_rate"] if applies else None


def _one_long(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and (case["batch"], case["context"]) == (1, 131072)
    return record["of_memory_rate"] if applies else None


def _one_short(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and (case["batch"], case["context"]) == (1, 1024)
    return record["us"][OURS] if applies else None


def _over_jax(record: Record, _: list[Record]) -> float | None:
    return record["speedup_over"].get(_JAX_KERNEL)


def _over_jax_alone(record: Record, _: list[Record]) -> float | None:
    """Return the speed relative to JAX's kernel for single sequences and ragged batches."""
    case = record["case"]
    applies = _is_plain(record) and (not _is_even(record) or case["batch"] == 1)
    return record["speedup_over"].get(_JAX_KERNEL) if applies else None


def _over_jax_quantised(record: Record, _: list[Record]) -> float | None:
    is_quantised = record["case"]["pool_dtype"] in _QUANTISED
    return record["speedup_over"].get(_JAX_KERNEL) if is_quantised else None


def _quantised(record: Record, records: list[Record]) -> float | None:
    """Return the speed relative to the same case over bfloat16 pools, for large pools."""
    case = record["case"]
    if record["op"] != "decode" or case["pool_dtype"] not in _QUANTISED:
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


def _in_cases(figure: Callable[[Record, list[Record]], float | None]) -> Callable[..., Figure]:
    """Return the figure of every record to which a goal applies; empty for reports of a CPU."""

    def figures(report: dict[str, Any]) -> Figure:
        records = report["results"] if report["accelerator"] else []
        found = {record["name"]: figure(record, records) for record in records}
        return {name: value for name, value in found.items() if value is not None}

    return figures


GOALS = (
    Goal(
        "decode, K and V of 0.5 GB or more: 92% of the copy rate", _in_cases(_large_even), low=0.92
    ),
    Goal(
        "the same, ragged batches (10:1): 88% of the copy rate", _in_cases(_large_ragged), low=0.88
    ),
    Goal("batch 1 at 128K tokens: 85% of the copy rate", _in_cases(_one_long), low=0.85),
    Goal("batch 1 at 1K tokens: at most 10 us", _in_cases(_one_short), high=10.0),
    Goal("never slower than JAX's own kernel at its best setting", _in_cases(_over_jax), low=1.0),
    Goal("1.3x JAX's own kernel, batch 1 or ragged", _in_cases(_over_jax_alone), low=1.3),
    Goal("2x JAX's own kernel, int8 and fp8 pools", _in_cases(_over_jax_quantised), low=2.0),
    Goal("int8 and fp8 pools: 1.75x bfloat16 of 0.5 GB or more", _in_cases(_quantised), low=1.75),
    Goal("chunks of 2K tokens: 55% of the matmul rate", _in_cases(_chunks), low=0.55),
    Goal(
        "one sequence of 128K among 63 of 1K: 85% of the copy rate",
        _in_cases(_large_skewed),
        low=0.85,
    ),
)
"""Goals for a data-centre GPU; bandwidths are for bfloat16, D 128 and C 16."""


def goal_lines(report: dict[str, Any]) -> list[str]:
    """Return a line for each goal: met, not met, or not measured (always on a CPU)."""
    return goal_lines_on(report["accelerator"], GOALS, report)


def plot(pyplot: Any, report: dict[str, Any], path: Path) -> None:
    """Draw rate over bytes: this kernel and others on the left, dtypes of the pool on the right."""
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
