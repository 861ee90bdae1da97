"""Benchmark of importance ratios before an update: log-probabilities of engine and trainer.

    python -m benchmarks.log_probs --json log-probs.json

An engine draws samples, and `log_probs` computes their log-probabilities again in one forward pass,
as a trainer does. Without rounding, both are equal, and all ratios are 1.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Column, command_line, environment, finish, heading, row
from paged_jax import LLM, SamplingParams, log_probs
from paged_jax.rollouts import read_rows

# Dtypes of the weights and of the cache.
DTYPES = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
COLUMNS = (
    Column("weights", -10, "weights"),
    Column("cache", -10, "cache"),
    Column("numerics", -10, "numerics"),
    Column("equal", 7, "equal", "{:.1%}"),
    Column("mean", 10, "mean", "{:.1e}"),
    Column("max", 10, "max", "{:.1e}"),
    Column("> 1%", 7, "ratios_off_by_1_percent", "{:.1%}"),
)
PROMPTS = [
    "It is a truth",
    "She was",
    "The morning after the ball they all",
    "There was nothing in the world that could",
    "My dear",
    "When the carriage",
    "I",
    "Dorothy said that",
]


def measure(
    model: Path | None, dtype: str, kv_dtype: str, numerics: str, num_samples: int, max_tokens: int
) -> dict[str, Any]:
    """Return the differences of log-probabilities between an engine and `log_probs`."""
    options: Any = {"model": model, "dtype": dtype, "kv_dtype": kv_dtype, "numerics": numerics}
    llm = LLM(**options, show_progress=False)
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    params = SamplingParams(n=num_samples, max_tokens=max_tokens, seed=0, ignore_eos=True)
    drawn = llm.rollout(prompts, None, params)
    rows = read_rows("measure", "prompts", prompts, "num_tokens", None)
    scores = jax.jit(log_probs)(llm.model, *rows, drawn.token_ids, num_drawn=drawn.num_drawn)
    differences = (np.asarray(scores) - drawn.logprobs)[np.asarray(drawn.mask)]
    ratios = np.exp(differences)
    return {
        "weights": dtype,
        "cache": drawn.cache_dtype,
        "numerics": numerics,
        "equal": float(np.mean(differences == 0)),
        "mean": float(np.mean(np.abs(differences))),
        "max": float(np.max(np.abs(differences))),
        "ratios_off_by_1_percent": float(np.mean(np.abs(ratios - 1) > 0.01)),
        "num_tokens": differences.size,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = command_line("Measure importance ratios of unchanged weights, with each dtype.")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: the bundled model")
    parser.add_argument("--samples", type=int, default=8, help="number of samples per prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    print(heading(COLUMNS))
    rows = []
    for numerics in ("fast", "exact"):
        for dtypes in DTYPES:
            rows.append(measure(args.model, *dtypes, numerics, args.samples, args.max_tokens))
            print(row(COLUMNS, rows[-1]), flush=True)
    finish(args, {**environment(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
