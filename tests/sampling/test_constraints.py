"""Forced tokens and masks of grammars."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling.constraints import Constraints
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.sample import rows_of, sample
from paged_jax.sampling.state import SlotSampling
from tests.support.decode_sequences import write_slot

V = 70
# Slot 1 has two forced tokens from position 5 on, then a mask.

KNOWN, ALLOWED = [3, 69], [0, 31, 32, 66]


def bound() -> Constraints:
    words = np.zeros((3, 3), np.int32)
    for token_id in ALLOWED:
        words[0, token_id // 32] |= np.uint32(1 << token_id % 32).view(np.int32)
    counts = np.array([2, 0, 0])
    rows = np.array([1, -1, -1]), np.full(3, 5), counts, counts + 6, np.array([KNOWN] * 3)
    return Constraints.create(3, V, max_forced=2).write(*map(jnp.asarray, (*rows, words)))


@pytest.fixture(scope="module")
def draw():
    """Return a function that draws the tokens of slots 0 and 1 at a position."""
    state = SlotSampling.create(3, V)
    for slot in (0, 1):
        state = write_slot(state, slot, SamplingParams(temperature=slot), seed=slot)
    slots = jnp.array([0, 1, 2], jnp.int32)
    rows, active = rows_of(state, slots), jnp.array([True, True, False])

    @jax.jit
    def run(logits, position, constraints):
        rows_bound = None if constraints is None else constraints.of_rows(slots)
        positions = jnp.full(3, position)
        return sample(logits, rows, positions, active, slots, True, rows_bound, num_top=1)[0]

    return run


def test_sample_applies_forced_tokens_and_masks(draw) -> None:
    logits = jax.random.normal(jax.random.key(0), (3, V)) * 3
    seen = set()
    for position in range(3, 60):
        free, draws = draw(logits, position, None), draw(logits, position, bound())
        assert draws.token_ids[0] == free.token_ids[0], "other rows are not affected"
        token_id = int(draws.token_ids[1])
        if position in (5, 6):
            assert token_id == KNOWN[position - 5]
        elif position != 7:
            assert token_id == free.token_ids[1]
        want = jax.nn.log_softmax(logits[1])[token_id]
        np.testing.assert_allclose(draws.logprobs[1], want, rtol=1e-5)
    # The position of the mask, with different logits.
    for seed in range(40):
        logits = jax.random.normal(jax.random.key(seed), (3, V)) * 3
        seen.add(int(draw(logits, 7, bound()).token_ids[1]))
    assert seen == set(ALLOWED)


def test_sample_can_draw_every_allowed_token(draw) -> None:
    logits = jnp.full((3, V), -jnp.inf).at[:, 40].set(1.0)
    assert int(draw(logits, 7, bound()).token_ids[1]) in ALLOWED
    logits = jnp.full((3, V), -jnp.inf).at[:, 66].set(-3e38)
    assert int(draw(logits, 7, bound()).token_ids[1]) in ALLOWED
