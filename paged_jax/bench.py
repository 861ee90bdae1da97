"""Benchmark of a server with OpenAI's API: ``python -m paged_jax.bench``.

With `--request-rate`, requests are sent at random times, as by independent users. Otherwise they
are sent as fast as `--max-concurrency` allows. All answers are streamed. The arrival times of the
stream's events give four metrics: the time to first token (TTFT), the time between two events
(inter-token latency, ITL), the time per output token after the first (TPOT), and the time until
the answer is complete (end-to-end latency, E2EL).
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from paged_jax.command_line import Parser, one_line, read_prompts

try:
    import httpx
except ModuleNotFoundError as error:
    raise SystemExit(
        f"paged_jax.bench: error: {error.name} is not installed. "
        "Run: pip install 'paged-jax[bench]'"
    ) from None

_PERCENTILES = (50, 90, 99)
_ENDPOINTS = {"chat": "chat/completions", "completions": "completions"}
# Names of the metrics, as used by `--goodput`, and their labels in the report. All are in
# milliseconds.
_METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between events",
    "e2el": "time of an answer",
}
# Frequent English words. Most tokenizers encode each of them as one token.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book"
).split()


@dataclasses.dataclass
class Result:
    """Times and token counts of a request. Times are seconds of ``time.perf_counter()``.

    Attributes:
      start: time at which the request was sent.
      events: times at which events with text or tool calls arrived.
      end: time at which the answer was complete.
      num_prompt: number of prompt tokens, as reported by the server.
      num_output: number of generated tokens, as reported by the server.
      error: the error in one line; None if the request succeeded.
    """

    start: float
    events: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    error: str | None = None

    def milliseconds(self) -> dict[str, list[float]]:
        """Return the values of each metric of `_METRICS` for this request, in milliseconds.

        ITL has a value for each pair of consecutive events; the other metrics have one value. A
        metric that is undefined has an empty list, for example TPOT for a single token.
        """
        if not self.events:
            return {name: [] for name in _METRICS}
        first, last = self.events[0], self.events[-1]
        per_token = (last - first) / (self.num_output - 1) if self.num_output > 1 else None
        return {
            "ttft": [1e3 * (first - self.start)],
            "tpot": [] if per_token is None else [1e3 * per_token],
            "itl": [1e3 * gap for gap in np.diff(self.events).tolist()],
            "e2el": [1e3 * (self.end - self.start)],
        }

    def meets(self, goals: Mapping[str, float]) -> bool:
        """Return whether the request succeeded and met all goals.

        `goals` maps metrics to their maximum in milliseconds. The mean of a metric's values must
        not exceed its maximum.
        """
        values = self.milliseconds()
        return self.error is None and all(
            not values[name] or float(np.mean(values[name])) <= limit
            for name, limit in goals.items()
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status. Expected errors print one line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    return parser.run(lambda: _run(args))


def make_parser() -> Parser:
    """Return the parser of the command ``bench``."""
    parser = Parser(
        "bench",
        examples=(
            "--num-prompts 64 --max-concurrency 16",
            "--base-url http://host:8000/v1 --request-rate 4 --goodput ttft:500 tpot:50",
            "--dataset prompts.jsonl --max-tokens 256 --json results.json",
        ),
        description="Measure the latencies and rates of a running server that has OpenAI's API.",
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url",
        default="http://127.0.0.1:5000/v1",
        metavar="URL",
        help="address of the API; the path /v1 is added if there is none; default: "
        "http://127.0.0.1:5000/v1",
    )
    server.add_argument(
        "--model", metavar="NAME", help="name of the model; default: the first model of the server"
    )
    server.add_argument(
        "--endpoint", choices=_ENDPOINTS, default="chat", help="kind of requests; default: chat"
    )
    _add_requests(parser.add_argument_group("requests"))
    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput",
        nargs="+",
        type=_goal,
        default=[],
        metavar="METRIC:MS",
        help="also report the rate of requests that meet all these goals; each is a metric and its "
        "maximum in milliseconds; the metrics are ttft (time to first token), tpot (time per "
        "output token after the first), itl (time between two events) and e2el (time until the "
        "answer is complete)",
    )
    report.add_argument("--json", metavar="FILE", help="write the report to this file as JSON")
    return parser


def _add_requests(requests: argparse._ArgumentGroup) -> None:
    requests.add_argument(
        "--num-prompts", type=int, default=100, metavar="N", help="number of requests; default: 100"
    )
    requests.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="X",
        help="mean number of requests per second; the requests are sent at random times; default: "
        "send all requests immediately",
    )
    requests.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="maximum number of requests in progress at the same time; default: no maximum",
    )
    requests.add_argument(
        "--dataset",
        metavar="FILE",
        help="file with a prompt in each line; a .jsonl file must have a JSON object with the "
        "field prompt in each line; default: prompts of random words",
    )
    requests.add_argument(
        "--input-len",
        type=int,
        default=128,
        metavar="N",
        help="number of random words in a prompt; default: 128",
    )
    requests.add_argument(
        "--prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="number of random words with which all prompts begin; default: 0",
    )
    requests.add_argument(
        "--max-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of tokens to generate for a prompt; default: 64",
    )
    requests.add_argument(
        "--ignore-eos",
        action="store_true",
        help="do not end at end-of-sequence tokens: generate --max-tokens tokens for each prompt",
    )
    requests.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of random words and arrival times; default: 0",
    )


def _goal(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    with contextlib.suppress(ValueError):
        if name in _METRICS and float(value) > 0:
            return name, float(value)
    raise argparse.ArgumentTypeError(
        f"must be METRIC:MILLISECONDS, such as ttft:500, with one of the metrics "
        f"{', '.join(_METRICS)}, got {text!r}"
    )


def _run(args: argparse.Namespace) -> None:
    for name in ("num_prompts", "input_len", "max_tokens", "request_rate", "max_concurrency"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}.")
    if args.prefix_len < 0:
        raise ValueError(f"--prefix-len must not be negative, got {args.prefix_len}.")
    args.base_url = _api_url(args.base_url)
    prompts = _prompts(args)
    try:
        seconds, results = asyncio.run(_send_all(args, prompts))
    except httpx.HTTPError as error:
        raise OSError(
            f"--base-url must be the address of a running server, got no answer from "
            f"{args.base_url} ({one_line(error)}). Start a server there, or give another address."
        ) from None
    report = summarise(results, seconds, dict(args.goodput))
    print("\n".join(table(report)))
    if args.json is not None:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        Path(args.json).write_text(json.dumps({"options": options, **report}, indent=1) + "\n")
    if not report["completed"]:
        raise OSError(f"all requests failed. The error of the first request: {results[0].error}")


def _prompts(args: argparse.Namespace) -> list[str]:
    """Return ``--num-prompts`` prompts from ``--dataset``, or prompts of random words.

    If the dataset has too few prompts, they are repeated in order.
    """
    if args.dataset is not None:
        prompts = read_prompts("--dataset", args.dataset)
        texts = [x if isinstance(x, str) else x.get("prompt") for x in prompts]
        for prompt, text in zip(prompts, texts, strict=True):
            if not isinstance(text, str):
                raise ValueError(
                    f"--dataset: prompts of {args.dataset} must be strings, got {str(prompt)[:80]}."
                )
        return [texts[i % len(texts)] for i in range(args.num_prompts)]
    draw = random.Random(args.seed)
    prefix = draw.choices(_WORDS, k=args.prefix_len)
    return [
        " ".join([*prefix, *draw.choices(_WORDS, k=args.input_len)])
        for _ in range(args.num_prompts)
    ]


def _api_url(url: str) -> str:
    """Return `url`, with the path ``/v1`` added if `url` has no path.

    Raises:
      ValueError: `url` is not an http or https URL.
    """
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        address = httpx.URL()
    if address.scheme not in ("http", "https") or not address.host:
        raise ValueError(f"--base-url must begin with http:// or https://, got {url}.")
    return str(address.copy_with(path="/v1") if address.path == "/" else address)


async def _send_all(args: argparse.Namespace, prompts: list[str]) -> tuple[float, list[Result]]:
    """Send a request for each prompt and wait for all answers.

    Returns:
      The duration of the run in seconds, and the results in the order of the prompts.
    """
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("PAGED_JAX_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base_url = args.base_url.rstrip("/") + "/"
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, limits=limits, timeout=None
    ) as client:
        model = args.model or await _first_model(client)
        semaphore = asyncio.Semaphore(args.max_concurrency or len(prompts))
        draw = random.Random(args.seed)

        async def send(prompt: str, bar: tqdm) -> Result:
            async with semaphore:
                result = await _send(client, args, model, prompt)
                bar.update()
                return result

        start = time.perf_counter()
        with tqdm(total=len(prompts), unit="req", desc="requests") as bar:
            tasks = []
            for prompt in prompts:
                tasks.append(asyncio.create_task(send(prompt, bar)))
                if args.request_rate != float("inf"):
                    await asyncio.sleep(draw.expovariate(args.request_rate))
            results = await asyncio.gather(*tasks)
        return time.perf_counter() - start, results


async def _first_model(client: httpx.AsyncClient) -> str:
    response = await client.get("models")
    if response.is_error:
        raise OSError(f"{response.url}: {_describe_error(response)}")
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise OSError(
            f"--base-url must be the address of an API like OpenAI's, such as "
            f"http://host:8000/v1, got no list of models from {response.url}. Correct the address, "
            "or give --model."
        ) from None


def _describe_error(response: httpx.Response) -> str:
    """Return the HTTP status and the message of an error response, in one line."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text
    return f"status {response.status_code}: {' '.join(str(message).split())[:200]}"


