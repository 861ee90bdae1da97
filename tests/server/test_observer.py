"""What can be seen of a server from outside: ids, the log, metrics, the dashboard, and traces."""

import json
import logging
import re
from collections.abc import Iterator

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paged_jax import Engine
from paged_jax.server import Settings
from paged_jax.server.request_log import JsonFormatter, TextFormatter
from tests.support import ROOT
from tests.support.live_server import LiveServer, wait_until
from tests.support.tiny_model import SIZES

BODY = {"prompt": "the cat sat on", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_folder):
    settings = Settings(model_name="tiny")
    with LiveServer(Engine(tiny_folder, **SIZES, steps_per_dispatch=2), settings) as server:
        assert server.post("/generate", BODY).status_code == 200
        yield server


@pytest.fixture
def lines(caplog) -> list[dict]:
    """What was logged of requests."""
    caplog.set_level(logging.DEBUG, logger="paged_jax.server")
    return _Lines(caplog)


class _Lines:
    def __init__(self, caplog):
        self._caplog = caplog

    def __iter__(self) -> Iterator[dict]:
        return (record.fields for record in self._caplog.records if hasattr(record, "fields"))

    def of(self, path: str) -> list[dict]:
        def found() -> list[dict]:
            return [fields for fields in self if fields.get("path") == path]

        wait_until(found)  # the answer comes first
        return found()


# Ids


def test_the_id_of_a_client_is_used_and_answered(server, lines) -> None:
    response = server.post("/v1/completions", BODY, headers={"X-Request-ID": "trace/7"})
    assert response.headers["x-request-id"] == "trace/7"
    assert response.json()["id"] == "cmpl-trace/7"
    # The line of a test before may come late.
    wait_until(lambda: "trace/7" in [line["request_id"] for line in lines.of("/v1/completions")])


def test_a_client_may_use_an_id_twice(server) -> None:
    # A proxy that tries again sends the id of a request that may still run.
    body = {**BODY, "stream": True, "max_tokens": 40}
    with server.client(headers={"X-Request-ID": "same"}) as client:
        with client.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()
            assert "cmpl-same" in next(lines)
            again = client.post("/v1/completions", json=BODY)
            assert again.status_code == 200 and again.json()["id"] == "cmpl-same"
            assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "<script>", "caf\u00e9"])
def test_an_id_that_is_no_short_word_is_replaced(server, given) -> None:
    headers = {"X-Request-ID": given.encode("latin-1")}
    answered = server.get("/v1/models", headers=headers).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{16}", answered)


