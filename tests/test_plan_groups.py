"""Tests of the planner for models with sliding-window layers, against allocated arrays."""

import dataclasses
import json
from typing import Any

import jax
import pytest

from paged_jax.cache.retention import AllTokens, LastTokens, retention
from paged_jax.engine.engine import Engine
from paged_jax.engine.footprint import Footprint, GroupFootprint, record_bytes
from paged_jax.engine.memory_plan import MemoryPlan, make_plan
from paged_jax.models.layer_groups import HYBRID, RECURRENT
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.paged_model import create_cache
from paged_jax.models.parts.delta_net import GatedDeltaNet
from paged_jax.models.parts.state_space import Mamba2
from paged_jax.models.tensor_parallel import shard_config
from paged_jax.plan import as_dict, as_text
from tests.support import ROOT
from tests.support.model_shapes import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    KIMI_LINEAR_48B,
    OLMO_HYBRID_7B,
    QWEN_3_5_35B,
)
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG

SLIDING, FULL = "sliding_attention", "full_attention"
# Sizes of Gemma 3 27B: https://huggingface.co/google/gemma-3-27b-it
GEMMA = LlamaConfig(
    vocab_size=262208,
    hidden_size=5376,
    intermediate_size=21504,
    num_hidden_layers=62,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=128,
    max_position_embeddings=131072,
    sliding_window=1024,
    layer_types=tuple(FULL if layer % 6 == 5 else SLIDING for layer in range(62)),
    dtype="bfloat16",
    model_type="gemma3_text",
)


# Sizes of Gemma 4 31B: https://huggingface.co/google/gemma-4-31b-it
GEMMA_4 = dataclasses.replace(
    GEMMA,
    vocab_size=262144,
    num_hidden_layers=60,
    head_dim=256,
    global_head_dim=512,
    num_global_key_value_heads=4,
    layer_types=tuple(FULL if layer % 6 == 5 else SLIDING for layer in range(60)),
    attention_k_eq_v=True,
    value_norm=True,
    qk_norm=True,
    model_type="gemma4_text",
)


def make_config(*layer_types: str, **changes: int) -> LlamaConfig:
    return dataclasses.replace(
        CONFIG,
        **changes,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        sliding_window=12,
        max_position_embeddings=256,
        model_type="qwen3",
    )


def test_windows_reduce_long_sequences_to_a_fifth_of_the_memory() -> None:
    plan = make_plan(GEMMA, 141 * 10**9, "gpu", max_model_len=32768)
    assert plan.sequence_bytes(32768) <= 0.21 * plan.uniform_bytes(32768)
    # The pools of an engine with all slots at full length.
    num_blocks = plan.num_engine_blocks
    assert num_blocks == 16 * 2048
    assert plan.footprint.pool_bytes(num_blocks) == 16 * plan.sequence_bytes(32768)
    cache = jax.eval_shape(
        lambda: create_cache(
            GEMMA, num_slots=16, max_length=32768, num_blocks=num_blocks, dtype="bfloat16",
            max_tokens=plan.sizes.max_step_tokens, platform="gpu",
        )
    )  # fmt: skip
    pools = [x for x in jax.tree.leaves(cache.group_pools)]
    num_bytes = sum(x.size * x.dtype.itemsize for x in pools)
    assert num_bytes == plan.footprint.pool_bytes(num_blocks)
    assert num_bytes <= 0.21 * num_blocks * plan.footprint.block


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    ("layers", "heads"),
    [
        ((SLIDING, SLIDING, FULL), {}),
        ((SLIDING, SLIDING, FULL), {"global_head_dim": 24, "num_global_key_value_heads": 1}),
        ((SLIDING, SLIDING), {}),
    ],
)
@pytest.mark.parametrize("num_blocks", [5, 200])
def test_plan_equals_the_memory_of_an_engine(layers, heads, num_blocks, kv_dtype) -> None:
    """With few blocks, all groups have the same number; otherwise windows limit their groups."""
    config = make_config(*layers, **heads)
    sizes: dict[str, Any] = {"block_size": 4, "max_num_seqs": 3, "max_chunk": 16}
    engine = Engine(random_llama(config), num_blocks=num_blocks, kv_dtype=kv_dtype, **sizes)
    footprint = make_plan(config, 1 << 30, "cpu", kv_dtype=kv_dtype, **sizes).footprint
    group_sizes = footprint.group_sizes(num_blocks)
    assert [group.num_blocks for group in engine.cache.groups] == list(group_sizes)
    assert footprint.pool_bytes(num_blocks) == engine.cache.nbytes
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(engine.core.runner.state))
    records = sum(group_sizes) * record_bytes(4)
    assert footprint.state + engine.cache.nbytes + records == state_bytes
    if len(layers) == 3:
        # 12 tokens and the next token need 4 blocks, and the other 15 tokens of a chunk 4 more.
        assert group_sizes == (num_blocks, min(num_blocks, 3 * 8))


