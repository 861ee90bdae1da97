"""Benchmark of the cost of exact numerics: decode steps and prompts, in turns with fast numerics.

    python -m benchmarks.exact_steps --json exact-steps.json

Two engines with the same random weights decode the same sequences. Their dispatches alternate, so
that both see the same load of the machine. They plan no dispatch ahead, because it would run while
the other engine is measured. Prompts are measured in the same way. The default takes about three
minutes on two cores. Without the C++ kernels, exact numerics are slow:

    python -m benchmarks.exact_steps --backend xla --sizes 1x512 --rounds 3
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.environment import environment
from benchmarks.common.shapes import DTYPES, SHAPES, write_random_model
from paged_jax import Engine, SamplingParams

NUMERICS = ("fast", "exact")
# Numbers of rows, and of tokens in each.
SIZES = ((1, 512), (16, 512), (16, 2048))


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


def median_ratio(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median seconds with each numerics, and the median of the ratios of pairs."""
    pairs = zip(*(seconds[name] for name in NUMERICS), strict=True)
    medians = {name: statistics.median(seconds[name]) for name in NUMERICS}
    return medians | {"ratio": statistics.median(exact / fast for fast, exact in pairs)}


def measure(
    make: Any, batch_size: int, length: int, num_rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a decode dispatch, and of a prompt, with each numerics."""
    engines = {name: make(numerics=name, max_num_seqs=batch_size) for name in NUMERICS}
    decode: dict[str, list[float]] = {name: [] for name in NUMERICS}
    prompt: dict[str, list[float]] = {name: [] for name in NUMERICS}
    for engine in engines.values():
        engine.core.scheduler.lookahead.is_used = False
        add_requests(engine, 1, length, 1, seed=0)  # compile
        while engine.has_unfinished:
            engine.step()
    for round in range(num_rounds):
        for name, engine in engines.items():
            add_requests(engine, 1, length, 1, seed=1 + round)
            start = time.perf_counter()
            while engine.has_unfinished:
                engine.step()
            prompt[name].append(time.perf_counter() - start)
    for engine in engines.values():
        # Early rows decode while later rows are still computing their prompts.
        max_tokens = 8 * (num_rounds + 4) + batch_size * length // 512
        add_requests(engine, batch_size, length, max_tokens, seed=100)
        while len(engine.step()) < batch_size:
            pass
        engine.step()  # compiles, if no dispatch had all rows before
    for _ in range(num_rounds):
        for name, engine in engines.items():
            start = time.perf_counter()
            engine.step()
            decode[name].append(time.perf_counter() - start)
    return median_ratio(decode), median_ratio(prompt)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="Measure the cost of exact numerics.")
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--backend", choices=("cpu", "xla"), help="default: the best")
    sizes = " ".join(f"{rows}x{tokens}" for rows, tokens in SIZES)
    parser.add_argument(
        "--sizes", type=read_size, nargs="+", default=SIZES, metavar="ROWSxTOKENS",
        help=f"numbers of rows, and of tokens in each; default: {sizes}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    print(f"{'rows':>5}{'tokens':>8}{'dispatch: fast':>16}{'exact':>10}{'ratio':>7}", end="")
    print(f"{'prompt: fast':>16}{'exact':>10}{'ratio':>7}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(args.shape, folder, args.dtype)
        allow_long_sequences(Path(folder, "config.json"))
        for batch_size, length in args.sizes:
            make = functools.partial(
                Engine, folder, backend=args.backend, max_model_len=length + 256,
                num_blocks=batch_size * (length + 256) // 16 + 64, enable_prefix_caching=False,
            )  # fmt: skip
            decode, prompt = measure(make, batch_size, length, args.rounds)
            print(f"{batch_size:>5}{length:>8}", end="")
            for figures, width in ((decode, 16), (prompt, 16)):
                print(f"{figures['fast']:>{width - 2}.3f} s{figures['exact']:>8.3f} s", end="")
                print(f"{figures['ratio']:>7.2f}", end="")
            print()
            row = {"rows": batch_size, "tokens": length, "dispatch": decode, "prompt": prompt}
            rows.append(row)
    if args.json:
        options = {"shape": args.shape, "dtype": args.dtype, "backend": args.backend}
        report = {**environment(), **options, "measurements": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
