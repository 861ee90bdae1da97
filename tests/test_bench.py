"""Tests of `python -m paged_jax.bench`: requests to a real server, and the figures."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from paged_jax import Engine, bench
from paged_jax.bench import Result, summarise
from paged_jax.server import Settings
from tests.support.live_server import CHAT_TEMPLATE, LiveServer
from tests.support.tiny_model import SIZES, save_tiny_model

# Prompts of the tiny model are characters, so a word is up to 10 tokens.
SHORT = ("--num-prompts", "5", "--input-len", "1", "--max-tokens", "4")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("bench"), chat_template=CHAT_TEMPLATE)
    with LiveServer(Engine(folder, **SIZES), Settings(model_name="tiny")) as server:
        yield server


@pytest.fixture
def run(server, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        status = bench.main(["--base-url", f"{server.url}/v1", *SHORT, *arguments])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_bench_streams_all_requests_and_counts_their_tokens(run, tmp_path, endpoint) -> None:
    path = tmp_path / "report.json"
    options = ("--endpoint", endpoint, "--ignore-eos", "--max-concurrency", "2")
    status, out, err = run(*options, "--goodput", "ttft:60000", "e2el:60000", "--json", str(path))
    assert status == 0, err
    report = json.loads(path.read_text())
    assert (report["completed"], report["failed"], report["output_tokens"]) == (5, 0, 20)
    assert report["prompt_tokens"] >= 5 * 3
    assert report["goodput_requests_per_second"] == pytest.approx(report["requests_per_second"])
    assert report["ttft_ms"]["mean"] < report["e2el_ms"]["mean"]
    assert "5 completed, 0 failed" in out and "time to first token (ttft)" in out
    assert report["options"]["endpoint"] == endpoint


def test_bench_reads_prompts_from_a_file_and_waits_between_requests(run, tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc"}\n\n{"prompt": "ab"}\n')
    options = ("--endpoint", "completions", "--ignore-eos", "--request-rate", "1000")
    status, out, err = run(*options, "--dataset", str(path))
    assert status == 0, err
    # Each prompt has a token for its start.
    assert f"{3 * 4 + 2 * 3} of prompts, 20 generated" in out


def test_bench_reports_failed_requests(run) -> None:
    status, out, err = run("--model", "other")
    assert status == 1 and "0 completed, 5 failed" in out
    assert (
        "error: all requests failed. The error of the first request: status 404: "
        in err.splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-prompts", "0"), "--num-prompts must be positive, got 0."),
        (("--request-rate", "nan"), "--request-rate must be positive, got nan."),
        (("--prefix-len", "-1"), "--prefix-len must not be negative, got -1."),
        (("--dataset", "none.jsonl"), "a readable text file, got none.jsonl: No such file"),
        (("--dataset", "words.jsonl"), "--dataset: words.jsonl, line 1 is not JSON: Expecting"),
        (("--dataset", "keys.jsonl"), "of keys.jsonl must be strings, got {'text': 'abc'}."),
        (("--dataset", "lists.jsonl"), "line 1 must be a JSON object with the field prompt or "),
        (("--dataset", "numbers.jsonl"), "must be strings, got {'prompt': 1}."),
    ],
)
def test_bench_reports_mistakes_in_one_line(run, arguments, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = {"words": "some words", "keys": '{"text": "abc"}', "lists": "[1]"}
    for name, line in (lines | {"numbers": '{"prompt": 1}'}).items():
        (tmp_path / f"{name}.jsonl").write_text(line)
    status, _, err = run(*arguments)
    assert status == 1 and err.startswith("paged_jax.bench: error: ") and message in err


def test_bench_says_that_there_is_no_server(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert bench.main(["--base-url", f"http://127.0.0.1:{port}/v1"]) == 1
    assert "got no answer from " in capsys.readouterr().err
    for url in (f"127.0.0.1:{port}", "http://", "ftp://host"):
        assert bench.main(["--base-url", url]) == 1
        assert (
            f"--base-url must begin with http:// or https://, got {url}" in capsys.readouterr().err
        )


def test_bench_adds_the_path_of_the_api_to_an_address_without_one(server, capsys) -> None:
    for url in (server.url, f"{server.url}/", f"{server.url}/v1/"):
        assert bench.main(["--base-url", url, *SHORT]) == 0, capsys.readouterr().err
    assert bench.main(["--base-url", f"{server.url}/other", *SHORT]) == 1
    assert "/other/models: status 404: " in capsys.readouterr().err


@pytest.fixture
def answer():
    """A server that gives one answer to all requests, as a function that sets the answer."""
    answers = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = answers[-1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def set_answer(status: int, body: str) -> str:
            answers.append((status, body))
            return f"http://127.0.0.1:{server.server_port}/v1"

        yield set_answer
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            503,
            '{"error": {"message": "The server\\nis starting."}}',
            "503: The server is starting.",
        ),
        (401, "no key", "/v1/models: status 401: no key"),
        (200, "<html>", "got no list of models from http"),
        (200, '{"data": []}', "got no list of models"),
        (200, "[1]", "got no list of models"),
    ],
)
def test_bench_reports_what_a_server_without_models_answers(
    answer, capsys, status, body, message
) -> None:
    assert bench.main(["--base-url", answer(status, body), *SHORT]) == 1
    err = capsys.readouterr().err
    assert message in err and err.startswith("paged_jax.bench: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "event",
    [
        "{",
        "1",
        '{"choices": [1]}',
        '{"usage": {"tokens": 1}}',
        '{"choices": [{"delta": 1}]}',
    ],
)
def test_bench_reports_events_that_do_not_follow_the_api(answer, capsys, event) -> None:
    url = answer(200, f"data: {event}\n\n")
    assert bench.main(["--base-url", url, "--model", "any", *SHORT]) == 1
    err = capsys.readouterr().err
    assert "an event of the stream does not follow OpenAI's API: " in err and "Traceback" not in err


def test_summarise_computes_metrics_by_their_definitions() -> None:
    first = Result(start=1.0, events=[1.5, 1.7, 2.5], end=2.6, num_prompt=10, num_output=5)
    second = Result(start=1.0, events=[3.0], end=3.0, num_prompt=20, num_output=1)
    failed = Result(start=1.0, end=1.1, error="status 500")
    report = summarise([first, second, failed], 4.0, {"ttft": 600.0, "tpot": 300.0})
    assert (report["completed"], report["failed"]) == (2, 1)
    assert (report["prompt_tokens"], report["output_tokens"]) == (30, 6)
    assert report["output_tokens_per_second"] == 1.5
    assert report["ttft_ms"]["mean"] == pytest.approx((500 + 2000) / 2)
    assert report["tpot_ms"]["p50"] == pytest.approx(250)  # a second for 4 tokens after the first
    assert report["itl_ms"]["mean"] == pytest.approx((200 + 800) / 2)
    assert report["e2el_ms"]["p99"] == pytest.approx(1996)
    assert report["goodput_requests_per_second"] == 0.25
