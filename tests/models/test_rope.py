"""Rotary embeddings: frequencies, configs, and the order of elements in a head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.kernels.norm_rope import rotate
from paged_jax.models.decoder import Decoder
from paged_jax.models.families.rope_entries import read_scaling
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.parts.attention import Attention
from paged_jax.models.rope import QueryScale, Rope, RopeScaling, head_order, rotations

_SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# The base is so small that the upper bound of the pairs, 36, exceeds the 16 elements.
_CLAMPED = {"beta_fast": 600.0, "original_max_position_embeddings": 4096}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.9, 2.0, 2.2, 2.5],
    "long_factor": [1.1, 1.4, 3.0, 9.0, 20.0, 40.0, 50.0, 60.0],
    "original_max_position_embeddings": 32,
}

# Factors of Phi-3.5-mini, exact in float32.
_PHI = {
    "rope_type": "longrope",
    "short_factor": [
        1.0, 1.02, 1.03, 1.03, 1.05, 1.05, 1.05, 1.05, 1.05, 1.07, 1.1, 1.11, 1.16, 1.16, 1.17,
        1.29, 1.34, 1.68, 1.79, 1.82, 1.85, 1.88, 1.91, 1.94, 1.99, 2.02, 2.02, 2.02, 2.02, 2.02,
        2.02, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03, 2.08, 2.09, 2.19, 2.22, 2.59,
        2.73, 2.75, 2.84,
    ],
    "long_factor": [
        1.08, 1.11, 1.14, 1.34, 1.59, 1.6, 1.62, 2.62, 3.23, 3.23, 4.79, 7.4, 7.7, 9.09, 12.2,
        17.67, 24.46, 28.57, 30.42, 30.84, 32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93,
        58.21, 60.14, 62.61, 62.62, 62.71, 63.14, 63.14, 63.77, 63.93, 63.96, 63.97, 64.03, 64.07,
        64.08, 64.12, 64.41, 64.48, 64.51, 64.53, 64.84,
    ],
    "original_max_position_embeddings": 4096,
}  # fmt: skip

# Rotary embeddings of real configs: D, maximum length, base, and other entries.
_REAL = {
    "Llama-2-7B": (128, 4096, 10000.0, {"rope_type": "default"}),
    "Llama-3.1-8B": (
        128,
        131072,
        500000.0,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Gemma-3-27B, full layers": (128, 131072, 1e6, {"rope_type": "linear", "factor": 8.0}),
    "Qwen2.5-7B-Instruct, 128K": (
        128,
        32768,
        1e6,
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "gpt-oss-20b": (
        64,
        131072,
        150000.0,
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "DeepSeek-V3's two scales": (
        64,
        163840,
        10000.0,
        {
            "type": "yarn",
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
    ),
    "Olmo-3-7B, full layers": (
        128,
        65536,
        500000.0,
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn with more pairs than dimensions": (16, 4096, 1.5, {**_YARN, **_CLAMPED}),
    "Phi-3.5-mini-instruct": (96, 131072, 10000.0, _PHI),
    "Phi-3.5-mini-instruct, short": (96, 4096, 10000.0, _PHI),
    "a factor of attention": (64, 512, 500.0, {**_YARN, "attention_factor": 1.25}),
    "yarn whose truncate is null": (64, 512, 500.0, {**_YARN, "truncate": None}),
    "yarn with only one mscale": (64, 512, 500.0, {**_YARN, "mscale": 0.5}),
    "dynamic": (64, 512, 10000.0, {"rope_type": "dynamic", "factor": 2.0}),
    "longrope, short": (16, 32, 10000.0, _LONGROPE),
    "longrope, long": (16, 128, 10000.0, _LONGROPE),
    "half of each head": (128, 131072, 10000.0, {"partial_rotary_factor": 0.5}),
    "three quarters, longrope": (
        24,
        128,
        10000.0,
        {**_LONGROPE, "partial_rotary_factor": 0.75}
        | {k: [*_LONGROPE[k], 3.5] for k in ("short_factor", "long_factor")},
    ),
}


@pytest.mark.peers
@pytest.mark.slow  # importing torch and transformers takes seconds
@pytest.mark.parametrize("name", _REAL)
def test_frequencies_match_transformers(name):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding

    head_dim, length, theta, entry = _REAL[name]
    # GLM 4 and Phi 3 have all switches of rotary embeddings in transformers.
    theirs = transformers.Glm4Config(
        head_dim=head_dim,
        max_position_embeddings=length,
        rope_parameters={"partial_rotary_factor": 1.0, **entry, "rope_theta": theta},
    )
    rope_type = theirs.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(
        rope_type, Glm4RotaryEmbedding.compute_default_rope_parameters
    )
    frequencies, factor = compute(theirs, None, seq_len=length)

    rope = _rope(head_dim, length, theta, entry)
    np.testing.assert_allclose(
        rope.frequencies()[: len(frequencies)], frequencies.numpy(), rtol=1e-6, atol=0
    )
    np.testing.assert_array_equal(rope.frequencies()[len(frequencies) :], 0)
    np.testing.assert_allclose(rope.scales()[: len(frequencies)], factor, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(rope.scales()[len(frequencies) :], 1)


def _rope(head_dim, length, theta, entry):
    return Rope(
        head_dim=head_dim,
        rotary_dim=int(head_dim * entry.get("partial_rotary_factor", 1.0)),
        theta=theta,
        scaling=read_scaling(entry, length),
        max_position_embeddings=length,
    )


@pytest.mark.peers
@pytest.mark.slow
def test_dynamic_rope_matches_transformers_token_by_token():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    length = 24
    entry = {"rope_type": "dynamic", "factor": 3.0}
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            head_dim=16,
            max_position_embeddings=length,
            rope_parameters={**entry, "rope_theta": 1e4},
        )
    )
    positions = np.arange(3 * length)
    steps = [theirs(torch.zeros(1), torch.tensor([[int(p)]])) for p in positions]
    cos, sin = rotations(jnp.asarray(positions), _rope(16, length, 1e4, entry), 16)
    for ours, which in ((cos, 0), (sin, 1)):
        expected = np.concatenate([step[which][0, :, :8].numpy() for step in steps])
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)  # of angles up to 72
    plain, _ = rotations(jnp.asarray(positions), _rope(16, length, 1e4, {}), 16)
    np.testing.assert_array_equal(cos[:length], plain[:length])
    assert np.abs(cos[length:] - plain[length:]).max() > 0.1


def test_longrope_factors_depend_on_the_maximum_length():
    config = LlamaConfig.from_dict(
        {"model_type": "llama", **_SIZES, "max_position_embeddings": 128, "rope_scaling": _LONGROPE}
    )
    assert config.ropes[0].scaling.attention_factor == pytest.approx(np.sqrt(1.4))  # log 4 / log 32
    plain = 10000.0 ** -(np.arange(8) / 8)
    for length, factors in ((128, "long_factor"), (33, "long_factor"), (32, "short_factor")):
        (rope,) = set(dataclasses.replace(config, max_position_embeddings=length).ropes)
        np.testing.assert_allclose(rope.frequencies(), plain / _LONGROPE[factors], rtol=1e-6)
        # The attention factor does not depend on the length of the sequences.
        np.testing.assert_allclose(rope.scales(), np.sqrt(1.4), rtol=1e-6)
    assert LlamaConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "clamped"),
    [("yarn with more pairs than dimensions", "high"), ("a factor of attention", "low")],
)
def test_yarn_clamps_its_range_of_pairs(name, clamped):
    """The reference code has ``low = max(floor(...), 0), high = min(ceil(...), D - 1)``."""
    head_dim, _, theta, entry = _REAL[name]
    length = entry["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return head_dim * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(theta))

    low, high = np.floor(pair_of(entry.get("beta_fast", 32))), np.ceil(pair_of(1))
    assert (low < 0) == (clamped == "low") and (high > head_dim - 1) == (clamped == "high")
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = np.arange(head_dim // 2)
    stretched = np.clip((pairs - low) / (high - low), 0, 1)
    factors = (1 - stretched) + stretched / entry["factor"]
    expected = theta ** -(pairs / (head_dim // 2)) * factors
    np.testing.assert_allclose(
        _rope(head_dim, length, theta, entry).frequencies(), expected, rtol=1e-6
    )


def test_llama3_scales_only_long_wavelengths():
    """The reference code of Llama 3.1 scales by wavelength, with a smooth transition."""
    head_dim, length, theta, entry = _REAL["Llama-3.1-8B"]
    original = entry["original_max_position_embeddings"]
    expected = []
    for plain in theta ** -(np.arange(head_dim // 2) / (head_dim // 2)):
        wavelength = 2 * np.pi / plain
        smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
        if wavelength < original / 4.0:
            expected.append(plain)
        elif wavelength > original / 1.0:
            expected.append(plain / 8.0)
        else:
            expected.append((1 - smooth) * plain / 8.0 + smooth * plain)
    np.testing.assert_allclose(
        _rope(head_dim, length, theta, entry).frequencies(), expected, rtol=1e-6
    )


def test_llama3_with_equal_factors_is_a_step():
    """As in Llama 4 Scout: wavelengths above the original context are divided."""
    entry = {**_REAL["Llama-3.1-8B"][-1], "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    plain = 500.0 ** -(np.arange(32) / 32)
    is_short = 2 * np.pi / plain <= entry["original_max_position_embeddings"]
    expected = np.where(is_short, plain, plain / entry["factor"])
    frequencies = _rope(64, 131072, 500.0, entry).frequencies()
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)


def test_yarn_without_a_transition_is_a_step():
    """If both bounds are the same pair, the reference code avoids a division by zero."""
    entry = {**_YARN, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}
    plain = 500.0 ** -(np.arange(32) / 32)
    is_kept = 32 * plain / (2 * np.pi) > 2.0  # number of turns in the original context
    assert 0 < is_kept.sum() < 32
    rope = _rope(64, 512, 500.0, entry)
    np.testing.assert_allclose(rope.frequencies(), np.where(is_kept, plain, plain / 4), rtol=1e-6)


def test_yarn_reads_the_two_scales_of_deepseek():
    """DeepSeek-V3's code scales by a quotient of two ``0.1 * mscale * log(factor) + 1``."""
    head_dim, length, theta, entry = _REAL["DeepSeek-V3's two scales"]
    scale, all_dim = (0.1 * mscale * np.log(40) + 1 for mscale in (1.0, 0.8))
    rope = _rope(head_dim, length, theta, entry)
    np.testing.assert_allclose(rope.scales(), scale / all_dim, rtol=1e-6)


