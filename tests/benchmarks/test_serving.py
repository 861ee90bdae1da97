"""Tests of the serving benchmark: its requests, its baselines, and its report."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import harness, http_server
from benchmarks.serving import __main__ as serving
from benchmarks.serving import peers as serving_peers
from benchmarks.serving import vllm_peer
from benchmarks.serving.engines import ContiguousBatches, EngineSizes, make_engine, serve
from benchmarks.serving.workloads import (
    Outcome,
    Request,
    Scale,
    Sizes,
    TraceRow,
    draw,
    fitting_scale,
    from_trace,
    median_summary,
    read_trace,
    summary,
    with_poisson_arrivals,
)
from paged_jax import Llama
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG

SIZES = Sizes(num_requests=5, prefix_len=6, prompt_lens=(1, 7), new_lens=(2, 6))
ENGINE_SIZES = EngineSizes(
    max_num_seqs=4,
    max_model_len=32,
    pool_tokens=96,
    block_size=4,
    max_num_batched_tokens=None,
    steps_per_dispatch=4,
)


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_llama(CONFIG, scale=0.4)


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """Return greedy tokens from the plain forward pass, one request and one token at a time."""
    return [greedy(model, request) for request in requests()]


def requests() -> list[Request]:
    return draw(SIZES, CONFIG.vocab_size, seed=0)


def greedy(model: Llama, request: Request) -> list[int]:
    tokens = list(request.prompt_token_ids)
    for _ in range(request.num_new):
        # One shape for all; padding at the right has no influence.
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = PLAIN(model, padded)
        tokens.append(int(jnp.argmax(logits[0, len(tokens) - 1])))
    return tokens[len(request.prompt_token_ids) :]


PLAIN = nnx.jit(lambda model, token_ids: model(token_ids))


def test_draw_shares_the_prefix_and_nothing_else() -> None:
    drawn = draw(Sizes(50, 8, (1, 9), (3, 5)), vocab_size=30000, seed=1)
    prompts = [request.prompt_token_ids for request in drawn]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt[8:]) for prompt in prompts}) > 40
    assert {len(prompt) for prompt in prompts} == set(range(9, 18))
    assert {request.num_new for request in drawn} == {3, 4, 5}
    assert all(3 <= token < 30000 for prompt in prompts for token in prompt)


def test_draw_gives_each_seed_the_same_lengths_and_other_tokens() -> None:
    one, two = (draw(SIZES, 1000, seed) for seed in (1, 2))
    assert one == draw(SIZES, 1000, 1)
    assert [r.num_tokens for r in one] == [r.num_tokens for r in two]
    assert one[0].prompt_token_ids[:6] != two[0].prompt_token_ids[:6]


def test_poisson_arrivals_have_the_rate() -> None:
    many = with_poisson_arrivals([Request([3], 1)] * 4000, rate=50.0, seed=0)
    arrivals = [request.arrival for request in many]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    # A property of the exponential distribution.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""
MOONCAKE = [
    {"timestamp": 2000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 5000, "input_length": 1536, "output_length": 60, "hash_ids": [0, 1, 3]},
]


def test_read_trace_reads_azure(tmp_path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    rows = read_trace(path, 2)
    assert [row[1:] for row in rows] == [(374, 44, ()), (396, 109, ())]
    assert rows[0].seconds == 0 and rows[1].seconds == pytest.approx(4.314579)


def test_read_trace_reads_mooncake(tmp_path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    assert read_trace(path, 9) == [
        TraceRow(0.0, 1100, 50, (0, 1, 2)),
        TraceRow(3.0, 1536, 60, (0, 1, 3)),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.txt", "", "must end in"),
        ("trace.csv", "a,b\n1,2\n", "must be an Azure"),
        ("trace.jsonl", "no json", "must be an Azure"),
        ("trace.jsonl", "", "at least one"),
    ],
)
def test_read_trace_refuses_other_files(tmp_path, name, text, message) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path, 9)


@pytest.mark.slow
def test_read_trace_reads_the_real_ones(data_dir) -> None:
    azure = read_trace(data_dir / "traces" / "azure2023_conv.csv", 10**6)
    mooncake = read_trace(data_dir / "traces" / "mooncake_conversation.jsonl", 10**6)
    assert (len(azure), len(mooncake)) == (19366, 12031)
    assert all(-(-row.prompt_len // 512) == len(row.block_ids) for row in mooncake)


def rows() -> list[TraceRow]:
    return [TraceRow(0.0, 1100, 50, (0, 1, 2)), TraceRow(3.0, 1536, 60, (0, 1, 3))]


def test_from_trace_shares_the_blocks_of_one_name() -> None:
    one, two = from_trace(
        rows(), vocab_size=999, max_len=4096, scale=Scale(prompt=0.5, new=0.1), speed=2.0
    )
    assert [len(r.prompt_token_ids) for r in (one, two)] == [550, 768]
    assert (one.num_new, two.num_new, two.arrival) == (5, 6, 1.5)
    assert one.prompt_token_ids[:512] == two.prompt_token_ids[:512]
    assert one.prompt_token_ids[512:] != two.prompt_token_ids[512:550]
    assert one.prompt_token_ids[:256] != one.prompt_token_ids[256:512]


def test_from_trace_fits_the_context() -> None:
    for max_len in (40, 300, 1596):
        scale = fitting_scale(rows(), max_len)
        made = from_trace(rows(), vocab_size=99, max_len=max_len, scale=scale, speed=1.0)
        longest = max(len(request.prompt_token_ids) for request in made)
        assert longest == min(1536, max_len - max_len // 4)
        assert max(request.num_new for request in made) == min(60, max_len // 4)
        assert all(request.num_tokens <= max_len for request in made)
    [cut, _] = from_trace(rows(), vocab_size=99, max_len=60, scale=Scale(1, 1), speed=1.0)
    assert (len(cut.prompt_token_ids), cut.num_new) == (10, 50)


@pytest.mark.parametrize("batch", [1, 2])
def test_contiguous_batches_equal_the_plain_forward(model, expected, batch) -> None:
    baseline = ContiguousBatches(model, batch=batch)
    outcome = baseline.run(requests())
    assert outcome.token_ids == expected
    assert outcome.num_tokens == sum(request.num_new for request in requests())
    for request, times in zip(requests(), outcome.token_times, strict=True):
        assert len(times) == request.num_new
        assert 0 < times[0] <= times[-1] <= outcome.seconds
    assert len(outcome.step_seconds) == -(-5 // batch)


def test_contiguous_batches_attend_within_the_window_of_each_layer(model) -> None:
    """Prompts longer than the window of a layer, in a model with windows in some layers."""
    windowed = nnx.clone(model)
    kinds = ("full_attention", "sliding_attention")
    windowed.config = dataclasses.replace(model.config, sliding_window=4, layer_types=kinds)
    one = requests()[:1]
    assert ContiguousBatches(windowed, batch=1).run(one).token_ids == [greedy(windowed, one[0])]
    assert greedy(windowed, one[0]) != greedy(model, one[0])


def test_contiguous_batches_are_compiled_by_warm_up(model) -> None:
    baseline = ContiguousBatches(model, batch=2)
    baseline.warm_up(requests())
    compiled = [f._cache_size() for f in (baseline._prefill, baseline._decode)]
    baseline.run(requests())
    assert [f._cache_size() for f in (baseline._prefill, baseline._decode)] == compiled


class FakeEngine:
    """An engine that counts: every step gives each request two tokens with the step's number."""

    def __init__(self):
        self.asked: list[tuple[list[int], int]] = []
        self.running: dict[str, list[int]] = {}
        self.num_steps = 0

    @property
    def stats(self):
        return Stats(self.num_steps, self.num_steps / 2, 7, {})

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def add_request(self, prompt, params) -> str:
        assert params.ignore_eos and params.temperature == 0
        self.asked.append((prompt["prompt_token_ids"], params.max_tokens))
        request_id = str(100 + len(self.asked))
        self.running[request_id] = []
        return request_id

    def step(self):
        self.num_steps += 1
        outputs = []
        for request_id, tokens in list(self.running.items()):
            most = self.asked[int(request_id) - 101][1]
            tokens += [self.num_steps] * min(2, most - len(tokens))
            sample = SimpleNamespace(token_ids=list(tokens))
            outputs.append(SimpleNamespace(request_id=request_id, outputs=[sample]))
            if len(tokens) == most:
                del self.running[request_id]
        return outputs


