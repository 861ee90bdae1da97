"""Default backends of GPUs, derived from result files of `benchmarks.gpu.backends`.

    python -m benchmarks.gpu.defaults results.json ...
    python -m benchmarks.gpu.defaults results.json --table table.json

The table is `paged_jax/kernels/gpu_defaults.json`, or the file of `--table`. The backend
`mosaic_gpu` replaces `triton` for a call only if it was at least as fast in all cases of the call
that were to be measured. A case that was not reached in time, failed or had a wrong result does not
count as fast. New entries replace older entries of the same calls; others are kept.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import write_json
from paged_jax.kernels import gpu_defaults

TABLE = Path(gpu_defaults.__file__).with_name("gpu_defaults.json")
# The backend that is preferred without measurements, and the backend that may replace it.
_PREFERRED, _OTHER = "triton", "mosaic_gpu"

# GPU -> op -> key -> entry.
Table = dict[str, dict[str, dict[str, dict[str, Any]]]]


def derive(report: Mapping[str, Any]) -> Table:
    """Return the entries of a report; none if the calls were not measured on a GPU.

    A call without any time of the preferred backend has no entry.
    """
    calls: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for record in report["results"]:
        calls.setdefault((record["op"], record["key"]), {})[record["name"]] = record["us"]
    measured = f"jax {report['versions']['jax']}, commit {report['commit']}"
    table: Table = {}
    for (op, key), times in calls.items():
        if report["accelerator"] is None or not any(_PREFERRED in us for us in times.values()):
            continue
        is_faster = all(
            {_PREFERRED, _OTHER} <= us.keys() and us[_OTHER] <= us[_PREFERRED]
            for us in times.values()
        )
        table.setdefault(report["accelerator"], {}).setdefault(op, {})[key] = {
            "backend": _OTHER if is_faster else _PREFERRED,
            "us": times,
            "measured": measured,
        }
    return table


def default_lines(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each default of a report."""
    return [
        f"default of {op}, {key}, on {kind}: {entry['backend']}"
        for kind, ops in derive(report).items()
        for op, entries in ops.items()
        for key, entry in entries.items()
    ]


def update_table(path: Path, reports: Iterable[Mapping[str, Any]]) -> Table:
    """Write the entries of reports to a table, which need not exist, and return the table."""
    table: Table = json.loads(path.read_text()) if path.exists() else {}
    for report in reports:
        for kind, ops in derive(report).items():
            for op, entries in ops.items():
                table.setdefault(kind, {}).setdefault(op, {}).update(entries)
    gpu_defaults.parse(json.dumps(table))
    write_json(path, table)
    return table


def main(arguments: list[str] | None = None) -> int:
    """Write the defaults of result files to a table, and print them."""
    parser = argparse.ArgumentParser(description="Derive default backends from measurements.")
    parser.add_argument("results", nargs="+", type=Path, help="files of benchmarks.gpu.backends")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="table to write")
    options = parser.parse_args(arguments)
    reports = [json.loads(path.read_text()) for path in options.results]
    lines = [line for report in reports for line in default_lines(report)]
    if not lines:
        print(
            "benchmarks.gpu.defaults: RESULTS must have times of the backend triton on a GPU, got "
            "none. Measure with `python -m benchmarks.gpu.backends --json RESULTS` on a GPU.",
            file=sys.stderr,
        )
        return 2
    update_table(options.table, reports)
    print(*lines, f"written to {options.table}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
