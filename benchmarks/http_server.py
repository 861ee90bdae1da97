"""Benchmark of the HTTP server: requests through the server, compared with its engine.

    python -m benchmarks.http_server
    python -m benchmarks.http_server --runs 9 --json http.json
    python -m benchmarks.http_server --shape 135M       # random weights

All requests start at the same time. Every round runs, in turns:

    engine        `AsyncEngine` in this process, each request a task that reads its tokens
    streaming     ``POST /generate`` to a server process, with ``"stream": true``
    whole         the same without streaming

Ratios are computed within a round, and figures are medians over rounds. Lengths are equal in all
runs. Prompts differ, so that the prefix cache finds none of them. In the warm-up all three serve
the same prompts and must give the same tokens.

The clients are one process, separate from the server. On few cores their CPU time reduces the speed
of the engine, so they only store the received bytes with the time, and parse them after the run.

CPU time is the time of the engine's process or, over HTTP, the time of the server and the clients.
The time of the server alone is shown as well, because clients usually run on other machines. CPU
time describes the experience of users less than elapsed time, but hardly depends on other load.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import re
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from benchmarks import harness
from benchmarks.harness import Column, Goal
from benchmarks.serving.workloads import (
    Outcome,
    Request,
    Sizes,
    add_size_options,
    chosen_sizes,
    draw,
    median_summary,
    summary,
)
from paged_jax import AsyncEngine, Engine, LlamaConfig, SamplingParams

ENGINE, STREAMING, WHOLE = "engine", "streaming", "whole"
# Maximum ratio over HTTP.
GOALS = tuple(
    Goal(
        f"{name}: at most 1.08x the time of the engine",
        lambda report, name=name: report["ratios_to_engine"][name],
        high=1.08,
    )
    for name in (STREAMING, WHOLE)
)
_RATIOS = ("ratios_to_engine", "cpu_ratios_to_engine", "server_cpu_ratios_to_engine")
# The server listens first, and becomes ready after compilation.
_READY = re.compile(r"listening on (\S+),.* ready: ", re.DOTALL)
_CPU_SECONDS = re.compile(r"^process_cpu_seconds_total (\S+)$", re.MULTILINE)

# Received data of a client: the time since the start of the run, and the bytes.
Parts = list[tuple[float, bytes]]
Serve = Callable[[list[Request]], Awaitable[Outcome]]


async def serve_in_process(engine: AsyncEngine, requests: list[Request]) -> Outcome:
    """Serve each request as a task of this process."""
    start = time.perf_counter()

    async def complete(request: Request) -> tuple[list[int], list[float]]:
        params = SamplingParams(temperature=0, max_tokens=request.num_new, ignore_eos=True)
        prompt = {"prompt_token_ids": request.prompt_token_ids}
        token_ids: list[int] = []
        times: list[float] = []
        async for output in engine.generate(prompt, params):
            token_ids = output.outputs[0].token_ids
            times += [time.perf_counter() - start] * (len(token_ids) - len(times))
        return token_ids, times

    return _outcome(await asyncio.gather(*map(complete, requests)), start)


async def serve_over_http(url: str, is_stream: bool, requests: list[Request]) -> Outcome:
    """Serve each request over a separate connection."""
    address = urlsplit(url)
    questions = [_question(address.netloc, request, is_stream) for request in requests]
    start = time.perf_counter()
    parts = await asyncio.to_thread(_exchange, address, questions, start)
    seconds = time.perf_counter() - start
    return _outcome([_tokens(each, is_stream) for each in parts], start, seconds)


async def with_cpu_seconds(serve: Serve, url: str | None, requests: list[Request]) -> Outcome:
    """Return the result of `serve`, with the CPU seconds added to the details.

    Args:
      serve: the function that serves the requests.
      url: URL of the server; None if this process serves and is no client.
      requests: the requests.
    """
    before = await asyncio.to_thread(_cpu_seconds, url)
    outcome = await serve(requests)
    after = await asyncio.to_thread(_cpu_seconds, url)
    server, client = (late - early for early, late in zip(before, after, strict=True))
    return dataclasses.replace(
        outcome, details={"cpu_seconds": server + client, "server_cpu_seconds": server}
    )


def _cpu_seconds(url: str | None) -> tuple[float, float]:
    """Return the CPU seconds of the serving process (in hundredths for servers) and of clients."""
    if url is None:
        return time.process_time(), 0.0
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        found = _CPU_SECONDS.search(answer.read().decode())
    if found is None:
        raise ValueError("the server must count its CPU seconds, got none. Measure on Linux.")
    return float(found[1]), time.process_time()


def _outcome(
    answers: list[tuple[list[int], list[float]]], start: float, seconds: float | None = None
) -> Outcome:
    return Outcome(
        seconds=time.perf_counter() - start if seconds is None else seconds,
        token_ids=[token_ids for token_ids, _ in answers],
        arrivals=[0.0] * len(answers),
        token_times=[times for _, times in answers],
        step_seconds=[],
    )


def _question(host: str, request: Request, is_stream: bool) -> bytes:
    body = json.dumps(
        {
            "prompt_token_ids": request.prompt_token_ids,
            "temperature": 0,
            "max_tokens": request.num_new,
            "ignore_eos": True,
            "stream": is_stream,
        }
    )
    # In HTTP/1.0 the end of the connection ends the answer, and there are no chunks.
    return (
        f"POST /generate HTTP/1.0\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: application/json\r\n\r\n{body}"
    ).encode()


def _exchange(address: SplitResult, questions: list[bytes], start: float) -> list[Parts]:
    """Return the answers to all requests. Plain sockets take a third of the time of asyncio."""
    answers: list[Parts] = [[] for _ in questions]
    with selectors.DefaultSelector() as selector:
        for question, answer in zip(questions, answers, strict=True):
            connection = socket.create_connection((address.hostname, address.port))
            connection.sendall(question)
            selector.register(connection, selectors.EVENT_READ, answer)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                data = connection.recv(2**16)
                if data:
                    key.data.append((time.perf_counter() - start, data))
                else:
                    selector.unregister(connection)
                    connection.close()
    return answers


def _tokens(parts: Parts, is_stream: bool) -> tuple[list[int], list[float]]:
    """Return the tokens of an answer, with the time at which each arrived.

    Raises:
      ValueError: the answer is not complete.
    """
    token_ids: list[int] = []
    times: list[float] = []
    head, _, rest = b"".join(data for _, data in parts).partition(b"\r\n\r\n")
    if b" 200 " not in head or (is_stream and not rest.endswith(b"data: [DONE]\n\n")):
        raise ValueError(f"the server must send a complete answer, got {rest[-200:]!r}.")
    if not is_stream:
        token_ids = json.loads(rest)["outputs"][0]["token_ids"]
        return token_ids, [parts[-1][0]] * len(token_ids)
    pending = b""
    for seconds, data in parts:
        *events, pending = (pending + data).split(b"\n\n")
        for event in events:
            _, has_data, data = event.partition(b"data: ")  # a ping has no data
            if has_data and data != b"[DONE]":
                token_ids += json.loads(data)["outputs"][0]["token_ids"]
        times += [seconds] * (len(token_ids) - len(times))
    return token_ids, times


async def measure_all(
    runs: dict[str, Serve], sizes: Sizes, vocab_size: int, *, num_warmup: int, num_rounds: int
) -> dict[str, list[Outcome]]:
    """Run everything in turns, and return the results of all rounds after the warm-up.

    Raises:
      ValueError: the tokens for the same prompts differ.
    """
    for number in range(num_warmup):
        requests = draw(sizes, vocab_size, number)
        tokens = {name: (await run(requests)).token_ids for name, run in runs.items()}
        if any(each != tokens[ENGINE] for each in tokens.values()):
            raise ValueError("all runs must generate the same tokens, got different ones.")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runs}
    seed = num_warmup
    for number in range(num_rounds):
        # Each variant comes first as often as last.
        for name in list(runs) if number % 2 == 0 else reversed(runs):
            outcomes[name].append(await runs[name](draw(sizes, vocab_size, seed)))
            seed += 1
    return outcomes


def ratios(outcomes: dict[str, list[Outcome]], of: Callable[[Outcome], float]) -> dict[str, float]:
    """Return the median over rounds of each time relative to the engine in the same round."""
    values = {name: list(map(of, each)) for name, each in outcomes.items()}
    return {name: round(ratio, 4) for name, ratio in harness.median_ratios(values, ENGINE).items()}


@contextlib.contextmanager
def server_process(arguments: list[str]) -> Iterator[str]:
    """Start a server, wait until it has compiled all programs, and yield its URL.

    Raises:
      ValueError: the server did not get ready.
    """
    command = [sys.executable, "-m", "paged_jax.serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = ""
        try:
            for line in process.stderr:
                log += line
                if found := _READY.search(log):
                    # The server logs a line for each request, and would block on a pipe that is not
                    # read.
                    threading.Thread(target=process.stderr.read, daemon=True).start()
                    yield found[1]
                    break
            else:
                raise ValueError(f"the server must become ready, got: {log[-500:]}")
        finally:
            process.terminate()


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the server with the model of a folder, and return the report."""
    sizes = chosen_sizes(options)
    context = LlamaConfig.from_file(folder).max_position_embeddings
    if sizes.max_len > context:
        raise ValueError(f"the longest request must fit {context} tokens, got {sizes.max_len}.")
    settings: dict[str, Any] = {
        # In bfloat16, tokens may depend on the content of the prefix cache.
        "dtype": "float32",
        "max_num_seqs": options.max_num_seqs,
        "steps_per_dispatch": options.steps_per_dispatch,
        "num_blocks": options.num_blocks,
    }
    arguments = [part for name, value in settings.items() for part in _option(name, value)]
    arguments += _option("model", str(folder))
    print("compiling, here and in a server process", file=sys.stderr, flush=True)
    with server_process(arguments) as url:
        engine = Engine(folder, **settings)
        engine.warmup()
        # The server does the same.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000)
        outcomes = asyncio.run(_measure(engine, url, sizes, options))
    return {
        **harness.environment(),
        "model": harness.model_name(options),
        "sizes": sizes._asdict(),
        "engine": settings,
        "results": {
            name: median_summary(each)
            | {
                f"{of}_us_per_token": round(
                    statistics.median(_us_per_token(f"{of}_seconds", one) for one in each), 1
                )
                for of in ("cpu", "server_cpu")
            }
            | {"rounds": [summary(outcome) for outcome in each]}
            for name, each in outcomes.items()
        },
        "ratios_to_engine": ratios(outcomes, lambda outcome: outcome.seconds),
        "cpu_ratios_to_engine": ratios(outcomes, functools.partial(_us_per_token, "cpu_seconds")),
        "server_cpu_ratios_to_engine": ratios(
            outcomes, functools.partial(_us_per_token, "server_cpu_seconds")
        ),
    }


