"""Tests of `benchmarks.weight_formats_time`: figures, errors and the exit status."""

import json

import numpy as np
import pytest

from benchmarks import weight_formats_time as benchmark


@pytest.mark.parametrize("name", benchmark.FORMATS)
def test_random_weights_have_the_arrays_of_their_format(name) -> None:
    format = benchmark.FORMATS[name]
    arrays = benchmark.random_weight(format, 256, np.random.default_rng(0))
    shapes = {key: (x.shape, x.dtype) for key, x in arrays._asdict().items() if x is not None}
    assert shapes == format.shapes((256, 256))
    # A chain of multiplications neither grows nor vanishes.
    w = benchmark.dequantise(arrays, format.code)
    assert 0.5 < np.linalg.norm(w, axis=1).mean() < 2


def test_report_has_a_row_per_format_and_number_of_rows(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(benchmark, "memory_rate", lambda: 10.0)
    monkeypatch.setattr(benchmark, "median_seconds", lambda *_: {"format": 1e-6, "bfloat16": 2e-6})
    path = tmp_path / "report.json"
    small = ["--size", "64", "--weights", "1", "--rows", "1", "3", "--json", str(path)]
    assert benchmark.main(["--formats", "q4_0", "mxfp4", *small]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert [(x["format"], x["rows"]) for x in figures] == [
        ("q4_0", 1), ("q4_0", 3), ("mxfp4", 1), ("mxfp4", 3)
    ]  # fmt: skip
    stored = 64 * 64 // 2 + 64 * 2 * 2
    assert figures[0]["of_copy_rate"] == pytest.approx(stored / 1e-6 / 1e9 / 10)
    assert figures[0]["over_bfloat16"] == pytest.approx(2)
    assert all(x["error"] < 2**-8 for x in figures)
    # A wrong result is reported.
    monkeypatch.setattr(benchmark, "linear", lambda x, w, **_: x * 1.5)
    capsys.readouterr()
    assert benchmark.main(["--formats", "q4_0", *small]) == 1
    assert capsys.readouterr().err.count("wrong: q4_0") == 2


def test_budget_ends_the_measurements(monkeypatch, capsys) -> None:
    monkeypatch.setattr(benchmark, "memory_rate", lambda: 10.0)
    assert benchmark.main(["--size", "64", "--weights", "1", "--budget", "-1"]) == 0
    assert capsys.readouterr().out.count("no time left") == len(benchmark.FORMATS)
