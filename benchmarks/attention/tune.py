"""Find the fastest launch parameters of the Triton kernels on this GPU, and keep them.

    python -m benchmarks.attention.tune                        # shapes of the usual models
    python -m benchmarks.attention.tune --ops decode --models TinyLlama --block-sizes 16
    python -m benchmarks.attention.tune --dry-run              # what would be timed; needs no GPU

For every shape (head dimension, group, block size, types) each candidate runs on a few batches:
even and ragged ones, one long sequence and one short one. What does not compile, or whose result is
not that of the XLA backend, is dropped; the others take turns, and the least geometric mean of the
times over the batches wins. Winners go into `paged_jax/kernels/triton/tuning.json`, where the
kernels look, or into the file of `--table`; its other entries stay.

For decode it also says how the number of parts that the kernel chooses compares with others.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.attention.cases import (
    BLOCK_SIZES,
    CHUNK,
    MODELS,
    POOL_DTYPES,
    Case,
    Inputs,
    make_inputs,
)
from benchmarks.attention.programs import (
    TOLERANCE,
    JaxCall,
    expected_result,
    plan_calls,
    prepare_all,
    reason,
    relative_error,
)
from benchmarks.common.device_time import Rates, measure_rates, take_turns
from benchmarks.common.environment import environment, write_json
from paged_jax.kernels import triton
from paged_jax.kernels.backend import AttentionArgs, Interpret, Options
from paged_jax.kernels.pool_format import is_quantised
from paged_jax.kernels.triton import tuning

TABLE = Path(tuning.__file__).with_name("tuning.json")
_STEP_TOKENS = (16, 32, 64, 128, 256)
_QUERY_ROWS = (64, 128)
_NUM_WARPS = {"decode": (2, 4, 8), "prefill": (4, 8)}
_NUM_STAGES = (2, 3, 4)
# Parts that a batch is divided into; 0: each sequence is one.
_PARTS = (0, 16, 32, 64, 128, 256, 512)
# Shared memory that a program may have on an H100 or H200 (CUDA C++ programming guide).
_SHARED_BYTES = 227 * 1024
# Numbers of a tile in the registers of a thread, beyond which kernels of either kind spill (ptxas,
# compute capability 9.0): those of K or V in decode, those of the scores and sums in prefill.
_THREAD_NUMBERS = 128
# Batch and context of what is timed, and whether it is ragged; the most telling ones first, since
# only candidates that are fast on one go on to the next.
_DECODED = ((32, 4096, False), (1, 32768, False), (64, 8192, True), (1, 1024, False))
_CHUNKS = ((1, CHUNK, False), (1, 4 * CHUNK, False))
# A candidate this much slower than the fastest on one batch is not tried on the next.
_HOPELESS = 1.3
_TURN_SECONDS = 0.005


class Job(NamedTuple):
    """What to find the parameters of.

    Attributes:
      op: a key of `tuning.OPS`.
      shape: of the entry.
      cases: what is timed.
    """

    op: str
    shape: tuning.Shape
    cases: tuple[Case, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.shape}"


def make_jobs(
    ops: list[str], models: list[str], block_sizes: list[int], pool_dtypes: list[str]
) -> list[Job]:
    """The jobs for some models, each shape once."""
    jobs: dict[tuple[str, tuning.Shape], Job] = {}
    # Models change fastest: where time runs out, every model has had its commonest types.
    for dtype, block_size, op, model in itertools.product(pool_dtypes, block_sizes, ops, models):
        sizes, chunk = (_DECODED, 0) if op == "decode" else (_CHUNKS, CHUNK)
        cases = tuple(Case(model, b, n, block_size, dtype, ragged, chunk) for b, n, ragged in sizes)
        num_heads, num_kv_heads, head_dim = MODELS[model]
        group = num_heads // num_kv_heads
        shape = tuning.Shape(head_dim, group, block_size, cases[0].q_dtype, dtype)
        jobs.setdefault((op, shape), Job(op, shape, cases))
    return list(jobs.values())


def current_params(device_kind: str, op: str, shape: tuning.Shape) -> tuning.Params:
    """What the kernels take now."""
    choose = {"decode": tuning.decode_params, "prefill": tuning.prefill_params}[op]
    return choose(device_kind, **shape._asdict())


def make_candidates(device_kind: str, op: str, shape: tuning.Shape) -> list[tuning.Params]:
    """The parameters to try, those in use first."""
    found: list[tuning.Params] = [current_params(device_kind, op, shape)]
    for step_tokens, num_warps, num_stages in itertools.product(
        _STEP_TOKENS, _NUM_WARPS[op], _NUM_STAGES
    ):
        if op == "decode":
            found.append(tuning.DecodeParams(step_tokens, num_warps, num_stages))
        else:
            found += [
                tuning.PrefillParams(rows, step_tokens, num_warps, num_stages)
                for rows in _QUERY_ROWS
            ]
    return [params for params in dict.fromkeys(found) if params == found[0] or fits(shape, params)]


def fits(shape: tuning.Shape, params: tuning.Params) -> bool:
    """Whether tiles fit shared memory and registers, as far as that can be told before compiling.

    Loads of a step are kept as they lie in the pool, 1 byte a number where it is quantised.
    """
    lanes = 1 << (shape.head_dim - 1).bit_length()
    pool_dtype = jnp.dtype(shape.pool_dtype)
    scale_bytes = 8 if is_quantised(pool_dtype) else 0
    stage_bytes = params.step_tokens * (2 * lanes * pool_dtype.itemsize + scale_bytes)
    threads = 32 * params.num_warps
    # The loads of all steps but the one that is computed.
    shared_bytes = (params.num_stages - 1) * stage_bytes
    if isinstance(params, tuning.DecodeParams):
        numbers = params.step_tokens * lanes
    else:
        numbers = params.query_rows * (params.step_tokens + lanes)
        shared_bytes += params.query_rows * lanes * jnp.dtype(shape.q_dtype).itemsize
    return shared_bytes <= _SHARED_BYTES and numbers <= _THREAD_NUMBERS * threads


def kernel_call(
    inputs: Inputs,
    params: tuning.Params,
    options: Options,
    *,
    num_parts: int | None = None,
    interpret: Interpret = False,
) -> JaxCall:
    """A Triton kernel with its parameters given."""

    def call(q: jax.Array, layer: Any, inputs: Inputs) -> jax.Array:
        _, pools, tables, lens, query_lens = inputs
        args = AttentionArgs(q, pools, tables, lens, query_lens, None, layer)
        if isinstance(params, tuning.DecodeParams):
            return triton.decode(
                args, options, params=params, num_parts=num_parts, interpret=interpret
            )[0]
        return triton.prefill(args, options, params=params, interpret=interpret)[0]

    return JaxCall(call, inputs)


def tune(
    job: Job,
    candidates: list[tuning.Params],
    rates: Rates,
    options: Options,
    interpret: Interpret = False,
) -> dict[tuning.Params, float]:
    """Time candidates on all cases of a job.

    Returns:
      The geometric mean of the seconds of a call, of every candidate that was among the fast ones
      on each case, and of the first candidate if it works.
    """
    seconds: dict[tuning.Params, list[float]] = {}
    left = candidates
    for case in job.cases:
        inputs = make_inputs(case)
        calls = {
            params: kernel_call(inputs, params, options, interpret=interpret) for params in left
        }
        timed = _time_calls(calls, case, inputs, rates)
        for params, taken in timed.items():
            seconds.setdefault(params, []).append(taken)
        most = _HOPELESS * min(timed.values(), default=0)
        left = [p for p, taken in timed.items() if taken <= most or p == candidates[0]]
    return {params: statistics.geometric_mean(seconds[params]) for params in left}


def tune_parts(
    job: Job, params: tuning.DecodeParams, rates: Rates, options: Options
) -> dict[Case, dict[int | None, float]]:
    """Seconds of a decode call by the number of parts; None is the kernel's own choice."""
    times = {}
    for case in job.cases:
        inputs = make_inputs(case)
        calls = {n: kernel_call(inputs, params, options, num_parts=n) for n in (None, *_PARTS)}
        times[case] = _time_calls(calls, case, inputs, rates)
    return times


