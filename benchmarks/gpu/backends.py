"""Times of all ops on each backend for GPUs, on the same inputs, compared with JAX's own op.

    python -m benchmarks.gpu.backends --json results.json         # all ops, pools of all dtypes
    python -m benchmarks.gpu.backends --ops write copy_blocks --models TinyLlama
    python -m benchmarks.gpu.backends --quick                     # small sizes, also on a CPU
    python -m benchmarks.gpu.defaults results.json                # use the faster backends

The results of all kernels are compared with the XLA backend before they are timed, and their runs
are interleaved. `benchmarks.gpu.defaults` derives the default backends from the file of `--json`.
On a CPU the backends for CPUs are timed.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

# JAX would otherwise allocate most of the memory at the start, see `benchmarks.attention.run`.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from benchmarks.attention.cases import LATENT_MODELS, MODELS, POOL_DTYPES
from benchmarks.attention.programs import (
    TOLERANCE,
    JaxCall,
    Prepared,
    TorchCall,
    fastest_settings,
    plan_calls,
    prepare_all,
    reason,
)
from benchmarks.common.device_time import Rates, measure_rates, take_turns
from benchmarks.common.environment import environment, write_json
from benchmarks.gpu.cases import (
    DEFAULT_MODELS,
    UPDATES,
    OpCase,
    attention_cases,
    make_op_inputs,
    quick_op_cases,
    update_cases,
)
from benchmarks.gpu.defaults import default_lines
from paged_jax.kernels import BACKENDS
from paged_jax.kernels.op import backends_of
from paged_jax.kernels.problem import PoolOp

# JAX's name of the platform of a program, by the platform of a device.
_PLATFORMS = {"gpu": "cuda"}


def backends_to_time(op: PoolOp) -> list[str]:
    """Return the names of the backends for the platform that have an op; on CPUs also XLA."""
    platform = jax.devices()[0].platform
    names = [
        name
        for name in backends_of(op)
        if BACKENDS[name].platform == _PLATFORMS.get(platform, platform)
    ]
    return names if platform == "gpu" else [*names, "xla"]


def measure(case: OpCase, rates: Rates, num_rounds: int, turn_seconds: float) -> dict[str, Any]:
    """Time one case on all backends, interleaved, and return its record.

    Args:
      case: the call to time.
      rates: rates of the device.
      num_rounds: number of turns of each kernel.
      turn_seconds: seconds of a turn, if the kernel reaches the rates of the device.
    """
    inputs = make_op_inputs(case)
    calls: dict[tuple[str, str], JaxCall | TorchCall] = {}
    calls |= {(name, ""): inputs.call(name) for name in backends_to_time(case.op)}
    calls |= {(name, s): call for name, made in inputs.others.items() for s, call in made.items()}
    plan = plan_calls(case, rates, turn_seconds)
    prepared, failures = prepare_all(calls, case, inputs.start, plan)
    reference, start = inputs.call("xla"), inputs.start
    expected = jax.jit(lambda start, arrays: reference.op(start, 0, arrays))(
        start, reference.arrays
    )
    failures |= _drop_different(prepared, expected, start if case.op in UPDATES else None)
    settings = fastest_settings(prepared)
    programs = {name: prepared[name, setting].program for name, setting in settings.items()}
    seconds = take_turns(programs, num_rounds)
    left_out = {name: why for (name, _), why in failures.items() if name not in settings}
    return record_of(case) | {
        "us": {name: round(1e6 * s, 2) for name, s in seconds.items()},
        "settings": {name: setting for name, setting in settings.items() if setting},
        "left_out": left_out,
    }


def record_of(case: OpCase) -> dict[str, Any]:
    """Return the record of a case without times."""
    return {
        "op": case.op,
        "key": str(case.key),
        "name": str(case),
        "bytes": case.num_bytes,
        "flops": case.flops,
        "us": {},
    }


def _drop_different(
    prepared: dict[tuple[str, str], Prepared], expected: Any, before: Any
) -> dict[tuple[str, str], str]:
    """Drop the kernels with a different result, and return the differences."""
    errors = {key: result_error(ready.once(), expected, before) for key, ready in prepared.items()}
    different = {key: error for key, error in errors.items() if not error <= TOLERANCE}
    for key in different:
        del prepared[key]
    return {
        key: f"the result has a relative error of {error:.3g}" for key, error in different.items()
    }


def result_error(actual: Any, expected: Any, before: Any) -> float:
    """Return the largest relative error of the arrays of a result; NaN if any value is NaN.

    Args:
      actual: the result.
      expected: the correct result.
      before: the values that the op has updated, or None. The error is relative to the changes,
        because most elements of a pool do not change.
    """
    if before is None:
        before = jax.tree.map(jnp.zeros_like, expected)
    return float(_largest_error(actual, expected, before))


@jax.jit
def _largest_error(actual: Any, expected: Any, before: Any) -> jax.Array:
    def error(actual: jax.Array, expected: jax.Array, before: jax.Array) -> jax.Array:
        actual, expected, before = (x.astype(jnp.float32) for x in (actual, expected, before))
        return jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected - before)

    errors = jax.tree.map(error, actual, expected, before)
    return jnp.max(jnp.stack(jax.tree.leaves(errors)))


def run(cases: list[OpCase], path: Path | None, budget: float, **options: Any) -> dict[str, Any]:
    """Measure cases until `budget` seconds have passed, print and save the results.

    Cases that were not measured have records without times.

    Args:
      cases: cases in order of importance.
      path: file of the report, which is written after every case; or None.
      budget: seconds after which no new case starts.
      **options: arguments of `measure`.
    """
    start = time.monotonic()
    device, rates = jax.devices()[0], measure_rates()
    report = {
        **environment(),
        "accelerator": None if device.platform == "cpu" else device.device_kind,
        **rates._asdict(),
        "results": [],
    }
    print(report["accelerator"] or report["device"], report["versions"], rates, sep="\n")
    for case in cases:
        if time.monotonic() - start > budget:
            record = record_of(case) | {"left_out": {"": "not reached in time"}}
        else:
            try:
                record = measure(case, rates, **options)
            except RuntimeError as error:  # an error of XLA; the other cases are still measured
                record = record_of(case) | {"left_out": {"": reason(error)}}
        report["results"].append(record)
        print(record_line(record), flush=True)
        if path is not None:
            write_json(path, report)
    print(*default_lines(report), sep="\n")
    return report


def record_line(record: dict[str, Any]) -> str:
    """Return one line: the case, and the time of each kernel or the reason why it has none."""
    times = [f"{name} {us:.1f} us" for name, us in record["us"].items()]
    others = [f"{name} {why}".strip() for name, why in record["left_out"].items()]
    return f"{record['op']}, {record['key']}, {record['name']}: {'; '.join([*times, *others])}"


def _choose_cases(options: argparse.Namespace) -> list[OpCase]:
    cases = [*attention_cases(options.models), *update_cases(options.models)]
    chosen = [
        case for case in cases if case.op in options.ops and case.pool_dtype in options.dtypes
    ]
    return quick_op_cases(chosen) if options.quick else chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time all ops on each backend for GPUs.")
    ops: Iterable[str] = get_args(PoolOp)
    parser.add_argument("--ops", nargs="+", choices=ops, default=list(ops))
    models = [*MODELS, *LATENT_MODELS]
    parser.add_argument("--models", nargs="+", choices=models, default=list(DEFAULT_MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=POOL_DTYPES, default=list(POOL_DTYPES))
    parser.add_argument("--budget", type=float, default=240, metavar="SECONDS", help="default: 240")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kernel; default: 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times to this file")
    parser.add_argument("--quick", action="store_true", help="a small case of each op")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and optionally write JSON."""
    options = _parser().parse_args(arguments)
    run(
        _choose_cases(options),
        options.json,
        options.budget,
        num_rounds=options.rounds,
        turn_seconds=0.0 if options.quick else 0.01,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