async def _send(
    client: httpx.AsyncClient, args: argparse.Namespace, model: str, prompt: str
) -> Result:
    """Send a request, read its stream, and return the result.

    Errors of the request are stored in `Result.error` instead of being raised.
    """
    is_chat = args.endpoint == "chat"
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": args.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}),
        **({"ignore_eos": True} if args.ignore_eos else {}),
    }
    result = Result(time.perf_counter())
    try:
        async with client.stream("POST", _ENDPOINTS[args.endpoint], json=body) as response:
            if response.is_error:
                await response.aread()
                result.error = _describe_error(response)
            else:
                await _read(response, result)
    except httpx.HTTPError as error:
        result.error = one_line(error)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        result.error = f"an event of the stream does not follow OpenAI's API: {one_line(error)}"
    result.end = time.perf_counter()
    if result.error is None and not result.events:
        result.error = "the answer has no text"
    return result


async def _read(response: httpx.Response, result: Result) -> None:
    async for event in _events(response):
        if "error" in event:
            result.error = str(event["error"])
        for choice in event.get("choices") or ():
            delta = choice.get("delta", choice)
            if any(
                delta.get(key) for key in ("content", "text", "reasoning_content", "tool_calls")
            ):
                result.events.append(time.perf_counter())
        if usage := event.get("usage"):
            result.num_prompt = usage["prompt_tokens"]
            result.num_output = usage["completion_tokens"]


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def summarise(results: list[Result], seconds: float, goals: Mapping[str, float]) -> dict[str, Any]:
    """Return the report of a run: token counts, rates, and statistics of each metric.

    Args:
      results: the results of all requests.
      seconds: duration of the run in seconds.
      goals: maps metrics to their maximum in milliseconds. The goodput is the number of requests
        per second that meet all goals. Without goals, the report has no goodput.
    """
    completed = [result for result in results if result.error is None]
    values = [result.milliseconds() for result in completed]
    report: dict[str, Any] = {
        "seconds": seconds,
        "completed": len(completed),
        "failed": len(results) - len(completed),
        "prompt_tokens": sum(result.num_prompt for result in completed),
        "output_tokens": sum(result.num_output for result in completed),
        "requests_per_second": len(completed) / seconds,
        "output_tokens_per_second": sum(result.num_output for result in completed) / seconds,
    }
    if goals:
        report["goodput_requests_per_second"] = sum(x.meets(goals) for x in results) / seconds
    for name in _METRICS:
        measurements = [number for request_values in values for number in request_values[name]]
        if measurements:
            percentiles = np.percentile(measurements, _PERCENTILES).tolist()
            report[f"{name}_ms"] = {
                "mean": float(np.mean(measurements)),
                **{f"p{p}": value for p, value in zip(_PERCENTILES, percentiles, strict=True)},
            }
    return report


def table(report: Mapping[str, Any]) -> list[str]:
    """Return the report of `summarise` as lines of text."""
    rows = {
        "requests": f"{report['completed']} completed, {report['failed']} failed",
        "seconds": f"{report['seconds']:.2f}",
        "tokens": f"{report['prompt_tokens']:,} of prompts, {report['output_tokens']:,} generated",
        "requests/s": f"{report['requests_per_second']:.2f}",
        "generated tokens/s": f"{report['output_tokens_per_second']:.1f}",
    }
    if "goodput_requests_per_second" in report:
        rows["requests/s within --goodput"] = f"{report['goodput_requests_per_second']:.2f}"
    lines = [f"{name:<32}{value}" for name, value in rows.items()]
    columns = ("mean", *(f"p{p}" for p in _PERCENTILES))
    lines += ["", f"{'milliseconds':<32}" + "".join(f"{column:>10}" for column in columns)]
    for name, text in _METRICS.items():
        if statistics := report.get(f"{name}_ms"):
            label = f"{text} ({name})"
            lines.append(f"{label:<32}" + "".join(f"{statistics[c]:>10.1f}" for c in columns))
    return lines


if __name__ == "__main__":
    sys.exit(main())
