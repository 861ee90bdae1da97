"""Assignment of sequences to slots."""

import dataclasses

import jax
import numpy as np
import pytest

from paged_jax.runner import decode_state
from paged_jax.runner.compiler import jit_for
from paged_jax.runner.decode_state import DecodeState
from tests.support.decode_sequences import (
    GREEDY,
    PENALISED,
    PROMPTS,
    S,
    Sequence,
    start,
)
from tests.support.tiny_model import BOS


def test_assign_rejects_invalid_sequences(model) -> None:
    state = start(model, [])
    for changes, message in (
        ({"num_prompt_tokens": 3}, r"num_prompt_tokens must be in \[1, 2\].*got 3"),
        ({"max_length": 2}, "max_length must be above 2, the number of token_ids.*got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(Sequence([BOS, 5]), **changes).assign(state, 0)


def test_assign_compiles_one_program_for_one_and_one_for_several(model, monkeypatch) -> None:
    monkeypatch.setattr(decode_state, "_WIDTH", 2)
    sequences = [
        Sequence(prompt, PENALISED if slot % 2 else GREEDY, seed=slot, sample_index=slot)
        for slot, prompt in enumerate(PROMPTS)
    ]
    assert len(sequences) == S == 4

    def assigned(*counts: int) -> DecodeState:
        state, first = start(model, []), 0
        for count in counts:
            pairs = list(enumerate(sequences))[first : first + count]
            state = decode_state.assign(state, [each.assignment(slot) for slot, each in pairs])
            first += count
        return state

    expected = assigned(1, 1, 1, 1)
    assert expected.token_ids.tolist() == [prompt[-1] for prompt in PROMPTS]
    assigned(2, 2)
    write = jit_for("cpu", decode_state._write_rows, donate_argnums=0)
    before = write._cache_size()
    # All slots in one call; some slots, with the last slot in a separate call; no slot.
    jax.tree.map(np.testing.assert_array_equal, assigned(4), expected)
    jax.tree.map(np.testing.assert_array_equal, assigned(1, 0, 3), expected)
    assert write._cache_size() == before > 0
