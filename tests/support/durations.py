"""Cost of the tests: recorded by pytest, and limited by a budget for each tier.

This is a pytest plugin. `--durations-json FILE` adds the cost of a run to a file.
`python -m tests.support.durations TIER FILE` prints the costs of all files as a table, and fails if
the tier costs more than its budget. CPU-seconds count the test processes and the child processes
that they waited for, so other load has little influence. The speed of the machine is measured with
a fixed piece of work on all cores, and the budget is scaled by it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

# CPU-seconds of all tests of a tier, on a machine on which `measure_machine` takes `_MACHINE`.
BUDGETS = {"core": 1200.0, "full": 3600.0}
_MACHINE = 2.8
# As in the Makefile.
_MAX_PROCESSES = 8
# Costs vary by about a tenth from run to run, because processes share caches, and by a quarter
# between machines on which the fixed work takes equally long.
_TOLERANCE = 1.35

# Files with the most expensive tests, which start first so that all processes end at about the same
# time, in descending order of their cost.
DEAR_FILES = (
    "tests/models/test_families.py",
    "tests/engine/test_exact.py",
    "tests/engine/test_tensor_parallel.py",
    "tests/engine/test_quantised_models.py",
    "tests/test_notebooks.py",
    "tests/kernels/test_cpu_quantised.py",
    "tests/test_docs.py",
    "tests/test_real_model.py",
    "tests/engine/test_groups.py",
    "tests/test_real_agents.py",
    "tests/models/test_family_weights.py",
    "tests/models/test_mixers.py",
    "tests/test_plan.py",
    "tests/engine/test_recurrent.py",
    "tests/server/test_openapi.py",
    "tests/kernels/test_lowering.py",
    "tests/kernels/test_attention.py",
    "tests/kernels/test_cpu_platforms.py",
    "tests/cache/test_states.py",
    "tests/engine/test_soak.py",
)
# Tests that neither compile nor start a process. They run before all others, so a broken scheduler
# is reported within seconds.
HOST_ONLY = (
    "tests/scheduler/",
    "tests/support/",
    "tests/sampling/test_params.py",
    "tests/sampling/test_structured_outputs.py",
)


class Cost(NamedTuple):
    """Cost of the tests of a file, with their fixtures."""

    num_tests: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __add__(self, other: tuple) -> "Cost":
        return Cost(*map(sum, zip(self, other, strict=True)))


def measure_machine() -> float:
    """Return the CPU-seconds of importing JAX and compiling a fixed function without a cache.

    As many processes as run the tests do this at the same time, because the cores of many machines
    share hardware: their CPU-seconds are longer if all of them are busy.
    """
    code = (
        "import jax, jax.numpy as jnp, os\n"
        "jax.config.update('jax_enable_compilation_cache', False)\n"
        "def f(x):\n"
        "    for i in range(24):\n"
        "        x = jax.nn.softmax(jnp.sin(x @ x.T) * i, axis=-1) @ x\n"
        "    return x\n"
        "jax.jit(jax.grad(lambda x: jnp.sum(f(x)))).lower(jnp.ones((8, 8))).compile()\n"
        "times = os.times()\n"
        "print(times.user + times.system)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    count = min(os.cpu_count() or 1, _MAX_PROCESSES)
    means = []
    for _ in range(3):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for _ in range(count)
        ]
        means.append(statistics.mean(float(each.communicate()[0]) for each in processes))
    return min(means)


def over_budget(tier: str, costs: Mapping[str, Cost], machine: float) -> str | None:
    """Return a message if a tier costs more than its budget, or None.

    Args:
      tier: a key of `BUDGETS`.
      costs: the cost of each file.
      machine: what `measure_machine` returned on the machine of the run.
    """
    total = sum(costs.values(), Cost()).cpu_seconds
    limit = BUDGETS[tier] * _TOLERANCE * machine / _MACHINE
    if total <= limit:
        return None
    return (
        f"the {tier} tests take {total:.0f} CPU-seconds, the limit is {limit:.0f}: "
        f"{BUDGETS[tier]:.0f} (budget) * {_TOLERANCE} * {machine / _MACHINE:.2f} (this machine)"
    )


def table(costs: Mapping[str, Cost]) -> str:
    """Return a Markdown table of costs in descending order."""
    rows = ["| File | Tests | CPU-seconds |", "| --- | ---: | ---: |"]
    rows += [
        f"| `{file}` | {cost.num_tests} | {cost.cpu_seconds:.1f} |"
        for file, cost in sorted(costs.items(), key=lambda item: -item[1].cpu_seconds)
    ]
    total = sum(costs.values(), Cost())
    rows.append(f"| **all** | **{total.num_tests}** | **{total.cpu_seconds:.0f}** |")
    return "\n".join(rows)


def start_order(files: Sequence[str]) -> list[int]:
    """Return an order of ``files``, one entry per test: host-only tests first, then dear files."""

    def rank(file: str) -> int:
        if file.startswith(HOST_ONLY):
            return -1
        return DEAR_FILES.index(file) if file in DEAR_FILES else len(DEAR_FILES)

    return sorted(range(len(files)), key=lambda index: rank(files[index]))


def read_json(path: Path) -> dict[str, Cost]:
    """Return the costs that ``--durations-json`` recorded."""
    return {file: Cost(**cost) for file, cost in json.loads(path.read_text()).items()}


def _add_to_json(path: Path, costs: Mapping[str, Cost]) -> None:
    """Add the costs of a run to a record of other runs, each of a part of the tests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    total = read_json(path) if path.exists() else {}
    for file, cost in costs.items():
        total[file] = total.get(file, Cost()) + cost
    files = {file: cost._asdict() for file, cost in sorted(total.items())}
    path.write_text(json.dumps(files, indent=1) + "\n")


