"""Protocol of a peer, and the prompts for all peers."""

import json
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Peer(Protocol):
    """An engine with a loaded model."""

    name: str
    """Name in the results, with the variant."""

    def start(self, batch: int, prompt_len: int, new_tokens: int) -> None:
        """Prefill `prompt_tokens(batch, prompt_len, ...)`, for up to `new_tokens` steps.

        Sequences from an earlier `start` are dropped.
        """
        ...

    def step(self) -> np.ndarray:
        """Decode one token for each sequence and return the tokens on the host, i64[B]."""
        ...

    def prefill(self, prompt_len: int) -> float:
        """Return the seconds to compute the next token of a new prompt."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


def prompt_tokens(batch: int, prompt_len: int, vocab_size: int) -> np.ndarray:
    """Return the prompts for every peer, i64[B, T]: random, and the same in each run.

    Example:
        >>> prompt_tokens(2, 3, 100).shape
        (2, 3)
    """
    # From 3, because most vocabularies have their special tokens below.
    return np.random.default_rng(0).integers(3, vocab_size, (batch, prompt_len), dtype=np.int64)


def timed_steps(peer: Peer, num_steps: int, warmup: int = 1) -> list[float]:
    """Return the seconds of each of `num_steps` steps, after `warmup` untimed steps."""
    for _ in range(warmup):
        peer.step()
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        peer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of the ``config.json`` of a model folder."""
    return json.loads((folder / "config.json").read_text())
