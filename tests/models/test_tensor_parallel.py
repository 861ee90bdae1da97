"""Tensor parallelism: configs of shards. `engine/test_tensor_parallel.py` runs divided models."""

import dataclasses

import pytest

from paged_jax.models.parts.kimi_delta import KimiDelta
from paged_jax.models.parts.state_space import Mamba2
from paged_jax.models.tensor_parallel import shard_config, widen_config
from tests.support.decode_step import LLAMA_3_8B


@pytest.mark.parametrize("num_devices, heads, kv_heads", [(1, 32, 8), (8, 4, 1), (32, 1, 1)])
def test_shard_config_divides_heads(num_devices, heads, kv_heads) -> None:
    shard = shard_config("plan", LLAMA_3_8B, num_devices)
    expected = dataclasses.replace(
        LLAMA_3_8B,
        head_dim=128,
        vocab_size=128256 // num_devices,
        intermediate_size=14336 // num_devices,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    assert (shard.vocab_size, shard.layers) == (expected.vocab_size, expected.layers)


def test_widen_config_adds_kv_heads_only_if_needed() -> None:
    assert widen_config(LLAMA_3_8B, 8).layers == LLAMA_3_8B.layers
    assert widen_config(LLAMA_3_8B, 16).num_key_value_heads == 16


KDA = KimiDelta(num_heads=8, head_dim=16, conv_width=4)
MAMBA = Mamba2(num_heads=24, num_groups=2, head_dim=16, state_dim=16, conv_width=4)
RECURRENT_LAYERS = {"layer_types": ("linear_attention",) * 32}


def test_shard_config_divides_the_heads_of_a_group() -> None:
    config = dataclasses.replace(LLAMA_3_8B, mixer=MAMBA, **RECURRENT_LAYERS)
    for num_devices, num_groups, num_copies in ((2, 1, 1), (4, 1, 2), (8, 1, 4)):
        mixer = shard_config("plan", config, num_devices).layers[0].find(Mamba2)
        assert isinstance(mixer, Mamba2) and mixer.num_heads == 24 // num_devices
        assert (mixer.num_groups, mixer.num_copies) == (num_groups, num_copies)
        assert mixer.state_shape == (24 // num_devices, 16, 16)


@pytest.mark.parametrize(
    "num_devices, changes, match",
    [
        (3, {}, "must divide the model's num_attention_heads, 32, got 3"),
        (16, {"intermediate_size": 24}, "must divide the model's intermediate_size, 24, got 16"),
        (
            4,
            {"num_attention_heads": 24, "num_key_value_heads": 6},
            "multiple of the model's num_key_value_heads, 6, got 4",
        ),
        (16, {"mixer": KDA, **RECURRENT_LAYERS}, "must divide the 8 heads of recurrent layers"),
        (
            16,
            {"mixer": MAMBA, **RECURRENT_LAYERS},
            "must divide the 24 heads of recurrent layers, and divide their 2 groups or be a "
            "multiple of them, got 16",
        ),
        (0, {}, "must be a positive integer, got 0"),
        (True, {}, "must be a positive integer, got True"),
    ],
)
def test_shard_config_rejects_indivisible_models(num_devices, changes, match):
    config = dataclasses.replace(LLAMA_3_8B, **changes)
    with pytest.raises(ValueError, match=f"^plan: tensor_parallel_size .*{match}"):
        shard_config("plan", config, num_devices)
