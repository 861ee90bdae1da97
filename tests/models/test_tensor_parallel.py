"""Tensor parallelism: configs of shards, and the logits of divided models."""

import dataclasses

import pytest

from paged_jax.models.mixer_sizes import KimiDelta, Mamba2
from paged_jax.models.tensor_parallel import shard_config, widen_config
from tests.support.decode_step import LLAMA_3_8B
from tests.support.processes import run_on_devices

_HEAD = """
import dataclasses

import jax
import numpy as np
from flax import nnx
from tests.support import tensor_parallel
from tests.support.covering import all_pairs
from tests.support.random_model import random_llama
from tests.support.tensor_parallel import CONFIG, divided_logits


def make_model(**changes):
    return random_llama(dataclasses.replace(CONFIG, **changes), scale=0.35)


logits = nnx.jit(tensor_parallel.logits)
TOKENS = jax.random.randint(jax.random.key(2), (12,), 0, CONFIG.vocab_size, "int32")
"""

# The other programs have layers without norms of heads, and models with only dense layers.
_SAME_LOGITS = """
FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5,
           "logit_scale": 0.7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MLPS = {"experts": EXPERTS | {"expert_bias": True, "norm_topk_prob": True, "swiglu_limit": 0.5},
        "shared": EXPERTS | {"shared_expert_intermediate_size": 20},
        "some dense": EXPERTS | {"mlp_layer_types": ("dense", "sparse")}}
NORMS = {"head": {"qk_norm": True},
         "own": {"qk_norm": True, "qk_norm_scope": "own"},
         "projection": {"qk_norm": True, "qk_norm_scope": "projection"}}
rows = all_pairs({
    "num_devices": (2, 4),
    "norms": tuple(NORMS),
    "mlp": tuple(MLPS),
    "norm_placement": ("pre", "sandwich", "post", "parallel"),
    "norm_type": ("rms", "layer"),
    "biases": (False, True),
    "factors": (False, True),
    "layer_types": ((), ("sliding_attention", "full_attention")),
    "other_heads": (False, True),
    "tie_word_embeddings": (False, True),
})
for row in rows:
    model = make_model(
        norm_placement=row["norm_placement"], norm_type=row["norm_type"],
        layer_types=row["layer_types"], sliding_window=4 if row["layer_types"] else None,
        tie_word_embeddings=row["tie_word_embeddings"],
        num_global_key_value_heads=1 if row["other_heads"] else 0,
        global_head_dim=8 if row["other_heads"] else 0,
        qkv_bias=row["biases"], o_bias=row["biases"], mlp_bias=row["biases"],
        attention_sinks=row["biases"],
        **MLPS[row["mlp"]], **NORMS[row["norms"]], **(FACTORS if row["factors"] else {}))
    same, num_sums = divided_logits(model, row["num_devices"], TOKENS)
    np.testing.assert_allclose(same, logits(model, TOKENS), atol=2e-5, err_msg=str(row))
    sums = 1 if row["norm_placement"] == "parallel" else 2
    sums += row["norms"] == "projection"
    assert num_sums == CONFIG.num_hidden_layers * sums + 1, (num_sums, row)
"""

_OTHER_SWITCHES = """
from paged_jax.models.family import Router
from paged_jax.models.layer_groups import ResidualStreams
from paged_jax.models.rope import QueryScale

GEMMA_4 = dict(attention_k_eq_v=True, value_norm=True, qk_norm=True, layer_scalar=True,
               global_head_dim=8, num_global_key_value_heads=1, hidden_size_per_layer_input=6,
               layer_types=("sliding_attention", "full_attention"), sliding_window=4)
ROUTER = Router("sigmoid", has_correction_bias=True, num_groups=4, num_chosen_groups=2,
                has_expert_scale=True)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, router=ROUTER,
               shared_expert_intermediate_size=20, shared_expert_gate=False,
               norm_placement="sandwich", separate_expert_norms=True)
GEMMA_3N = dict(residual_streams=ResidualStreams(3, 1), laurel_rank=6, norm_placement="sandwich",
                hidden_size_per_layer_input=6, vocab_size=48, vocab_size_per_layer_input=40,
                activation_sparsity=(0.7, 0.0), intermediate_sizes=(48, 32))
LLAMA_4 = dict(qk_norm=True, qk_norm_weight=False, qk_norm_layers=(True, False),
               rope_layers=(True, False), query_scale=QueryScale(0.3, 4, 1, True), num_experts=8,
               num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_gate=False,
               shared_expert_intermediate_size=20, router=Router("sigmoid", scales_inputs=True))
for num_devices, changes in ((2, GEMMA_4), (4, dict(attention_gate=True)), (2, EXPERTS),
                             (2, GEMMA_3N), (4, LLAMA_4)):
    model = make_model(**changes)
    same, _ = divided_logits(model, num_devices, TOKENS)
    expected = logits(model, TOKENS)
    np.testing.assert_allclose(same, expected, atol=2e-5, err_msg=str(changes))
"""