def test_blocks_fill_the_memory_for_any_groups() -> None:
    full = GroupFootprint(AllTokens(), 1, 7, 1, max_blocks_per_slot=99, max_blocks=990)
    groups = (
        full,
        GroupFootprint(LastTokens(90), 4, 29, 1, 9, 90),
        GroupFootprint(LastTokens(30), 2, 14, 1, 3, 30),
    )
    footprint = Footprint(100, 10, {"decode": 5}, groups)
    for memory in (100, 168, 169, 1700, 1850, 5500, 5540, 9000):
        num_blocks = footprint.num_blocks(memory)
        taken = [115 + footprint.pool_bytes(n, with_overhead=True) for n in range(num_blocks + 2)]
        assert taken[num_blocks] <= memory < taken[-1] or memory < 115 + 53 and not num_blocks


@pytest.mark.parametrize(("length", "ratio"), [(32768, 0.134), (131072, 0.102)])
def test_plan_of_gemma_4_equals_the_cache_to_the_byte(length, ratio) -> None:
    """Layers with a window have 16 KV heads of 256, and other layers 4 of 512."""
    plan = make_plan(GEMMA_4, 141 * 10**9, "gpu", max_model_len=length, max_num_seqs=2)
    full, window = plan.footprint.groups
    assert full.block // 16 == 81920 and window.block // 16 == 50 * 2 * 16 * 256 * 2
    num_blocks = plan.num_engine_blocks
    cache = jax.eval_shape(
        lambda: create_cache(
            GEMMA_4, num_slots=2, max_length=length, num_blocks=num_blocks, dtype="bfloat16",
            max_tokens=plan.sizes.max_step_tokens, platform="gpu",
        )
    )  # fmt: skip
    pools = jax.tree.leaves(cache.group_pools)
    num_bytes = sum(x.size * x.dtype.itemsize for x in pools)
    assert num_bytes == plan.footprint.pool_bytes(num_blocks) == 2 * plan.sequence_bytes(length)
    assert round(plan.sequence_bytes(length) / plan.uniform_bytes(length), 3) == ratio


@pytest.mark.parametrize(("length", "ratio"), [(32768, 0.45), (131072, 0.3)])
def test_plan_of_chunked_layers_equals_the_cache_to_the_byte(length, ratio) -> None:
    """Of the 48 layers of Llama 4 Scout, 36 keep a chunk of 8,192 tokens."""
    kinds = tuple(FULL if layer % 4 == 3 else "chunked_attention" for layer in range(48))
    changes: Any = {"num_hidden_layers": 48, "layer_types": kinds, "num_key_value_heads": 8}
    changes |= {"sliding_window": None, "attention_chunk_size": 8192, "num_attention_heads": 40}
    config = dataclasses.replace(GEMMA, **changes)
    plan = make_plan(config, 2 * 10**12, "gpu", max_model_len=length, max_num_seqs=2)
    full, chunked = plan.footprint.groups
    assert (full.retention, chunked.retention) == (AllTokens(), LastTokens(8192))
    assert full.block // 16 == 12 * 2 * 8 * 128 * 2 and chunked.block == 3 * full.block
    num_blocks = plan.num_engine_blocks
    cache = jax.eval_shape(
        lambda: create_cache(
            config, num_slots=2, max_length=length, num_blocks=num_blocks, dtype="bfloat16",
            max_tokens=plan.sizes.max_step_tokens, platform="gpu",
        )
    )  # fmt: skip
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.group_pools))
    assert num_bytes == plan.footprint.pool_bytes(num_blocks)
    share = plan.sequence_bytes(length) / plan.uniform_bytes(length)
    assert share == pytest.approx(ratio, abs=1e-3)


