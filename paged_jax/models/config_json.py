"""Conversion between the fields of a `LlamaConfig` and a Hugging Face ``config.json``.

An entry that changes the computation is either read, or rejected with an error that names it.
`rope_json` converts the entries about rotary embeddings and latent attention, `layers_json` the
entries about layer types and experts.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any

from paged_jax.arguments import check_positive, is_int, is_real
from paged_jax.models.config_checks import check_num_layers
from paged_jax.models.families import ALIASES, FAMILIES, PARTS
from paged_jax.models.family import Family, InnerTextModel, Multipliers, UnsupportedConfigError
from paged_jax.models.layer_groups import RECURRENT_TYPES, SPARSE, ResidualStreams
from paged_jax.models.layers_json import (
    ACTIVATION_NAMES,
    check_neutral,
    expand_layers,
    read_chunk_size,
    read_experts,
    read_global_heads,
    read_mixer,
    read_mlp_types,
    read_norm_placements,
    read_sliding_window,
    write_experts,
    write_mixer,
    write_sliding_window,
)
from paged_jax.models.model_folder import (
    read_boolean,
    read_integer,
    read_name,
    read_names,
    read_number,
)
from paged_jax.models.quantisation import QUANTISATION_KEYS, find_quantisation
from paged_jax.models.rope_json import (
    longest_sequence,
    read_latent,
    read_rope,
    write_latent,
    write_rope,
)

# Keys that change the computation, each with the value that has no effect. A config with any other
# value is rejected, unless its family reads the key.
_NEUTRAL: Mapping[str, Any] = {
    "mlp_bias": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "use_qk_norm": False,
    # Only Cohere's files have the next three keys. transformers does not read them.
    "use_parallel_block": True,
    "use_gated_activation": True,
    "rotary_pct": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
}

# Prefixes of the `model_type` or class name, in lower case, of models with sparse attention in
# which an indexer chooses the tokens. These models are not supported.
_WITH_INDEXER = (
    "deepseek_v32",
    "deepseekv32",
    "deepseek_v4",
    "deepseekv4",
    "glm_moe_dsa",
    "glmmoedsa",
)

# Fields of `LlamaConfig` that `write_fields` copies to the key of the same name.
_SAME_NAMES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "tie_word_embeddings", "initializer_range", "bos_token_id",
)  # fmt: skip
_PER_LAYER_VOCABULARY = "vocab_size_per_layer_input"
# Keys of the outer config of a multimodal model that also apply to its text model.
_SHARED_KEYS = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", *QUANTISATION_KEYS)


# Defaults of Gemma 3n if the config has no `activation_sparsity_pattern`: the first 10 layers have
# an activation sparsity of 0.95.
_NUM_SPARSE, _SPARSITY = 10, 0.95


def read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the content of a ``config.json`` to the fields of a `LlamaConfig`, by name.

    Raises:
      UnsupportedConfigError, ValueError: see `LlamaConfig.from_dict`.
    """
    config = text_config(config)
    model_type = _model_type(config)
    family = FAMILIES[model_type]
    others = {key: config[other] for other, key in family.aliases.items() if other in config}
    config = {**config, **others}
    if family.mixer is not None:
        config = expand_layers(config, family.mixer, family.defaults)
    config = {**family.defaults, **config}
    _check_supported(config, family)
    replacements = family.replacements.get("hidden_act", {})
    hidden_act = read_name(config, family.key("hidden_act"), "silu")
    heads = read_integer(config, "num_attention_heads")
    kv_heads = read_integer(config, "num_key_value_heads", None)
    max_position_embeddings = read_integer(config, "max_position_embeddings")
    num_hidden_layers = read_integer(config, "num_hidden_layers")
    check_num_layers(num_hidden_layers)
    sliding_window, layer_types = read_sliding_window(config, family, num_hidden_layers)
    has_mixer = family.mixer is not None and {*RECURRENT_TYPES} & {*layer_types}
    mixer = read_mixer(config, family) if has_mixer else None
    rope = read_rope(config, family, num_hidden_layers, layer_types)
    placements = read_norm_placements(family, layer_types)
    switches = _read_switches(config, family)
    has_norms = family.norms_rotated and switches.get("qk_norm")
    return {
        **dict(
            vocab_size=read_integer(config, "vocab_size"),
            hidden_size=read_integer(config, "hidden_size"),
            intermediate_size=_read_intermediate_size(config, family),
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,
            head_dim=read_integer(config, "head_dim", None) or 0,
            max_position_embeddings=longest_sequence(rope["rope_scaling"], max_position_embeddings),
            rms_norm_eps=read_number(config, family.key("rms_norm_eps"), 1e-6),
            **rope,
            tie_word_embeddings=read_boolean(config, "tie_word_embeddings", False),
            hidden_act={**ACTIVATION_NAMES, **replacements}.get(hidden_act, hidden_act),
            sliding_window=sliding_window,
            attention_chunk_size=read_chunk_size(config, family, layer_types),
            layer_types=layer_types,
            mixer=mixer,
            norm_placements=placements,
            qk_norm_layers=rope["rope_layers"] if has_norms else (),
            initializer_range=read_number(config, "initializer_range", 0.02),
            bos_token_id=read_integer(config, "bos_token_id", None),
            eos_token_ids=_token_ids(config, "eos_token_id"),
            model_type=model_type,
            dtype=_dtype(config),
        ),
        **switches,
        **read_global_heads(config, family, layer_types),
        **read_latent(config, family),
        **_read_streams(config, family, num_hidden_layers),
    } | _read_mlps(config, family, num_hidden_layers)


