"""Tests of the recorded costs, the budgets and the order of tests."""

import pytest

from tests.support import durations
from tests.support.durations import BUDGETS, DEAR_FILES, Cost, over_budget, read_json, start_order


def test_over_budget_scales_with_the_machine(monkeypatch) -> None:
    monkeypatch.setattr(durations, "_TOLERANCE", 1.0)
    half = {"tests/test_a.py": Cost(3, 9.0, BUDGETS["core"] / 2)}
    more = half | {"tests/test_b.py": Cost(3, 9.0, BUDGETS["core"] / 2 + 1)}
    assert over_budget("core", half, durations._MACHINE) is None
    assert over_budget("core", more, 2 * durations._MACHINE) is None
    assert f"{BUDGETS['core']:.0f} (budget)" in str(over_budget("core", more, durations._MACHINE))


def test_start_order_begins_with_the_host_and_the_dear_files() -> None:
    files = ["tests/a.py", DEAR_FILES[1], "tests/a.py", "tests/scheduler/b.py", DEAR_FILES[0]]
    assert start_order(files) == [3, 4, 1, 0, 2]


def test_main_prints_a_table_and_fails_over_the_budget(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "costs.json"
    monkeypatch.setattr(durations, "measure_machine", lambda: durations._MACHINE)
    durations._add_to_json(path, {"tests/test_a.py": Cost(2, 5.0, 3.0)})
    durations._add_to_json(path, {"tests/test_a.py": Cost(1, 5.0, 4.0), "b.py": Cost(1, 1.0, 9.0)})
    durations.main(["core", str(path)])
    rows = capsys.readouterr().out.splitlines()
    assert rows[2:5] == ["| `b.py` | 1 | 9.0 |", "| `tests/test_a.py` | 3 | 7.0 |",
                         "| **all** | **4** | **16** |"]  # fmt: skip
    durations._add_to_json(path, {"b.py": Cost(1, 1.0, 2 * BUDGETS["core"])})
    with pytest.raises(SystemExit, match="CPU-seconds, the limit is"):
        durations.main(["core", str(path)])


def test_plugin_records_a_run(pytester) -> None:
    pytester.makepyfile(
        test_x="""
        import time
        def test_cpu():
            start = time.process_time()
            while time.process_time() < start + 0.2:
                pass
        def test_b():
            pass
        """
    )
    options = ("-p", "tests.support.durations", "--durations-json", "costs.json")
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=2)
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=2)
    [(file, cost)] = read_json(pytester.path / "costs.json").items()
    assert (file, cost.num_tests) == ("test_x.py", 4)
    assert 0.4 <= cost.cpu_seconds