def test_yarn_extends_the_maximum_length():
    qwen = {"model_type": "llama", **_SIZES, "max_position_embeddings": 40960}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = LlamaConfig.from_dict({**qwen, "rope_scaling": yarn})
    assert config.max_position_embeddings == 131072
    assert LlamaConfig.from_dict(config.to_dict()) == config
    long = LlamaConfig.from_dict({**qwen, "rope_scaling": yarn, "max_position_embeddings": 200000})
    assert long.max_position_embeddings == 200000
    linear = {"rope_type": "linear", "factor": 8.0}  # Gemma 3: the config has the scaled length
    assert LlamaConfig.from_dict({**qwen, "rope_scaling": linear}).max_position_embeddings == 40960


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_scaling": {**_LONGROPE, "long_factor": [1.0]}}, "long_factor must have 8 numbers"),
        ({"rope_scaling": {**_LONGROPE, "short_factor": None}}, "short_factor must be a list"),
        (
            {"rope_scaling": {**_YARN, "attention_factor": -1.0}},
            "attention_factor must be positive",
        ),
        ({"rope_scaling": {**_YARN, "beta_slow": 64}}, "beta_slow must be positive and at most"),
        ({"rope_scaling": {**_YARN, "factor": "4"}}, "factor must be a number"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor is missing"),
    ],
)
def test_from_dict_names_invalid_rope_entries(changes, problem):
    with pytest.raises(ValueError, match=problem):
        LlamaConfig.from_dict({"model_type": "llama", **_SIZES, **changes})