def test_plan_of_shared_keys_and_values_equals_the_cache_to_the_byte() -> None:
    """Of the 35 layers of Gemma 3n E4B, the last 15 read keys and values of layers 18 and 19."""
    sizes = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35}
    config = LlamaConfig.from_dict({"model_type": "gemma3n_text", **sizes, "dtype": "bfloat16"})
    assert config.kv_sources[20:] == (18, 18, 18, 18, 19) * 3
    plan = make_plan(config, 141 * 10**9, "gpu", max_model_len=32768, max_num_seqs=2)
    assert [group.num_layers for group in plan.footprint.groups] == [4, 16]
    assert plan.footprint.groups[0].block // 16 == 4 * 2 * 2 * 256 * 2
    cache = jax.eval_shape(
        lambda: create_cache(
            config, num_slots=2, max_length=32768, num_blocks=plan.num_engine_blocks,
            dtype="bfloat16", max_tokens=plan.sizes.max_step_tokens, platform="gpu",
        )
    )  # fmt: skip
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.group_pools))
    assert num_bytes == plan.footprint.pool_bytes(plan.num_engine_blocks)


def test_groups_of_all_tokens_have_equal_numbers_of_blocks() -> None:
    """Such groups have layers with other heads. They cache prefixes of equal length."""
    groups = tuple(
        GroupFootprint(retention(window), 1, block, 1, max_blocks_per_slot=9, max_blocks=90)
        for window, block in ((None, 7), (None, 5), (64, 3))
    )
    footprint = Footprint(100, 10, {"decode": 5}, groups)
    assert footprint.group_sizes(200) == (200, 200, 90) and footprint.group_sizes(5) == (5, 5, 5)
    for memory in (115 + 18, 1700, 2000, 5500):
        num_blocks = footprint.num_blocks(memory)
        taken = [115 + footprint.pool_bytes(num_blocks + n, with_overhead=True) for n in (0, 1)]
        assert taken[0] <= memory < taken[1]


def test_plan_describes_groups() -> None:
    plan = make_plan(GEMMA, 141 * 10**9, "gpu", max_model_len=32768)
    text = as_text(plan, [32768])
    assert "in 10 of 62 layers that keep all tokens" in text
    assert "in 52 of 62 layers with a window of 1,024, at most 97 blocks per sequence" in text
    assert "of 32,768 tokens, 0.201 of the bytes if all layers kept all tokens" in text
    numbers = json.loads(json.dumps(as_dict(plan, [32768])))
    assert [g["most_blocks_of_a_sequence"] for g in numbers["groups"]] == [2048, 97]
    assert numbers["lengths"][0]["sequence_bytes"] == plan.sequence_bytes(32768)
    uniform = make_plan(dataclasses.replace(GEMMA, layer_types=(), sliding_window=None),
                        141 * 10**9, "gpu", max_model_len=32768)  # fmt: skip
    assert "groups" not in as_dict(uniform, [32768]) and "layers" not in as_text(uniform, [32768])


@pytest.mark.parametrize("length", [512, 2048, 32768])
def test_number_of_running_sequences_is_limited_by_slots(length) -> None:
    """Pools of window layers are limited by the number of slots, which is two in the first plan."""

    def plan_of(num_slots: int) -> MemoryPlan:
        return make_plan(GEMMA, 141 * 10**9, "gpu", max_model_len=32768, max_num_seqs=num_slots)

    plan = plan_of(2)
    num_paged = plan.num_paged(length)
    assert plan.num_running(length) == 2 < plan.num_contiguous < num_paged
    # Additional slots need memory for their state and for the logits of a step.
    assert 0.9 * num_paged < plan_of(num_paged).num_running(length) <= num_paged


def test_read_bytes_counts_only_windows() -> None:
    plan = make_plan(GEMMA, 141 * 10**9, "gpu", max_model_len=32768)
    token_of_a_layer = 2 * 16 * 128 * 2
    assert plan.read_bytes(512) == 62 * 512 * token_of_a_layer
    assert plan.read_bytes(8192) == (10 * 8192 + 52 * 1024) * token_of_a_layer


# Sizes of Qwen3.5-35B-A3B: three of four layers are gated delta nets.
QWEN = LlamaConfig(
    vocab_size=248320,
    hidden_size=2048,
    intermediate_size=512,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=262144,
    layer_types=tuple(FULL if layer % 4 == 3 else RECURRENT for layer in range(40)),
    mixer=GatedDeltaNet(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4
    ),
    dtype="bfloat16",
    model_type="qwen3_5_text",
)


