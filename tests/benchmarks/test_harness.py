"""Tests of the shared parts of benchmarks; the environment also on a machine without git."""

import json
import re
import shutil
import sys

import pytest

from benchmarks import harness
from tests.support import ROOT


@pytest.mark.skipif(
    not ((ROOT / ".git").exists() and shutil.which("git")), reason="not a repository of git"
)
def test_the_commit_is_that_of_the_repository() -> None:
    assert re.fullmatch("[0-9a-f]{7,}", harness.environment()["commit"] or "")


def test_without_git_the_commit_is_what_the_environment_says(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("PAGED_JAX_COMMIT", raising=False)
    assert harness.environment()["commit"] is None
    monkeypatch.setenv("PAGED_JAX_COMMIT", "0123abc")
    assert harness.environment()["commit"] == "0123abc"


def test_take_turns_calls_everything_once_per_round() -> None:
    calls = []
    runs = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert harness.take_turns(runs, 2) == {"a": [1, 3], "b": [2, 4]}
    assert calls == ["a", "b", "a", "b"]


def test_median_ratios_are_of_the_same_round() -> None:
    values = {"base": [1.0, 10.0, 100.0], "other": [2.0, 40.0, 300.0]}
    assert harness.median_ratios(values, "base") == {"base": 1.0, "other": 3.0}
    assert harness.medians(values) == {"base": 10.0, "other": 40.0}


def test_table_leaves_cells_without_a_value_empty() -> None:
    columns = [
        harness.Column("name", -6, "name"),
        harness.Column("time", 8, "seconds", "{:.1f} s"),
        harness.Column("half", 6, lambda record: record["seconds"] and record["seconds"] / 2),
    ]
    records = [{"name": "one", "seconds": 3.0}, {"name": "none", "seconds": None}]
    assert harness.table(columns, records) == [
        "name      time  half",
        "one      3.0 s   1.5",
        "none                ",
    ]


def test_budget_leaves_time_for_a_measurement() -> None:
    budget = harness.Budget(100)
    assert not budget.is_over() and not budget.is_over(50)
    assert budget.is_over(101) and harness.Budget(-1).is_over()


def test_finish_prints_and_writes(tmp_path, capsys) -> None:
    parser = harness.command_line("a benchmark", budget=60, rounds=3, goals=True)
    path = tmp_path / "new" / "report.json"
    options = parser.parse_args(["--json", str(path), "--rounds", "5"])
    assert (options.budget, options.rounds, options.goals) == (60, 5, False)
    harness.finish(options, {"b": 1, "a": 2}, ["a line"])
    assert capsys.readouterr().out == "a line\n"
    assert list(json.loads(path.read_text())) == ["b", "a"]
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]
    harness.finish(parser.parse_args([]), {}, [])


def test_measure_in_process_returns_the_last_line(tmp_path) -> None:
    module = "benchmarks.common.shapes"
    with pytest.raises(harness.PeerUnavailable, match="a peer: .*invalid choice: 'none'"):
        harness.measure_in_process("a peer", module, "none", tmp_path)
    with pytest.raises(harness.PeerUnavailable, match="a peer: took more than 0 s"):
        harness.measure_in_process("a peer", module, "15M", tmp_path, timeout=0.01)
    found = harness.measure_in_process("json", "json.tool", "--compact", _file(tmp_path))
    assert found == {"python": sys.executable}


def _file(folder) -> str:
    path = folder / "in.json"
    path.write_text(json.dumps({"python": sys.executable}))
    return str(path)
