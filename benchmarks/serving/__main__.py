"""Benchmark of serving: continuous batching compared with simpler schedules, in one run.

    python -m benchmarks.serving                                # the small bundled model
    python -m benchmarks.serving --shape 135M --runs 1          # random weights
    python -m benchmarks.serving --trace-file azure2023_conv.csv --json replay.json

Every engine gets the same weights and the same requests with a common prefix, decodes greedily and
generates the same number of tokens for each request:

    naive            sequential requests, contiguous K and V           (baselines.py)
    static batches   static batches, contiguous K and V                (baselines.py)
    offline          continuous batching, all requests at the start    (engines.py)
    online           the same, requests arrive in a Poisson process    (engines.py)

The last two run with paged K and V, with and without a prefix cache, and with contiguous K and V,
all in the same memory. The engines run in turns in every round, and ratios are computed within a
round. Figures are medians over rounds. The prefix cache is empty at the start of a run.
transformers' continuous batching runs in a separate process, and so does paged_jax for that
comparison (peers.py). With --vllm-python, so does vLLM's build for CPUs (vllm_peer.py).

With --trace-file the requests of a trace are served instead, at their times (`--speed`), with
their lengths scaled to the model's context (`--length-scale`). Scaling also shrinks the blocks of
Mooncake's prompts. Use a `--block-size` that is not larger, otherwise few of them are found again.

A report is the content of the JSON file::

    sizes, settings     settings of the run
    results             name -> figures of `median_summary`, "details", "rounds"
    ratios_to_naive     name -> generation rate relative to "naive", median over rounds
    peers               name -> record of `peers.measure`, without its tokens
    replays             name -> figures of a trace
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import harness
from benchmarks.common.shapes import DTYPES
from benchmarks.harness import Column, Goal, PeerUnavailable, Report
from benchmarks.serving.engines import (
    VARIANTS,
    ContiguousBatches,
    EngineSizes,
    make_engine,
    serve,
    warm_up,
)
from benchmarks.serving.peers import OURS, PEERS, VLLM, measure
from benchmarks.serving.workloads import (
    Outcome,
    Request,
    Scale,
    Sizes,
    add_size_options,
    chosen_sizes,
    draw,
    fitting_scale,
    from_trace,
    median_summary,
    read_trace,
    summary,
    with_poisson_arrivals,
)
from paged_jax import Engine, Llama

MODES = ("naive", "static", "offline", "online", "peers")
# Seconds after which the process of a peer is ended.
_PEER_TIMEOUT = 600.0
# Seeds of the two warm-up rounds, far from the numbers of the measured rounds.
_WARMUP_ROUND = 10**6

Serve = Callable[[list[Request]], Outcome]

NAIVE = "naive"
STATIC = "static batches"
OFFLINE = "offline, "
ONLINE = "online, "
BEST = "paged, prefix cache"


# The report.


def _over_naive(name: str) -> Callable[[Report], float | None]:
    return lambda report: report["ratios_to_naive"].get(name)


def _over_peer(key: str) -> Callable[[Report], float | None]:
    def figure(report: Report) -> float | None:
        ours, theirs = (report["peers"].get(name) for name in (OURS, PEERS[0]))
        return ours[key] / theirs[key] if ours and theirs else None

    return figure


GOALS = (
    Goal("offline: 5.3x the rate of one request at a time", _over_naive(OFFLINE + BEST), low=5.3),
    Goal("online: 4.0x the rate of one request at a time", _over_naive(ONLINE + BEST), low=4.0),
    Goal("4x the rate of transformers' continuous batching", _over_peer("tokens_per_s"), low=4.0),
    Goal(
        "at most a tenth of the peak memory of transformers' continuous batching",
        _over_peer("peak_bytes"),
        high=0.1,
    ),
)
"""Goals of the engine for the workload with a shared prefix."""


def _column(title: str, width: int, figure: str, digits: int) -> Column:
    return Column(title, width, figure, f"{{:.{digits}f}}")


_NAME, _RATE = Column("", -30, "name"), _column("tokens/s", 9, "tokens_per_s", 0)
_LATENCIES = (
    _column("first token, ms p50", 20, "ttft_ms_p50", 1),
    _column("p99", 8, "ttft_ms_p99", 0),
    _column("next, ms p50", 13, "tpot_ms_p50", 2),
    _column("p99", 8, "tpot_ms_p99", 2),
)


def result_lines(report: Report) -> list[str]:
    """Return a table of all engines: rate, ratio, steps, and the latency for users."""
    if not report["results"]:
        return []
    columns = (
        _NAME,
        _RATE,
        _column("x naive", 8, "ratio", 2),
        _column("ms/token", 9, "ms_per_token", 3),
        _column("ms/step", 8, "step_ms_p50", 2),
        _column("mean", 8, "step_ms_mean", 2),
        *_LATENCIES,
        Column("same tokens", 13, "same_tokens", "{:.0%}"),
    )
    records = [
        {"name": name, "ratio": report["ratios_to_naive"].get(name)} | figures
        for name, figures in report["results"].items()
    ]
    return [
        *harness.table(columns, records),
        "A step of an engine is a dispatch: prompts, and several tokens for each sequence.",
    ]


def time_lines(report: Report) -> list[str]:
    """Return the parts of an engine's time, and its counts, by name."""
    lines = []
    for name, figures in (report["results"] | report["replays"]).items():
        details = figures.get("details", {})
        seconds = {key: value for key, value in details.items() if key.endswith("_seconds")}
        if not seconds:
            continue
        shares = "  ".join(
            f"{key.removesuffix('_seconds')} {value / figures['details_wall_seconds']:.1%}"
            for key, value in seconds.items()
        )
        counts = "  ".join(
            f"{key.removeprefix('num_')} {value:g}"
            for key, value in details.items()
            if value and key not in seconds
        )
        lines += [f"{name}: {shares}", f"{'':4s}{counts}"]
    return lines


