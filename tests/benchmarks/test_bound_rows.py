"""Tests of the benchmark of requests with and without a schema in the same batch."""

import json

import pytest

from benchmarks.serving import bound_rows
from benchmarks.serving.bound_rows import Case, Speeds, lines, main, measure
from paged_jax import Engine
from tests.support.structured import SIZES

CASES = dict(
    zip(
        bound_rows.CASES,
        [Case(0, 1), Case(0, 4), Case(3, 1, can_choose=False), Case(3, 1), Case(4, 0)],
        strict=True,
    )
)


@pytest.mark.slow
def test_measure_counts_the_tokens_of_both_kinds(monkeypatch) -> None:
    monkeypatch.setattr(bound_rows, "_NUM_WARM_STEPS", 4)
    engine = Engine(**{**SIZES, "num_blocks": 60})
    one, choosing = (measure(engine, CASES[name], 0.2) for name in list(CASES)[2:4])
    assert one.bound > 0 and choosing.bound > 0 and choosing.free > 0
    # Without the choice, all texts get a token in each step. (Some were replaced.)
    assert 0.6 < one.free / one.bound < 1.7
    assert measure(engine, CASES["1 free"], 0.05).bound == 0
    assert not engine.has_unfinished and engine.core.scheduler.lookahead.is_used


def test_lines_have_the_ratios() -> None:
    speeds = [Speeds(0, 100), Speeds(0, 50), Speeds(20, 20), Speeds(22, 60), Speeds(25, 0)]
    table = lines(dict(zip(CASES, speeds, strict=True)))
    assert len(table) == 8
    assert table[-2].endswith(
        "0.60 of alone (one step for all: 0.20), 1.20 of beside 7 free (0.40)"
    )
    assert table[-1] == "bound: 1.10 of one step for all"


def test_main_writes_the_speeds(monkeypatch, tmp_path, capsys) -> None:
    speeds = dict.fromkeys(CASES, Speeds(1.0, 2.0))
    monkeypatch.setattr(bound_rows, "measure_all", lambda *options: speeds)
    assert main(["--json", str(tmp_path / "bound.json")]) == 0
    report = json.loads((tmp_path / "bound.json").read_text())
    assert report["tokens_per_second"]["1 free"] == [1.0, 2.0] and report["model"] == "bundled"
    assert "1.00 of one step for all" in capsys.readouterr().out