def _read_mlps(config: Mapping[str, Any], family: Family, num_hidden_layers: int) -> dict[str, Any]:
    kinds = () if family.mixer is None else read_mlp_types(config, family.mixer)
    if kinds and SPARSE not in kinds:
        return {"mlp_layer_types": kinds}
    experts = read_experts(config, family, num_hidden_layers)
    return experts | {"mlp_layer_types": kinds} if kinds else experts


def write_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the fields of a `LlamaConfig` to the content of a ``config.json``.

    `read_fields` and transformers can read the result.

    Fields that the family's ``config.json`` cannot express are omitted.

    Raises:
      ValueError: the model type is unknown.
    """
    family = FAMILIES.get(fields["model_type"])
    if family is None:
        raise ValueError(
            f"LlamaConfig: model_type must be one of {', '.join(FAMILIES)}, "
            f"got {fields['model_type']!r}."
        )
    eos_token_ids = fields["eos_token_ids"]
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        **{name: fields[name] for name in _SAME_NAMES},
        family.key("hidden_act"): fields["hidden_act"],
        family.key("rms_norm_eps"): fields["rms_norm_eps"],
        **write_rope(fields, family),
        **write_latent(fields, family),
        "attention_dropout": 0.0,
        "eos_token_id": eos_token_ids[0] if len(eos_token_ids) == 1 else [*eos_token_ids] or None,
        # Without this entry, transformers would use a default token id, which may be outside of
        # this model's vocabulary.
        "pad_token_id": None,
        "torch_dtype": fields["dtype"],
    }
    if family.has_latent:
        del written["head_dim"]  # it has different meanings in transformers' classes
    if family.biases:
        written["attention_bias"] = all(fields[field] for field in family.biases)
    written |= {cap: fields[cap] for cap in family.caps}
    for scale in family.scales:
        if scale.key not in written:
            factor = fields[scale.field]
            # Only `attention_multiplier` can be None, which stands for ``head_dim ** -0.5``.
            number = scale.write(fields["head_dim"] ** -0.5 if factor is None else factor)
            # Some config classes of transformers reject an integer here.
            is_float = isinstance(family.defaults.get(scale.key), float)
            written[scale.key] = float(number) if is_float else number
    written |= _write_multipliers(fields["multipliers"], family)
    written |= {key: fields[field] for field, key in family.switches.items()}
    written |= {name: fields[name] for name in family.sizes}
    if "hidden_size_per_layer_input" in family.sizes:
        written[_PER_LAYER_VOCABULARY] = fields[_PER_LAYER_VOCABULARY] or fields["vocab_size"]
    # Always write these keys: if they are missing, transformers uses default values that are not
    # supported here.
    written |= {key: value for key, value in family.only.items() if key in family.defaults}
    if family.global_heads:
        written["global_head_dim"] = fields["global_head_dim"] or fields["head_dim"]
        written["num_global_key_value_heads"] = fields["num_global_key_value_heads"] or None
    if family.has_adjusted_mlp:
        written["block_auto_adjust_ff_dim"] = False
    if "intermediate_size" in family.keys:
        written[family.key("intermediate_size")] = written["intermediate_size"]
    written |= write_sliding_window(fields, family) | write_experts(fields, family)
    return written | write_mixer(fields, family) | _write_streams(fields, family)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model: `config`, or an entry of it in multimodal models."""
    for model_type, text in PARTS.items():
        architectures = config.get("architectures")
        if config.get("model_type") == model_type or architectures == [text.architecture]:
            known = (text.architecture, _base_architecture(text.architecture))
            for other in architectures if isinstance(architectures, list) else ():
                if other not in known:
                    raise _unsupported("architecture", other)
            return _text_part(config, text)
    return config


