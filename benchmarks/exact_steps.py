"""Benchmark of the cost of exact numerics: decode steps and prompts, in turns with fast numerics.

    python -m benchmarks.exact_steps --json exact-steps.json

Two engines with the same random weights decode the same sequences. Their dispatches alternate, so
that both see the same load of the machine. They plan no dispatch ahead, because it would run while
the other engine is measured. Prompts are measured in the same way. The default takes about three
minutes on two cores. Without the C++ kernels, exact numerics are slow:

    python -m benchmarks.exact_steps --backend xla --sizes 1x512 --rounds 3
"""

import itertools
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.common.shapes import DTYPES, SHAPES, write_random_model
from benchmarks.harness import Column
from paged_jax import Engine, SamplingParams

NUMERICS = ("fast", "exact")
# Numbers of rows, and of tokens in each.
SIZES = ((1, 512), (16, 512), (16, 2048))


def _columns(part: str) -> tuple[Column, ...]:
    return (
        Column(f"{part}: fast", 16, lambda record: record[part]["fast"], "{:.3f} s"),
        Column("exact", 10, lambda record: record[part]["exact"], "{:.3f} s"),
        Column("ratio", 7, lambda record: record[part]["ratio"], "{:.2f}"),
    )


COLUMNS = (
    Column("rows", 5, "rows"),
    Column("tokens", 8, "tokens"),
    *_columns("dispatch"),
    *_columns("prompt"),
)


def read_size(text: str) -> tuple[int, int]:
    """Return the number of rows and of tokens, written as 16x512."""
    num_rows, num_tokens = map(int, text.split("x"))
    return num_rows, num_tokens


def allow_long_sequences(path: Path) -> None:
    """Raise the maximum length in a `config.json`, which the sizes exceed by the new tokens."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": 8192}))


def add_requests(engine: Engine, batch_size: int, length: int, max_tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    for _ in range(batch_size):
        tokens = rng.integers(3, engine.model.config.vocab_size, length).tolist()
        engine.add_request({"prompt_token_ids": tokens}, params)


def run_all(engine: Engine) -> None:
    """Run an engine until it has no requests."""
    while engine.has_unfinished:
        engine.step()


def ratio_record(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median seconds with each numerics, and the median of the ratios of pairs."""
    return harness.medians(seconds) | {"ratio": harness.median_ratios(seconds, "fast")["exact"]}


def measure(
    make: Any, batch_size: int, length: int, num_rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a decode dispatch, and of a prompt, with each numerics."""
    engines = {name: make(numerics=name, max_num_seqs=batch_size) for name in NUMERICS}
    for engine in engines.values():
        engine.core.scheduler.lookahead.is_used = False
        add_requests(engine, 1, length, 1, seed=0)  # compile
        run_all(engine)
    seeds = {name: itertools.count(1) for name in NUMERICS}

    def run_prompt(name: str) -> float:
        add_requests(engines[name], 1, length, 1, seed=next(seeds[name]))
        return harness.elapsed(lambda: run_all(engines[name]))

    prompt = harness.take_turns({name: partial(run_prompt, name) for name in NUMERICS}, num_rounds)
    for engine in engines.values():
        # Early rows decode while later rows are still computing their prompts.
        max_tokens = 8 * (num_rounds + 4) + batch_size * length // 512
        add_requests(engine, batch_size, length, max_tokens, seed=100)
        while len(engine.step()) < batch_size:
            pass
        engine.step()  # compiles, if no dispatch had all rows before
    decode = harness.take_turns(
        {name: partial(harness.elapsed, engine.step) for name, engine in engines.items()},
        num_rounds,
    )
    return ratio_record(decode), ratio_record(prompt)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = harness.command_line("Measure the cost of exact numerics.", rounds=7)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--backend", choices=("cpu", "xla"), help="default: the best")
    sizes = " ".join(f"{rows}x{tokens}" for rows, tokens in SIZES)
    parser.add_argument(
        "--sizes", type=read_size, nargs="+", default=SIZES, metavar="ROWSxTOKENS",
        help=f"numbers of rows, and of tokens in each; default: {sizes}",
    )  # fmt: skip
    args = parser.parse_args(argv)
    print(harness.heading(COLUMNS))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(args.shape, folder, args.dtype)
        allow_long_sequences(Path(folder, "config.json"))
        for batch_size, length in args.sizes:
            make = partial(
                Engine, folder, backend=args.backend, max_model_len=length + 256,
                num_blocks=batch_size * (length + 256) // 16 + 64, enable_prefix_caching=False,
            )  # fmt: skip
            dispatch, prompt = measure(make, batch_size, length, args.rounds)
            rows.append(
                {"rows": batch_size, "tokens": length, "dispatch": dispatch, "prompt": prompt}
            )
            print(harness.row(COLUMNS, rows[-1]), flush=True)
    options = {"shape": args.shape, "dtype": args.dtype, "backend": args.backend}
    harness.finish(args, {**harness.environment(), **options, "measurements": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