def _time_calls(
    calls: Mapping[Any, JaxCall], case: Case, inputs: Inputs, rates: Rates
) -> dict[Any, float]:
    """Seconds of a call of each kernel that compiles and gives the result of the XLA backend."""
    plan = plan_calls(case, rates, _TURN_SECONDS)
    expected = expected_result(inputs)
    prepared, failures = prepare_all(calls, case, inputs.q, plan)
    for key, why in failures.items():
        print(f"  {key}: {why}")
    programs = {}
    for key, ready in prepared.items():
        error = relative_error(ready.once(), expected)
        if error <= TOLERANCE:
            programs[key] = ready.program
        else:
            print(f"  {key}: differs from the XLA backend by {error:.3g}")
    first = take_turns(programs, 1)
    most = _HOPELESS * min(first.values(), default=0)
    near = {key: programs[key] for key, taken in first.items() if taken <= most}
    return first | take_turns(near, 5)


def write_entries(
    path: Path, device_kind: str, entries: Mapping[Job, tuning.Params], measured: str
) -> None:
    """Put entries into a table, in place of older ones; the file is always whole.

    Args:
      path: of the table, which need not exist.
      device_kind: what was measured on.
      entries: parameters by job.
      measured: what they were measured with.
    """
    table = json.loads(path.read_text()) if path.exists() else {}
    for job, params in entries.items():
        shapes = table.setdefault(device_kind, {}).setdefault(job.op, {})
        shapes[str(job.shape)] = params._asdict() | {"measured": measured}
    text = json.dumps(table, indent=1, sort_keys=True) + "\n"
    tuning.parse(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def run(jobs: list[Job], path: Path, budget: float, json_path: Path | None = None) -> None:
    """Tune jobs while the budget lasts, and write each winner at once.

    Args:
      jobs: in order of importance.
      path: of the table.
      budget: seconds; a job is not begun that would not end in time if it took as long as the
        longest so far.
      json_path: where to write all times, too.
    """
    start = time.monotonic()
    kind = tuning.device().kind
    about = environment()
    measured = f"jax {about['versions']['jax']}, commit {about['commit']}"
    rates, options = measure_rates(), Options(scale=1.0)
    print(kind, rates)
    report = {**about, "accelerator": kind, **rates._asdict(), "results": [], "not reached": []}
    longest = 0.0
    for done, job in enumerate(jobs):
        begun = time.monotonic()
        if begun - start + longest > budget:
            print(f"{len(jobs) - done} shapes not reached in time, the first is {job}")
            report["not reached"] = list(map(str, jobs[done:]))
            _save(report, json_path)
            break
        try:
            record, best = tune_job(job, kind, rates, options)
        except RuntimeError as error:  # of XLA: the other shapes are still tuned
            record, best = {"job": str(job), "failed": reason(error)}, None
            print(f"{job}: {record['failed']}")
        report["results"].append(record)
        if best is not None:
            write_entries(path, kind, {job: best}, measured)
        longest = max(longest, time.monotonic() - begun)
        _save(report, json_path)


def _save(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        write_json(path, report)


def tune_job(
    job: Job, device_kind: str, rates: Rates, options: Options
) -> tuple[dict[str, Any], tuning.Params | None]:
    """Tune one job, and print it: what was measured, for JSON, and the winner if anything works."""
    candidates = make_candidates(device_kind, job.op, job.shape)
    seconds = tune(job, candidates, rates, options)
    record: dict[str, Any] = {"job": str(job), "cases": list(map(str, job.cases))}
    if not seconds:
        print(f"{job}: nothing works")
        return record, None
    best = min(seconds, key=seconds.__getitem__)
    gain = seconds.get(candidates[0], float("nan")) / seconds[best]
    print(f"{job}: {best}, {gain:.2f}x {candidates[0]}", flush=True)
    record |= {"best": best._asdict(), "before": candidates[0]._asdict(), "gain": round(gain, 3)}
    record["us"] = {str(params): round(1e6 * s, 2) for params, s in seconds.items()}
    if isinstance(best, tuning.DecodeParams):
        record["us_by_parts"] = {}
        for case, times in tune_parts(job, best, rates, options).items():
            shown = {"own" if n is None else str(n): round(1e6 * s, 1) for n, s in times.items()}
            record["us_by_parts"][str(case)] = shown
            listed = ", ".join(f"{n} {us}" for n, us in shown.items())
            print(f"  {case}: us by number of parts: {listed}")
    return record, best


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Tune the Triton kernels on this GPU.")
    parser.add_argument("--ops", nargs="+", choices=tuning.OPS, default=list(tuning.OPS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--block-sizes", nargs="+", type=int, default=list(BLOCK_SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=POOL_DTYPES, default=list(POOL_DTYPES))
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="default 540")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="to write")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    parser.add_argument("--dry-run", action="store_true", help="print the candidates")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Tune, or say what would be tuned."""
    options = _parser().parse_args(arguments)
    jobs = make_jobs(options.ops, options.models, options.block_sizes, options.dtypes)
    kind = tuning.device().kind
    if options.dry_run:
        for job in jobs:
            candidates = make_candidates(kind, job.op, job.shape)
            print(f"{job}: {len(candidates)} candidates on", *job.cases, sep="\n  ")
            print(*candidates, sep="\n    ")
        return 0
    if not kind:
        platform = jax.devices()[0].platform
        print(
            f"benchmarks.attention.tune: needs an NVIDIA GPU, JAX has a {platform} here. "
            "`--dry-run` prints what would be timed.",
            file=sys.stderr,
        )
        return 2
    run(jobs, options.table, options.budget, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