@dataclasses.dataclass
class Stats:
    num_steps: int
    host_seconds: float
    peak_num_blocks: int
    other: dict


def test_serve_adds_requests_when_they_are_due() -> None:
    engine = FakeEngine()
    engine.num_steps = 10
    late, early = Request([1, 2], 3, arrival=0.1), Request([3], 5)
    outcome = serve(engine, [late, early])  # pyright: ignore[reportArgumentType]
    assert engine.asked == [([3], 5), ([1, 2], 3)]
    assert outcome.token_ids == [[14, 14, 15], [11, 11, 12, 12, 13]]
    (late_first, _, late_end), early_times = outcome.token_times
    assert 0.1 <= late_first < late_end <= outcome.seconds
    assert early_times == sorted(early_times) and early_times[-1] < 0.1
    assert len(set(early_times)) == 3
    assert outcome.arrivals == [0.1, 0.0]
    assert len(outcome.step_seconds) == 5
    assert outcome.details == {"num_steps": 5, "host_seconds": 2.5, "peak_num_blocks": 7}


def test_make_engine_runs_what_fits_the_memory(model) -> None:
    paged, contiguous = (make_engine(model, ENGINE_SIZES, v) for v in ("paged", "contiguous"))
    assert (paged.block_size, paged.num_blocks, paged.max_num_seqs) == (4, 24, 4)
    assert (contiguous.block_size, contiguous.max_num_seqs) == (32, 3)
    for request in requests()[:4]:
        contiguous.add_request({"prompt_token_ids": request.prompt_token_ids})
    assert not contiguous.core.scheduler.running
    plan = contiguous.core.scheduler.schedule(contiguous.core.runner, 0.0)
    assert len(plan.decodes) == 3


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["paged, prefix cache", "contiguous"])
def test_serve_gives_the_tokens_of_the_plain_forward(model, expected, variant) -> None:
    engine = make_engine(model, ENGINE_SIZES, variant)
    assert serve(engine, requests()).token_ids == expected
    arriving = with_poisson_arrivals(requests(), rate=500.0, seed=0)
    assert serve(engine, arriving).token_ids == expected