def test_every_answer_has_an_id(server, monkeypatch) -> None:
    for path in ("/live", "/nothing", "/v1/models/none", "/metrics"):
        assert server.get(path).headers["x-request-id"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        completion = client.completions.create(model="tiny", prompt="ab", max_tokens=1)
        assert completion._request_id is not None

    def fail() -> bytes:
        raise RuntimeError("of the test")

    monkeypatch.setattr(server.service.metrics, "text", fail)
    response = server.get("/metrics", headers={"X-Request-ID": "broken"})
    assert response.status_code == 500 and response.headers["x-request-id"] == "broken"


# The log


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_line_with_tokens_and_times(server, lines, stream) -> None:
    body = {**BODY, "prompt": ["the cat sat on", "in"], "n": 2, "stream": stream}
    server.post("/v1/completions", body)
    server.wait_until_idle()
    [line] = lines.of("/v1/completions")
    assert (line["method"], line["status"]) == ("POST", 200)
    assert line["generated_tokens"] == 4 * 6
    assert line["cached_tokens"] >= 8  # the fixture has asked for the first prompt
    # The second prompt may have waited for longer than the first one's first token took.
    assert 0 <= line["queued_seconds"] <= line["seconds"]
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert "error" not in line and "client_gone" not in line


def test_times_of_one_prompt_are_in_order(server, lines) -> None:
    server.post("/v1/completions", BODY, headers={"X-Request-ID": "one"})
    server.wait_until_idle()
    wait_until(lambda: "one" in [line["request_id"] for line in lines.of("/v1/completions")])
    [line] = [line for line in lines.of("/v1/completions") if line["request_id"] == "one"]
    assert 0 <= line["queued_seconds"] <= line["first_token_seconds"] <= line["seconds"]


def test_refusals_have_a_line_with_the_reason(server, lines) -> None:
    server.post("/generate", {**BODY, "n": 1000})
    server.get("/nothing")
    server.send(b"not HTTP at all\r\n\r\n")
    server.wait_until_idle()
    [refused], [missing] = lines.of("/generate"), lines.of("/nothing")
    assert (refused["status"], refused["error_code"]) == (400, "max_n_exceeded")
    assert (
        missing["status"] == 404
        and "There is no GET /nothing. See /openapi.json" in missing["error"]
    )
    assert any(line["status"] == 400 and "path" not in line for line in lines)


def test_a_client_that_leaves_is_told_apart(server, lines) -> None:
    body = {**BODY, "stream": True, "max_tokens": 45}
    with server.client() as client, client.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    server.wait_until_idle()
    [line] = lines.of("/generate")
    assert line["client_gone"] is True and 0 < line["generated_tokens"] < 45


def test_probes_are_logged_only_for_debugging(server, caplog, monkeypatch) -> None:
    caplog.set_level(logging.DEBUG, logger="paged_jax.server")
    server.get("/live")
    with monkeypatch.context() as patch:
        patch.setattr(type(server.service), "unreadiness", "full")
        assert server.get("/ready").status_code == 503
    server.get("/v1/models")
    expected = {"/live": "DEBUG", "/ready": "DEBUG", "/v1/models": "INFO"}

    def levels() -> dict[str, str]:
        """By path; the line of a request before, of another path, may come late."""
        records = [record for record in caplog.records if hasattr(record, "fields")]
        return {record.fields["path"]: record.levelname for record in records}

    wait_until(lambda: expected.items() <= levels().items())


def test_lines_cannot_be_forged() -> None:
    record = logging.LogRecord("paged_jax.server", logging.INFO, "", 0, "request", None, None)
    record.fields = {"path": "/a\n2026 INFO: request", "error": 'x="y" z', "seconds": 0.12345678}
    text, line = TextFormatter().format(record), JsonFormatter().format(record)
    assert text.count("\n") == line.count("\n") == 0
    assert text.endswith(r'path="/a\n2026 INFO: request" error="x=\"y\" z" seconds=0.123457')
    assert json.loads(line)["path"] == "/a\n2026 INFO: request"


# Metrics


def samples(server) -> dict[str, float]:
    """All samples, named as Prometheus shows them."""
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }


def names(server) -> set[str]:
    return {name.partition("{")[0] for name in samples(server)}


def test_each_metric_moves(server) -> None:
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


def test_paths_and_methods_of_clients_name_no_metric(server) -> None:
    server.send(b"BREW /pot/1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    server.get("/v1/models/strange")
    text = server.get("/metrics").text
    assert "BREW" not in text and "pot" not in text and "strange" not in text
    assert 'handler="/v1/models/{model}"' in text


def test_the_dashboard_asks_for_nothing_that_is_not_exported(server) -> None:
    board = json.loads((ROOT / "examples" / "grafana.json").read_text())
    exprs = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])] + [
        each["definition"] for each in board["templating"]["list"] if "definition" in each
    ]
    asked = {name for expr in exprs for name in re.findall(r"[a-z0-9_]+:?[a-z0-9_]+(?=\{)", expr)}
    assert len(asked) > 26 and asked <= names(server)


# Traces


def test_a_request_is_a_span_of_its_clients_trace(server, monkeypatch) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace as api
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # Not set_tracer_provider, which is for good: spans of all tests after this one would be kept.
    monkeypatch.setattr(api, "get_tracer_provider", lambda: provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    server.post("/generate", BODY, headers={"traceparent": parent, "X-Request-ID": "seven"})
    server.wait_until_idle()
    [span] = [each for each in exporter.get_finished_spans() if each.name == "POST /generate"]
    assert f"{span.context.trace_id:032x}" in parent and f"{span.parent.span_id:016x}" in parent
    assert span.attributes["gen_ai.request.id"] == "seven"
    assert span.attributes["gen_ai.usage.output_tokens"] == 6
    assert span.attributes["http.response.status_code"] == 200
