"""`step_bound` and `collectives` against the same sums done by hand for published models."""

import dataclasses
from typing import Any

import pytest

from paged_jax.engine.memory_plan import DEVICES, collectives, make_plan, step_bound
from paged_jax.models.config import LlamaConfig
from paged_jax.models.mixer_sizes import Mamba2
from tests.support.decode_step import LLAMA_3_8B, LLAMA_3_70B, QWEN_3_1B7
from tests.support.model_shapes import OLMO_HYBRID_7B


def plan_of(config, device: str, num_devices: int):
    return make_plan(
        config, DEVICES[device].memory, DEVICES[device].platform, dtype="bfloat16",
        tensor_parallel_size=num_devices,
    )  # fmt: skip


def test_step_bound_on_one_device_is_the_reading_time() -> None:
    plan = plan_of(LLAMA_3_8B, "h200", 1)
    assert collectives(plan, 64) == (0, 0, 0)
    # All weights except the embedding, and 128 KiB per token.
    num_bytes = 2 * (8_030_261_248 - 128256 * 4096) + 64 * 1000 * 131072
    bound = step_bound(plan, DEVICES["h200"], 64, 1000)
    assert bound.reading == num_bytes / 4.8e12 == bound.seconds
    assert bound.computing == pytest.approx(2 * 64 * (8_030_261_248 - 128256 * 4096) / 989e12)


def test_step_bound_of_large_batches_is_the_computing_time() -> None:
    plan = plan_of(LLAMA_3_8B, "h200", 1)
    bound = step_bound(plan, DEVICES["h200"], 1024, 1)
    assert bound.seconds == bound.computing > bound.reading


def test_step_bound_on_several_devices_counts_reading_and_sending() -> None:
    plan = plan_of(LLAMA_3_70B, "v5e", 16)
    heads, mlp = (4 + 2 + 4) * 128 * 8192, 3 * (28672 // 16) * 8192  # K and V on two devices each
    weights = 80 * (heads + mlp + 2 * 8192) + 8192 + 128256 // 16 * 8192  # the head is the last
    assert plan.footprint.weights == 2 * (weights + 128256 // 16 * 8192)
    assert plan.token_bytes == 80 * 2 * 1 * 128 * 2
    bound = step_bound(plan, DEVICES["v5e"], 64, 2048)
    assert bound.reading == (2 * weights + 64 * 2048 * plan.token_bytes) / 819e9
    sums, gathers, sent = collectives(plan, 64)
    assert (sums, gathers) == (161, 1)
    assert sent == 64 * 4 * (2 * 161 * 8192 + 128256) * 15 / 16
    assert bound.seconds == bound.reading + sent / 200e9


def test_step_bound_reads_int8_weights_and_scales() -> None:
    half, whole = (
        make_plan(LLAMA_3_8B, 10**11, "gpu", dtype=dtype) for dtype in ("int8", "bfloat16")
    )
    bounds = [step_bound(plan, DEVICES["h200"], 1, 1) for plan in (half, whole)]
    assert 0.5 < bounds[0].reading / bounds[1].reading < 0.51


def test_step_bound_reads_tied_embeddings_as_the_head() -> None:
    plan = plan_of(QWEN_3_1B7, "v6e", 1)
    assert plan.config.tie_word_embeddings
    assert step_bound(plan, DEVICES["v6e"], 0, 1).reading == plan.footprint.weights / 1638e9


def test_collectives_count_layers_of_different_kinds() -> None:
    """Sums are two per layer, and two values for norms over all heads and for sparse gates."""

    def values_of(config: LlamaConfig) -> tuple[int, float]:
        plan = make_plan(config, 10**12, "gpu", tensor_parallel_size=2)
        sums, gathers, sent = collectives(plan, 1)
        assert gathers == 1
        return sums, sent / 4 - config.vocab_size / 2  # each device sends half of the logits

    # Gemma 3n E4B: the first 10 of 35 layers have sparse gates, and each layer has an embedding of
    # 256 numbers.
    sizes = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35}
    gemma = LlamaConfig.from_dict({"model_type": "gemma3n_text", **sizes})
    assert values_of(gemma) == (2 * 35 + 10 + 2, (2 * 35 + 1) * 2048 + 10 * 2 + 35 * 256)
    # OLMo Hybrid: 8 of 32 layers have attention, with norms of q and k over all heads.
    assert values_of(OLMO_HYBRID_7B) == (2 * 32 + 8 + 1, (2 * 32 + 1) * 3840 + 8 * 2)
    # Nemotron-H: a layer has Mamba-2, attention, or an MLP.
    kinds = ("linear_attention", "none", "full_attention", "none")
    mixer = Mamba2(num_heads=8, num_groups=2, head_dim=8, state_dim=8, conv_width=4, conv_bias=True)
    changes: Any = {"layer_types": kinds, "mixer": mixer, "num_hidden_layers": 4}
    changes["mlp_layer_types"] = ("none", "dense", "none", "dense")
    nemotron = dataclasses.replace(QWEN_3_1B7, **changes)
    assert values_of(nemotron) == (4 + 1, 5 * QWEN_3_1B7.hidden_size)
