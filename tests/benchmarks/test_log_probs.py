"""Test of the benchmark of importance ratios: they are 1 with exact numerics."""

import json

import pytest

from benchmarks import log_probs


@pytest.mark.slow
def test_main_prints_every_dtype(tiny_folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(log_probs, "DTYPES", [("bfloat16", "bfloat16")])
    monkeypatch.setattr(log_probs, "PROMPTS", ["the cat", "a mat in the"])
    out = tmp_path / "out.json"
    args = ["--model", str(tiny_folder), "--samples", "3", "--max-tokens", "9", "--json", str(out)]
    assert log_probs.main(args) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    fast, exact = json.loads(out.read_text())["rows"]
    assert fast["num_tokens"] == exact["num_tokens"] == 2 * 3 * 9
    assert 0 < fast["mean"] < fast["max"] < 0.1 and fast["equal"] < 1
    assert (exact["mean"], exact["max"], exact["equal"]) == (0, 0, 1)
