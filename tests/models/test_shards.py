"""What one of several devices has of a model."""

import dataclasses

import pytest

from paged_jax.models.tensor_parallel import shard_config, widen_config
from tests.support.decode_step import LLAMA_3_8B


@pytest.mark.parametrize("num_devices, heads, kv_heads", [(1, 32, 8), (8, 4, 1), (32, 1, 1)])
def test_shards_have_whole_heads(num_devices, heads, kv_heads) -> None:
    shard = shard_config("plan", LLAMA_3_8B, num_devices)
    assert shard == dataclasses.replace(
        LLAMA_3_8B,
        vocab_size=128256 // num_devices,
        intermediate_size=14336 // num_devices,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


def test_widen_keeps_what_has_heads_enough() -> None:
    assert widen_config(LLAMA_3_8B, 8) == LLAMA_3_8B
    assert widen_config(LLAMA_3_8B, 16).num_key_value_heads == 16


@pytest.mark.parametrize(
    "num_devices, changes, match",
    [
        (3, {}, "must divide the model's num_attention_heads of 32, got 3"),
        (16, {"intermediate_size": 24}, "must divide the model's intermediate_size of 24, got 16"),
        (
            4,
            {"num_attention_heads": 24, "num_key_value_heads": 6},
            "num_key_value_heads of 6 or be a multiple of it, got 4",
        ),
        (0, {}, "must be a positive integer, got 0"),
        (True, {}, "must be a positive integer, got True"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_with_numbers(num_devices, changes, match):
    config = dataclasses.replace(LLAMA_3_8B, **changes)
    with pytest.raises(ValueError, match=f"^plan: tensor_parallel_size .*{match}"):
        shard_config("plan", config, num_devices)
