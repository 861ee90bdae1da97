"""`warmup` and `on_compile`: compilation of the programs of an engine."""

import io
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, SamplingParams
from tests.support.generation import GREEDY, PROMPTS, generate
from tests.support.tiny_model import SIZES
from tests.support.workload import check_empty


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_compile_replaces_the_progress_on_a_terminal(tiny_folder, monkeypatch) -> None:
    lines: list[str] = []
    shown = []
    for on_compile in (None, lines.append):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        llm = LLM(tiny_folder, on_compile=on_compile, **SIZES)
        for _ in range(2):
            llm.generate(["the cat", "the dog"], SamplingParams(max_tokens=2))
        shown.append(terminal.getvalue().count("compiling"))
        assert "requests: 100%" in terminal.getvalue()
        assert llm.stats.compile_seconds > 0
    assert [shown[0] > 0, shown[1]] == [True, 0]
    assert len(lines) == len(set(lines)) > 1, "each program is announced once"
    assert all(line.startswith("compiling ") for line in lines)


@pytest.mark.slow
def test_nothing_compiles_after_warmup(tiny_folder) -> None:
    lines: list[str] = []
    # Programs of earlier tests must not hide programs that warmup misses.
    jax.clear_caches()
    llm = LLM(tiny_folder, on_compile=lines.append, **SIZES)
    reports: list[tuple[int, int, str]] = []
    llm.warmup(lambda *report: reports.append(report))
    assert [done for done, _, _ in reports] == list(range(1, len(reports) + 1))
    assert {total for _, total, _ in reports} == {len(reports)}
    assert len({name for _, _, name in reports}) == len(reports)
    check_empty(llm)
    llm.update_params(nnx.state(llm.model))  # the first call compiles, outside of requests

    seconds = llm.stats.compile_seconds
    compiled: list[str] = []

    def listen(event: str, duration: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details["fun_name"])

    random = np.random.default_rng(0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(4):
            prompts, params = [], []
            for _ in range(8):
                num_tokens, max_tokens = int(random.integers(1, 30)), int(random.integers(1, 17))
                prompts.append({"prompt_token_ids": random.integers(2, 43, num_tokens).tolist()})
                params.append(
                    SamplingParams(
                        temperature=float(random.integers(0, 2)),
                        n=int(random.integers(1, 4)),
                        max_tokens=max_tokens,
                        top_k=int(random.integers(0, 5)),
                        repetition_penalty=float(random.uniform(1, 1.5)),
                        logprobs=[None, None, 3][int(random.integers(3))],
                        prompt_logprobs=[None, None, 3][int(random.integers(3))],
                        stop_token_ids=random.integers(2, 43, 2).tolist(),
                        min_tokens=int(random.integers(0, max_tokens + 1)),
                    )
                )
            generate(llm, prompts, params)
        llm.reset_prefix_cache()
        llm.update_params(nnx.state(llm.model))
        generate(llm, PROMPTS, GREEDY)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == [] and lines == []
    assert llm.stats.compile_seconds == seconds
    assert llm.stats.num_preemptions > 0, "the pool must be too small for all requests"
    check_empty(llm)
