"""Recurrent layers of small models: gradients, states of any dtype, and the mapping of tensors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import WeightsError
from paged_jax.models.layer_groups import HYBRID, NOTHING, RECURRENT
from paged_jax.models.llama_config import LlamaConfig, Multipliers
from paged_jax.models.loading.saving import save_weights
from paged_jax.models.loading.tensor_map import standard_name
from paged_jax.models.paged_model import create_cache
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.convolution import ShortConvolution
from paged_jax.models.parts.delta_net import GatedDeltaNet
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.kimi_delta import KimiDelta
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.part import LayerCall
from paged_jax.models.parts.state_space import Mamba2
from tests.support.random_model import random_llama

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
BIASES = {"in_bias": True, "conv_bias": True, "out_bias": True}
MIXERS = {
    "convolution": ShortConvolution(num_channels=24, conv_width=3, **BIASES),
    "delta net": GatedDeltaNet(
        num_key_heads=2,
        num_value_heads=4,
        key_dim=6,
        value_dim=10,
        conv_width=4,
        has_negative_eigenvalues=True,
        **BIASES,
    ),
    "kimi delta": KimiDelta(num_heads=2, head_dim=6, conv_width=4),
    "mamba": Mamba2(num_heads=4, num_groups=2, head_dim=6, state_dim=10, conv_width=4, **BIASES),
    # With attention in the same layer.
    "hybrid": Mamba2(
        num_heads=4,
        num_groups=2,
        head_dim=6,
        state_dim=10,
        conv_width=4,
        norm="before gate",
        in_multiplier=0.7,
        out_multiplier=1.2,
        piece_multipliers=(0.8, 1.1, 0.9, 1.3, 0.6),
    ),
}
MULTIPLIERS = Multipliers(attention_in=0.7, key=1.4, attention_out=0.6, mlp_gate=1.3, mlp_out=0.8)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 20), np.int32)


def make_model(name: str, dtype=jnp.float32) -> Decoder:
    config = dataclasses.replace(
        CONFIG, layer_types=(RECURRENT, "full_attention"), mixer=MIXERS[name]
    )
    if name == "hybrid":
        kinds = (HYBRID, "full_attention")
        config = dataclasses.replace(
            config, layer_types=kinds, multipliers=MULTIPLIERS, o_bias=True
        )
    return random_llama(config, dtype=dtype)


@functools.partial(nnx.jit)
def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(model(tokens)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1))


# The others take longer to compile.
IN_CORE = ("mamba", "hybrid")
SOME_SLOW = [
    pytest.param(name, marks=[] if name in IN_CORE else pytest.mark.slow) for name in MIXERS
]


@pytest.mark.parametrize("name", SOME_SLOW)
def test_gradients_predict_the_change_of_the_loss(name) -> None:
    """Also checks that no parameter of a recurrent layer is unused."""
    model, tokens = make_model(name), jnp.asarray(TOKENS)
    gradient = nnx.grad(loss)(model, tokens)
    leaves = jax.tree.leaves(gradient)
    assert all(np.isfinite(x).all() and np.any(x) for x in leaves)
    norm = float(jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in leaves)))
    graphdef, state = nnx.split(model)

    def moved(step: float) -> float:
        moved = jax.tree.map(lambda x, g: x + step / norm * g, state, gradient)
        return float(loss(nnx.merge(graphdef, moved), tokens))

    step = 1e-3
    np.testing.assert_allclose((moved(step) - moved(-step)) / (2 * step), norm, rtol=2e-2)


@functools.partial(nnx.jit)
def scored_loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Return `loss` of logits that a cache computes in two chunks, of which one is a token."""
    B, T = tokens.shape
    cache = model.create_cache(num_slots=B, max_length=T, block_size=4)
    slots, logits = jnp.arange(B, dtype=jnp.int32), []
    for chunk in (tokens[:, :-1], tokens[:, -1:]):
        counts = jnp.full(B, chunk.shape[1], jnp.int32)
        scores, cache, _ = model.score(cache, chunk, slots, counts)
        logits.append(scores)
    log_probs = jax.nn.log_softmax(jnp.concatenate(logits, axis=1)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_gradients_of_scoring_equal_those_of_the_plain_forward(name) -> None:
    model, tokens = make_model(name), jnp.asarray(TOKENS)
    (value, scored), (expected, plain) = (
        nnx.value_and_grad(function)(model, tokens) for function in (scored_loss, loss)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(scored), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MIXERS)
def test_states_have_the_shapes_and_dtypes_of_the_config(name) -> None:
    config = make_model(name).config
    states, no_states = config.state_shapes
    assert not no_states and (config.kv_shapes[0] is None) == (name != "hybrid")
    layer = make_model(name).layers[0]
    x = jnp.ones((6, config.hidden_size))
    positions = jnp.zeros(6, jnp.int32)
    call = LayerCall(
        layer, None, 0, None, False, lambda index, heads, carry: (heads, carry), positions, None
    )
    recurrence = MIXERS[name].mix(x, call).recurrence
    assert recurrence.arrays == states
    before = recurrence.initial_states(2, jnp.bfloat16)
    out, after = jax.jit(recurrence.run)(before, jnp.array([3, 0]))
    assert out.shape[0] == 6 and out.dtype == jnp.float32
    for shape, old, new in zip(states, before, after, strict=True):
        assert new.shape == (2, *shape.shape)
        assert new.dtype == old.dtype == jnp.dtype(shape.dtype or jnp.bfloat16)
        assert np.any(np.asarray(new[0], np.float32))
        assert not np.any(np.asarray(new[1], np.float32)), "a row without tokens"


@pytest.mark.optimised
def test_decode_step_updates_pools_of_states_in_place() -> None:
    """The temporaries are two copies of the states of a batch in one layer: before and after."""
    sizes = {"num_value_heads": 8, "key_dim": 64, "value_dim": 64}
    mixer = dataclasses.replace(MIXERS["delta net"], **sizes)
    kinds = (RECURRENT, RECURRENT, "full_attention")
    config = dataclasses.replace(CONFIG, num_hidden_layers=3, layer_types=kinds, mixer=mixer)
    model = Decoder(config, rngs=nnx.Rngs(0))
    cache = create_cache(config, num_slots=4, max_length=64, num_states=128)
    held = cache.groups[-1].nbytes
    of_rows = held // (2 * 128) * 4
    step = jax.jit(Decoder.decode, donate_argnames="cache")
    lowered = step.lower(model, cache, jnp.zeros(4, jnp.int32), jnp.arange(4))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes > held
    assert memory.temp_size_in_bytes < 3 * of_rows


def test_decay_stays_float32_in_models_of_16_bits() -> None:
    layer = make_model("mamba", jnp.bfloat16).layers[0]
    dtypes = {name: getattr(layer, name).dtype for name in MIXERS["mamba"].shapes(24)}
    assert {name for name, dtype in dtypes.items() if dtype == jnp.float32} == {
        "mixer_decay",
        "mixer_time",
    }


@pytest.mark.slow
def test_layers_with_one_part_have_its_norm_only() -> None:
    config = dataclasses.replace(
        CONFIG,
        num_hidden_layers=3,
        layer_types=(RECURRENT, NOTHING, "full_attention"),
        mlp_layer_types=(NOTHING, "dense", NOTHING),
        mixer=MIXERS["mamba"],
        gated_mlp=False,
        hidden_act="relu2",
    )
    model = random_llama(config)
    names = [set(nnx.to_pure_dict(nnx.state(layer))) for layer in model.layers]
    assert names[1] == {"post_attention_norm", "gate_up_proj", "down_proj"}
    assert model.layers[1].gate_up_proj.shape == (1, 32, 24)
    assert names[2] == {"input_norm", "qkv_proj", "o_proj"}
    assert "post_attention_norm" not in names[0]
    assert config.layer_groups[0].layers == (2,)
    assert np.isfinite(nnx.jit(lambda model: model(TOKENS))(model)).all()


def test_config_rejects_recurrent_layers_without_sizes() -> None:
    with pytest.raises(ValueError, match="mixer must be set if and only if layer_types contains"):
        dataclasses.replace(CONFIG, layer_types=(RECURRENT, "full_attention"))
    with pytest.raises(ValueError, match="num_value_heads must be a multiple of num_key_heads"):
        dataclasses.replace(MIXERS["delta net"], num_value_heads=3)


_SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_from_dict_reads_the_pattern_of_old_nemotron_files() -> None:
    config = LlamaConfig.from_dict(
        {"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*-", "head_dim": 8, **_SIZES}
    )
    kinds = [[type(step.part) for step in layer.steps] for layer in config.layers]
    assert kinds == [[Mamba2], [Experts], [Mamba2], [Attention], [Dense]]
    with pytest.raises(ValueError, match="hybrid_override_pattern must be a string of"):
        LlamaConfig.from_dict(
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX", **_SIZES}
        )


def test_from_dict_counts_the_layers_of_kimi_files_from_1() -> None:
    nested = {"full_attn_layers": [4], "kda_layers": [1, 2, 3, 5], "head_dim": 16, "num_heads": 4}
    nested["short_conv_kernel_size"] = 3
    config = LlamaConfig.from_dict(
        # As in transformers, the object has precedence.
        {"model_type": "kimi_linear", "linear_attn_config": nested, "linear_head_dim": 8, **_SIZES}
    )
    mixers = [layer.find(KimiDelta) for layer in config.layers]
    assert [layer for layer, mixer in enumerate(mixers) if mixer is None] == [3]
    assert mixers[0] == KimiDelta(num_heads=4, head_dim=16, conv_width=3)


def test_from_dict_reads_the_factors_of_falcon_files() -> None:
    given = {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 24,
        "mamba_n_heads": 4,
        "mamba_rms_norm": True,
        "mlp_multipliers": [0.9, 0.3],
        "ssm_multipliers": [0.5, 0.25, 0.2, 0.3, 0.4],
        "key_multiplier": 0.4,
        **_SIZES,
    }
    config = LlamaConfig.from_dict(given)
    attention, mlp, mixer = (config.layers[4].get(kind) for kind in (Attention, Dense, Mamba2))
    assert config.layers == config.layers[:1] * 5
    assert (attention.in_multiplier, attention.key_multiplier) == (1.0, 0.4)
    assert (attention.out_multiplier, mlp.gate_multiplier, mlp.out_multiplier) == (1.0, 0.9, 0.3)
    assert mixer.piece_multipliers == (0.5, 0.25, 0.2, 0.3, 0.4)
    assert (mixer.head_dim, mixer.norm) == (6, "before gate")
    # Each layer keeps tokens and a state.
    assert [group.layers for group in config.layer_groups] == [tuple(range(5))]
    assert [group.layers for group in config.state_groups] == [tuple(range(5))]
    with pytest.raises(ValueError, match="ssm_multipliers must be a list of 5 numbers"):
        LlamaConfig.from_dict({**given, "ssm_multipliers": [1.0, 2.0]})
    with pytest.raises(ValueError, match="mlp_multipliers must be a list of 2 numbers"):
        LlamaConfig.from_dict({**given, "mlp_multipliers": [1.0]})


def test_from_dict_reads_the_layers_of_olmo_hybrid_files() -> None:
    given = {"model_type": "olmo_hybrid", **_SIZES, "hidden_size": 32, "rope_theta": None}
    config = LlamaConfig.from_dict(given)
    mixers = [layer.find(GatedDeltaNet) for layer in config.layers]
    assert [mixer is None for mixer in mixers] == [layer.kv is not None for layer in config.layers]
    assert [layer for layer, mixer in enumerate(mixers) if mixer is None] == [3]
    sizes = {"num_key_heads": 2, "num_value_heads": 2, "key_dim": 12, "value_dim": 24}
    assert mixers[0] == GatedDeltaNet(
        conv_width=4, has_negative_eigenvalues=True, norm_eps=1e-5, **sizes
    )
    steps = [step for layer in config.layers for step in layer.steps]
    norms = [(step.input_norm is None, step.output_norm is None) for step in steps]
    assert norms == [(False, True)] * 6 + [(True, False)] * 2 + [(False, True)] * 2
    assert config.ropes == (None,) * 5
    for rope in ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}):
        assert LlamaConfig.from_dict({**given, "rope_parameters": rope}).ropes[3] is not None
    with pytest.raises(ValueError, match="norm_placements must have one value for each of the 5"):
        LlamaConfig(**_SIZES, norm_placements=("pre",))
    with pytest.raises(ValueError, match="norm_placement must be one of .* got 'before'"):
        LlamaConfig(**_SIZES, norm_placements=("before",) * 5)


