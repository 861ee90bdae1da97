"""Entries of a ``config.json`` that many families share: reading and writing.

A function ``read_...`` has a counterpart ``write_...`` that returns the entries for it. The errors
are those of `LlamaConfig.from_dict`.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, TypedDict

from paged_jax.arguments import check_positive, is_int
from paged_jax.models.config import Family, ModelConfig, check_num_layers
from paged_jax.models.config_json import (
    ConfigEntries,
    as_integer,
    as_json,
    read_boolean,
    read_integer,
    read_name,
    read_number,
    read_token_ids,
    write_token_ids,
)
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.rope_entries import (
    check_no_query_scale,
    check_rope_keys,
    check_same_for_all,
    choose_object,
    is_nested,
    longest_sequence,
    read_scaling,
    split_by_layer_type,
    write_scaling,
)
from paged_jax.models.layer_groups import FULL, SLIDING
from paged_jax.models.layer_spec import Kind, LayerSpec
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import MAX_HEAD_DIM, Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import Part
from paged_jax.models.parts.residual import Parallel, Sublayer
from paged_jax.models.rope import QueryScale, Rope, RopeScaling

# Other names of activations in files.
_ACTIVATION_NAMES: Mapping[str, str] = {
    "swish": "silu",
    "gelu_python": "gelu",
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_pytorch_tanh"
    ),
}


def pre_norm(tokens: Part, mlp: Part, norm: Norm, multiplier: float = 1.0) -> LayerSpec:
    """Return a layer with norms before the part that mixes tokens and before the MLP."""
    return LayerSpec((
        Sublayer(part=tokens, norm=norm, input_norm="input_norm", multiplier=multiplier),
        Sublayer(part=mlp, norm=norm, input_norm="post_attention_norm", multiplier=multiplier),
    ))  # fmt: skip


def parallel(tokens: Part, mlp: Part, norm: Norm) -> LayerSpec:
    """Return a layer whose two parts run in parallel, on the output of the same norm."""
    return LayerSpec((Sublayer(part=Parallel((tokens, mlp)), norm=norm, input_norm="input_norm"),))


def post_norm(tokens: Part, mlp: Part, norm: Norm) -> LayerSpec:
    """Return a layer with norms after the part that mixes tokens and after the MLP."""
    return LayerSpec((
        Sublayer(part=tokens, norm=norm, output_norm="attention_out_norm"),
        Sublayer(part=mlp, norm=norm, output_norm="mlp_out_norm"),
    ))  # fmt: skip


def sandwich_norm(tokens: Part, mlp: Part, norm: Norm) -> LayerSpec:
    """Return a layer with norms before and after both of its parts."""
    return LayerSpec((
        Sublayer(
            part=tokens, norm=norm, input_norm="input_norm", output_norm="attention_out_norm"
        ),
        Sublayer(
            part=mlp, norm=norm, input_norm="post_attention_norm", output_norm="mlp_out_norm"
        ),
    ))  # fmt: skip


def read_model(family: Family, entries: ConfigEntries, **fields: Any) -> ModelConfig:
    """Return the config of a model with the fields that all families have in common.

    Args:
      family: family of the model.
      entries: content of the ``config.json``.
      fields: fields of the `ModelConfig` that depend on the family: `layers`, `norm` and others.
    """
    dtype = read_name(entries, "dtype", read_name(entries, "torch_dtype", "float32"))
    return ModelConfig(
        **{
            "vocab_size": read_integer(entries, "vocab_size"),
            "hidden_size": read_integer(entries, "hidden_size"),
            "max_position_embeddings": read_length(family, entries),
            "tie_word_embeddings": read_boolean(entries, "tie_word_embeddings", False),
            "initializer_range": read_number(entries, "initializer_range", 0.02),
            "bos_token_id": read_integer(entries, "bos_token_id", None),
            "eos_token_ids": read_token_ids(entries, "eos_token_id"),
            "model_type": family.model_type,
            "dtype": dtype.removeprefix("torch."),
            "family": family,
        }
        | fields
    )


def write_model(config: ModelConfig) -> dict[str, Any]:
    """Return the entries for `read_model`."""
    assert config.family is not None
    return {
        "architectures": [config.family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": write_token_ids(config.eos_token_ids),
        # Without this entry, transformers would use a default token id, which may be outside of
        # this model's vocabulary.
        "pad_token_id": None,
        "torch_dtype": config.dtype,
    }


def check_only(family: Family, entries: ConfigEntries, **supported: Any) -> None:
    """Check entries that change the computation, each with the only value that is supported.

    They may also be missing or null.
    """
    for key, value in supported.items():
        if (entry := entries.get(key)) not in (None, value):
            raise UnsupportedConfigError(
                f"LlamaConfig: {key} must be {as_json(value)} for {family.architecture}, got "
                f"{as_json(entry)}."
            )


def read_num_layers(entries: ConfigEntries) -> int:
    """Return the number of layers, which is checked before lists of this length are made."""
    num_layers = read_integer(entries, "num_hidden_layers")
    check_num_layers(num_layers)
    return num_layers


def read_size(entries: ConfigEntries, key: str) -> int:
    """Return an entry that must be a positive integer."""
    size = read_integer(entries, key)
    check_positive("LlamaConfig", **{key: size})
    return size


def read_layer_indices(entries: Mapping[str, Any], key: str) -> list[int] | None:
    """Return an entry that must be a list of layer indices; None if it is missing or null."""
    listed = entries.get(key)
    if listed is not None and not (isinstance(listed, list) and all(map(is_int, listed))):
        raise ValueError(f"LlamaConfig: {key} must be a list of layer indices, got {listed!r}.")
    return listed


def use_other_names(entries: ConfigEntries, names: Mapping[str, str]) -> ConfigEntries:
    """Give entries of some files the keys under which other files have them.

    Args:
      entries: content of the ``config.json``.
      names: other keys, each mapped to the key that the family reads.
    """
    return entries.replace({key: entries[name] for name, key in names.items() if name in entries})


def find_part(config: ModelConfig, kind: type[Kind]) -> Kind | None:
    """Return the first part of a class in any layer; None if no layer has one."""
    return next(filter(None, (spec.find(kind) for spec in config.layers)), None)


class HeadSizes(TypedDict):
    """Fields of `Attention` with the numbers and the dimension of heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(entries: ConfigEntries) -> HeadSizes:
    """Return the fields of `Attention` with the numbers and the dimension of heads."""
    num_heads = read_integer(entries, "num_attention_heads")
    num_kv_heads = read_integer(entries, "num_key_value_heads", None)
    head_dim = read_integer(entries, "head_dim", None)
    hidden_size = read_integer(entries, "hidden_size")
    check_positive("LlamaConfig", hidden_size=hidden_size)
    if not head_dim and (num_heads < 1 or hidden_size % num_heads):
        raise ValueError(
            "LlamaConfig: hidden_size must be a multiple of num_attention_heads when head_dim is "
            f"not given, got hidden_size {hidden_size} and num_attention_heads {num_heads}."
        )
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    head_dim = head_dim or hidden_size // num_heads
    check_positive(
        "LlamaConfig",
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
    )
    if num_heads % num_kv_heads:
        raise ValueError(
            "LlamaConfig: num_attention_heads must be a multiple of num_key_value_heads, got "
            f"num_attention_heads {num_heads} and num_key_value_heads {num_kv_heads}."
        )
    check_head_dim(head_dim=head_dim)
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def check_head_dim(**sizes: int) -> None:
    """Check head dimensions, which are given by their keys, for rotation and against typing errors.

    Raises:
      ValueError: a head dimension is odd or too large.
    """
    for key, size in sizes.items():
        if size % 2 or size > MAX_HEAD_DIM:
            raise ValueError(
                f"LlamaConfig: {key} must be even and at most {MAX_HEAD_DIM}, got {size}."
            )