def _text_part(config: Mapping[str, Any], text: InnerTextModel) -> Mapping[str, Any]:
    if not isinstance(part := config.get(text.key), Mapping):
        raise ValueError(
            f"LlamaConfig: {text.key} must be a JSON object with the config of the text model, got "
            f"{part!r}."
        )
    if part.get("final_logit_softcapping") is not None and not text.has_cap:
        raise UnsupportedConfigError(
            "LlamaConfig: final_logit_softcapping must be null in this multimodal model, because "
            f"transformers ignores it there, got {part['final_logit_softcapping']!r}."
        )
    shared = {name: config[name] for name in _SHARED_KEYS if config.get(name) is not None}
    # The outer config decides whether embeddings are tied, because the output head belongs to the
    # whole model.
    tied = config.get("tie_word_embeddings", text.is_tied) or False
    outer = {**shared, "tie_word_embeddings": tied, "architectures": None}
    kind = {} if text.model_type is None else {"model_type": text.model_type}
    return {**text.defaults, **part, **outer, **kind}


def _base_architecture(architecture: str) -> str:
    """Return the transformers class that is `architecture` without its output head.

    Example:
      >>> _base_architecture("Qwen3ForCausalLM"), _base_architecture("Gemma3ForCausalLM")
      ('Qwen3Model', 'Gemma3TextModel')
    """
    if architecture in [f"{name}ForCausalLM" for name in ("Gemma3", "Gemma3n", "Gemma4", "Llama4")]:
        return architecture.replace("ForCausalLM", "TextModel")
    return architecture.partition("For")[0] + "Model"


def _unsupported(kind: str, name: str) -> UnsupportedConfigError:
    is_sparse = name.lower().startswith(_WITH_INDEXER)
    reason = ": its sparse attention chooses tokens by an indexer" if is_sparse else ""
    return UnsupportedConfigError(
        f"LlamaConfig: {kind} {name!r} is not supported{reason}. See docs/families.md for the "
        "models that are."
    )


def _model_type(config: Mapping[str, Any]) -> str:
    architectures = read_names(config, "architectures") or []
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    by_architecture |= {_base_architecture(name): kind for name, kind in by_architecture.items()}
    for architecture in architectures:
        if architecture not in by_architecture:
            raise _unsupported("architecture", architecture)
    model_type = config.get("model_type")
    if model_type is None and architectures:
        return by_architecture[architectures[0]]
    if model_type is None:
        raise ValueError("LlamaConfig: model_type is missing.")
    if not isinstance(model_type, str):
        raise ValueError(f"LlamaConfig: model_type must be a name, got {model_type!r}.")
    model_type = ALIASES.get(model_type, model_type)
    if model_type not in FAMILIES:
        raise _unsupported("model_type", model_type)
    if any(by_architecture[architecture] != model_type for architecture in architectures):
        raise ValueError(
            f"LlamaConfig: architectures must only contain classes of model_type {model_type!r}, "
            f"got {architectures}."
        )
    return model_type


