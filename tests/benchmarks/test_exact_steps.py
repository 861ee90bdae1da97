"""Test of the benchmark of exact numerics."""

import json

import pytest

from benchmarks import exact_steps
from benchmarks.common import shapes


@pytest.mark.slow
def test_main_measures_both_numerics(tmp_path, monkeypatch, capsys) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128, "head_dim": 8}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(shapes.SHAPES, "15M", shapes.SHAPES["15M"] | sizes)
    monkeypatch.setattr(exact_steps, "SIZES", ((2, 32),))
    out = tmp_path / "out.json"
    assert exact_steps.main(["--shape", "15M", "--rounds", "2", "--json", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    [row] = json.loads(out.read_text())["measurements"]
    for name in ("dispatch", "prompt"):
        assert all(value > 0 for value in row[name].values())