@pytest.mark.parametrize("max_model_len", [32768, 131072])
def test_plan_of_recurrent_layers_equals_the_cache(max_model_len) -> None:
    plan = make_plan(QWEN, 141 * 10**9, "gpu", max_model_len=max_model_len, num_snapshots=6)
    footprint, num_blocks = plan.footprint, plan.num_engine_blocks
    cache = jax.eval_shape(
        lambda: create_cache(
            QWEN, num_slots=16, max_length=max_model_len, num_blocks=num_blocks, dtype="bfloat16",
            num_states=22, platform="gpu",
        )
    )  # fmt: skip
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.group_pools))
    assert num_bytes == footprint.pool_bytes(num_blocks) + footprint.recurrent
    # 30 states f32 [32, 128, 128], and 3 inputs of a convolution over 8,192 channels in bfloat16.
    assert footprint.sequence_state == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert plan.token_bytes == 10 * 2 * 2 * 256 * 2
    # 10 of 40 layers have K and V. The states are worth 3,144 tokens.
    share = plan.sequence_bytes(max_model_len) / plan.uniform_bytes(max_model_len)
    assert share == pytest.approx(0.25 + 3144 / 4 / max_model_len, abs=1e-4)


@pytest.mark.parametrize("max_model_len", [32768, 131072])
def test_plan_of_recurrent_and_latent_layers_equals_the_cache(max_model_len) -> None:
    """20 of 27 layers of Kimi Linear keep a state, and the others a latent vector per token."""
    plan = make_plan(
        KIMI_LINEAR_48B, 141 * 10**9, "gpu", max_model_len=max_model_len, num_snapshots=6
    )
    footprint, num_blocks = plan.footprint, plan.num_engine_blocks
    cache = jax.eval_shape(
        lambda: create_cache(
            KIMI_LINEAR_48B, num_slots=16, max_length=max_model_len, num_blocks=num_blocks,
            dtype="bfloat16", num_states=22, platform="gpu",
        )
    )  # fmt: skip
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.group_pools))
    assert num_bytes == footprint.pool_bytes(num_blocks) + footprint.recurrent
    assert footprint.sequence_state == 20 * (32 * 128 * 128 * 4 + 3 * (3 * 32 * 128) * 2)
    assert plan.token_bytes == 7 * 576 * 2
    # The states are worth 5,384 tokens of the 7 layers.
    share = plan.sequence_bytes(max_model_len) / plan.uniform_bytes(max_model_len)
    assert share == pytest.approx(7 / 27 * (1 + 5384 / max_model_len), abs=1e-4)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_plan_of_states_with_other_keys_than_values_equals_the_cache(platform) -> None:
    """24 of 32 layers of OLMo Hybrid keep a state of 96 x 192 per head, and no keys and values."""
    plan = make_plan(OLMO_HYBRID_7B, 141 * 10**9, platform, max_model_len=32768, num_snapshots=6)
    footprint, num_blocks = plan.footprint, plan.num_engine_blocks
    cache = jax.eval_shape(
        lambda: create_cache(
            OLMO_HYBRID_7B, num_slots=16, max_length=32768, num_blocks=num_blocks,
            block_size=plan.sizes.block_size, dtype="bfloat16", num_states=22, platform=platform,
        )
    )  # fmt: skip
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.group_pools))
    assert num_bytes == footprint.pool_bytes(num_blocks) + footprint.recurrent
    # Three inputs of a convolution over all queries, keys and values, in bfloat16. On TPUs, rows
    # of states fill whole tiles of 128 lanes.
    state = 96 * (256 if platform == "tpu" else 192)
    assert footprint.sequence_state == 24 * 30 * (state * 4 + 3 * (2 * 96 + 192) * 2)
    assert plan.token_bytes == 8 * 2 * 30 * 128 * 2
    if platform == "tpu":
        return
    # 8 of 32 layers have K and V. The states are worth 446 tokens.
    share = plan.sequence_bytes(32768) / plan.uniform_bytes(32768)
    assert share == pytest.approx(0.25 + 446 / 4 / 32768, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Qwen3.5-35B-A3B", QWEN_3_5_35B),
        ("Kimi-Linear-48B-A3B", KIMI_LINEAR_48B),
        ("Gemma 4 31B", GEMMA_4),
        ("DeepSeek-V3", DEEPSEEK_V3),
    ],
)
def test_docs_have_the_planned_bytes_of_a_sequence(name, config) -> None:
    numbers = []
    for length in (32768, 131072):
        plan = make_plan(config, 2 * 10**12, "gpu", max_model_len=length, max_num_seqs=2)
        uniform, num_bytes = plan.uniform_bytes(length), plan.sequence_bytes(length)
        if config is DEEPSEEK_V3:
            uniform = length * 61 * 128 * (192 + 128) * 2
        numbers += [f"{num_bytes / 2**20:,.1f}", f"{num_bytes / uniform:.3f}"]
    row = f"| {' | '.join([name, *numbers])} |"
    assert row in (ROOT / "docs" / "families.md").read_text().splitlines()


