"""From logits to tokens: what a user may ask for, the state of each slot, and the draw itself."""

from paged_jax.sampling.keys import fold_in
from paged_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from paged_jax.sampling.sample import Draws, ranks, rows_of, sample, top_logprobs
from paged_jax.sampling.state import SlotSampling, settle, write_slot

__all__ = [
    "MAX_LOGPROBS",
    "Draws",
    "SamplingParams",
    "SlotSampling",
    "fold_in",
    "ranks",
    "rows_of",
    "sample",
    "settle",
    "top_logprobs",
    "write_slot",
]
