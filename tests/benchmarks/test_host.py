"""Tests of the host benchmark, which runs the engine with a device that computes nothing."""

import json

import numpy as np
import pytest

from benchmarks import host


def test_requests_get_the_text_that_the_device_draws() -> None:
    engine = host.make_engine(3, 2, 100)
    device = engine.core.executor
    assert isinstance(device, host.InstantDevice)
    host.fill(engine, device.text)
    for _ in range(3):
        engine.step()
    text = " ".join(map(str, device.text.tolist()))
    for sequence in engine.sequences:
        assert sequence.num_generated > 2 and sequence.completion.text
        assert " ".join(map(str, sequence.token_ids[host.PROMPT_TOKENS :])) in text


def test_a_slow_device_has_less_time_to_wait() -> None:
    row = host.measure(2, 4, 3, step_ms=[0.01, 50.0])
    assert row["num_steps"] == 2  # of four dispatched steps
    assert row["token_step_us"] == pytest.approx(row["dispatch_us"] / 2)
    assert 0 <= row["idle"]["50 ms"] < row["idle"]["0.01 ms"] <= 1
    assert all(np.array(list(row["parts_us"].values())) > 0)


def test_main_prints_a_line_for_each_case(tmp_path, capsys) -> None:
    out = tmp_path / "host.json"
    args = ["--sequences", "2", "--steps", "1", "8", "--dispatches", "2", "--step-ms", "1"]
    assert host.main([*args, "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[3:5]] == [["2", "x", "1"], ["2", "x", "8"]]
    assert lines[-2].startswith("not measured")
    assert len(json.loads(out.read_text())["rows"]) == 2
