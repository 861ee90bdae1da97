"""Check and time matrix multiplication with weights in every quantised format.

    python -m benchmarks.weight_formats_time --json weight-formats.json
    python -m benchmarks.weight_formats_time --formats q4_0 mxfp4 --rows 1 2048
    python -m benchmarks.weight_formats_time --int8-inputs --rows 16 512   # int8 activations

A program multiplies by many different weights in turn, so that no cache contains a weight. Each
result is the input of the next multiplication. Before the measurement, a result is compared with
the same multiplication in float64. For each format the table shows the time of a multiplication,
the rate at which the weight is read as it is stored, compared with the copy rate of the device, and
the speed compared with bfloat16. On a GPU it also shows the speed compared with XLA, which converts
a tile of the weight to floats before it multiplies.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common.device_time import Program, median_seconds, memory_rate
from benchmarks.harness import Budget, Column, command_line, environment, finish, heading, row
from paged_jax.kernels.linear import Weight, linear
from paged_jax.kernels.platforms import weight_store
from paged_jax.kernels.weight_formats import (
    CODES,
    WeightArrays,
    WeightFormat,
    dequantise,
    num_bits,
)
from paged_jax.kernels.weight_packing import pack, store_scales

FORMATS: Mapping[str, WeightFormat] = {
    "bfloat16": WeightFormat("bfloat16"),
    "int8 of a row": WeightFormat("int8", None, "float32"),
    "fp8 of a row": WeightFormat("float8_e4m3fn", None, "float32"),
    "int4 in groups of 128": WeightFormat("int4", 128, "bfloat16"),
    "awq": WeightFormat("int4", 128, "float16", "float32"),
    "q4_0": WeightFormat("int4", 32, "float16"),
    "q4_1": WeightFormat("uint4", 32, "float16", "float16"),
    "q4_k": WeightFormat("uint4", 32, "int8", "int8"),
    "iq4_nl": WeightFormat("iq4", 32, "float16"),
    "mxfp4": WeightFormat("e2m1", 32, "bfloat16"),
    "nvfp4": WeightFormat("e2m1", 16, "float32"),
    "nf4": WeightFormat("nf4", 64, "float32"),
    "q8_0": WeightFormat("int8", 32, "float16"),
    "q5_0": WeightFormat("int5", 32, "float16"),
    "q5_1": WeightFormat("uint5", 32, "float16", "float16"),
    "q6_k": WeightFormat("int8", 16, "int8"),
    "fp8 in blocks of 128": WeightFormat("float8_e4m3fn", 128, "float32"),
}

COLUMNS = (
    Column("format", -22, "format"),
    Column("rows", 6, "rows"),
    Column("time", 15, "microseconds", "{:.1f} us"),
    Column("of rate", 10, "of_copy_rate", "{:.1%}"),
    Column("of bf16", 11, "over_bfloat16", "{:.2f} x"),
    Column("of XLA", 11, "over_xla", "{:.2f} x"),
    Column("error", 10, "error", "{:.1e}"),
)

# Largest error of a result, relative to the sum of the magnitudes of its terms: rows, scales and
# weights are rounded to bfloat16.
MAX_ERROR = 2**-7


def random_weight(format: WeightFormat, size: int, rng: np.random.Generator) -> WeightArrays:
    """Return a random square weight, with rows of about unit length."""
    if not format.is_quantised:
        values = rng.standard_normal((size, size), np.float32) / size**0.5
        return WeightArrays(values.astype(format.value_dtype))
    if format.is_packed:
        bits = num_bits(format.code)
        values = pack(rng.integers(0, 1 << bits, (size, size), np.uint8), bits)
        spread = float(np.std(CODES[format.code]))
    else:
        values = rng.integers(-100, 100, (size, size), np.int8)
        values = values.astype(np.float32).astype(format.value_dtype)
        spread = 58.0
    groups = (size, size // (format.group_size or size))
    scales = rng.uniform(0.5, 1.5, groups).astype(np.float32) / (spread * size**0.5)
    mean = float(np.mean(CODES[format.code])) if format.is_packed else 0.0
    return WeightArrays(
        values,
        store_scales(scales, format.scale_dtype, size),
        store_scales(-mean * scales, format.min_dtype, size),
    )


def as_weight(arrays: WeightArrays, format: WeightFormat, int8_inputs: bool = False) -> Weight:
    """Return a square weight on the first device, stored as engines store it."""
    size = arrays.values.shape[0]
    store = weight_store(jax.default_backend())
    [layout] = store.layouts([(format, (size, size))], jnp.bfloat16)
    stored = arrays if layout is None else arrays.map_rows(layout.prepare)
    on_device = jax.tree.map(jnp.asarray, stored)
    stored_format = replace(format, layout=layout)
    return Weight.of_format(on_device, stored_format, jnp.bfloat16, int8_inputs=int8_inputs)


def relative_error(
    arrays: WeightArrays, format: WeightFormat, num_rows: int, int8_inputs: bool = False
) -> float:
    """Return the largest error of a result, relative to the sum of the magnitudes of its terms."""
    rng = np.random.default_rng(1)
    size = arrays.values.shape[0]
    x = rng.standard_normal((num_rows, size), np.float32)
    multiply = jax.jit(linear)
    got = np.asarray(multiply(jnp.asarray(x), as_weight(arrays, format, int8_inputs)), np.float64)
    w = dequantise(arrays, format.code).astype(np.float64)
    groups = dequantise(arrays._replace(mins=None), format.code).astype(np.float64)
    terms = np.abs(x) @ (np.abs(groups) + np.abs(w - groups)).T
    return float((np.abs(got - x @ w.T) / terms).max())


def make_program(weights: list[Weight], num_rows: int, backend: str | None = None) -> Program:
    """Return a program that multiplies by each of the weights with a backend of `linear`."""
    size = weights[0].shape[-1]
    # A call of a program takes as long as many matmuls on a GPU.
    num_loops = 16 if jax.default_backend() == "gpu" else 1

    @jax.jit
    def chain(x: jax.Array, weights: list[Weight]) -> jax.Array:
        def body(_: int, x: jax.Array) -> jax.Array:
            for w in weights:
                x = linear(x, w, backend=backend)
            return x

        return jax.lax.fori_loop(0, num_loops, body, x)

    x = jnp.asarray(np.random.default_rng(2).standard_normal((num_rows, size), np.float32))
    program = Program(lambda: chain(x, weights).block_until_ready(), num_loops * len(weights))
    program.run()
    return program


def measure(
    names: list[str],
    rows: list[int],
    size: int,
    num_weights: int,
    rounds: int,
    budget: float,
    int8_inputs: bool = False,
) -> dict[str, Any]:
    """Return the figures of all formats and numbers of rows, until the budget is used up.

    Args:
      names: formats of `FORMATS`.
      rows: numbers of rows.
      size: inputs and outputs of a weight.
      num_weights: number of different weights.
      rounds: number of measurements.
      budget: seconds after which no other format is measured.
      int8_inputs: whether inputs are rounded to int8.
    """
    limit, rng = Budget(budget), np.random.default_rng(0)
    figures = []
    rate = memory_rate()
    floats = [as_weight(random_weight(FORMATS["bfloat16"], size, rng), FORMATS["bfloat16"])]
    floats = [jax.tree.map(lambda x: x + 0, floats[0]) for _ in range(num_weights)]
    for name in names:
        if limit.is_over():
            print(f"{name}: no time left")
            continue
        format = weight_store(jax.default_backend()).stored_format(FORMATS[name], num_devices=1)
        arrays = random_weight(format, size, rng)
        weights = [as_weight(arrays, format, int8_inputs) for _ in range(num_weights)]
        stored = format.num_bytes((size, size))
        for num_rows in rows:
            error = relative_error(arrays, format, num_rows, int8_inputs)
            programs = {
                "format": make_program(weights, num_rows),
                "bfloat16": make_program(floats, num_rows),
            }
            if format.is_quantised and jax.default_backend() == "gpu":
                programs["xla"] = make_program(weights, num_rows, "xla")
            seconds = median_seconds(programs, rounds)
            figures.append(
                {
                    "format": name,
                    "rows": num_rows,
                    "microseconds": 1e6 * seconds["format"],
                    "of_copy_rate": stored / seconds["format"] / 1e9 / rate,
                    "over_bfloat16": seconds["bfloat16"] / seconds["format"],
                    "over_xla": seconds["xla"] / seconds["format"] if "xla" in seconds else None,
                    "error": error,
                }
            )
            print(row(COLUMNS, figures[-1]), flush=True)
    return {"size": size, "copy_rate": rate, "figures": figures}


def main(argv: list[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a result is wrong."""
    parser = command_line("Check and time weights in quantised formats.", budget=1e9, rounds=15)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 2048])
    parser.add_argument("--size", type=int, default=4096, help="inputs and outputs of a weight")
    parser.add_argument("--weights", type=int, default=16, help="number of different weights")
    parser.add_argument("--int8-inputs", action="store_true", help="round inputs to int8")
    args = parser.parse_args(argv)
    print(heading(COLUMNS))
    sizes = args.rows, args.size, args.weights
    report = measure(args.formats, *sizes, args.rounds, args.budget, args.int8_inputs)
    finish(args, {**environment(), **report})
    wrong = [figure for figure in report["figures"] if not figure["error"] <= MAX_ERROR]
    for figure in wrong:
        print(f"wrong: {row(COLUMNS, figure)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
