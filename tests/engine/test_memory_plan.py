"""`step_bound` and `collectives` against the same sums done by hand for published models."""

import pytest

from paged_jax.engine.memory_plan import DEVICES, collectives, make_plan, step_bound
from tests.support.decode_step import LLAMA_3_8B, LLAMA_3_70B, QWEN_3_1B7


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