def test_plan_of_layers_with_attention_and_a_recurrence_equals_the_cache() -> None:
    """Each of 44 layers keeps tokens and a state, with the sizes of Falcon-H1 7B."""
    mixer = Mamba2(
        num_heads=24, num_groups=1, head_dim=128, state_dim=256, conv_width=4, conv_bias=True
    )
    changes: Any = {"num_hidden_layers": 44, "num_key_value_heads": 2, "head_dim": 128}
    changes |= {"layer_types": (HYBRID,) * 44, "num_attention_heads": 12, "mixer": mixer}
    config = dataclasses.replace(QWEN, **changes)
    plan = make_plan(config, 10**12, "gpu", max_model_len=32768, num_snapshots=6)
    cache = jax.eval_shape(
        lambda: create_cache(
            config, num_slots=16, max_length=32768, num_blocks=plan.num_engine_blocks,
            dtype="bfloat16", num_states=22, platform="gpu",
        )
    )  # fmt: skip
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.group_pools))
    footprint = plan.footprint
    assert num_bytes == footprint.pool_bytes(plan.num_engine_blocks) + footprint.recurrent
    assert plan.token_bytes == 44 * 2 * 2 * 128 * 2
    channels = 24 * 128 + 2 * 256
    assert footprint.sequence_state == 44 * (24 * 128 * 256 * 4 + 3 * channels * 2)


@pytest.mark.parametrize(
    ("name", "max_model_len", "kv_dtype", "token_bytes"),
    [
        ("V3", 32768, "bfloat16", 70_272),
        ("V3", 131072, "bfloat16", 70_272),
        ("V2-Lite", 32768, "bfloat16", 31_104),
        ("V2-Lite", 131072, "fp8", 15_552 + 27 * 4),  # with a scale per layer
    ],
)
def test_plan_of_latent_layers_equals_the_cache(name, max_model_len, kv_dtype, token_bytes) -> None:
    """A token has 576 elements per layer, instead of 320 per layer and head."""
    config = {"V3": DEEPSEEK_V3, "V2-Lite": DEEPSEEK_V2_LITE}[name]
    sizes: Any = {"max_model_len": max_model_len, "kv_dtype": kv_dtype}
    plan = make_plan(config, 2 * 10**12, "gpu", **sizes)
    num_blocks, footprint = plan.num_engine_blocks, plan.footprint

    def cache_bytes(config: LlamaConfig) -> int:
        dtype = "float8_e4m3fn" if kv_dtype == "fp8" else kv_dtype
        cache = jax.eval_shape(
            lambda: create_cache(
                config, num_slots=16, max_length=max_model_len, num_blocks=num_blocks,
                dtype=dtype, platform="gpu",
            )
        )  # fmt: skip
        assert all(group.pools.v is None for group in cache.groups)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.group_pools))

    assert cache_bytes(config) == footprint.pool_bytes(num_blocks)
    assert plan.token_bytes == token_bytes
    materialised = 2 * 320 * config.num_attention_heads * config.num_hidden_layers
    ratio = materialised / (576 * 2 * config.num_hidden_layers)
    assert ratio == pytest.approx({"V3": 71.1, "V2-Lite": 8.9}[name], abs=0.1)
    # Devices do not divide the vectors, unlike weights and heads.
    assert cache_bytes(shard_config("plan", config, 8)) == footprint.pool_bytes(num_blocks)
    if name == "V2-Lite":
        parallel = make_plan(config, 2 * 10**12, "gpu", tensor_parallel_size=8, **sizes)
        assert parallel.token_bytes == plan.token_bytes
        assert parallel.footprint.weights < 0.2 * footprint.weights