def peer_lines(report: Report) -> list[str]:
    """Return a line for each engine that ran in a separate process."""
    ours = report["peers"].get(OURS)
    lines = []
    for name, record in report["peers"].items():
        peak, imports = record["peak_bytes"] / 1e6, record["imports_bytes"] / 1e6
        line = f"{name:30s}{record['tokens_per_s']:9.0f} tokens/s{peak:9.0f} MB peak"
        line += f" ({imports:.0f} after imports), {record['cpu_seconds']:.1f} s of CPU time"
        if ours and name != OURS:
            line += (
                f"; paged_jax has {ours['tokens_per_s'] / record['tokens_per_s']:.2f}x the rate in "
            )
            line += f"{ours['peak_bytes'] / record['peak_bytes']:.3f} of the memory"
            if "same_tokens" in record:
                line += f", {record['same_tokens']:.0%} of the requests have the same tokens"
        lines.append(line)
    return lines


def replay_lines(report: Report) -> list[str]:
    """Return a table of the engine's variants on a trace."""
    if not report["replays"]:
        return []
    columns = (
        _NAME,
        _RATE,
        _column("seconds", 8, "seconds", 1),
        *_LATENCIES,
        _column("preemptions", 12, "num_preemptions", 0),
        Column("hit rate", 9, "hit_rate", "{:.1%}"),
    )
    return harness.table(
        columns, [{"name": n} | figures for n, figures in report["replays"].items()]
    )


# The run.


def measure_all(
    runs: dict[str, Serve],
    draw_round: Callable[[int], list[Request]],
    *,
    load: float,
    num_warmup: int,
    num_rounds: int,
) -> tuple[dict[str, list[Outcome]], float]:
    """Run everything in turns, with new requests in every round.

    Args:
      runs: functions that serve a list of requests, by name. Names that begin with ONLINE get
        requests with arrival times.
      draw_round: returns the requests of a round, by its number.
      load: arrival rate, as a multiple of the rate of OFFLINE + BEST in the last warm-up round,
        which must be among the runs if any is online.
      num_warmup: number of warm-up rounds, at least one.
      num_rounds: number of measured rounds.

    Returns:
      The outcomes of each run, and the arrival rate in requests per second (0 without online runs).
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runs}
    rate = 0.0
    for number in range(num_warmup + num_rounds):
        requests = draw_round(number)
        for name, run in runs.items():
            is_online = name.startswith(ONLINE)
            if is_online and number < num_warmup:
                # The offline run of this round comes before.
                rate = load * len(requests) / outcomes[OFFLINE + BEST][-1].seconds
            arriving = with_poisson_arrivals(requests, rate, number) if is_online else requests
            outcomes[name].append(run(arriving))
    return {name: each[num_warmup:] for name, each in outcomes.items()}, rate


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Return the median over rounds of each rate relative to NAIVE; empty without NAIVE."""
    found = harness.median_ratios(rates, NAIVE) if NAIVE in rates else {}
    return {name: round(ratio, 3) for name, ratio in found.items()}


