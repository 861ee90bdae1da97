"""Benchmark of requests with a JSON schema (bound) and without one (free) in the same batch.

    python -m benchmarks.serving.bound_rows                     # the small bundled model
    python -m benchmarks.serving.bound_rows --shape 135M --json bound.json

Each case runs some requests with a schema and some without, and replaces requests that end. The
engine chooses the number of steps that free requests take while the host computes masks for bound
requests (`MaskClock`). In the case "one step for all", it always decodes one step of all requests.
The cases run in turns, and the figures are medians over rounds.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import harness
from benchmarks.harness import Column
from paged_jax import Engine, SamplingParams, StructuredOutputsParams, Tokenizer
from paged_jax.models.loading.pretrained import bundled_folder

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "count": {"type": "integer"},
    },
    "required": ["name", "tags", "count"],
}
# Steps after which a case begins, for the clock to choose.
_NUM_WARM_STEPS = 60


class Case(NamedTuple):
    """Requests that run at the same time.

    Attributes:
      num_bound: number of requests with a schema.
      num_free: number of requests without.
      can_choose: whether the engine may let the free requests decode alone.
    """

    num_bound: int
    num_free: int
    can_choose: bool = True


CASES = {
    "1 free": Case(0, 1),
    "8 free": Case(0, 8),
    "1 free, 7 bound, one step for all": Case(7, 1, can_choose=False),
    "1 free, 7 bound": Case(7, 1),
    "8 bound": Case(8, 0),
}


class Speeds(NamedTuple):
    """Tokens per second of each request with a schema, and without; 0 if there are none."""

    bound: float
    free: float


def measure(engine: Engine, case: Case, seconds: float, *, first_seed: int = 0) -> Speeds:
    """Return the speeds in a case.

    Args:
      engine: an engine without requests.
      case: the requests.
      seconds: duration of the measurement.
      first_seed: seed of the first request; each further request has the next seed.
    """
    lookahead = engine.core.scheduler.lookahead
    was_used, lookahead.is_used = lookahead.is_used, case.can_choose or not case.num_bound
    seeds = iter(range(first_seed, sys.maxsize))

    def add(kind: str) -> None:
        form = StructuredOutputsParams(json=SCHEMA) if kind == "bound" else None
        seed = next(seeds)
        params = SamplingParams(
            seed=seed, max_tokens=None, ignore_eos=form is None, structured_outputs=form
        )
        engine.add_request("It is", params, request_id=f"{kind} {seed}")

    for kind, count in (("bound", case.num_bound), ("free", case.num_free)):
        for _ in range(count):
            add(kind)
    counts: Counter[str] = Counter()
    seen: dict[str, int] = {}

    def step() -> None:
        for output in engine.step():
            kind, num_tokens = output.request_id.split()[0], len(output.outputs[0].token_ids)
            counts[kind] += num_tokens - seen.get(output.request_id, 0)
            seen[output.request_id] = num_tokens
            if output.finished:
                add(kind)

    for _ in range(_NUM_WARM_STEPS):
        step()
    before, start = counts.copy(), time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        step()
    for sequence in engine.sequences:
        engine.abort(sequence.request.request_id)
    lookahead.is_used = was_used
    rates = [(counts[kind] - before[kind]) / elapsed for kind in ("bound", "free")]
    return Speeds(rates[0] / max(1, case.num_bound), rates[1] / max(1, case.num_free))


def measure_all(engine: Engine, seconds: float, num_rounds: int) -> dict[str, Speeds]:
    """Return the median speeds of all cases, which run in turns."""
    speeds: dict[str, list[Speeds]] = {name: [] for name in CASES}
    for case in CASES.values():  # compile, also the programs that only some steps need
        measure(engine, case, seconds, first_seed=num_rounds * 1000)
    for number in range(num_rounds):
        for name, case in CASES.items():
            speeds[name].append(measure(engine, case, seconds, first_seed=1000 * number))
    return {
        name: Speeds(*map(statistics.median, zip(*rounds, strict=True)))
        for name, rounds in speeds.items()
    }


def lines(speeds: dict[str, Speeds]) -> list[str]:
    """Return the table of the speeds and the ratios between cases."""
    alone, full, before, after, _ = speeds.values()
    columns = (
        Column("tokens/s of each request", -36, lambda item: item[0]),
        Column("bound", 10, lambda item: item[1].bound, "{:.1f}"),
        Column("free", 10, lambda item: item[1].free, "{:.1f}"),
    )
    return [
        *harness.table(columns, speeds.items()),
        f"free beside 7 bound: {after.free / alone.free:.2f} of alone (one step for all: "
        f"{before.free / alone.free:.2f}), {after.free / full.free:.2f} of beside 7 free ("
        f"{before.free / full.free:.2f})",
        f"bound: {after.bound / before.bound:.2f} of one step for all",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the speeds."""
    parser = harness.command_line(str(__doc__).split("\n")[0], rounds=3)
    harness.add_model_options(parser)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each case")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_folder(options.model or bundled_folder())
    with harness.model_folder(options) as folder:
        engine = Engine(folder, tokenizer=tokenizer, max_num_seqs=8, max_model_len=512)
    speeds = measure_all(engine, options.seconds, options.rounds)
    report = {"model": harness.model_name(options), "tokens_per_second": speeds}
    harness.finish(options, harness.environment() | report, lines(speeds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
