"""The device's side of the engine: the state, and the programs that change it."""

from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import StepTokens, decode_steps, verify_steps
from paged_jax.runner.executor import Pending
from paged_jax.runner.programs import BeamTokens, Scores
from paged_jax.runner.replicas import ReplicaError
from paged_jax.runner.runner import ModelRunner
from paged_jax.runner.sizes import MAX_NUM_BATCHED_TOKENS, Sizes
from paged_jax.runner.slots import Slots, slot_of
from paged_jax.runner.weights import Weights

__all__ = [
    "MAX_NUM_BATCHED_TOKENS",
    "BeamTokens",
    "DecodeState",
    "ModelRunner",
    "Pending",
    "ReplicaError",
    "Scores",
    "Sizes",
    "Slots",
    "StepTokens",
    "Weights",
    "decode_steps",
    "slot_of",
    "verify_steps",
]
