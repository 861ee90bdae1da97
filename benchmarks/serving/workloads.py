"""Requests to serve, and the result of serving them.

Requests are random with a common prefix, or come from recorded traces.

A workload is a list of `Request`: token ids and a number of tokens to generate, so that every
engine does the same work for the same list. All random values come from seeds.
"""

import argparse
import csv
import dataclasses
import datetime
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Most vocabularies have their special tokens below.
_FIRST_TOKEN = 3
# Number of prompt tokens of one entry of `hash_ids` (Mooncake, arXiv 2407.00079).
MOONCAKE_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, the number of tokens to generate, and the arrival time.

    Attributes:
      prompt_token_ids: at least one token.
      num_new: number of tokens to generate, at least one; no token ends the request earlier.
      arrival: seconds after the start of the run.
    """

    prompt_token_ids: list[int]
    num_new: int
    arrival: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Length of the complete sequence."""
        return len(self.prompt_token_ids) + self.num_new


class Sizes(NamedTuple):
    """Number and lengths of requests.

    Attributes:
      num_requests: number of requests in the workload.
      prefix_len: number of tokens at the start of every prompt that are the same in all prompts.
      prompt_lens: minimum and maximum number of tokens after the prefix, drawn uniformly.
      new_lens: minimum and maximum number of tokens to generate, drawn uniformly.
    """

    num_requests: int
    prefix_len: int
    prompt_lens: tuple[int, int]
    new_lens: tuple[int, int]

    @property
    def max_len(self) -> int:
        """Maximum length of a sequence."""
        return self.prefix_len + self.prompt_lens[1] + self.new_lens[1]


def draw(sizes: Sizes, vocab_size: int, seed: int) -> list[Request]:
    """Draw requests that all arrive at the start.

    Lengths are the same for every seed, and tokens differ: runs with different seeds do the same
    amount of work, and never find each other's prompts in a prefix cache.

    Example:
      >>> sizes = Sizes(num_requests=2, prefix_len=3, prompt_lens=(2, 2), new_lens=(4, 4))
      >>> one, two = draw(sizes, vocab_size=100, seed=0)
      >>> one.prompt_token_ids[:3] == two.prompt_token_ids[:3], one.num_tokens
      (True, 9)
    """
    lengths = np.random.default_rng(0)
    own = lengths.integers(*sizes.prompt_lens, sizes.num_requests, endpoint=True)
    new = lengths.integers(*sizes.new_lens, sizes.num_requests, endpoint=True)
    random = np.random.default_rng([1, seed])
    prefix = _tokens(random, sizes.prefix_len, vocab_size)
    return [
        Request(prefix + _tokens(random, int(num_own), vocab_size), int(num_new))
        for num_own, num_new in zip(own, new, strict=True)
    ]


def with_poisson_arrivals(requests: list[Request], rate: float, seed: int) -> list[Request]:
    """Return the requests with arrivals of a Poisson process with `rate` per second."""
    gaps = np.random.default_rng([2, seed]).exponential(1 / rate, len(requests))
    arrivals = np.cumsum(gaps) - gaps[0]
    return [
        dataclasses.replace(request, arrival=float(arrival))
        for request, arrival in zip(requests, arrivals, strict=True)
    ]


class TraceRow(NamedTuple):
    """A request of a trace.

    Attributes:
      seconds: arrival time, relative to the first request.
      prompt_len: number of prompt tokens.
      new_len: number of generated tokens.
      block_ids: names of the blocks of MOONCAKE_BLOCK prompt tokens, if the trace has them. Two
        prompts share the blocks at their start that have equal names.
    """

    seconds: float
    prompt_len: int
    new_len: int
    block_ids: tuple[int, ...] = ()


