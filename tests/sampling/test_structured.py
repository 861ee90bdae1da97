"""Forms that texts must have, as parameters and as what binds the draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import SamplingParams, StructuredOutputsParams
from paged_jax.sampling.filters import Constraints
from paged_jax.sampling.sample import rows_of, sample
from paged_jax.sampling.state import SlotSampling, write_slot

V = 70


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object must be given, got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json": "{"}, "json must be JSON: "),
        ({"json": "[]"}, "json must be a JSON schema"),
        ({"json": True}, "json must be a JSON schema"),
        ({"json": {"a": object()}}, "json must be JSON: "),
        ({"regex": ""}, "regex must be a non-empty text"),
        ({"grammar": 3}, "grammar must be a non-empty text"),
        ({"choice": []}, "choice must be a list of one or more"),
        ({"choice": "ab"}, "choice must be a list of one or more"),
        ({"choice": ["a", ""]}, "choice must be a list of one or more"),
        ({"json_object": 1}, "json_object must be a bool"),
    ],
)
def test_structured_outputs_are_refused_in_words(form, message) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**form)


def test_structured_outputs_are_values() -> None:
    schema = {"b": 1, "a": 2}
    one, other = (StructuredOutputsParams(json=schema, json_object=False) for _ in range(2))
    schema["c"] = 3
    assert one == other and hash(one) == hash(other) and one.json == '{"b": 1, "a": 2}'
    params = SamplingParams(structured_outputs=one)
    assert params == SamplingParams(structured_outputs=other) and hash(params)


def test_sampling_params_take_no_dict_for_a_form() -> None:
    with pytest.raises(ValueError, match="must be StructuredOutputsParams or None"):
        SamplingParams(structured_outputs={"regex": "a"})


def test_a_slot_leaves_the_end_of_a_form_to_its_mask() -> None:
    """Which may end it before min_tokens, where the device must stop."""
    for form, is_held in ((StructuredOutputsParams(regex="a"), False), (None, True)):
        params = SamplingParams(min_tokens=3, structured_outputs=form)
        state = write_slot(SlotSampling.create(3, V), 1, params, seed=0, eos_token_ids=[5])
        assert bool((state.held_ids[1] == 5).any()) is is_held
        assert bool(state.held_until[1] == 3) is is_held


# What binds the draw: slot 1 has two known tokens from position 5 on, then a mask.

KNOWN, ALLOWED = [3, 69], [0, 31, 32, 66]


def bound() -> Constraints:
    words = np.zeros((3, 3), np.int32)
    for token_id in ALLOWED:
        words[0, token_id // 32] |= np.uint32(1 << token_id % 32).view(np.int32)
    rows = np.array([1, -1, -1]), np.full(3, 5), np.array([2, 0, 0]), np.array([KNOWN] * 3)
    return Constraints.create(3, V, max_forced=2).write(*map(jnp.asarray, (*rows, words)))


@pytest.fixture(scope="module")
def draw():
    """The tokens at a position, of slots 0 and 1, and what is reported of them."""
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


def test_sample_takes_what_is_known_and_then_what_is_allowed(draw) -> None:
    logits = jax.random.normal(jax.random.key(0), (3, V)) * 3
    seen = set()
    for position in range(3, 60):
        free, draws = draw(logits, position, None), draw(logits, position, bound())
        assert draws.token_ids[0] == free.token_ids[0], "other rows see nothing of it"
        token_id = int(draws.token_ids[1])
        if position in (5, 6):
            assert token_id == KNOWN[position - 5]
        elif position != 7:
            assert token_id == free.token_ids[1]
        want = jax.nn.log_softmax(logits[1])[token_id]
        np.testing.assert_allclose(draws.logprobs[1], want, rtol=1e-5)
    # The position of the mask, with other logits each time.
    for seed in range(40):
        logits = jax.random.normal(jax.random.key(seed), (3, V)) * 3
        seen.add(int(draw(logits, 7, bound()).token_ids[1]))
    assert seen == set(ALLOWED)


def test_sample_can_always_draw_what_is_allowed(draw) -> None:
    logits = jnp.full((3, V), -jnp.inf).at[:, 40].set(1.0)
    assert int(draw(logits, 7, bound()).token_ids[1]) in ALLOWED
    logits = jnp.full((3, V), -jnp.inf).at[:, 66].set(-3e38)
    assert int(draw(logits, 7, bound()).token_ids[1]) in ALLOWED
