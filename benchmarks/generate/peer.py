"""What a peer must do, and the prompts that all of them are given."""

import json
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Peer(Protocol):
    """One engine, loaded with one model."""

    name: str
    """What the results call it, with the variant."""

    def start(self, batch: int, prompt_len: int, new_tokens: int) -> None:
        """Prefills `prompt_tokens(batch, prompt_len, ...)`; `step` may follow `new_tokens` times.

        Any sequences from an earlier `start` are dropped.
        """
        ...

    def step(self) -> np.ndarray:
        """Decodes one token for each sequence and returns them on the host, i64[B]."""
        ...

    def prefill(self, prompt_len: int) -> float:
        """Runs a new prompt up to its next token; returns the seconds. Undoes `start`."""
        ...

    def close(self) -> None:
        """Frees the model."""
        ...


def prompt_tokens(batch: int, prompt_len: int, vocab_size: int) -> np.ndarray:
    """Returns the prompts that every peer is given, i64[B, T]: random, the same in each run.

    Example:
        >>> prompt_tokens(2, 3, 100).shape
        (2, 3)
    """
    # From 3: below are the special tokens of most vocabularies.
    return np.random.default_rng(0).integers(3, vocab_size, (batch, prompt_len), dtype=np.int64)


def timed_steps(peer: Peer, num_steps: int, warmup: int = 1) -> list[float]:
    """Returns the seconds of each of `num_steps` steps, after `warmup` untimed ones."""
    for _ in range(warmup):
        peer.step()
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        peer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a model folder's ``config.json``."""
    return json.loads((folder / "config.json").read_text())
