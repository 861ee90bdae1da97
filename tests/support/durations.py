"""Cost of each test file: recorded by pytest, kept in tests/durations.md, limited by a budget.

This is a pytest plugin. `--durations-json FILE` records a run.
`python -m tests.support.durations FILE` writes the recorded costs to the table. `--check-durations`
fails a run if a file costs much more than in the table. CPU-seconds count the test process and the
child processes that it waited for, so other load has little influence.
"""

import json
import os
import re
import statistics
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

DURATIONS = ROOT / "tests" / "durations.md"
_ROW = re.compile(r"^\| `(?P<file>[^`]+)` \| (?P<tests>\S+) \| (?P<before>\S+) \| (?P<now>\S+) \|$")
_MARK = "<!-- durations -->\n"

# A file may cost `_FACTOR` times the cost in its row of the table, plus `_SLACK` CPU-seconds. The
# first file that needs a program compiles it; the programs of an engine take about 30 CPU-seconds.
_FACTOR, _SLACK = 1.5, 40.0
# Minimum CPU-seconds of lines that determine the speed of the machine.
_LONG = 2.0


class Cost(NamedTuple):
    """Cost of the tests of a file, with their fixtures."""

    num_tests: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


class Line(NamedTuple):
    """A line of the table.

    Attributes:
      num_tests: number of tests in the file.
      before: cost before files shared programs, as text.
      now: CPU-seconds.
    """

    num_tests: int
    before: str
    now: float


def over_budget(
    costs: Mapping[str, Cost], table: Mapping[str, Line], *, slack: float = _SLACK
) -> list[str]:
    """Return a message for each file that costs too much or has no line.

    If most files cost more than their lines, the machine is slower than the machine of the table,
    and all lines are scaled by the median ratio.
    """
    lines = {file: line.now for file, line in table.items()}
    ratios = [
        cost.cpu_seconds / lines[file]
        for file, cost in costs.items()
        if lines.get(file, 0.0) >= _LONG
    ]
    slowness = max(1.0, statistics.median(ratios)) if ratios else 1.0
    messages = []
    for file, cost in sorted(costs.items()):
        if file not in lines:
            messages.append(f"{file} has no line; it takes {cost.cpu_seconds:.1f} CPU-seconds")
        elif cost.cpu_seconds > (limit := _FACTOR * slowness * lines[file] + slack):
            messages.append(
                f"{file} takes {cost.cpu_seconds:.1f} CPU-seconds, the limit is {limit:.1f}: "
                f"{_FACTOR} * {slowness:.2f} (slowness of this machine) * {lines[file]:.1f} (its "
                f"line) + {slack:.0f}"
            )
    return messages


def read_table(text: str) -> dict[str, Line]:
    """Return the lines of the table by file."""
    rows = filter(None, map(_ROW.match, text.splitlines()))
    return {row["file"]: Line(int(row["tests"]), row["before"], float(row["now"])) for row in rows}


def write_table(text: str, costs: Mapping[str, Cost]) -> str:
    """Return ``text`` with a table of ``costs`` in descending order, keeping "Before"."""
    before, _, after = text.partition(_MARK)
    old = read_table(after)
    lines = {
        file: Line(cost.num_tests, old[file].before if file in old else "-", cost.cpu_seconds)
        for file, cost in costs.items()
    }
    rows = ["| File | Tests | Before | Now |", "| --- | ---: | ---: | ---: |"]
    rows += [
        f"| `{file}` | {line.num_tests} | {line.before} | {line.now:.1f} |"
        for file, line in sorted(lines.items(), key=lambda item: -item[1].now)
    ]
    num_tests = sum(line.num_tests for line in lines.values())
    sums = [
        sum(float(line.before) for line in lines.values() if line.before != "-"),
        sum(line.now for line in lines.values()),
    ]
    rows.append(f"| **all** | **{num_tests}** | **{sums[0]:.0f}** | **{sums[1]:.0f}** |")
    return before + _MARK + "\n".join(rows) + "\n" + re.sub(r"\A(\|.*\n)*", "", after)


def dearest_first(files: Sequence[str], table: Mapping[str, Line]) -> list[int]:
    """Return an order of ``files``, one entry per test, with the most expensive first."""

    def cost(index: int) -> float:
        line = table.get(_row_of(files[index]))
        # A file without a line may be expensive.
        return float("inf") if line is None else line.now

    return sorted(range(len(files)), key=lambda index: -cost(index))


def _add_to_json(path: Path, costs: Mapping[str, Cost]) -> None:
    """Add the costs of a run to a record of other runs, each of a part of the tests."""
    total = read_json(path) if path.exists() else {}
    for file, cost in costs.items():
        total[file] = Cost(*map(sum, zip(total.get(file, Cost()), cost, strict=True)))
    files = {file: cost._asdict() for file, cost in sorted(total.items())}
    path.write_text(json.dumps(files, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Cost]:
    """Return the costs that ``--durations-json`` recorded."""
    return {file: Cost(**cost) for file, cost in json.loads(path.read_text()).items()}


def _row_of(file: str) -> str:
    """Return the line of a file: its own, or the line of all examples in docstrings."""
    return "paged_jax/" if file.startswith("paged_jax/") else file


# Plugin


class _Recorder:
    """Adds up the reports of test processes, in the process that reports to the user."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = _row_of(report.nodeid.partition("::")[0])
        cost = self.costs.get(row, Cost())
        self.costs[row] = Cost(
            cost.num_tests + (report.when == "setup"),
            cost.wall_seconds + report.duration,
            cost.cpu_seconds + dict(report.user_properties).get("cpu_seconds", 0.0),
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if path := session.config.getoption("--durations-json"):
            _add_to_json(Path(path), self.costs)
        if session.config.getoption("--check-durations") and self._messages():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        config = terminalreporter.config
        if config.getoption("--check-durations") and (messages := self._messages()):
            terminalreporter.section("over budget", red=True)
            for message in messages:
                terminalreporter.line(message)
            terminalreporter.line("`make durations` writes the table in tests/durations.md.")

    def _messages(self) -> list[str]:
        return over_budget(self.costs, read_table(DURATIONS.read_text()))


class _Meter:
    """Measures CPU time between reports, in the process that runs the tests."""

    def __init__(self) -> None:
        self._last = self._cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = self._cpu_seconds()
        report.user_properties = [*item.user_properties, ("cpu_seconds", now - self._last)]
        self._last = now
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        self._last = self._cpu_seconds()

    @staticmethod
    def _cpu_seconds() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations by file")
    group.addoption(
        "--durations-json", metavar="FILE", help="add what each file costs to a JSON file"
    )
    group.addoption(
        "--check-durations",
        action="store_true",
        help="fail if a file costs much more than its line in tests/durations.md",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Meter())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests so that the most expensive files start first, if files are distributed."""
    if hasattr(config, "workerinput"):
        files = [item.nodeid.partition("::")[0] for item in items]
        items[:] = [items[i] for i in dearest_first(files, read_table(DURATIONS.read_text()))]


def main(path: str) -> None:
    """Write the costs that ``--durations-json`` recorded to the table."""
    DURATIONS.write_text(write_table(DURATIONS.read_text(), read_json(Path(path))))


if __name__ == "__main__":
    main(*sys.argv[1:])