def _us_per_token(seconds: str, outcome: Outcome) -> float:
    return 1e6 * outcome.details[seconds] / outcome.num_tokens


def _option(name: str, value: int | str) -> list[str]:
    return [f"--{name.replace('_', '-')}", str(value)]


async def _measure(
    engine: Engine, url: str, sizes: Sizes, options: argparse.Namespace
) -> dict[str, list[Outcome]]:
    async with AsyncEngine(engine) as asynchronous:
        runs: dict[str, tuple[Serve, str | None]] = {
            ENGINE: (functools.partial(serve_in_process, asynchronous), None),
            STREAMING: (functools.partial(serve_over_http, url, True), url),
            WHOLE: (functools.partial(serve_over_http, url, False), url),
        }
        return await measure_all(
            {name: functools.partial(with_cpu_seconds, *run) for name, run in runs.items()},
            sizes,
            engine.config.vocab_size,
            num_warmup=options.warmup_runs,
            num_rounds=options.runs,
        )


def result_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    columns = [
        Column("", -12, "name"),
        Column("tokens/s", 11, "tokens_per_s", "{:.0f}"),
        Column("x engine", 11, "ratios_to_engine", "{:.3f}"),
        Column("CPU us/tok", 11, "cpu_us_per_token", "{:.1f}"),
        Column("x engine", 11, "cpu_ratios_to_engine", "{:.3f}"),
        Column("server's", 11, "server_cpu_ratios_to_engine", "{:.3f}"),
        # A whole answer has no gaps, and its first and last token arrive together.
        Column("TTFT p50", 11, "ttft_ms_p50", "{:.1f}"),
        Column("p99", 11, "ttft_ms_p99", "{:.1f}"),
        Column("gap p50", 11, "gap_ms_p50", "{:.1f}"),
    ]
    records = [
        {"name": name} | figures | {key: report[key][name] for key in _RATIOS}
        for name, figures in report["results"].items()
    ]
    first, *lines = harness.table(columns, records)
    return [f"{first}  (ms)", *lines]


def _parser() -> argparse.ArgumentParser:
    parser = harness.command_line("Measure the overhead of the HTTP server.", show_defaults=True)
    harness.add_model_options(parser)
    add_size_options(parser, max_num_seqs=16, runs=5)
    parser.add_argument("--num-blocks", type=int, default=512, help="blocks in the pool")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and optionally write JSON."""
    options = _parser().parse_args(arguments)
    try:
        with harness.model_folder(options) as folder:
            report = run(options, folder)
    except (ValueError, OSError) as error:
        print(f"http_server: {error}", file=sys.stderr)
        return 2
    report["goals"] = harness.goal_lines(GOALS, report)
    machine = (report["device"], report["versions"])
    harness.finish(options, report, [*machine, *result_lines(report), "", *report["goals"]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