def write_heads(config: ModelConfig) -> dict[str, int]:
    """Return the entries for `read_heads`.

    All layers must have the same heads, and keep these heads in the cache. In a model without
    attention, the entries have no effect, but must be valid.
    """
    if not config.num_attention_heads:
        return {"num_attention_heads": 1, "num_key_value_heads": 1}
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }


def read_rope(
    family: Family,
    entries: ConfigEntries,
    head_dim: int,
    *,
    may_be_partial: bool = False,
    is_interleaved: bool = False,
    has_query_scale: bool = False,
) -> Rope:
    """Return the rotary embedding of layers that all rotate in the same way.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one object
    ``rope_parameters``.

    Args:
      family: family of the model.
      entries: content of the ``config.json``.
      head_dim: head dimension (D).
      may_be_partial: whether the family reads ``partial_rotary_factor``.
      is_interleaved: whether rotated pairs are neighbours in the family's checkpoints. Files that
        say otherwise are rejected.
      has_query_scale: whether the family reads ``llama_4_scaling_beta``, see `read_query_scale`.
    """
    rope_object = choose_object(entries, family)
    check_same_for_all(rope_object, family.architecture)
    check_rope_keys(rope_object, family.architecture)
    if not has_query_scale:
        check_no_query_scale(entries, rope_object, family.architecture)
    check_only(family, entries, rope_interleaved=is_interleaved)
    return convert_rope(family, entries, rope_object, head_dim, may_be_partial=may_be_partial)


