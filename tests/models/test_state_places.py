"""The states of draft tokens: scored first, and applied only as far as they are accepted."""

import jax.numpy as jnp
import numpy as np

from paged_jax.models.layer_attention import Recurrence
from paged_jax.models.layer_groups import StateShape
from paged_jax.models.state_places import StatePlaces
from tests.support.block_tables import i32


def test_states_advance_over_accepted_tokens_only() -> None:
    """Accept one of three tokens, none, and all. A state is the sum of its tokens."""

    def advance(inputs, states, num_tokens):
        is_token = jnp.arange(3)[None] < num_tokens[:, None]
        sums = jnp.sum(jnp.where(is_token, inputs[0][:, :, 0], 0), axis=1)
        return inputs[0], (states[0] + sums[:, None],)

    inputs = jnp.arange(1.0, 10.0).reshape(9, 1)
    ids, none = jnp.arange(3, dtype=jnp.int32), jnp.full(3, 4, jnp.int32)
    places = StatePlaces(ids, ids, none, none, 4, ((0, 0),), 0, [])
    carry = ((jnp.full((1, 4, 1), 100.0),),)
    recurrence = Recurrence((inputs,), advance, (StateShape("sum", (1,), None),))
    out, carry = places.advance(0, recurrence, carry, i32([3, 3, 3]))
    np.testing.assert_array_equal(out, inputs)
    assert carry[0][0][0, :, 0].tolist() == [100, 100, 100, 100]
    [[pool]] = places.advance_postponed(carry, i32([1, 0, 3]))
    assert pool[0, :, 0].tolist() == [101, 100, 100 + 7 + 8 + 9, 100]