@pytest.mark.slow
def test_runs_find_nothing_cached_that_an_earlier_one_left(model) -> None:
    modes = ["offline", "online"]
    runs = serving.make_runs(model, modes, ENGINE_SIZES, lambda _: requests()[:2])
    cached = [run(requests()[:2]).details["num_cached_tokens"] for run in runs.values()]
    # The second request of a run finds the full block of the shared prefix. It would find more if
    # the prompts of the previous run were cached. Only the first variant has a prefix cache.
    assert cached == [4, 0, 0] * 2


def outcome(seconds: float, token_ids=((5, 6, 7), (8,))) -> Outcome:
    times = [[0.5, 0.5, 1.5], [1.0]]
    return Outcome(seconds, list(map(list, token_ids)), [0.25, 0.5], times, [0.5, 1.0])


def test_summary_counts_from_arrival() -> None:
    figures = summary(outcome(2.0))
    assert (figures["tokens_per_s"], figures["ms_per_token"]) == (2.0, 500.0)
    assert figures["ttft_ms_mean"] == pytest.approx(375)
    assert figures["tpot_ms_p50"] == 500
    assert figures["gap_ms_p50"] == 1000
    assert (figures["step_ms_mean"], figures["step_ms_p50"]) == (750, 750)


def test_median_summary_takes_the_median_of_rounds() -> None:
    figures = median_summary([outcome(1.0), outcome(2.0), outcome(9.0)])
    assert (figures["seconds"], figures["seconds_mean"]) == (2.0, 4.0)
    assert figures["tokens_per_s"] == 2.0


