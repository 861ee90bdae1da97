"""The contract of parts: what the rest of the library derives from them fits together."""

import dataclasses
import functools

import jax
import pytest
from flax import nnx

from paged_jax.models.config import ModelConfig
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.tensor_map import map_parameter
from paged_jax.models.matrix_formats import is_matrix
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.latent import LatentAttention
from paged_jax.models.parts.mixer import Mixer
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import AttentionPart, Parameter, Part
from paged_jax.models.parts.residual import Sublayer
from paged_jax.models.rope import Rope
from tests.support import references

NAMES = references.names()
ROPE = Rope(head_dim=8, rotary_dim=8, theta=100.0)
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": ROPE}


def config_of(name: str) -> ModelConfig:
    return LlamaConfig.from_dict(references.stored(name).config)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_names_and_tensors_that_fit_them(name):
    config = config_of(name)
    scopes = {"": config.outer_parameters}
    for index, spec in enumerate(config.layers):
        scopes[f"layers.{index}."] = spec.parameters(config.hidden_size)
    for scope, parameters in scopes.items():
        for kind, parameter in parameters.items():
            assert is_matrix(scope + kind) == parameter.is_matrix, kind
            assert config.parameter(scope + kind) == parameter
            boxes = [mapping.box_shape for mapping in map_parameter(config, scope + kind)]
            assert boxes and {len(box) for box in boxes} == {len(parameter.shape)}, kind
            if parameter.divided is not None:
                assert 1 <= parameter.divided <= len(parameter.shape)
            if parameter.pieces is not None:
                # The dimension after the heads has all pieces, and the rest if one has no size.
                rows = parameter.shape[len(parameter.shape) - parameter.divided + 1 :]
                sizes = [size for size, _ in parameter.pieces]
                total = sum(size for size in sizes if size is not None)
                assert None in sizes or rows[0] == total, kind


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_two_devices_are_halves(name):
    config = config_of(name)
    try:
        shard = config.divide("test", 2)
    except ValueError:
        return  # sizes that are not even
    wide = config.widen(2)
    for whole, part in zip(wide.layers, shard.layers, strict=True):
        theirs, ours = (spec.parameters(config.hidden_size) for spec in (whole, part))
        assert theirs.keys() == ours.keys()
        for kind, parameter in theirs.items():
            shape = [*parameter.shape]
            if parameter.divided is not None:
                shape[-parameter.divided] //= 2
            assert ours[kind].shape == tuple(shape), kind
        for both in zip(whole.walk(), part.walk(), strict=True):
            assert type(both[0]) is type(both[1])
        if whole.kv is not None:
            assert whole.kv.num_kv_heads == 2 * part.kv.num_kv_heads


def test_initial_values_have_the_described_shapes():
    for name in NAMES:
        config = config_of(name)
        for parameter in config.layers[0].parameters(config.hidden_size).values():
            if parameter.initial is not None:
                assert jax.eval_shape(functools.partial(initial_values, parameter)).shape == (
                    parameter.shape
                )


def initial_values(parameter: Parameter) -> jax.Array:
    assert parameter.initial is not None
    return parameter.initial(nnx.Rngs(0), parameter.shape, parameter.dtype or "float32")


def test_each_part_is_in_a_stored_model():
    """The two tests above cover all parts of the library."""
    specs = [spec for name in NAMES for spec in config_of(name).layers]
    found = {type(part) for spec in specs for part in spec.walk()}
    bases = {Part, AttentionPart, Mixer}
    own = {each for each in all_subclasses(Part) if each.__module__.startswith("paged_jax.")}
    assert found and own - bases <= found, own - bases - found


def all_subclasses(kind: type) -> set[type]:
    direct = set(kind.__subclasses__())
    return direct.union(*map(all_subclasses, direct))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(**{**SIZES, "num_kv_heads": 3}), "multiple of num_kv_heads, got .* 3"),
        (lambda: Attention(**{**SIZES, "num_kv_heads": 0}), "num_kv_heads must be a positive"),
        (lambda: Attention(**{**SIZES, "head_dim": 7}), "head_dim must be even and at most"),
        (lambda: Attention(**SIZES, window=0), "window must be a positive integer"),
        (lambda: Attention(**SIZES, soft_cap=-1.0), "soft_cap must be positive, got -1.0"),
        (lambda: Dense(features=-3), "intermediate_size must be a positive integer"),
        (lambda: Activation("softmax"), "hidden_act must be one of silu"),
        (lambda: Norm(0.0), "eps must be positive"),
        (lambda: Norm(1e-6, kind="batch"), "kind must be rms or layer"),
        (lambda: dataclasses.replace(ROPE, theta=0.0), "rope_theta must be positive"),
        (lambda: Experts(num_experts=2, num_chosen=3, features=4), "num_chosen must be at most"),
    ],
)
def test_parts_check_their_sizes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_layer_has_one_part_of_a_kind():
    norm = Norm(1e-6)
    first = Sublayer(part=Attention(**SIZES), norm=norm, input_norm="input_norm")
    second = Sublayer(part=Attention(**SIZES), norm=norm, input_norm="post_attention_norm")
    with pytest.raises(ValueError, match="parameters of different names, got .* in several parts"):
        LayerSpec((first, second))
    layer = LayerSpec((first,))
    assert layer.find(LatentAttention) is None and layer.attention == first.part
    with pytest.raises(ValueError, match="must have a part Dense"):
        layer.get(Dense)