def records(outcomes: dict[str, list[Outcome]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each run, for JSON.

    ``same_tokens`` is the fraction of requests with the same tokens as in the first run.
    """
    first = next(iter(outcomes.values()), [])
    return {
        name: median_summary(each)
        | {
            "same_tokens": round(statistics.mean(map(same_tokens, each, first)), 4),
            **_details(each),
            "rounds": [summary(outcome) for outcome in each],
        }
        for name, each in outcomes.items()
    }


def same_tokens(outcome: Outcome, other: Outcome) -> float:
    """Return the fraction of requests with the same tokens in both."""
    pairs = zip(outcome.token_ids, other.token_ids, strict=True)
    return statistics.mean(ours == theirs for ours, theirs in pairs)


def _details(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the counts of the engine in the round with the median time."""
    if not outcomes[0].details:
        return {}
    middle = sorted(outcomes, key=lambda outcome: outcome.seconds)[len(outcomes) // 2]
    details = {name: round(value, 4) for name, value in middle.details.items()}
    return {"details": details, "details_wall_seconds": round(middle.seconds, 4)}


def make_runs(
    model: Llama,
    modes: list[str],
    sizes: EngineSizes,
    draw_round: Callable[[int], list[Request]],
    unrolled: Llama | None = None,
) -> dict[str, Serve]:
    """Return the functions of the modes, compiled for the requests of `draw_round`.

    Baselines run `unrolled`, the same model with one module per layer, because their K and V are a
    pair of arrays per layer. The default is `model` itself.
    """
    runs: dict[str, Serve] = {}
    # As many rows as fit into the memory of the pools if each has the maximum length.
    rows = max(1, min(sizes.max_num_seqs, sizes.pool_tokens // sizes.max_model_len))
    for mode, name, batch in (("naive", NAIVE, 1), ("static", STATIC, rows)):
        if mode in modes:
            _say(f"compiling: {name}, {batch} at a time")
            baseline = ContiguousBatches(unrolled or model, batch=batch)
            baseline.warm_up(draw_round(_WARMUP_ROUND))
            runs[name] = baseline.run
    engines: dict[str, Serve] = {}
    for variant in VARIANTS if {"offline", "online"} & set(modes) else ():
        _say(f"compiling: engine, {variant}")
        engine = make_engine(model, sizes, variant)
        warm_up(engine, draw_round(_WARMUP_ROUND) + draw_round(_WARMUP_ROUND + 1))
        engines[variant] = functools.partial(_serve_unknown, engine)
    for mode, prefix in (("offline", OFFLINE), ("online", ONLINE)):
        if mode in modes:
            runs |= {prefix + variant: run for variant, run in engines.items()}
    return runs


def _serve_unknown(engine: Engine, requests: list[Request]) -> Outcome:
    """Serve requests after emptying the prefix cache of the engine."""
    engine.reset_prefix_cache()
    return serve(engine, requests)


def measure_peers(
    folder: Path,
    dtype: str,
    sizes: EngineSizes,
    draw_round: Callable[[int], list[Request]],
    peers: Sequence[str] = PEERS,
    vllm_python: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure paged_jax and the available peers in separate processes.

    Args:
      folder: a Hugging Face model folder.
      dtype: "float32" or "bfloat16".
      sizes: sizes of the engines.
      draw_round: returns the requests of a round, by its number.
      peers: the peers besides vLLM.
      vllm_python: the Python that has vLLM, which is then a peer; None for no vLLM.
    """
    found: dict[str, dict[str, Any]] = {}
    pythons = {name: Path(sys.executable) for name in (OURS, *peers)}
    if vllm_python is not None:
        pythons[VLLM] = vllm_python
    for name, python in pythons.items():
        _say(f"in a separate process: {name}")
        try:
            found[name] = measure(
                name,
                folder,
                dtype,
                draw_round(0),
                draw_round(_WARMUP_ROUND),
                sizes._asdict(),
                timeout=_PEER_TIMEOUT,
                python=python,
            )
        except PeerUnavailable as error:
            _say(f"left out: {error}")
    tokens = {name: record.pop("token_ids") for name, record in found.items()}
    if OURS in tokens:
        for name, record in found.items():
            pairs = zip(tokens[name], tokens[OURS], strict=True)
            record["same_tokens"] = round(statistics.mean(a == b for a, b in pairs), 4)
    return found


def measure_replay(
    model: Llama, sizes: EngineSizes, requests: list[Request]
) -> dict[str, dict[str, Any]]:
    """Serve the requests of a trace at their times, with and without a prefix cache."""
    found = {}
    for variant in ("paged, prefix cache", "paged"):
        _say(f"compiling: engine, {variant}")
        engine = make_engine(model, sizes, variant)
        engine.warmup()
        _say(f"serving {len(requests)} requests, the last arrives at {requests[-1].arrival:.1f} s")
        outcome = serve(engine, requests)
        prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        found[variant] = summary(outcome) | {
            "num_preemptions": outcome.details.get("num_preemptions", 0),
            "hit_rate": round(outcome.details.get("num_cached_tokens", 0) / prompt_tokens, 4),
            "prompt_tokens": prompt_tokens,
            "generated_tokens": outcome.num_tokens,
            **_details([outcome]),
        }
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _engine_sizes(options: argparse.Namespace, context: int) -> EngineSizes:
    max_model_len = options.max_model_len or min(context, 512)
    pool_tokens = options.pool_tokens or options.max_num_seqs * max_model_len // 2
    return EngineSizes(
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        pool_tokens=pool_tokens // options.block_size * options.block_size,
        block_size=options.block_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
        steps_per_dispatch=options.steps_per_dispatch,
    )


def _mistake(options: argparse.Namespace, sizes: Sizes, engine_sizes: EngineSizes) -> str | None:
    """Return the error in the command line as one line, or None."""
    longest, limit = sizes.max_len, engine_sizes.max_model_len
    if options.trace_file is None and longest > limit:
        return (
            f"the longest request must fit the {limit} tokens of a sequence, got {longest}. Lower "
            "--prefix-len, --prompt-lens or --new-tokens, or raise --max-model-len."
        )
    if engine_sizes.pool_tokens < limit:
        return f"--pool-tokens must be at least {limit}, got {engine_sizes.pool_tokens}."
    positive = [options.speed, options.load, *(options.length_scale or ())]
    if min(positive) <= 0:
        return "--speed, --load and --length-scale must be positive."
    for name, (least, most) in (("prompt-lens", sizes.prompt_lens), ("new-tokens", sizes.new_lens)):
        if not 1 <= least <= most:
            return f"--{name} must be two ascending positive numbers, got {least} {most}."
    if options.warmup_runs < 1 or options.runs < 1:
        return "--warmup-runs and --runs must be at least 1."
    if "online" in options.modes and "offline" not in options.modes:
        return "--modes online also requires offline, which determines the arrival rate."
    return None


def _write_trace(folder: Path, run: Serve, requests: list[Request]) -> None:
    with jax.profiler.trace(str(folder)):
        run(requests)
    _say(f"profile of one offline run written to {folder}")


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the requested parts, and return the report."""
    model = Llama.from_pretrained(folder, dtype=options.dtype)
    config = model.config
    sizes = chosen_sizes(options)
    engine_sizes = _engine_sizes(options, config.max_position_embeddings)
    mistake = _mistake(options, sizes, engine_sizes)
    if mistake:
        raise SystemExit(f"serving: {mistake}")
    report: dict[str, Any] = {
        **harness.environment(),
        "model": harness.model_name(options),
        "dtype": options.dtype,
        "engine": engine_sizes._asdict(),
        "results": {},
        "ratios_to_naive": {},
        "peers": {},
        "replays": {},
    }
    if options.trace_file is not None:
        rows = read_trace(options.trace_file, options.num_requests)
        scale = fitting_scale(rows, engine_sizes.max_model_len)
        if options.length_scale:
            scale = Scale(*options.length_scale)
        requests = from_trace(
            rows,
            vocab_size=config.vocab_size,
            max_len=engine_sizes.max_model_len,
            scale=scale,
            speed=options.speed,
        )
        report |= {
            "trace": options.trace_file.name,
            "length_scale": scale._asdict(),
            "speed": options.speed,
        }
        report["replays"] = measure_replay(model, engine_sizes, requests)
        return report

    def draw_round(number: int) -> list[Request]:
        return draw(sizes, config.vocab_size, number)

    report["sizes"] = sizes._asdict()
    if "peers" in options.modes:
        # First, while this process uses little memory.
        report["peers"] = measure_peers(
            folder,
            options.dtype,
            engine_sizes,
            draw_round,
            options.peers,
            options.vllm_python,
        )
    unrolled = Llama.from_pretrained(folder, dtype=options.dtype, scan_layers=False)
    runs = make_runs(model, options.modes, engine_sizes, draw_round, unrolled)
    outcomes, rate = measure_all(
        runs,
        draw_round,
        load=options.load,
        num_warmup=options.warmup_runs,
        num_rounds=options.runs,
    )
    report |= {"results": records(outcomes), "arrivals_per_s": round(rate, 3)}
    rates = {name: [o.num_tokens / o.seconds for o in each] for name, each in outcomes.items()}
    report["ratios_to_naive"] = ratios(rates)
    if options.trace is not None and OFFLINE + BEST in runs:
        unseen = draw_round(options.warmup_runs + options.runs)
        _write_trace(options.trace, runs[OFFLINE + BEST], unseen)
    return report


def _parser() -> argparse.ArgumentParser:
    parser = harness.command_line(
        "Time continuous batching, compared with simpler schedules.", show_defaults=True
    )
    add = parser.add_argument
    harness.add_model_options(parser)
    add_size_options(parser, max_num_seqs=64, runs=3)
    add("--dtype", choices=DTYPES, default="float32", help="dtype of the weights")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=str(MODES))
    add("--load", type=float, default=2.0, help="online arrival rate / offline rate")
    add("--max-model-len", type=int, help="default: the model's context, at most 512")
    add("--pool-tokens", type=int, help="tokens in the pool; default: half of the maximum")
    add("--block-size", type=int, default=16, help="tokens in a block")
    add("--max-num-batched-tokens", type=int, help="default: the default of the engine")
    add("--trace", type=Path, metavar="DIR", help="write a jax.profiler trace of an offline run")
    add("--trace-file", type=Path, metavar="FILE", help="serve an Azure .csv or Mooncake .jsonl")
    add("--length-scale", type=float, nargs=2, metavar=("PROMPTS", "OUTPUTS"),
        help="factors for the lengths of a trace; default: the longest requests fit")  # fmt: skip
    add("--speed", type=float, default=1.0, help="divisor of the times of a trace")
    add("--peers", nargs="*", choices=PEERS, default=PEERS, help="peers besides vLLM")
    add("--vllm-python", type=Path, metavar="FILE",
        help="Python with vLLM's build for CPUs, which is then a peer")  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and optionally write JSON."""
    options = _parser().parse_args(arguments)
    try:
        with harness.model_folder(options, options.dtype) as folder:
            report = run(options, folder)
    except (ValueError, OSError) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    report["goals"] = [] if options.trace_file else harness.goal_lines(GOALS, report)
    print(report["device"], report["versions"], sep="\n")
    for lines in (result_lines, time_lines, peer_lines, replay_lines):
        if text := lines(report):
            print(*text, "", sep="\n")
    harness.finish(options, report, report["goals"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
