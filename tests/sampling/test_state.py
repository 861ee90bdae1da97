"""Sampling state of the slots, and the rows that the host writes."""

import jax
import numpy as np
import pytest

from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.state import SlotSampling
from paged_jax.sampling.structured_outputs import StructuredOutputsParams
from tests.support.decode_sequences import write_slot

V = 70


def test_write_slot_changes_only_its_slot():
    params = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=2.0,
        logit_bias={4: 1.5},
        min_tokens=3,
        stop_token_ids=[5],
    )
    fresh = jax.tree.map(np.array, SlotSampling.create(3, 6, max_logit_bias=2, max_stop_ids=2))
    state = SlotSampling.create(3, 6, max_logit_bias=2, max_stop_ids=2)
    state = write_slot(state, 1, params, seed=1, prompt_token_ids=[0, 0], output_token_ids=[2, 2])
    for field in ("temperature", "top_k", "top_p", "min_p"):
        assert getattr(state, field)[1] == getattr(params, field)
    for field in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert getattr(state, field)[1] == getattr(params, field)
    assert state.bias_ids[1].tolist() == [4, 6] and state.bias_values[1].tolist() == [1.5, 0]
    assert state.held_ids[1].tolist() == [5, 6] and state.held_until[1] == 5
    assert state.prompt_mask[1].tolist() == [True] + [False] * 5
    assert state.output_counts[1].tolist() == [0, 0, 2, 0, 0, 0]
    # A later request without options resets all fields.
    state = write_slot(state, 1, SamplingParams(temperature=0), seed=0)
    for name, before in vars(fresh).items():
        after = np.array(getattr(state, name))
        rows = [0, 2] if name == "keys" else [0, 1, 2]
        np.testing.assert_array_equal(after[rows], before[rows], err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": 2}, r"slot must be an integer in \[0, 2\), got 2"),
        ({"slot": -1}, r"slot must be an integer in \[0, 2\), got -1"),
        ({"seed": 2**63}, "seed must be an integer in"),
        ({"seed": -1}, "seed must be an integer in"),
        ({"sample_index": -1}, "sample_index must be an integer in"),
        ({"prompt_token_ids": [10]}, r"prompt_token_ids must hold token ids in \[0, 10\), got 10"),
        ({"output_token_ids": [-1]}, "output_token_ids must hold token ids"),
        ({"params": SamplingParams(logit_bias={10: 1.0})}, "logit_bias must hold token ids"),
        (
            {"params": SamplingParams(logit_bias={0: 1, 1: 1, 2: 1})},
            "logit_bias must have at most 2 entries, got 3",
        ),
        (
            {"params": SamplingParams(min_tokens=1, stop_token_ids=[1, 2, 3])},
            "stop_token_ids must have at most 2 entries, got 3",
        ),
    ],
    ids=str,
)
def test_slot_row_rejects(change, message):
    state = SlotSampling.create(2, 10, max_logit_bias=2, max_stop_ids=2)
    arguments = {"slot": 0, "params": SamplingParams(), "seed": 0, **change}
    with pytest.raises(ValueError, match=f"slot_row: {message}"):
        write_slot(state, **arguments)
    assert not state.temperature.is_deleted()


@pytest.mark.parametrize(
    "sizes", [{"num_slots": 0}, {"vocab_size": 0}, {"max_logit_bias": -1}, {"max_stop_ids": 1.5}]
)
def test_create_rejects_invalid_sizes(sizes):
    (name,) = sizes
    with pytest.raises(ValueError, match=f"SlotSampling.create: {name} must be an integer >= "):
        SlotSampling.create(**{"num_slots": 1, "vocab_size": 4, **sizes})


def test_slot_row_leaves_min_tokens_to_the_grammar_mask() -> None:
    """The mask may end the text before min_tokens, if no other token can follow."""
    for form, is_held in ((StructuredOutputsParams(regex="a"), False), (None, True)):
        params = SamplingParams(min_tokens=3, structured_outputs=form)
        state = write_slot(SlotSampling.create(3, V), 1, params, seed=0, eos_token_ids=[5])
        assert bool((state.held_ids[1] == 5).any()) is is_held
        assert bool(state.held_until[1] == 3) is is_held
