"""What tests share: oracles, fakes, poisoned batches, a tiny model and its server."""

from pathlib import Path

# Of the checkout.
ROOT = Path(__file__).resolve().parents[2]
