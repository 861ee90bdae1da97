"""From logits to tokens: what a user may ask for, the state of each slot, and the draw itself."""

from paged_jax.sampling.constraints import Constraints
from paged_jax.sampling.keys import fold_in
from paged_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from paged_jax.sampling.sample import Draws, ranks, rows_of, sample, top_logprobs
from paged_jax.sampling.state import SlotRow, SlotSampling, settle, slot_row, write_rows, write_slot
from paged_jax.sampling.structured import StructuredOutputsParams
from paged_jax.sampling.token_bias import NO_BIAS, TokenBias

__all__ = [
    "MAX_LOGPROBS",
    "NO_BIAS",
    "Constraints",
    "Draws",
    "SamplingParams",
    "SlotRow",
    "SlotSampling",
    "StructuredOutputsParams",
    "TokenBias",
    "fold_in",
    "ranks",
    "rows_of",
    "sample",
    "settle",
    "slot_row",
    "top_logprobs",
    "write_rows",
    "write_slot",
]