def _row_of(file: str) -> str:
    """Return the row of a file: its own, or the row of all examples in docstrings."""
    return "paged_jax/" if file.startswith("paged_jax/") else file


# Plugin


class _Recorder:
    """Adds up the reports of test processes, in the process that reports to the user."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._costs: dict[str, Cost] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = _row_of(report.nodeid.partition("::")[0])
        cpu_seconds = dict(report.user_properties).get("cpu_seconds", 0.0)
        cost = Cost(int(report.when == "setup"), report.duration, cpu_seconds)
        self._costs[row] = self._costs.get(row, Cost()) + cost

    def pytest_sessionfinish(self) -> None:
        _add_to_json(self._path, self._costs)


class _Meter:
    """Measures CPU time between reports, in the process that runs the tests."""

    def __init__(self) -> None:
        # The first test also pays for the imports and the collection of its process.
        self._last = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = self._cpu_seconds()
        report.user_properties = [*item.user_properties, ("cpu_seconds", now - self._last)]
        self._last = now
        return report

    @staticmethod
    def _cpu_seconds() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("durations by file").addoption(
        "--durations-json",
        metavar="FILE",
        type=Path,
        help="add the cost of each file to a JSON file",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Meter())
    path = config.getoption("--durations-json")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests as `start_order` does if files are distributed to processes."""
    if hasattr(config, "workerinput"):
        files = [item.nodeid.partition("::")[0] for item in items]
        items[:] = [items[i] for i in start_order(files)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of a recorded run, and exit with an error if it is over the budget."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.durations")
    parser.add_argument("tier", choices=BUDGETS)
    parser.add_argument("file", type=Path, help="written by --durations-json")
    args = parser.parse_args(arguments)
    if not args.file.exists():
        sys.exit(f"{args.file} does not exist, so no tests ran")
    costs, machine = read_json(args.file), measure_machine()
    print(f"{table(costs)}\n\nfixed work on this machine: {machine:.1f} CPU-seconds")
    if message := over_budget(args.tier, costs, machine):
        sys.exit(message)


if __name__ == "__main__":
    main()
