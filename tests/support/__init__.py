"""Shared code of tests: oracles, fakes, poisoned batches, a tiny model and its server."""

from pathlib import Path

# Root of the checkout.
ROOT = Path(__file__).resolve().parents[2]
# Files that tests read: quantised checkpoints, configs, and values of other libraries.
DATA = ROOT / "tests" / "data"