def read_ropes(family: Family, entries: ConfigEntries, head_dim: int) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of layers without and with a sliding window.

    transformers 4 writes ``rope_theta`` and ``rope_scaling`` for layers without a window, and
    ``rope_local_base_freq`` for layers with a window, whose frequencies are not scaled.
    transformers 5 writes ``rope_parameters`` with an object for each of these layer types.
    """
    rope_object = choose_object(entries, family, has_local_rope=True)
    full, local = split_by_layer_type(rope_object) if is_nested(rope_object) else (rope_object, {})
    check_rope_keys({**full, **local}, family.architecture)
    check_no_query_scale(entries, full, family.architecture)
    check_only(family, entries, rope_interleaved=False)
    rope = convert_rope(family, entries, full, head_dim)
    theta = read_number(entries, "rope_local_base_freq", rope.theta)
    local_rope = convert_rope(family, entries.replace({"rope_theta": theta}), local, head_dim)
    if local_rope.scaling is not None and local_rope != rope:
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_parameters of {SLIDING!r} must have rope_type 'default', or equal "
            f"the rope_parameters of {FULL!r}, got rope_type {local_rope.scaling.rope_type!r}."
        )
    return rope, local_rope


def convert_rope(
    family: Family,
    entries: ConfigEntries,
    rope_object: Mapping[str, Any],
    head_dim: int,
    *,
    may_be_partial: bool = False,
) -> Rope:
    """Convert an object with rotary parameters. What it lacks is at the top level of the file.

    Args:
      family: family of the model.
      entries: content of the ``config.json``.
      rope_object: the object.
      head_dim: head dimension (D).
      may_be_partial: whether ``partial_rotary_factor`` may differ from 1.
    """
    merged = entries.replace(
        {key: value for key, value in rope_object.items() if value is not None}
    )
    factor = read_number(merged, "partial_rotary_factor", 1.0)
    if factor != 1 and not may_be_partial:
        raise UnsupportedConfigError(
            f"LlamaConfig: partial_rotary_factor must be 1 for {family.architecture}, got "
            f"{factor!r}."
        )
    return Rope(
        head_dim=head_dim,
        rotary_dim=int(head_dim * factor),
        theta=read_number(merged, "rope_theta", 10000.0),
        scaling=read_rope_scaling(entries, rope_object),
        max_position_embeddings=read_length(family, entries),
    )


def read_rope_scaling(entries: ConfigEntries, rope_object: Mapping[str, Any]) -> RopeScaling | None:
    """Return the scaling of an object with rotary parameters; None if it does not scale."""
    original = entries.get("original_max_position_embeddings")
    return read_scaling(rope_object, _read_length(entries), original)


def _read_length(entries: ConfigEntries) -> int:
    # Tools that extend contexts write a float here.
    length = as_integer(entries["max_position_embeddings"])
    return read_integer({"max_position_embeddings": length}, "max_position_embeddings")


def write_rope(family: Family, rope: Rope | None) -> dict[str, Any]:
    """Return the entries for `read_rope`; nothing without a rotary embedding."""
    if rope is None:
        return {}
    # null would mean the default scaling of the family.
    default = {"rope_type": "default"} if "rope_parameters" in family.defaults else None
    written: dict[str, Any] = {
        "rope_theta": rope.theta,
        "rope_scaling": default if rope.scaling is None else write_scaling(rope.scaling),
    }
    if rope.rotary_dim != rope.head_dim or "partial_rotary_factor" in family.defaults:
        written["partial_rotary_factor"] = rope.rotary_dim / rope.head_dim
    return written


def write_ropes(config: ModelConfig) -> dict[str, Any]:
    """Return the entries for `read_ropes`."""
    attentions = [spec.get(Attention) for spec in config.layers]
    by_kind = {attention.window is not None: attention.rope for attention in attentions}
    full, local = by_kind.get(False, by_kind.get(True)), by_kind.get(True, by_kind.get(False))
    if full is None or local is None:
        return {}
    scaling = None if full.scaling is None else write_scaling(full.scaling)
    return {
        "rope_theta": full.theta,
        "rope_scaling": scaling,
        "rope_local_base_freq": local.theta,
        # transformers 5 reads only this entry, transformers 4 the other entries.
        "rope_parameters": {FULL: write_parameters(full), SLIDING: write_parameters(local)},
    }


def write_parameters(rope: Rope) -> dict[str, Any]:
    """Return the entry ``rope_parameters`` of layers with this rotary embedding."""
    scaling = {"rope_type": "default"} if rope.scaling is None else write_scaling(rope.scaling)
    return {**scaling, "rope_theta": rope.theta}


def write_query_scale(written: Mapping[str, Any], scale: QueryScale) -> dict[str, Any]:
    """Add the entries for `read_query_scale` to those for `read_rope`.

    transformers reads them only from ``rope_parameters``, so this object replaces the entries of
    `write_rope`.
    """
    replaced = ("rope_theta", "rope_scaling")
    entries = {key: value for key, value in written.items() if key not in replaced}
    parameters = {
        "rope_type": "default",
        **(written["rope_scaling"] or {}),
        "rope_theta": written["rope_theta"],
        "llama_4_scaling_beta": scale.beta,
        "original_max_position_embeddings": scale.length,
    }
    return {**entries, "rope_parameters": parameters}


def read_rotations(entries: ConfigEntries) -> list[bool]:
    """Return whether each layer rotates queries and keys, from the list ``no_rope_layers``.

    Despite its name, 1 means that a layer rotates. By default, every n-th layer does not, with n
    from ``no_rope_layer_interval``.
    """
    num_layers = read_num_layers(entries)
    rotates, interval = entries.get("no_rope_layers"), entries.get("no_rope_layer_interval", 4)
    if not is_int(interval) or interval < 1:
        raise ValueError(
            f"LlamaConfig: no_rope_layer_interval must be a positive integer, got {interval!r}."
        )
    if rotates in (None, []):
        return [bool((layer + 1) % interval) for layer in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) < num_layers:
        raise ValueError(
            "LlamaConfig: no_rope_layers must be a list with a number for each of the "
            f"{num_layers} layers, got {rotates!r}."
        )
    return [bool(rotates_layer) for rotates_layer in rotates[:num_layers]]


def write_rotations(config: ModelConfig) -> dict[str, list[int]]:
    """Return the entry for `read_rotations`."""
    return {"no_rope_layers": [int(rope is not None) for rope in config.ropes]}


def read_length(family: Family, entries: ConfigEntries) -> int:
    """Return the maximum length of a sequence in tokens, see `longest_sequence`."""
    rope_object = choose_object(entries, family)
    if is_nested(rope_object):
        rope_object, _ = split_by_layer_type(rope_object)
    return longest_sequence(read_rope_scaling(entries, rope_object), _read_length(entries))


def read_dense(entries: ConfigEntries, *, has_bias: bool = False) -> Dense:
    """Return a dense MLP with a gate."""
    return Dense(
        features=read_integer(entries, "intermediate_size"),
        activation=Activation(read_activation(entries)),
        has_bias=has_bias,
    )


def write_dense(mlp: Dense) -> dict[str, Any]:
    """Return the entries for `read_dense`."""
    return {"intermediate_size": mlp.features, "hidden_act": mlp.activation.name}


def read_factor(entries: ConfigEntries, key: str) -> float:
    """Return a factor, or a number from which one is computed; it must be positive."""
    factor = read_number(entries, key)
    # 1 divided by a smaller number would overflow.
    if not sys.float_info.min < factor < math.inf:
        raise ValueError(f"LlamaConfig: {key} must be positive, got {factor!r}.")
    return factor


def write_factor(factor: float) -> float:
    """Round a factor to 14 digits, which hides the error of computing it from an entry."""
    return float(f"{factor:.14g}")


def read_activation(entries: ConfigEntries, key: str = "hidden_act") -> str:
    """Return the name of an activation, a key of `norm_rope.ACTIVATIONS`."""
    name = read_name(entries, key, "silu")
    return _ACTIVATION_NAMES.get(name, name)