def _read_intermediate_size(config: Mapping[str, Any], family: Family) -> int:
    sizes = config.get("intermediate_size")
    if family.has_streams and isinstance(sizes, list) and sizes and all(map(is_int, sizes)):
        return max(sizes)
    size = read_integer(config, family.key("intermediate_size"))
    if family.has_adjusted_mlp and read_boolean(config, "block_auto_adjust_ff_dim", True):
        unit = read_integer(config, "block_multiple_of", 256)
        check_positive("LlamaConfig", block_multiple_of=unit)
        size = int(read_number(config, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = unit * -(-size // unit)
    return size


def _read_streams(
    config: Mapping[str, Any], family: Family, num_hidden_layers: int
) -> dict[str, Any]:
    """Return the fields about residual streams and about MLP sizes that differ by layer."""
    if not family.has_streams:
        return {}
    streams = ResidualStreams(
        read_integer(config, "altup_num_inputs"),
        read_integer(config, "altup_active_idx"),
        read_boolean(config, "altup_correct_scale", True),
    )
    sizes = config.get("intermediate_size")
    sparsity = config.get("activation_sparsity_pattern")
    if sparsity is None:
        num_sparse = _NUM_SPARSE if num_hidden_layers > _NUM_SPARSE else 0
        sparsity = [_SPARSITY] * num_sparse + [0.0] * (num_hidden_layers - num_sparse)
    for key, values in {
        "intermediate_size": sizes,
        "activation_sparsity_pattern": sparsity,
    }.items():
        if isinstance(values, list) and not (
            len(values) == num_hidden_layers and all(map(is_real, values))
        ):
            raise ValueError(
                f"LlamaConfig: {key} must be a list of {num_hidden_layers} numbers, one for each "
                f"layer, got {values!r}."
            )
    if not isinstance(sparsity, list):
        raise ValueError(
            f"LlamaConfig: activation_sparsity_pattern must be a list, got {sparsity!r}."
        )
    return {
        "residual_streams": streams,
        "intermediate_sizes": tuple(map(int, sizes)) if isinstance(sizes, list) else (),
        "activation_sparsity": tuple(map(float, sparsity)),
    }


def _write_streams(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries of a ``config.json`` from which `_read_streams` reads its fields."""
    streams: ResidualStreams | None = fields["residual_streams"]
    if not family.has_streams or streams is None:
        return {}
    L = fields["num_hidden_layers"]
    return {
        "altup_num_inputs": streams.count,
        "altup_active_idx": streams.active,
        "altup_correct_scale": streams.scales_active,
        "intermediate_size": [*fields["intermediate_sizes"]] or [fields["intermediate_size"]] * L,
        "activation_sparsity_pattern": [*fields["activation_sparsity"]] or [0.0] * L,
    }


def _check_supported(config: Mapping[str, Any], family: Family) -> None:
    find_quantisation(config, has_mxfp4=family.is_mxfp4)
    check_neutral(config, family, {**_NEUTRAL, **family.only})
    if read_boolean(config, "attention_bias", False) and not (
        family.biases or "qkv_bias" in {**family.fixed, **family.switches}
    ):
        raise UnsupportedConfigError(
            f"LlamaConfig: attention_bias is not supported for {family.architecture}."
        )


def _read_switches(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields that only some families have.

    Their values are fixed by the family, or read from the config.
    """
    switches: dict[str, Any] = dict(family.fixed)
    switches |= {
        cap: read_number(config, cap) for cap in family.caps if config.get(cap) is not None
    }
    for scale in family.scales:
        number = read_number(config, scale.key)
        # 1 divided by a smaller number would overflow.
        if not sys.float_info.min < number < math.inf:
            raise ValueError(f"LlamaConfig: {scale.key} must be positive, got {number!r}.")
        switches[scale.field] = scale.read(number)
    if family.multipliers:
        switches["multipliers"] = _read_multipliers(config, family)
    if read_boolean(config, "attention_bias", False):
        switches |= dict.fromkeys(family.biases, True)
    switches |= {name: read_integer(config, name, 0) for name in family.sizes}
    if switches.get("hidden_size_per_layer_input"):
        vocab_size = read_integer(config, "vocab_size")
        given = read_integer(config, _PER_LAYER_VOCABULARY, vocab_size)
        if _PER_LAYER_VOCABULARY in family.sizes:
            switches[_PER_LAYER_VOCABULARY] = 0 if given == vocab_size else given
        elif given != vocab_size:
            raise UnsupportedConfigError(
                f"LlamaConfig: {_PER_LAYER_VOCABULARY} must equal vocab_size, got {given}."
            )
    return switches | {
        field: read_boolean(config, key, False) for field, key in family.switches.items()
    }


def _read_multipliers(config: Mapping[str, Any], family: Family) -> Multipliers:
    factors: dict[str, float] = {}
    for name, (key, index) in family.multipliers.items():
        value = config.get(key)
        if index is not None:
            value = value[index] if isinstance(value, list) and len(value) > index else value
        if not is_real(value):
            raise ValueError(
                f"LlamaConfig: {key} must be a number, or a list with a number for each "
                f"multiplier, got {config.get(key)!r}."
            )
        factors[name] = float(value)
    return Multipliers(**factors)


def _write_multipliers(multipliers: Multipliers, family: Family) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for name, (key, index) in family.multipliers.items():
        factor = getattr(multipliers, name)
        # Fields of the same list come in the order of their indices, so they can be appended.
        written[key] = factor if index is None else [*written.get(key, ()), factor]
    return written


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(dtype, str):
        raise ValueError(f"LlamaConfig: dtype must be a string such as 'bfloat16', got {dtype!r}.")
    return dtype.removeprefix("torch.")


def _token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_int(token) and token >= 0 for token in values):
        raise ValueError(
            f"LlamaConfig: {key} must be a token id or a list of token ids (integers of at least "
            f"0), got {value!r}."
        )
    return tuple(values)