_RECURRENT = """
from paged_jax.models.mixer_sizes import GatedDeltaNet, KimiDelta, Mamba2, ShortConvolution

# If there are fewer groups of Mamba-2 than devices, a group has heads on several devices. If there
# is a norm, it needs the mean over these devices.
BIASES = dict(in_bias=True, conv_bias=True, out_bias=True)
DELTA = dict(num_key_heads=4, num_value_heads=8, key_dim=6, value_dim=10)
MAMBA = dict(num_heads=8, head_dim=6, state_dim=10, out_multiplier=0.7, **BIASES)
for num_devices, mixer, num_means in (
    (4, ShortConvolution(conv_width=3, num_channels=24, **BIASES), 0),
    (4, GatedDeltaNet(conv_width=4, **DELTA), 0),
    (2, KimiDelta(conv_width=4, num_heads=4, head_dim=6), 0),
    (4, Mamba2(conv_width=4, num_groups=4, **MAMBA), 0),
    (2, Mamba2(conv_width=4, num_groups=1, **MAMBA), 1),
    (4, Mamba2(conv_width=4, num_groups=2, norm="before gate", **MAMBA), 1),
    (4, Mamba2(conv_width=4, num_groups=1, norm="none", **MAMBA), 0),
):
    model = make_model(layer_types=("linear_attention", "full_attention"), mixer=mixer)
    same, num_sums = divided_logits(model, num_devices, TOKENS)
    np.testing.assert_allclose(same, logits(model, TOKENS), atol=2e-5, err_msg=str(mixer))
    assert num_sums == CONFIG.num_hidden_layers * 2 + 1 + num_means, (num_sums, mixer)
"""


@pytest.mark.slow
def test_logits_match_a_single_device() -> None:
    """All programs run in one process, because a process takes seconds to start."""
    run_on_devices(_HEAD + _SAME_LOGITS + _OTHER_SWITCHES + _RECURRENT)


_SHARED_HEADS = """
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.tensor_parallel import TensorParallel

# Two devices share a KV head with four queries. Each computes two queries.
# The vocabulary is odd, so it is padded.
model = make_model(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1, vocab_size=47,
                   qk_norm=True, qk_norm_scope="projection")
same, _ = divided_logits(model, 2, TOKENS)
np.testing.assert_allclose(same, logits(model, TOKENS), atol=2e-5)
parallel = TensorParallel.create("test", jax.make_mesh((2,), ("x",)), model.config)
state = nnx.state(model)
arrays, treedef = jax.tree.flatten(state)
names = list(named_arrays(state))
laid_out = [parallel.to_program_layout(name, x) for name, x in zip(names, arrays)]
device_1 = parallel.mesh.devices.flat[1]
checked = set()
for name, x, y in zip(names, arrays, laid_out):
    kind = name.rpartition(".")[2]
    if kind not in ("qkv_proj", "qkv_bias", "q_norm", "k_norm"):
        continue
    checked.add(kind)
    # A parameter is [1 KV head, 4 queries + key + value, ...]. q_norm has no key, k_norm no query.
    heads = np.asarray(x).reshape(1, -1, model.config.head_dim, *x.shape[3:])
    [mine] = [part.data for part in y.addressable_shards if part.device == device_1]
    expected = heads[:, 2:] if kind != "k_norm" else heads
    np.testing.assert_array_equal(np.asarray(mine).reshape(expected.shape), expected, err_msg=name)
assert len(checked) == 4, checked
"""


def test_devices_with_the_same_kv_head_compute_different_queries() -> None:
    """Check the weights of each device, and the logits of both (quick test)."""
    run_on_devices(_HEAD + _SHARED_HEADS, num_devices=2)


@pytest.mark.parametrize("num_devices, heads, kv_heads", [(1, 32, 8), (8, 4, 1), (32, 1, 1)])
def test_shard_config_divides_heads(num_devices, heads, kv_heads) -> None:
    shard = shard_config("plan", LLAMA_3_8B, num_devices)
    assert shard == dataclasses.replace(
        LLAMA_3_8B,
        vocab_size=128256 // num_devices,
        intermediate_size=14336 // num_devices,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


def test_widen_config_adds_kv_heads_only_if_needed() -> None:
    assert widen_config(LLAMA_3_8B, 8) == LLAMA_3_8B
    assert widen_config(LLAMA_3_8B, 16).num_key_value_heads == 16


KDA = KimiDelta(num_heads=8, head_dim=16, conv_width=4)
MAMBA = Mamba2(num_heads=24, num_groups=2, head_dim=16, state_dim=16, conv_width=4)
RECURRENT_LAYERS = {"layer_types": ("linear_attention",) * 32}


def test_shard_config_divides_the_heads_of_a_group() -> None:
    config = dataclasses.replace(LLAMA_3_8B, mixer=MAMBA, **RECURRENT_LAYERS)
    for num_devices, num_groups, num_copies in ((2, 1, 1), (4, 1, 2), (8, 1, 4)):
        mixer = shard_config("plan", config, num_devices).mixer
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
