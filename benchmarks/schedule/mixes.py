"""Batches of sequence lengths: synthetic batches, and batches from recorded traffic."""

from pathlib import Path

import numpy as np

from benchmarks.schedule.rules import Call
from benchmarks.serving.workloads import read_trace

LONG, SHORT = 131072, 1024
"""Number of tokens of the long sequence, and of the other sequences."""

TRACES = {
    "Azure 2023": ("azure2023_conv.csv", 16384, (64, 256)),
    "Mooncake": ("mooncake_conversation.jsonl", LONG, (16, 64)),
}
"""File of each trace, maximum number of tokens of a sequence, and batch sizes."""


def made_up() -> dict[str, Call]:
    """Return even batches, and the worst batches for a fixed division of every sequence."""
    ragged = np.linspace(8192, 819, 64).round().astype(int)
    shuffled = np.random.default_rng(0).permutation(ragged)
    one_long = np.full(64, SHORT)
    one_long[32] = LONG
    return {
        "64 of 8K": Call(np.full(64, 8192), 8192),
        "64 of 8K, table for 128K": Call(np.full(64, 8192), LONG),
        "64, longest 8K, shortest 0.8K": Call(shuffled, 8192),
        "one of 128K among 63 of 1K": Call(one_long, LONG),
        "one of 128K": Call(np.array([LONG]), LONG),
    }


def recorded(folder: Path, num_draws: int) -> dict[str, Call]:
    """Return batches of consecutive requests, each at a random position in its output.

    Args:
      folder: folder of the traces; missing traces are skipped.
      num_draws: number of batches of each size.
    """
    calls = {}
    for name, (file, capacity, batches) in TRACES.items():
        if not (folder / file).is_file():
            continue
        rows = read_trace(folder / file, 10**6)
        random = np.random.default_rng(0)
        for batch in batches:
            if batch > len(rows):
                continue
            for draw in range(num_draws):
                at = random.integers(len(rows) - batch + 1)
                progress = random.uniform(size=batch)
                lengths = [
                    row.prompt_len + int(part * row.new_len)
                    for row, part in zip(rows[at : at + batch], progress, strict=True)
                ]
                call = Call(np.minimum(lengths, capacity), capacity)
                calls[f"{batch} of {name}, draw {draw + 1}"] = call
    return calls