def test_measure_all_takes_turns_over_the_same_requests() -> None:
    calls = []

    def run(name, seconds):
        def serve(requests):
            calls.append((name, requests[0].prompt_token_ids, requests[-1].arrival > 0))
            return outcome(seconds)

        return serve

    offline = serving.OFFLINE + serving.BEST
    runs = {"naive": run("naive", 8.0), offline: run("off", 2.0), "online, x": run("on", 3.0)}
    outcomes, rate = serving.measure_all(
        runs,
        lambda number: [Request([number], 1)] * 4,
        load=3.0,
        num_warmup=1,
        num_rounds=2,
    )
    expected = [[("naive", [n], False), ("off", [n], False), ("on", [n], True)] for n in range(3)]
    assert calls == sum(expected, [])
    assert rate == 6.0
    assert {name: len(each) for name, each in outcomes.items()} == dict.fromkeys(runs, 2)


def test_records_compare_tokens_with_the_first_run() -> None:
    other = outcome(2.0, token_ids=((5, 6, 7), (9,)))
    found = serving.records({"naive": [outcome(8.0)] * 3, "other": [other] * 3})
    assert found["naive"]["same_tokens"] == 1.0
    assert found["other"]["same_tokens"] == 0.5
    assert "details" not in found["other"] and len(found["other"]["rounds"]) == 3


def report(**changes) -> dict:
    empty = {"results": {}, "ratios_to_naive": {}, "peers": {}, "replays": {}}
    return empty | changes


def peer(rate: float, peak: int) -> dict:
    return {"tokens_per_s": rate, "cpu_seconds": 2.0, "peak_bytes": peak, "imports_bytes": 1}


def answers(**changes) -> list[str]:
    lines = harness.goal_lines(serving.GOALS, report(**changes))
    return [line[:12].strip() for line in lines]


def test_goals_are_met_missed_or_not_measured() -> None:
    unmeasured = ["not measured"] * 4
    assert answers() == unmeasured
    offline, online = (f"{kind}, paged, prefix cache" for kind in ("offline", "online"))
    assert answers(ratios_to_naive={offline: 5.3, online: 4.0}) == ["met"] * 2 + unmeasured[2:]
    assert answers(ratios_to_naive={offline: 5.29, online: 3.99})[:2] == ["NOT met"] * 2
    theirs = {"transformers, as it comes": peer(10, 1000)}
    assert answers(peers={"paged_jax": peer(40, 100)} | theirs)[2:] == ["met"] * 2
    assert answers(peers={"paged_jax": peer(39, 101)} | theirs)[2:] == ["NOT met"] * 2
    assert answers(peers=theirs) == unmeasured


def test_ratios_need_naive() -> None:
    assert serving.ratios({"other": [1.0]}) == {}


def test_tables_have_a_line_for_everything() -> None:
    details = {"host_seconds": 0.5, "num_preemptions": 3, "num_swap_preemptions": 0}
    measured = dataclasses.replace(outcome(2.0), details=details)
    results = serving.records({"naive": [outcome(8.0)], "offline, paged": [measured]})
    replay = summary(measured) | {"num_preemptions": 3, "hit_rate": 0.25}
    made = report(
        results=results,
        ratios_to_naive={"naive": 1.0, "offline, paged": 4.0},
        peers={"paged_jax": peer(40, 10**6), "transformers, sized": peer(10, 10**7)},
        replays={"paged": replay},
    )
    table = serving.result_lines(made)
    assert len(table) == 4 and " 4.00" in table[2] and "100%" in table[2]
    assert serving.time_lines(made) == [
        "offline, paged: host 25.0%",
        "    preemptions 3",
    ]
    assert "4.00x the rate in 0.100 of the memory" in serving.peer_lines(made)[1]
    assert " 3" in serving.replay_lines(made)[1]
    assert "25.0%" in serving.replay_lines(made)[1]


def test_peers_that_fail_are_left_out(tmp_path, capsys, monkeypatch) -> None:
    def fail(name, *arguments, **options):
        raise serving.PeerUnavailable(f"{name}: not here")

    monkeypatch.setattr(serving, "measure", fail)
    assert serving.measure_peers(tmp_path, "float32", ENGINE_SIZES, lambda _: requests()) == {}
    assert "left out: paged_jax: not here" in capsys.readouterr().err


