"""Tests of request ids, log lines and traces."""

import logging
import re
from collections.abc import Iterator

import pytest

from paged_jax import Engine
from paged_jax.server import Settings
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
    """Return the fields of all log lines of requests."""
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

        wait_until(found)  # the response is sent before the line is written
        return found()


def test_request_id_of_the_client_is_used(server, lines) -> None:
    response = server.post("/v1/completions", BODY, headers={"X-Request-ID": "trace/7"})
    assert response.headers["x-request-id"] == "trace/7"
    assert response.json()["id"] == "cmpl-trace/7"
    # The line of an earlier test may arrive late.
    wait_until(lambda: "trace/7" in [line["request_id"] for line in lines.of("/v1/completions")])


def test_request_id_may_be_used_twice(server) -> None:
    # A proxy that retries sends the id of a request that may still be running.
    body = {**BODY, "stream": True, "max_tokens": 40}
    with server.client(headers={"X-Request-ID": "same"}) as client:
        with client.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()
            assert "cmpl-same" in next(lines)
            again = client.post("/v1/completions", json=BODY)
            assert again.status_code == 200 and again.json()["id"] == "cmpl-same"
            assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "<script>", "caf\u00e9"])
def test_invalid_request_id_is_replaced(server, given) -> None:
    headers = {"X-Request-ID": given.encode("latin-1")}
    answered = server.get("/v1/models", headers=headers).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{16}", answered)


def test_all_responses_have_a_request_id(server, monkeypatch) -> None:
    for path in ("/live", "/nothing", "/v1/models/none", "/metrics"):
        assert server.get(path).headers["x-request-id"]
    assert server.post("/v1/completions", BODY).headers["x-request-id"]

    def fail() -> bytes:
        raise RuntimeError("of the test")

    monkeypatch.setattr(server.service.metrics, "text", fail)
    response = server.get("/metrics", headers={"X-Request-ID": "broken"})
    assert response.status_code == 500 and response.headers["x-request-id"] == "broken"


@pytest.mark.parametrize("stream", [False, True])
def test_log_line_has_tokens_and_times(server, lines, stream) -> None:
    body = {**BODY, "prompt": ["the cat sat on", "in"], "n": 2, "stream": stream}
    server.post("/v1/completions", body)
    server.wait_until_idle()
    [line] = lines.of("/v1/completions")
    assert (line["method"], line["status"]) == ("POST", 200)
    assert line["generated_tokens"] == 4 * 6
    assert line["cached_tokens"] >= 8  # the fixture has sent the first prompt
    # The second prompt may wait for longer than the first prompt takes to its first token.
    assert 0 <= line["queued_seconds"] <= line["seconds"]
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert "error" not in line and "client_gone" not in line


def test_log_line_counts_the_beams_and_not_their_steps(server, lines) -> None:
    body = {"prompt": "the cat", "n": 3, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", {**body, "use_beam_search": True}).json()
    server.wait_until_idle()
    line = lines.of("/v1/completions")[-1]
    assert line["generated_tokens"] == answer["usage"]["completion_tokens"] == 3 * 4
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_log_line_has_times_in_order(server, lines) -> None:
    server.post("/v1/completions", BODY, headers={"X-Request-ID": "one"})
    server.wait_until_idle()
    wait_until(lambda: "one" in [line["request_id"] for line in lines.of("/v1/completions")])
    [line] = [line for line in lines.of("/v1/completions") if line["request_id"] == "one"]
    assert 0 <= line["queued_seconds"] <= line["first_token_seconds"] <= line["seconds"]


def test_log_line_has_the_error(server, lines) -> None:
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


def test_log_line_marks_a_disconnect(server, lines) -> None:
    body = {**BODY, "stream": True, "max_tokens": 45}
    with server.client() as client, client.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    server.wait_until_idle()
    [line] = lines.of("/generate")
    assert line["client_gone"] is True and 0 < line["generated_tokens"] < 45


def test_probes_are_logged_at_debug_level(server, caplog, monkeypatch) -> None:
    caplog.set_level(logging.DEBUG, logger="paged_jax.server")
    server.get("/live")
    with monkeypatch.context() as patch:
        patch.setattr(type(server.service), "unreadiness", "full")
        assert server.get("/ready").status_code == 503
    server.get("/v1/models")
    expected = {"/live": "DEBUG", "/ready": "DEBUG", "/v1/models": "INFO"}

    def levels() -> dict[str, str]:
        """Return the level of each path. Lines of earlier requests may arrive late."""
        records = [record for record in caplog.records if hasattr(record, "fields")]
        return {record.fields["path"]: record.levelname for record in records}

    wait_until(lambda: expected.items() <= levels().items())


@pytest.mark.peers
def test_request_continues_the_trace_of_the_client(server, monkeypatch) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace as api
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # set_tracer_provider cannot be undone and would collect the spans of all later tests.
    monkeypatch.setattr(api, "get_tracer_provider", lambda: provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    server.post("/generate", BODY, headers={"traceparent": parent, "X-Request-ID": "seven"})
    server.wait_until_idle()
    [span] = [each for each in exporter.get_finished_spans() if each.name == "POST /generate"]
    assert f"{span.context.trace_id:032x}" in parent and f"{span.parent.span_id:016x}" in parent
    assert span.attributes["gen_ai.request.id"] == "seven"
    assert span.attributes["gen_ai.usage.output_tokens"] == 6
    assert span.attributes["http.response.status_code"] == 200