def test_to_dict_is_inverse_for_every_rope():
    base = {"model_type": "llama", **_SIZES, "max_position_embeddings": 256}
    for head_dim, _, theta, entry in _REAL.values():
        if "partial_rotary_factor" in entry:
            continue
        rope = {"head_dim": head_dim, "rope_theta": theta, "rope_scaling": entry}
        config = LlamaConfig.from_dict({**base, **rope})
        assert LlamaConfig.from_dict(config.to_dict()) == config


# Config with partial, interleaved heads and layers that rotate differently.
_MIXED = LlamaConfig(
    **_SIZES,
    rope_scaling=RopeScaling("linear", 4.0),
    rope_local_base_freq=100.0,
    sliding_window=4,
    layer_types=("sliding_attention", "full_attention") * 2,
    rope_layers=(True, True, True, False),
    partial_rotary_factor=0.5,
    rope_interleaved=True,
    qkv_bias=True,
    qk_norm=True,
)


def test_ropes_differ_between_layers():
    local, full, again, none = _MIXED.ropes
    assert local is not None and local == again and none is None
    assert (local.theta, local.scaling) == (100.0, None)
    assert full == dataclasses.replace(local, theta=10000.0, scaling=RopeScaling("linear", 4.0))
    assert not _MIXED.can_scan_layers
    nowhere = dataclasses.replace(_MIXED, rope_layers=(False,) * 4)
    np.testing.assert_array_equal(rotations(jnp.arange(3), nowhere.ropes[0], 16)[0], 1)
    np.testing.assert_array_equal(rotations(jnp.arange(3), nowhere.ropes[0], 16)[1], 0)
    with pytest.raises(ValueError, match="rope_layers must have one value for each of the 4"):
        dataclasses.replace(_MIXED, rope_layers=(True,))
    with pytest.raises(ValueError, match="even number"):
        dataclasses.replace(_MIXED, partial_rotary_factor=0.2)


