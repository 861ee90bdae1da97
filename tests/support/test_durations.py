"""Tests of the budget for test files and of its table."""

import pytest

from tests.support.durations import (
    DURATIONS,
    Cost,
    Line,
    dearest_first,
    over_budget,
    read_table,
    write_table,
)

TABLE = {
    "tests/test_a.py": Line(3, "90", 40.0),
    "tests/test_b.py": Line(3, "90", 20.0),
    "tests/test_c.py": Line(3, "90", 10.0),
    "tests/test_d.py": Line(3, "-", 1.0),
}


def costs(**cpu_seconds: float) -> dict[str, Cost]:
    return {f"tests/test_{name}.py": Cost(3, 1.0, x) for name, x in cpu_seconds.items()}


def test_over_budget_is_quiet_where_files_cost_what_they_did() -> None:
    assert over_budget(costs(a=40, b=20, c=10, d=1), TABLE, slack=5.0) == []
    # A part of the suite.
    assert over_budget(costs(b=20), TABLE, slack=5.0) == []


def test_over_budget_names_a_file_that_costs_much_more() -> None:
    assert over_budget(costs(a=40, b=34.9, c=10, d=1), TABLE, slack=5.0) == []
    [message] = over_budget(costs(a=40, b=35.1, c=10, d=1), TABLE, slack=5.0)
    assert message.startswith("tests/test_b.py takes 35.1 CPU-seconds, the limit is 35.0")


def test_over_budget_lets_small_files_compile_what_others_compiled() -> None:
    assert over_budget(costs(a=40, b=20, c=10, d=6), TABLE, slack=5.0) == []
    assert len(over_budget(costs(a=40, b=20, c=10, d=7), TABLE, slack=5.0)) == 1


def test_over_budget_allows_for_a_slow_machine_but_not_for_a_slow_file_on_it() -> None:
    assert over_budget(costs(a=120, b=60, c=30, d=3), TABLE, slack=5.0) == []
    [message] = over_budget(costs(a=120, b=60, c=51, d=3), TABLE, slack=5.0)
    assert message.startswith("tests/test_c.py takes 51.0")


def test_over_budget_gives_nothing_away_on_a_fast_machine() -> None:
    assert over_budget(costs(a=20, b=20, c=5, d=1), TABLE, slack=5.0) == []
    assert len(over_budget(costs(a=20, b=36, c=5, d=1), TABLE, slack=5.0)) == 1


def test_over_budget_asks_for_a_line() -> None:
    assert over_budget(costs(a=40, e=0.1), TABLE, slack=5.0) == [
        "tests/test_e.py has no line; it takes 0.1 CPU-seconds"
    ]


def test_write_table_replaces_the_table_and_keeps_what_was_before() -> None:
    text = write_table("above\n\n<!-- durations -->\n\nbelow | too\n", costs(a=1, b=2))
    assert text.startswith("above\n\n<!-- durations -->\n| File |")
    assert text.endswith("|\n\nbelow | too\n")
    assert read_table(text) == {
        "tests/test_b.py": Line(3, "-", 2.0),
        "tests/test_a.py": Line(3, "-", 1.0),
    }
    assert list(read_table(text)) == ["tests/test_b.py", "tests/test_a.py"], "dearest first"
    known = text.replace("| - | 2.0 |", "| 75 | 2.0 |")
    again = write_table(known, costs(b=4, c=1))
    assert read_table(again) == {
        "tests/test_b.py": Line(3, "75", 4.0),
        "tests/test_c.py": Line(3, "-", 1.0),
    }
    assert "| **all** | **6** | **75** | **5** |" in again and again.endswith("below | too\n")


def test_dearest_first_keeps_files_whole_and_begins_with_unknown_ones() -> None:
    files = ["tests/test_d.py", "tests/test_b.py", "tests/test_b.py", "tests/new.py"]
    assert dearest_first(files, TABLE) == [3, 1, 2, 0]


def test_table_of_this_project_is_read() -> None:
    table = read_table(DURATIONS.read_text())
    assert len(table) > 30 and "tests/test_llm.py" in table


@pytest.mark.parametrize("options, status", [((), 0), (("--check-durations",), 1)])
def test_check_durations_fails_a_run(pytester, options, status) -> None:
    pytester.makepyfile(test_new="def test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "tests.support.durations", *options)
    assert result.ret == status
    result.assert_outcomes(passed=1)
    if status:
        result.stdout.fnmatch_lines(["*over budget*", "test_new.py has no line; *"])