def test_load_weights_joins_convolutions_that_were_divided_equally(tmp_path) -> None:
    """transformers divides the convolution of OLMo Hybrid into thirds when it saves a model."""
    given = {"model_type": "olmo_hybrid", **_SIZES, "hidden_size": 32}
    model = Decoder(LlamaConfig.from_dict(given), rngs=nnx.Rngs(0))
    save_weights(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    names = [f"model.layers.0.linear_attn.{piece}_conv1d.weight" for piece in "qkv"]
    assert [len(tensors[name]) for name in names] == [24, 24, 48]
    thirds = np.split(np.concatenate([tensors[name] for name in names]), 3)
    save_file(tensors | dict(zip(names, thirds, strict=True)), path)
    same = Decoder.from_pretrained(tmp_path)
    np.testing.assert_array_equal(same.layers[0].mixer_conv[...], model.layers[0].mixer_conv[...])
    save_file(tensors | {names[2]: thirds[2]}, path)
    with pytest.raises(WeightsError, match="v_conv1d.weight must have shape"):
        Decoder.from_pretrained(tmp_path)


def test_from_dict_reads_the_text_part_of_qwen3_5() -> None:
    part = {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "full_attention_interval": 2,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        **_SIZES,
    }
    config = LlamaConfig.from_dict({"model_type": "qwen3_5", "text_config": part})
    kinds = [layer.find(GatedDeltaNet) is None for layer in config.layers[:2]]
    assert kinds == [False, True]
    rope = config.layers[1].get(Attention).rope
    assert (rope.theta, rope.rotary_dim, rope.head_dim) == (1e7, 64, 256)
    names = {
        "model.language_model.layers.0.linear_attn.A_log": "model.layers.0.linear_attn.A_log",
        "model.visual.patch_embed.proj.weight": None,
        "mtp.fc.weight": None,
        "lm_head.weight": "lm_head.weight",
    }
    assert {name: standard_name(config, name) for name in names} == names
    with pytest.raises(ValueError, match="attn_output_gate"):
        LlamaConfig.from_dict({**part, "attn_output_gate": False})


@pytest.mark.parametrize("kinds", ["r", "f", "rf"])
@pytest.mark.parametrize(
    ("model_type", "recurrent", "full"),
    [
        ("lfm2", "conv", "full_attention"),
        ("lfm2_moe", "conv", "full_attention"),
        ("olmo_hybrid", RECURRENT, "full_attention"),
        ("qwen3_5_text", RECURRENT, "full_attention"),
        ("qwen3_5_moe_text", RECURRENT, "full_attention"),
        ("qwen3_next", RECURRENT, "full_attention"),
        ("granitemoehybrid", "mamba", "attention"),
        ("kimi_linear", RECURRENT, "full_attention"),
        ("nemotron_h", "mamba", "attention"),
    ],
)
def test_to_dict_writes_hybrids_without_attention_or_recurrence(
    model_type, recurrent, full, kinds
) -> None:
    names = [recurrent if kind == "r" else full for kind in (kinds * 4)[:4]]
    given = {"model_type": model_type, **_SIZES, "num_hidden_layers": 4, "layer_types": names}
    if model_type == "granitemoehybrid":
        given["mamba_n_heads"] = 4  # the default has more heads than channels
    config = LlamaConfig.from_dict(given)
    assert [bool(layer.states) for layer in config.layers] == [name == recurrent for name in names]
    assert [layer.kv is not None for layer in config.layers] == [name == full for name in names]
    assert LlamaConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("model_type", "entries", "message"),
    [
        ("lfm2", {"full_attn_idxs": 2}, "full_attn_idxs must be a list of layer indices, got 2"),
        ("lfm2", {"layer_types": ["conv", "mamba"] * 2}, "layer_types must only contain .*'mamba'"),
        ("falcon_h1", {"layer_types": ["hybrid", "x"] * 2}, "must only contain 'hybrid', got 'x'"),
        (
            "qwen3_next",
            {"full_attention_interval": 0},
            "full_attention_interval must be a positive",
        ),
        ("nemotron_h", {"layers_block_type": []}, "layers_block_type must name at least one layer"),
        ("nemotron_h", {"layer_types": ["mlp", "x"]}, "layers_block_type must only contain .*'x'"),
        ("nemotron_h", {"time_step_limit": [0.0]}, "time_step_limit must be a list of 2 numbers"),
        ("nemotron_h", {"moe_latent_size": -1}, "moe_latent_size must be a positive integer"),
        ("kimi_linear", {"num_shared_experts": -1}, "num_shared_experts must be 0 or more, got -1"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope must be true for .*, got false"),
    ],
)
def test_from_dict_names_invalid_entries_of_hybrids(model_type, entries, message) -> None:
    sizes = {**_SIZES, "num_hidden_layers": 4}
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_dict({"model_type": model_type, **sizes, **entries})
