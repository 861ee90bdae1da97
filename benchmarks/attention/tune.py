"""Tuner for the launch parameters of the Triton kernels on this GPU.

    python -m benchmarks.attention.tune                        # shapes of common models
    python -m benchmarks.attention.tune --ops decode --models TinyLlama --block-sizes 16
    python -m benchmarks.attention.tune --dry-run              # list the candidates; needs no GPU

For every shape (head dimension, group, block size, dtypes), each candidate runs on a few batches:
even and ragged batches, one long sequence and one short sequence. Candidates that do not compile,
or differ from the XLA backend, are dropped. The others run in turns, and the candidate with the
smallest geometric mean of times over the batches wins. Winners are written to
`paged_jax/kernels/triton/tuning.json`, which the kernels read, or to the file of `--table`. Other
entries in the file are kept.

For decode the tuner also compares the number of parts that the kernel chooses with other numbers.
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
    relative_error,
)
from benchmarks.common.device_time import Rates, measure_rates, median_seconds
from benchmarks.harness import Budget, command_line, environment, reason, write_json
from paged_jax.kernels import gpu_device
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.call_table import CallShape
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.triton import tuning
from paged_jax.kernels.triton.decode import decode
from paged_jax.kernels.triton.prefill import prefill

TABLE = Path(tuning.__file__).with_name("tuning.json")
_STEP_TOKENS = (16, 32, 64, 128, 256)
_QUERY_ROWS = (64, 128)
_NUM_WARPS = {"decode": (2, 4, 8), "prefill": (4, 8)}
_NUM_STAGES = (2, 3, 4)
# Numbers of parts of a batch; 0 means one part per sequence.
_PARTS = (0, 16, 32, 64, 128, 256, 512)
# Maximum shared memory of a thread block on an H100 or H200 (CUDA C++ programming guide).
_SHARED_BYTES = 227 * 1024
# Maximum number of tile elements in the registers of a thread before kernels spill (ptxas, compute
# capability 9.0): elements of K or V in decode, elements of scores and sums in prefill.
_THREAD_NUMBERS = 128
# Batch, context, and whether the batch is ragged. The most informative batches come first, because
# only candidates that are fast on a batch continue to the next.
_DECODED = ((32, 4096, False), (1, 32768, False), (64, 8192, True), (1, 1024, False))
_CHUNKS = ((1, CHUNK, False), (1, 4 * CHUNK, False))
# A candidate that is slower than the fastest by this factor on a batch is not tried on the next.
_HOPELESS = 1.3
_TURN_SECONDS = 0.005


class Job(NamedTuple):
    """A shape with parameters to tune.

    Attributes:
      op: a key of `tuning.OPS`.
      shape: shape of the table entry.
      cases: cases to time.
    """

    op: str
    shape: CallShape
    cases: tuple[Case, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.shape}"


def make_jobs(
    ops: list[str], models: list[str], block_sizes: list[int], pool_dtypes: list[str]
) -> list[Job]:
    """Create the jobs for some models, each shape once."""
    jobs: dict[tuple[str, CallShape], Job] = {}
    # The model varies fastest, so that every model has its most common dtypes if time runs out.
    for dtype, block_size, op, model in itertools.product(pool_dtypes, block_sizes, ops, models):
        sizes, chunk = (_DECODED, 0) if op == "decode" else (_CHUNKS, CHUNK)
        cases = tuple(Case(model, b, n, block_size, dtype, ragged, chunk) for b, n, ragged in sizes)
        num_heads, num_kv_heads, head_dim, _ = MODELS[model]
        group = num_heads // num_kv_heads
        shape = CallShape(head_dim, group, block_size, cases[0].q_dtype, dtype)
        jobs.setdefault((op, shape), Job(op, shape, cases))
    return list(jobs.values())


def current_params(device_kind: str, op: str, shape: CallShape) -> tuning.Params:
    """Return the parameters that the kernels use now."""
    choose = {"decode": tuning.decode_params, "prefill": tuning.prefill_params}[op]
    return choose(device_kind, shape)


def make_candidates(device_kind: str, op: str, shape: CallShape) -> list[tuning.Params]:
    """Return the parameters to try, beginning with the current ones."""
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


def fits(shape: CallShape, params: tuning.Params) -> bool:
    """Return whether tiles are expected to fit into shared memory and registers.

    Loads keep the dtype of the pool: 1 byte per element if it is quantised.
    """
    lanes = 1 << (shape.head_dim - 1).bit_length()
    pool_dtype = jnp.dtype(shape.pool_dtype)
    scale_bytes = 2 * KVDtype.of(pool_dtype).scale_bytes
    stage_bytes = params.step_tokens * (2 * lanes * pool_dtype.itemsize + scale_bytes)
    threads = 32 * params.num_warps
    # Loads of all pipeline stages except the current one.
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
    """Return a call of a Triton kernel with the given parameters."""

    def call(q: jax.Array, layer: Any, inputs: Inputs) -> jax.Array:
        _, pools, tables, lens, query_lens = inputs
        args = AttentionArgs(q, pools, tables, lens, query_lens, None, layer)
        if isinstance(params, tuning.DecodeParams):
            return decode(args, options, params=params, num_parts=num_parts, interpret=interpret)[0]
        return prefill(args, options, params=params, interpret=interpret)[0]

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
      The geometric mean of the seconds of a call, for every candidate that was among the fast ones
      on each case, and for the first candidate if it works.
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
    """Time a decode call for several numbers of parts; None is the choice of the kernel."""
    times = {}
    for case in job.cases:
        inputs = make_inputs(case)
        calls = {n: kernel_call(inputs, params, options, num_parts=n) for n in (None, *_PARTS)}
        times[case] = _time_calls(calls, case, inputs, rates)
    return times


def _time_calls(
    calls: Mapping[Any, JaxCall], case: Case, inputs: Inputs, rates: Rates
) -> dict[Any, float]:
    """Time a call of each kernel that compiles and agrees with the XLA backend."""
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
    first = median_seconds(programs, 1)
    most = _HOPELESS * min(first.values(), default=0)
    near = {key: programs[key] for key, taken in first.items() if taken <= most}
    return first | median_seconds(near, 5)


def write_entries(
    path: Path, device_kind: str, entries: Mapping[Job, tuning.Params], measured: str
) -> None:
    """Write entries to a table, replacing older entries. The file is always complete.

    Args:
      path: the table; it need not exist.
      device_kind: the device that was measured.
      entries: parameters by job.
      measured: settings of the measurement.
    """
    table = json.loads(path.read_text()) if path.exists() else {}
    for job, params in entries.items():
        shapes = table.setdefault(device_kind, {}).setdefault(job.op, {})
        shapes[str(job.shape)] = params._asdict() | {"measured": measured}
    tuning.parse(json.dumps(table))
    write_json(path, table, sort_keys=True)


def run(jobs: list[Job], path: Path, budget: float, json_path: Path | None = None) -> None:
    """Tune jobs while the budget lasts, and write each winner immediately.

    Args:
      jobs: jobs in order of importance.
      path: the table.
      budget: seconds. A job does not start if it would exceed the budget with the duration of the
        longest job so far.
      json_path: file for all times.
    """
    limit = Budget(budget)
    kind = gpu_device.device().kind
    about = environment()
    measured = f"jax {about['versions']['jax']}, commit {about['commit']}"
    rates, options = measure_rates(), Options(scale=1.0)
    print(kind, rates)
    report = {**about, "accelerator": kind, **rates._asdict(), "results": [], "not reached": []}
    longest = 0.0
    for done, job in enumerate(jobs):
        begun = time.monotonic()
        if limit.is_over(longest):
            print(f"{len(jobs) - done} shapes not reached in time, the first is {job}")
            report["not reached"] = list(map(str, jobs[done:]))
            write_json(json_path, report)
            break
        try:
            record, best = tune_job(job, kind, rates, options)
        except RuntimeError as error:  # an error of XLA; the other shapes are still tuned
            record, best = {"job": str(job), "failed": reason(error)}, None
            print(f"{job}: {record['failed']}")
        report["results"].append(record)
        if best is not None:
            write_entries(path, kind, {job: best}, measured)
        longest = max(longest, time.monotonic() - begun)
        write_json(json_path, report)


def tune_job(
    job: Job, device_kind: str, rates: Rates, options: Options
) -> tuple[dict[str, Any], tuning.Params | None]:
    """Tune one job and print it. Return the measurements for JSON, and the winner or None."""
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
    parser = command_line("Tune the Triton kernels on this GPU.", budget=540)
    parser.add_argument("--ops", nargs="+", choices=tuning.OPS, default=list(tuning.OPS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--block-sizes", nargs="+", type=int, default=list(BLOCK_SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=POOL_DTYPES, default=list(POOL_DTYPES))
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="table to write")
    parser.add_argument("--dry-run", action="store_true", help="print the candidates")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Tune, or list the candidates."""
    options = _parser().parse_args(arguments)
    jobs = make_jobs(options.ops, options.models, options.block_sizes, options.dtypes)
    kind = gpu_device.device().kind
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
            "`--dry-run` lists the candidates.",
            file=sys.stderr,
        )
        return 2
    run(jobs, options.table, options.budget, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
