"""Tests of metrics, and of the dashboard that reads them."""

import json
import re

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paged_jax import Engine
from paged_jax.server import Settings
from paged_jax.server.metrics import BulkHistogram
from tests.support import ROOT
from tests.support.live_server import GREEDY, LiveServer
from tests.support.tiny_model import SIZES

LABELS = {"model_name": "tiny", "engine": "0"}
BUCKETS = (0.001, 0.5, 2.5, 300)
# Values below, at, between and above the bounds, with their counts.
VALUES = {0.0: 2, 0.001: 1, 0.25: 5, 0.5: 3, 300.0: 1, 1e9: 4}
BODY = {"prompt": "the cat sat on", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_folder):
    settings = Settings(model_name="tiny")
    with LiveServer(Engine(tiny_folder, **SIZES, steps_per_dispatch=2), settings) as server:
        for n in (1, 2):  # compile, so that times are short
            assert server.post("/generate", {**BODY, "n": n}).status_code == 200
        yield server


def test_metrics_have_the_names_of_vllm(server) -> None:
    def read() -> dict[str, float]:
        lines = server.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        own = '{engine="0",model_name="tiny"}'
        return {name.replace(own, ""): float(value) for name, value in pairs}

    before = read()
    server.post("/generate", {"prompt": "the cat sat on", **GREEDY})
    server.wait_until_idle()
    after = read()
    growth = {name: after[name] - before.get(name, 0) for name in after}
    assert growth["vllm:generation_tokens_total"] == 8
    assert growth["vllm:prompt_tokens_total"] > 8
    assert growth["vllm:time_to_first_token_seconds_count"] == 1
    assert growth["vllm:e2e_request_latency_seconds_count"] == 1
    assert growth["vllm:request_time_per_output_token_seconds_count"] == 1
    assert growth["vllm:inter_token_latency_seconds_count"] >= 6
    for reason in ("stop", "length", "abort", "error"):  # a rate needs the count before the first
        labels = f'{{engine="0",finished_reason="{reason}",model_name="tiny"}}'
        assert f"vllm:request_success_total{labels}" in before
    labels = '{engine="0",finished_reason="length",model_name="tiny"}'
    assert growth[f"vllm:request_success_total{labels}"] == 1
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert {"vllm:num_preemptions_total", "vllm:prefix_cache_queries_total"} <= set(after)


def samples(server) -> dict[str, float]:
    """Return all samples by name and labels."""
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }


def names(server) -> set[str]:
    return {name.partition("{")[0] for name in samples(server)}


def test_metrics_count_a_request(server) -> None:
    def total(found: dict[str, float], name: str) -> float:
        return sum(value for each, value in found.items() if each.partition("{")[0] == name)

    before = samples(server)
    server.post("/v1/completions", {**BODY, "n": 2})
    server.get("/nothing")
    server.wait_until_idle()
    after = samples(server)
    growth = {name: total(after, name) - total(before, name) for name in names(server)}
    for name in ("prefill_time_seconds", "decode_time_seconds", "inference_time_seconds"):
        assert growth[f"vllm:request_{name}_count"] == 1
        assert 0 < growth[f"vllm:request_{name}_sum"] < 10
    assert growth["vllm:request_max_num_generation_tokens_sum"] == 6
    assert growth["vllm:request_params_n_sum"] == 2
    assert growth["vllm:request_params_max_tokens_sum"] == 6
    cached = growth["vllm:prompt_tokens_cached_total"]
    assert 0 < cached < growth["vllm:prompt_tokens_total"]
    computed = growth["vllm:prompt_tokens_total"] - cached
    assert growth["vllm:iteration_tokens_total_sum"] == computed + 12
    key = 'http_requests_total{"handler": "%s", "method": "%s", "status": "%s"}'
    for parts in (("/v1/completions", "POST", "2xx"), ("none", "GET", "4xx")):
        assert after[key % parts] == before.get(key % parts, 0) + 1
    [config] = [name for name in after if name.startswith("vllm:cache_config_info")]
    assert '"block_size": "4"' in config and '"num_gpu_blocks": "20"' in config
    assert after[config] == 1
    reasons = [name for name in after if name.startswith("vllm:num_requests_waiting_by_reason")]
    assert len(reasons) == 2 and all('"engine": "0"' in name for name in reasons)


def test_metrics_have_no_labels_from_clients(server) -> None:
    server.send(b"BREW /pot/1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    server.get("/v1/models/strange")
    text = server.get("/metrics").text
    assert "BREW" not in text and "pot" not in text and "strange" not in text
    assert 'handler="/v1/models/{model}"' in text


def test_dashboard_reads_only_existing_metrics(server) -> None:
    board = json.loads((ROOT / "examples" / "grafana.json").read_text())
    exprs = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])] + [
        each["definition"] for each in board["templating"]["list"] if "definition" in each
    ]
    asked = {name for expr in exprs for name in re.findall(r"[a-z0-9_]+:?[a-z0-9_]+(?=\{)", expr)}
    assert len(asked) > 26 and asked <= names(server)


def without_times(text: bytes) -> str:
    return re.sub(r"(_created\S*) \S+", r"\1", text.decode())


@pytest.mark.parametrize("labels", [LABELS, {}])
def test_bulk_histogram_matches_prometheus_client(labels) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    one = Histogram("gap_seconds", "Gaps.", list(labels), registry=theirs, buckets=BUCKETS)
    histogram = BulkHistogram("gap_seconds", "Gaps.", labels, BUCKETS)
    ours.register(histogram)
    for value, count in VALUES.items():
        histogram.observe(value, count)
        for _ in range(count):
            (one.labels(**labels) if labels else one).observe(value)
    assert without_times(generate_latest(ours)) == without_times(generate_latest(theirs))