def test_measure_says_why_a_process_failed(tmp_path, monkeypatch) -> None:
    done = subprocess.CompletedProcess([], 1, "", "Traceback\n  more\nValueError: no such thing\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)
    with pytest.raises(serving_peers.PeerUnavailable, match="paged_jax: ValueError: no such thing"):
        serving_peers.measure("paged_jax", tmp_path, "float32", [], [], {}, timeout=60)


def test_measure_leaves_memory_to_others(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(serving_peers, "_available_memory", lambda: 0.5)
    with pytest.raises(serving_peers.PeerUnavailable, match="60% of the machine's memory"):
        serving_peers.measure(serving_peers.PEERS[0], tmp_path, "float32", [], [], {}, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefix-len", "400"], "must fit the 512 tokens"),
        (["--pool-tokens", "100"], "--pool-tokens must be at least"),
        (["--prompt-lens", "5", "4"], "ascending"),
        (["--runs", "0"], "at least 1"),
        (["--speed", "0"], "must be positive"),
        (["--modes", "online"], "also requires offline"),
        (["--trace-file", "nothing.csv"], "nothing.csv"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_main_says_what_is_wrong(arguments, message, capsys) -> None:
    try:
        assert serving.main(arguments) == 2
    except SystemExit as error:
        assert message in str(error)
    else:
        assert message in capsys.readouterr().err


class FakeVllm:
    """The part of vLLM that the benchmark uses: it repeats the first token of a prompt."""

    __version__ = "1.2"
    options: dict = {}

    def LLM(self, folder, **options):
        self.options |= {"folder": folder, **options}
        return self

    def SamplingParams(self, **params):
        return SimpleNamespace(**params)

    def generate(self, prompts, params, use_tqdm):
        rows = [
            [p["prompt_token_ids"][0]] * s.max_tokens for p, s in zip(prompts, params, strict=True)
        ]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=row)]) for row in rows]

    def reset_prefix_cache(self):
        self.options["resets"] = self.options.get("resets", 0) + 1


def test_vllm_gets_the_limits_and_requests_of_paged_jax(tmp_path, capsys, monkeypatch) -> None:
    fake = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    job = {"engine": serving_peers.VLLM, "folder": "F", "dtype": "bfloat16", "warmup": [([5], 1)]}
    job |= {"requests": [([7, 8], 3), ([9], 2)], "sizes": ENGINE_SIZES._asdict()}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert vllm_peer.main([str(tmp_path / "job.json")]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["token_ids"] == [[7, 7, 7], [9, 9]] and record["num_tokens"] == 5
    assert fake.options["max_num_seqs"] == ENGINE_SIZES.max_num_seqs
    num_tokens = fake.options["num_gpu_blocks_override"] * fake.options["block_size"]
    assert 0 <= num_tokens - ENGINE_SIZES.pool_tokens < fake.options["block_size"]
    assert fake.options["resets"] == 1, "only the timed requests are in the prefix cache"


def test_vllm_runs_in_its_own_python(tmp_path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf \'{"called": "%s"}\' $2\n')
    python.chmod(0o755)
    record = serving_peers.measure(
        serving_peers.VLLM, tmp_path, "float32", [], [], {}, timeout=60, python=python
    )
    assert record == {"called": "benchmarks.serving.vllm_peer"}


def test_clients_over_http_skip_pings() -> None:
    def event(*token_ids: int) -> bytes:
        return b"data: %b\n\n" % json.dumps({"outputs": [{"token_ids": token_ids}]}).encode()

    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: ping\n\n"
    parts = [(1.0, head), (2.0, event(5, 6) + b": pi"), (3.0, b"ng\n\n"), (4.0, event(7))]
    parts.append((5.0, b"data: [DONE]\n\n"))
    assert http_server._tokens(parts, is_stream=True) == ([5, 6, 7], [2.0, 2.0, 4.0])
