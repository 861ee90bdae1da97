"""Tests of `benchmarks.quantised`: turns, ratios and goals."""

import itertools
import time

import numpy as np
import pytest

from benchmarks.generate.peers import prefill_rates
from benchmarks.harness import goal_line
from benchmarks.quantised import __main__ as run
from benchmarks.quantised import starts
from benchmarks.quantised.__main__ import SOURCE, gguf_file, source_file


class FakeEngine:
    """Engine that records its calls. Each step advances the clock by some seconds."""

    def __init__(self, name: str, seconds: float, clock: list[float], calls: list[str]):
        self.name, self._seconds, self._clock, self._calls = name, seconds, clock, calls

    def start(self, batch: int, prompt_len: int, new_tokens: int) -> None:
        self._left = new_tokens

    def step(self) -> np.ndarray:
        assert self._left > 0, "the engine was started for fewer steps"
        self._left -= 1
        self._clock[0] += self._seconds
        self._calls.append(self.name)
        return np.zeros(1, np.int64)

    def prefill(self, prompt_len: int) -> float:
        self._calls.append(self.name)
        return self._seconds

    def close(self) -> None:
        pass


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def engines(monkeypatch, calls) -> dict[str, FakeEngine]:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    seconds = {"paged_jax Q4_1": 0.25, "llama.cpp Q4_1": 0.5}
    return {name: FakeEngine(name, each, clock, calls) for name, each in seconds.items()}


def test_engines_take_turns(engines, calls) -> None:
    rates = run.measure_decode(engines, batch=4, num_turns=3)
    assert rates == {"paged_jax Q4_1": 16.0, "llama.cpp Q4_1": 8.0}
    turns = [(name, len([*group])) for name, group in itertools.groupby(calls)]
    assert turns == [(name, run.TURN) for _ in range(4) for name in engines]
    calls.clear()
    assert prefill_rates(engines, 2) == {"paged_jax Q4_1": 2048.0, "llama.cpp Q4_1": 1024.0}
    assert calls == [*engines] * 3


def make_report(rate: float, first_token: float, peak: float) -> dict:
    rates = {"paged_jax Q4_1": rate, "llama.cpp Q4_1": 100.0, "paged_jax BF16": 80.0}
    second = {"first_token_s": first_token, "peak_over_weights_and_pool": peak}
    return {
        "tokens_per_s": {"decode, batch 1": rates},
        "starts": {
            "paged_jax Q4_1": {"second": second},
            "llama.cpp Q4_1": {"second": {"first_token_s": 0.5}},
        },
    }


def test_goals_compare_with_the_same_file_and_with_bfloat16() -> None:
    lines = [goal_line(goal, make_report(140.0, 1.0, 1.6)) for goal in run.make_goals()]
    measured = [line for line in lines if not line.startswith("not measured")]
    assert [line.split(None, 1)[0] for line in measured] == ["met", "NOT", "met", "met"]
    assert "Q4_1 over llama.cpp Q4_1, at least 1.4: 1.4" in measured[0]
    assert "Q4_1 over paged_jax BF16, at least 1.8: 1.75" in measured[1]
    worse = [goal_line(goal, make_report(139.0, 1.01, 1.61)) for goal in run.make_goals()]
    assert not any(line.startswith("met") for line in worse)
    # Four engines and four formats over bfloat16 in four phases, memory, and the first token.
    assert len(lines) == 34


def test_start_reports_times_and_memory(monkeypatch, tmp_path) -> None:
    created = []

    class Engine(FakeEngine):
        weight_bytes, cache_bytes = 10**6, 10**6

        def __init__(self, file, *dtype, **sizes):
            super().__init__("engine", 0.0, [0.0], [])
            created.append((file, *dtype))

    monkeypatch.setattr(starts, "_load_class", lambda engine: Engine)
    ours = starts.start("paged_jax", tmp_path, "int8")
    peer = starts.start("llama.cpp", tmp_path, "auto")
    assert created == [(tmp_path, "int8"), (tmp_path,)]
    assert set(peer) == {"imports_s", "first_token_s", "first_token_cpu_s"} <= set(ours)
    assert (ours["weights_mb"], ours["pool_mb"]) == (1, 1)


def test_missing_model_says_how_to_get_it(tmp_path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(FileNotFoundError, match="fetch_smollm2.py"):
        source_file(path)
    path.touch()
    assert source_file(path) == gguf_file(SOURCE, path, tmp_path) == path