def test_forward_computes_equal_angles_once():
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(_MIXED, rngs=nnx.Rngs(0))))

    def forward(state, token_ids):
        return nnx.merge(graphdef, state)(token_ids)

    program = jax.jit(forward).lower(state, jnp.zeros((1, 8), jnp.int32)).as_text()
    # Four layers with two kinds of rotations. The last layer does not rotate.
    assert (program.count("stablehlo.cosine "), program.count("stablehlo.sine ")) == (2, 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 12, 16])
def test_head_order_preserves_the_rotation(interleaved, rotary_dim):
    D, theta = 16, 10.0
    head = np.random.default_rng(0).normal(size=(5, 1, D)).astype(np.float32)
    expected = head.copy()
    for pair in range(rotary_dim // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary_dim // 2)
        turn = np.exp(1j * np.arange(5) * theta ** (-2 * pair / rotary_dim))
        turned = (head[:, 0, i] + 1j * head[:, 0, j]) * turn
        expected[:, 0, i], expected[:, 0, j] = turned.real, turned.imag
    order = list(head_order(D, rotary_dim, interleaved=interleaved) or range(D))
    cos, sin = rotations(jnp.arange(5), Rope(D, rotary_dim, theta), D)
    rotated = rotate(jnp.asarray(head[..., order]), cos, sin)
    np.testing.assert_allclose(rotated, expected[..., order], rtol=0, atol=1e-6)
    assert (order == list(range(D))) == (rotary_dim == D and not interleaved)


SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def test_query_scale_is_the_factor_of_ministral_3():
    """`get_llama_4_attn_scale` of transformers, in float64."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }  # fmt: skip
    sizes = SIZES | {"max_position_embeddings": 262144, "rope_parameters": rope}
    config = LlamaConfig.from_dict({"model_type": "ministral3", **sizes})
    scale = config.layers[0].get(Attention).query_scale
    assert scale is not None and not scale.only_without_rope
    edges = np.arange(1, 17) * 16384
    positions = np.concatenate([[0, 1], edges - 1, edges])
    want = 1 + 0.1 * np.log(1 + np.floor(positions / 16384))
    found = scale.factors(jnp.asarray(positions, jnp.int32))
    np.testing.assert_allclose(found, want, rtol=2e-7, atol=0)


def test_query_scale_of_llama_4_counts_positions_from_one():
    """Llama4TextAttention of transformers, in float64."""
    given = SIZES | {"model_type": "llama4_text", "floor_scale": 64, "attn_scale": 0.2}
    given |= {"attn_temperature_tuning": True, "no_rope_layer_interval": 1}
    scale = LlamaConfig.from_dict(given).layers[0].get(Attention).query_scale
    assert scale is not None and scale.only_without_rope
    positions = np.array([0, 62, 63, 64, 126, 127, 10**6])
    want = np.log1p(np.floor((positions + 1.0) / 64)) * 0.2 + 1
    found = scale.factors(jnp.asarray(positions, jnp.int32))
    np.testing.assert_allclose(found, want, rtol=2e-7, atol=0)
    # Negative positions are those of tokens that do not exist.
    np.testing.assert_array_equal(scale.factors(jnp.array([-1, -999])), 1)
    with pytest.raises(ValueError, match="query_scale must have a positive beta"):
        QueryScale(beta=0.0, length=4)


def test_only_longrope_depends_on_the_maximum_length():
    """Weights of a model with another maximum length replace those of an engine."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    longer = dataclasses.replace(config, max_position_embeddings=4096)
    assert longer.layers == config.layers
    scaling = RopeScaling("longrope", 2.0, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)
    short, long = (dataclasses.replace(each, rope_scaling=scaling) for each in (config, longer))
    assert short.layers != long.layers