def read_trace(path: Path, num_requests: int) -> list[TraceRow]:
    """Read the first requests of a trace.

    Args:
      path: a CSV with TIMESTAMP, ContextTokens and GeneratedTokens (Azure LLM inference traces),
        or JSON lines with timestamp (ms), input_length, output_length and hash_ids (Mooncake).
      num_requests: maximum number of rows to read.

    Raises:
      ValueError: the file has neither format.
    """
    read = {".csv": _read_azure, ".jsonl": _read_mooncake}.get(path.suffix)
    if read is None:
        raise ValueError(f"read_trace: path must end in .csv or .jsonl, got {path}.")
    try:
        rows = read(path, num_requests)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"read_trace: {path} must be an Azure or a Mooncake trace, got {error!r} in it."
        ) from error
    if not rows:
        raise ValueError(f"read_trace: {path} must hold at least one request, got none.")
    first = rows[0].seconds
    return [row._replace(seconds=row.seconds - first) for row in rows]


def _read_azure(path: Path, num_requests: int) -> list[TraceRow]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [
            TraceRow(
                datetime.datetime.fromisoformat(row["TIMESTAMP"]).timestamp(),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
            for _, row in zip(range(num_requests), csv.DictReader(file), strict=False)
        ]


def _read_mooncake(path: Path, num_requests: int) -> list[TraceRow]:
    def row(fields: dict[str, Any]) -> TraceRow:
        return TraceRow(
            fields["timestamp"] / 1000,
            fields["input_length"],
            fields["output_length"],
            tuple(fields["hash_ids"]),
        )

    with path.open(encoding="utf-8") as file:
        return [row(json.loads(line)) for _, line in zip(range(num_requests), file, strict=False)]


class Scale(NamedTuple):
    """Factors for the lengths of a trace.

    Attributes:
      prompt: factor for prompts and their named blocks.
      new: factor for generated tokens.
    """

    prompt: float
    new: float


def fitting_scale(rows: list[TraceRow], max_len: int) -> Scale:
    """Return the scale (at most 1) that fits prompts into 3/4 of a sequence, outputs into 1/4.

    Prompts of today's services are tens of times longer than their outputs. With a common factor, a
    small model would have almost nothing to generate.
    """
    longest = max(row.prompt_len for row in rows), max(row.new_len for row in rows)
    room = max_len - max_len // 4, max_len // 4
    return Scale(*(min(1.0, most / length) for most, length in zip(room, longest, strict=True)))


def from_trace(
    rows: list[TraceRow], *, vocab_size: int, max_len: int, scale: Scale, speed: float
) -> list[Request]:
    """Return requests with the lengths, times and common prefixes of a trace.

    Each named block is a run of tokens drawn with its name as the seed, so blocks with the same
    name are equal. A prompt without names has independent tokens.

    Args:
      rows: see `read_trace`.
      vocab_size: exclusive upper bound of token ids.
      max_len: maximum length of a sequence; longer prompts are cut at their end.
      scale: factors for lengths.
      speed: divides the times.
    """
    block_len = max(1, round(MOONCAKE_BLOCK * scale.prompt))
    requests = []
    for index, row in enumerate(rows):
        num_new = min(max(1, round(row.new_len * scale.new)), max_len - 1)
        num_prompt = min(max(1, round(row.prompt_len * scale.prompt)), max_len - num_new)
        if row.block_ids:
            num_blocks = -(-num_prompt // block_len)
            # Blocks are rounded as well, and may be shorter than the prompt: the last block
            # repeats.
            ids = row.block_ids + row.block_ids[-1:] * (num_blocks - len(row.block_ids))
            blocks = [_block(block_id, block_len, vocab_size) for block_id in ids[:num_blocks]]
            prompt = [token for block in blocks for token in block][:num_prompt]
        else:
            prompt = _tokens(np.random.default_rng([4, index]), num_prompt, vocab_size)
        requests.append(Request(prompt, num_new, row.seconds / speed))
    return requests


def _block(block_id: int, length: int, vocab_size: int) -> list[int]:
    return _tokens(np.random.default_rng([3, block_id]), length, vocab_size)


def _tokens(random: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    return random.integers(_FIRST_TOKEN, vocab_size, count).tolist()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run over a workload. Times are seconds after the start of the run.

    Attributes:
      seconds: time until the last token was on the host.
      token_ids: generated tokens of each request.
      arrivals: arrival time of each request.
      token_times: time at which each token of each request was on the host. Tokens of a dispatch
        arrive together.
      step_seconds: time of each decode step, or the mean per sequence or batch if steps are not
        timed individually.
      details: other counts of the engine.
    """

    seconds: float
    token_ids: list[list[int]]
    arrivals: list[float]
    token_times: list[list[float]]
    step_seconds: list[float]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens of all requests."""
        return sum(map(len, self.token_ids))


def summary(outcome: Outcome) -> dict[str, float]:
    """Return the rounded figures of a run, for JSON.

    ``ttft`` is the time from the arrival of a request to its first token, ``tpot`` the mean time of
    each further token of a request, ``gap`` the time between two deliveries of tokens to a request.

    Example:
      >>> run = Outcome(2.0, [[5, 6, 7]], [0.5], [[1.0, 2.0, 2.0]], [1.0])
      >>> figures = summary(run)
      >>> figures["tokens_per_s"], figures["ttft_ms_p50"], figures["tpot_ms_p50"]
      (1.5, 500.0, 500.0)
    """
    pairs = list(zip(outcome.arrivals, outcome.token_times, strict=True))
    ttft = [times[0] - arrival for arrival, times in pairs]
    tpot = [(times[-1] - times[0]) / (len(times) - 1) for _, times in pairs if len(times) > 1]
    gaps = [gap for _, times in pairs for gap in np.diff(sorted(set(times))).tolist()]
    figures = {
        "seconds": outcome.seconds,
        "tokens_per_s": outcome.num_tokens / outcome.seconds,
        "ms_per_token": 1e3 * outcome.seconds / outcome.num_tokens,
        **_quantiles("step", outcome.step_seconds),
        **_quantiles("ttft", ttft),
        **_quantiles("tpot", tpot),
        **_quantiles("gap", gaps),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def median_summary(outcomes: list[Outcome]) -> dict[str, float]:
    """Return the median over runs of each figure, and the mean of their seconds."""
    summaries = [summary(outcome) for outcome in outcomes]
    names = [name for name in summaries[0] if all(name in each for each in summaries)]
    medians = {name: statistics.median(each[name] for each in summaries) for name in names}
    return medians | {"seconds_mean": statistics.mean(each["seconds"] for each in summaries)}


def _quantiles(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    milliseconds = 1e3 * np.array(seconds)
    return {
        f"{name}_ms_mean": float(milliseconds.mean()),
        f"{name}_ms_p50": float(np.quantile(milliseconds, 0.5)),
        f"{name}_ms_p99": float(np.quantile(milliseconds, 0.99)),
    }


def add_size_options(parser: argparse.ArgumentParser, *, max_num_seqs: int, runs: int) -> None:
    """Add the options for `Sizes`, rounds and the engine, with some defaults."""
    add = parser.add_argument
    add("--num-requests", type=int, default=64, help="requests in a round or trace")
    add("--prefix-len", type=int, default=128, help="tokens that all prompts share")
    add("--prompt-lens", type=int, nargs=2, default=[16, 64], help="tokens after the prefix")
    add("--new-tokens", type=int, nargs=2, default=[16, 96], help="tokens to generate")
    add("--warmup-runs", type=int, default=1, help="warm-up rounds")
    add("--runs", type=int, default=runs, help="measured rounds")
    add("--max-num-seqs", type=int, default=max_num_seqs, help="maximum number of sequences")
    add("--steps-per-dispatch", type=int, default=8, help="decode steps per dispatch")


def chosen_sizes(options: argparse.Namespace) -> Sizes:
    """Return the sizes of `add_size_options`."""
    return Sizes(
        options.num_requests,
        options.prefix_len,
        tuple(options.prompt_lens),
        tuple(options.new_tokens),
    )
