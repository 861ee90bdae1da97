"""Checks of structured outputs."""

import pytest

from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.structured_outputs import StructuredOutputsParams


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
def test_structured_outputs_params_rejects(form, message) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**form)


def test_structured_outputs_params_is_immutable_and_hashable() -> None:
    schema = {"b": 1, "a": 2}
    one, other = (StructuredOutputsParams(json=schema, json_object=False) for _ in range(2))
    schema["c"] = 3
    assert one == other and hash(one) == hash(other) and one.json == '{"b": 1, "a": 2}'
    params = SamplingParams(structured_outputs=one)
    assert params == SamplingParams(structured_outputs=other) and hash(params)


def test_sampling_params_rejects_a_dict_of_structured_outputs() -> None:
    with pytest.raises(ValueError, match="must be StructuredOutputsParams or None"):
        SamplingParams(structured_outputs={"regex": "a"})
