"""The states of draft tokens: scored first, and applied only as far as they are accepted."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from paged_jax.cache.attention_metadata import AttentionMetadata, StateMetadata
from paged_jax.models.layer_attention import Recurrence
from paged_jax.models.layer_groups import StateShape
from paged_jax.models.paged_attention import DraftAttention, DraftCarry, PrefillAttention
from paged_jax.models.recurrent_states import DraftStates
from tests.support.block_tables import i32


def test_states_advance_over_accepted_tokens_only() -> None:
    """Accept one of three tokens, none, and all. A state is the sum of its tokens."""

    def advance(inputs, states, num_tokens):
        is_token = jnp.arange(3)[None] < num_tokens[:, None]
        sums = jnp.sum(jnp.where(is_token, inputs[0][:, :, 0], 0), axis=1)
        return inputs[0], (states[0] + sums[:, None],)

    inputs, entries = jnp.arange(1.0, 10.0).reshape(9, 1), i32([0, 1, 2])
    metadata = AttentionMetadata(
        seq_lens=i32([3, 3, 3]),
        num_tokens=i32([3, 3, 3]),
        positions=i32([0, 1, 2] * 3),
        groups=(StateMetadata(entries, entries),),
        layers=(None,),
        recurrent_layers=((0, 0, 0),),
        block_size=4,
    )
    config = cast(Any, None)  # used only by attention layers
    attend = DraftAttention(PrefillAttention(metadata, config, None))
    recurrence = Recurrence((inputs,), advance, (StateShape("sum", (1,), None),))
    carry = DraftCarry((((jnp.full((1, 4, 1), 100.0),),),), ())
    out, carry = attend(0, recurrence, carry)
    np.testing.assert_array_equal(out, inputs)
    [[[pool]]] = carry.pools
    assert pool[0, :, 0].tolist() == [100, 100, 100, 100]
    drafts = DraftStates(metadata, carry.recurrences, None)
    [[[pool]]] = drafts.advance(carry.pools, i32([1, 0, 3]))
    assert pool[0, :, 0].tolist() == [101, 100, 100 + 7 + 8 + 9, 100]
