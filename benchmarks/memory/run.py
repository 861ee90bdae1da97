"""Benchmark of KV memory that holds tokens: contiguous and paged, by formula and in the allocator.

    python -m benchmarks.memory                                  # a few minutes
    python -m benchmarks.memory --quick                          # less than a minute
    python -m benchmarks.memory --json memory.json --plot memory.png

It measures the fraction of the memory that holds tokens, the effect of the block size, the cost of
a shared prompt, the number of sequences in a memory budget, and the blocks that samples and beams
of a prompt share. It runs the allocator of the library under jit; see `allocator.py` and
`sharing.py`. A full run reports whether each goal is met.

Only the times depend on the machine: counts depend only on the seed. (Beams come from a model, so
rounding on another device may lead to other beams.)
"""

import argparse
from typing import NamedTuple

from benchmarks.common.environment import environment, write_json
from benchmarks.common.figures import add_outputs, plotter
from benchmarks.memory import allocator as allocator
from benchmarks.memory import sharing as sharing
from benchmarks.memory.report import Report, all_lines, goal_lines, plot
from paged_jax.models.decoder import Decoder


class Sizes(NamedTuple):
    """Sizes of the measurements.

    Attributes:
      batches: numbers of concurrent sequences, ascending.
      num_draws: number of draws of each batch.
      block_sizes: block sizes to compare.
      num_slots: number of slots in the comparison of block sizes.
      num_rounds: number of timing rounds.
      num_contiguous: number of contiguous sequences that fit into the fixed budget.
      held_tokens: numbers of tokens of each sequence in the budget.
      widths: numbers of samples of a prompt, and of beams.
      num_requests: number of requests for sampling and beam search.
      group_size: number of requests in one beam search.
      max_length: maximum number of tokens of such a request.
    """

    batches: tuple[int, ...] = (10, 20, 50, 100, 150, 200)
    num_draws: int = 10
    block_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    num_slots: int = 64
    num_rounds: int = 9
    num_contiguous: int = 16
    held_tokens: tuple[int, ...] = (50, 100, 200, 500, 1000, 2048)
    widths: tuple[int, ...] = (2, 4, 6)
    num_requests: int = 64
    group_size: int = 8
    max_length: int = 512


FULL = Sizes()
QUICK = Sizes(
    batches=(2, 10),
    num_draws=1,
    block_sizes=(16, 256),
    num_slots=4,
    num_rounds=1,
    num_contiguous=2,
    held_tokens=(200,),
    widths=(2,),
    num_requests=4,
    group_size=4,
    max_length=64,
)


def run(sizes: Sizes, model: Decoder, seed: int) -> Report:
    """Measure everything, and return the report without its goals."""
    max_length = min(sizes.max_length, model.config.max_position_embeddings)
    requests = sharing.draw_requests(sizes.num_requests, max_length, seed)
    return {
        **environment(),
        "seed": seed,
        "sizes": sizes._asdict(),
        "max_length": allocator.MAX_LENGTH,
        "block_size": allocator.BLOCK_SIZE,
        "implied_mean_lengths": allocator.implied_means(0.24, 0.985),
        "utilisation": allocator.measure_utilisation(sizes.batches, sizes.num_draws, seed),
        "block_sizes": allocator.measure_block_sizes(
            sizes.block_sizes, sizes.num_slots, sizes.num_rounds, seed
        ),
        "shared_prompt": allocator.measure_shared_prompt(),
        "concurrency": allocator.measure_concurrency(sizes.num_contiguous, sizes.held_tokens),
        "requests": {
            "mean_prompt": float(requests.num_prompt.mean()),
            "mean_output": float(requests.num_output.mean()),
            "spread_prompt": sharing.SPREAD_PROMPT,
            "spread_output": sharing.SPREAD_OUTPUT,
            "num_requests": sizes.num_requests,
            "max_length": max_length,
        },
        "sharing": sharing.measure(
            model, requests, sizes.widths, allocator.BLOCK_SIZE, sizes.group_size, seed
        ),
        "saved_by_spread": sharing.saved_by_spread(
            (0.4, 0.6, 0.8, 1.0), max(sizes.widths), allocator.BLOCK_SIZE, seed
        ),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure how much KV memory holds tokens, contiguous and paged."
    )
    parser.add_argument("--quick", action="store_true", help="run small sizes, without goals")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random values; default: 0")
    add_outputs(parser)
    return parser


def load_model() -> Decoder:
    """Load the bundled model in float32, which is the fastest dtype on CPUs."""
    return Decoder.from_pretrained(dtype="float32")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and optionally write JSON and a plot."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed must not be negative, got {options.seed}.")
    report = run(QUICK if options.quick else FULL, load_model(), options.seed)
    # A few small sequences cannot be compared with the published figures for many sequences.
    report["goals"] = [] if options.quick else goal_lines(report)
    print(*all_lines(report), *report["goals"], sep="\n")
    if options.json:
        write_json(options.json, report)
    if options.plot:
        plot(plotter(), report, options.plot)
    return 0
