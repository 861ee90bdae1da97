"""`step_bound` and `collectives` against the same sums done by hand for published models."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from paged_jax.engine.memory_plan import DEVICES, collectives, make_plan, step_bound
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.paged_model import create_cache
from paged_jax.models.parts.state_space import Mamba2
from paged_jax.models.tensor_parallel import AXIS, DeviceShard, shard_config
from tests.support import tensor_parallel
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


def traced_sums(config: LlamaConfig, num_devices: int) -> list[int]:
    """Return the number of values per token in each sum over devices of a forward pass."""
    num_tokens = 5
    shard = DeviceShard(AXIS, config.vocab_size, num_devices)
    own = shard_config("test", config, num_devices)
    graphdef, weights = nnx.split(
        nnx.eval_shape(lambda: Decoder(own, rngs=nnx.Rngs(0), shard=shard))
    )

    def run(weights: Any, tokens: jax.Array) -> jax.Array:
        return tensor_parallel.logits(nnx.merge(graphdef, weights), tokens)

    def sums_of(jaxpr: Any) -> Iterator[int]:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "psum":
                yield sum(math.prod(x.aval.shape) for x in equation.invars) // num_tokens
            for each in jax.tree.leaves([*equation.params.values()]):
                inner = getattr(each, "jaxpr", each)
                yield from sums_of(inner) if hasattr(inner, "eqns") else ()

    make_jaxpr = jax.make_jaxpr(run, axis_env=[(AXIS, num_devices)])
    return [*sums_of(make_jaxpr(weights, jnp.zeros(num_tokens, jnp.int32)).jaxpr)]


EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20, "shared_expert_gate": False,
    "norm_placement": "sandwich",
}  # fmt: skip
MAMBA = Mamba2(num_heads=8, num_groups=2, head_dim=6, state_dim=10, conv_width=4, conv_bias=True)


@pytest.mark.parametrize(
    ("num_devices", "changes"),
    [
        (2, EXPERTS),
        (2, EXPERTS | {"separate_expert_norms": True}),
        (2, {"qk_norm": True, "qk_norm_scope": "projection", "norm_placement": "parallel"}),
        (4, {"mixer": MAMBA, "layer_types": ("linear_attention", "full_attention")}),
    ],
    ids=["experts", "experts with separate norms", "norms over all heads", "Mamba-2"],
)
def test_collectives_equal_those_of_the_traced_model(num_devices, changes) -> None:
    config = dataclasses.replace(tensor_parallel.CONFIG, **changes)
    sums = traced_sums(config, num_devices)
    plan = make_plan(config, 1 << 30, "cpu", tensor_parallel_size=num_devices)
    found = collectives(plan, 3)
    assert found.num_all_reduces == len(sums)
    # A device sends each value of a sum twice, except for its own part.
    logits = num_devices * plan.shard.vocab_size
    assert found.sent == 3 * 4 * (2 * sum(sums) + logits) * (num_devices - 1) // num_devices


def test_steps_have_room_for_three_copies_of_the_states_of_a_recurrent_layer() -> None:
    """Two plans differ only in the size of the states, which is counted in arrays of a cache."""
    config = dataclasses.replace(
        tensor_parallel.CONFIG, mixer=MAMBA, layer_types=("linear_attention", "linear_attention")
    )
    wide = dataclasses.replace(config, mixer=dataclasses.replace(MAMBA, state_dim=50))

    def steps_and_state(config: LlamaConfig) -> tuple[dict[str, int], int]:
        plan = make_plan(config, 1 << 30, "gpu", max_num_seqs=7, num_speculative_tokens=2)
        cache = jax.eval_shape(
            lambda: create_cache(
                config, num_slots=7, max_length=64, num_blocks=4, dtype=plan.kv_dtype, num_states=7,
                platform="gpu",
            )
        )  # fmt: skip
        states = jax.tree.leaves(cache.groups[-1].pools)
        return plan.footprint.steps, sum(x.size * x.dtype.itemsize for x in states) // 14

    (steps, state), (wide_steps, wide_state) = map(steps_and_state, (config, wide))
    added = {name: wide_steps[name] - size for name, size in steps.items()}
    of_model = dict.fromkeys(("prefill", "score", "decode", "verify"), 3 * 7 * (wide_state - state))
    assert added == of_model | {"swap": 0, "tables": 0}
