"""Reading and writing of ``config.json`` entries about rotary embeddings and latent attention.

For the arguments and the errors, see `layers_json`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.arguments import check_positive, is_int, is_real
from paged_jax.models.family import Family, UnsupportedConfigError
from paged_jax.models.layer_groups import ATTENTION_TYPES, FULL, SLIDING, LatentSizes
from paged_jax.models.model_folder import read_boolean, read_integer, read_number, read_object
from paged_jax.models.rope import SCALING_FIELDS, QueryScale, RopeScaling

# Required keys with the sizes of latent attention. One more key, `q_lora_rank`, may be null.
_LATENT_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_rope(
    config: Mapping[str, Any], family: Family, num_layers: int, layer_types: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of a `LlamaConfig` that describe rotary embeddings.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``, and for Gemma 3 also
    ``rope_local_base_freq``. transformers 5 writes everything into ``rope_parameters``, which is
    one object, or an object for each layer type.
    """
    rope = _choose_object(config, family)
    local: Mapping[str, Any] | None = None
    if _is_nested(rope):
        rope, local = _split_by_layer_type(rope, family)
    merged = {**config, **{key: value for key, value in rope.items() if value is not None}}
    # With latent attention, the rotated elements are a separate part of a head, and this part is
    # always rotated completely.
    partial_factor = 1.0 if family.has_latent else _partial_factor(merged, family)
    theta, scaling = read_number(merged, "rope_theta", 10000.0), _read_scaling(rope, config)
    rope_of_others = theta, scaling, partial_factor
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_local_base_freq": _local_theta(config, family, local, rope_of_others),
        "query_scale": _read_query_scale(config, rope, family),
        "rope_layers": read_rope_layers(config, family, num_layers, layer_types),
        "partial_rotary_factor": partial_factor,
        "rope_interleaved": _is_interleaved(config, family),
    }


def write_rope(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries of `config.json` about rotary embeddings; `read_rope` reads them."""
    if family.rope_layers == "none":
        return {}
    if family.rope_layers == "with a base" and fields["rope_layers"]:
        return {"rope_theta": None}
    rope_scaling: RopeScaling | None = fields["rope_scaling"]
    scaling: dict[str, Any] | None
    scaling = None if rope_scaling is None else write_scaling(rope_scaling)
    # null would mean the default scaling of the family
    if scaling is None and "rope_parameters" in family.defaults:
        scaling = {"rope_type": "default"}
    if scaling is not None and rope_scaling is not None:
        if mscale := _mscale_all_dim(fields, rope_scaling.factor):
            scaling["mscale_all_dim"] = mscale
    theta, local_theta = fields["rope_theta"], fields["rope_local_base_freq"]
    written: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    partial = {"partial_rotary_factor": fields["partial_rotary_factor"]}
    if family.partial_rope and not family.local_rope:
        written |= partial
    if rope_scaling is not None and "original_max_position_embeddings" in family.defaults:
        original = rope_scaling.original_max_position_embeddings
        written["original_max_position_embeddings"] = original
    if family.rope_layers == "switched":
        written["position_embedding_type"] = "nope" if fields["rope_layers"] else "rope"
    if family.rope_layers == "listed":
        rotates = fields["rope_layers"] or (True,) * fields["num_hidden_layers"]
        written["no_rope_layers"] = list(map(int, rotates))
    if family.local_rope:
        default = {"rope_type": "default"}
        local_scaling = None if local_theta else scaling
        written["rope_local_base_freq"] = local_theta or theta
        # transformers 5 reads only the entry `rope_parameters`, transformers 4 the other entries.
        written["rope_parameters"] = {
            FULL: {**(scaling or default), "rope_theta": theta},
            SLIDING: {**(local_scaling or default), "rope_theta": local_theta or theta},
        }
        if family.partial_rope:
            # The partial rotary factor applies only to layers without a window. Only the entry
            # `rope_parameters` can express this, because `rope_scaling` applies to all layers.
            written["rope_parameters"][FULL] |= partial
            del written["rope_scaling"]
    scale: QueryScale | None = fields["query_scale"]
    if family.query_scale == "rope_parameters" and scale is not None:
        # transformers reads these values only from `rope_parameters`.
        parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
        parameters |= {
            "llama_4_scaling_beta": scale.beta,
            "original_max_position_embeddings": scale.length,
        }
        return {"rope_parameters": parameters}
    if family.query_scale == "attn_temperature_tuning":
        written["attn_temperature_tuning"] = scale is not None
        if scale is not None:
            written |= {"attn_scale": scale.beta, "floor_scale": scale.length}
    return written


def read_latent(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of a `LlamaConfig` that latent attention sets; empty without it."""
    if not family.has_latent:
        return {}
    sizes = {name: read_integer(config, name) for name in _LATENT_KEYS}
    latent = LatentSizes(read_integer(config, "q_lora_rank", None) or 0, **sizes)
    rope, fields = _choose_object(config, family), {}
    scaling = _read_scaling(rope, config)
    if scaling is not None and rope.get("mscale_all_dim"):
        # This factor of the attention scores is applied in addition to `attention_factor`.
        scale = _yarn_scale(scaling.factor, read_number(rope, "mscale_all_dim"))
        fields["attention_multiplier"] = latent.query_dim**-0.5 * scale**2
    # The number of KV heads is the number of heads, as in the files, although all heads share one
    # latent vector.
    heads = read_integer(config, "num_attention_heads")
    fields |= {"num_key_value_heads": heads, "head_dim": latent.qk_rope_head_dim}
    return fields | {"latent": latent}


def write_latent(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries about latent attention, for `read_latent` and transformers."""
    latent: LatentSizes | None = fields["latent"]
    if not family.has_latent or latent is None:
        return {}
    written = {name: getattr(latent, name) for name in _LATENT_KEYS}
    written["rope_interleave"] = fields["rope_interleaved"]
    return written | {"q_lora_rank": latent.q_lora_rank or None}


def _mscale_all_dim(fields: Mapping[str, Any], factor: float) -> float:
    """Return the entry ``mscale_all_dim`` for `attention_multiplier`; 0 if it is not needed.

    `factor` is the factor of the rotary scaling.
    """
    latent: LatentSizes | None = fields["latent"]
    multiplier = fields["attention_multiplier"]
    if latent is None or multiplier is None or factor <= 1:
        return 0.0
    scale = math.sqrt(multiplier * latent.query_dim**0.5)
    # Rounding to 12 digits hides rounding errors, and keeps every number that a person would write.
    return float(f"{(scale - 1) / (0.1 * math.log(factor)):.12g}")


def _read_query_scale(
    config: Mapping[str, Any], rope: Mapping[str, Any], family: Family
) -> QueryScale | None:
    """Return the `QueryScale` of a config; None if queries have no position-dependent scale.

    `rope` is the entry `rope_parameters`.
    """
    if family.query_scale == "attn_temperature_tuning":
        # The value is a boolean in newer files, and a number in early files, where 0 means false.
        if not config.get("attn_temperature_tuning"):
            return None
        beta = read_number(config, "attn_scale")
        length = read_number(config, "floor_scale")
        return QueryScale(beta, int(length), offset=1, only_without_rope=True)
    # In early files of Mistral, these values are in a separate entry. `rope` may be a default.
    given = {**rope, **read_object(config, "llama_4_scaling")}
    beta = given.get("beta", given.get("llama_4_scaling_beta"))
    if beta is None:
        return None
    if family.query_scale != "rope_parameters":
        raise UnsupportedConfigError(
            f"LlamaConfig: llama_4_scaling_beta must be null for {family.architecture}, got "
            f"{beta!r}."
        )
    length = _context_length(
        "original_max_position_embeddings", given.get("original_max_position_embeddings")
    )
    return QueryScale(read_number({"llama_4_scaling_beta": beta}, "llama_4_scaling_beta"), length)


def read_scaling(
    rope: Mapping[str, Any], max_position_embeddings: int, original: int | None = None
) -> RopeScaling | None:
    """Convert the object ``rope_scaling``, or an object in ``rope_parameters``.

    Args:
      rope: the object to convert.
      max_position_embeddings: value of this key in the same config.
      original: value of ``original_max_position_embeddings`` at the top level of the config
        (Phi-3), or None.

    Returns:
      The scaling; None if frequencies are not scaled.

    Raises:
      UnsupportedConfigError: the ``rope_type`` is unknown.
      ValueError: a number is missing or invalid.

    Example:
      >>> read_scaling({"rope_type": "linear", "factor": 8}, 32768)
      RopeScaling(rope_type='linear', factor=8.0, ...)
    """
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type not in tuple(SCALING_FIELDS):
        return RopeScaling(rope_type, 1.0)  # raises UnsupportedConfigError
    fields: dict[str, Any] = {"original_max_position_embeddings": max_position_embeddings}
    if rope_type != "dynamic":  # its original context is max_position_embeddings
        given = rope.get("original_max_position_embeddings") if original is None else original
        if given is not None:
            fields["original_max_position_embeddings"] = _context_length(
                "original_max_position_embeddings", given
            )
    used = SCALING_FIELDS[rope_type]
    if rope_type == "proportional":
        rope = {"factor": 1.0, **rope}
    if rope_type == "llama3":
        fields |= {k: read_number(rope, k) for k in ("low_freq_factor", "high_freq_factor")}
    if rope.get("factor") is not None or rope_type in ("linear", "dynamic", "llama3"):
        fields["factor"] = read_number(rope, "factor")
    else:
        # The default is the ratio of the maximum context length to the original context length.
        # Files of Phi-3 rely on it.
        fields["factor"] = max_position_embeddings / fields["original_max_position_embeddings"]
    for key in ("beta_fast", "beta_slow"):
        if key in used and rope.get(key):  # null and 0 stand for the default, as in transformers
            fields[key] = read_number(rope, key)
    if "truncate" in used:
        fields["truncate"] = bool(rope.get("truncate", True))  # transformers treats null as false
    for key in ("short_factor", "long_factor"):
        if key in used:
            fields[key] = _positive_numbers(rope, key)
    if "attention_factor" in used:
        fields["attention_factor"] = _attention_factor(rope_type, rope, fields)
    if "original_max_position_embeddings" not in used:
        del fields["original_max_position_embeddings"]
    return RopeScaling(rope_type, **fields)


def write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """Return the entry ``rope_scaling``, which `read_scaling` and transformers can read."""
    written: dict[str, Any] = {"rope_type": scaling.rope_type}
    for name in SCALING_FIELDS[scaling.rope_type]:
        value = getattr(scaling, name)
        written[name] = list(value) if isinstance(value, tuple) else value
    if scaling.rope_type == "dynamic":
        del written["original_max_position_embeddings"]
    return written


def longest_sequence(scaling: RopeScaling | None, max_position_embeddings: int) -> int:
    """Return the maximum length of a sequence in tokens.

    To extend the context of Qwen models, users add ``"yarn"`` to a config, but leave
    `max_position_embeddings` at the training length. With ``"yarn"``, the maximum length is
    therefore at least ``factor * original_max_position_embeddings``, as in vLLM.
    """
    if scaling is None or scaling.rope_type != "yarn":
        return max_position_embeddings
    scaled = int(scaling.factor * scaling.original_max_position_embeddings)
    return max(max_position_embeddings, scaled)


def read_rope_layers(
    config: Mapping[str, Any], family: Family, num_layers: int, layer_types: Sequence[str]
) -> tuple[bool, ...]:
    """Return whether each layer rotates queries and keys; empty if all layers do."""
    if family.rope_layers == "sliding":
        uniform = FULL if config.get("sliding_window") is None else SLIDING
        return tuple(kind == SLIDING for kind in layer_types or (uniform,) * num_layers)
    if family.rope_layers == "all":
        return ()
    if family.rope_layers == "with a base":
        parameters = read_object(config, "rope_parameters")
        theta = {"rope_theta": 0.0, **config, **parameters}["rope_theta"]
        return (False,) * num_layers if theta is None else ()
    if family.rope_layers in ("none", "switched"):
        kind = config.get("position_embedding_type")
        rotates = family.rope_layers == "switched" and kind == "rope"
        return () if rotates else (False,) * num_layers
    rotates = config.get("no_rope_layers")  # despite its name, 1 means that a layer rotates
    if rotates in (None, []):
        interval = config.get("no_rope_layer_interval", 4)
        if not is_int(interval) or interval < 1:
            raise ValueError(
                f"LlamaConfig: no_rope_layer_interval must be a positive integer, got {interval!r}."
            )
        return tuple(bool((layer + 1) % interval) for layer in range(num_layers))
    if not isinstance(rotates, list) or len(rotates) < num_layers:
        raise ValueError(
            "LlamaConfig: no_rope_layers must be a list with a number for each of the "
            f"{num_layers} layers, got {rotates!r}."
        )
    return tuple(map(bool, rotates[:num_layers]))


def _choose_object(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return the entry `rope_scaling` or `rope_parameters`.

    If the config has both, check that they agree.
    """
    scaling = read_object(config, "rope_scaling")
    parameters = read_object(config, "rope_parameters")
    if not parameters or parameters == family.defaults.get("rope_parameters"):
        return scaling or parameters
    if family.local_rope and not _is_nested(parameters):
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_parameters must have the keys {FULL!r} and {SLIDING!r} for "
            f"{family.architecture}, each with an object, got {dict(parameters)!r}."
        )
    if not scaling:
        return parameters
    given, theta = parameters, config.get("rope_theta", 10000.0)
    if _is_nested(parameters):
        given = read_object(parameters, FULL, f"rope_parameters of {FULL!r}")
        theta = given.get("rope_theta")
    kind = scaling.get("rope_type", scaling.get("type"))
    used = {"rope_theta": theta, **scaling, "rope_type": kind, "type": kind}
    if any(used.get(key) != value for key, value in given.items()):
        raise UnsupportedConfigError(
            "LlamaConfig: rope_scaling must be null or agree with rope_parameters, got "
            f"rope_scaling {dict(scaling)!r} and rope_parameters {dict(given)!r}. Remove one of "
            "them."
        )
    return parameters if _is_nested(parameters) else scaling


def _is_nested(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in rope.values())


def _split_by_layer_type(
    rope: Mapping[str, Any], family: Family
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return two objects: for layers without a sliding window, and for layers with a window.

    `rope` is an entry ``rope_parameters`` with one object for each layer type.
    """
    if not family.local_rope:
        raise UnsupportedConfigError(
            "LlamaConfig: rope_parameters must be the same for all layers of "
            f"{family.architecture}, got an object for each layer type."
        )
    if others := set(rope) - set(ATTENTION_TYPES):
        raise UnsupportedConfigError(
            "LlamaConfig: the keys of rope_parameters must be "
            f"{' and '.join(map(repr, ATTENTION_TYPES))}, got {min(others)!r}."
        )
    full, sliding = (
        read_object(rope, kind, f"rope_parameters of {kind!r}") for kind in ATTENTION_TYPES
    )
    return full, sliding


def _read_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    original = config.get("original_max_position_embeddings")
    # In early Phi-3 files, the type "longrope" is called "su" or "yarn".
    if config.get("model_type") == "phi3" and rope.get("type", rope.get("rope_type")) in (
        "su",
        "yarn",
    ):
        rope = {**rope, "rope_type": "longrope"}
    return read_scaling(rope, config["max_position_embeddings"], original)


def _local_theta(
    config: Mapping[str, Any],
    family: Family,
    local: Mapping[str, Any] | None,
    others: tuple[float, RopeScaling | None, float],
) -> float | None:
    """Return the rotary base of layers with a sliding window.

    The result is None if these layers rotate like all other layers.

    Args:
      config: content of ``config.json``.
      family: family of the model.
      local: object in `rope_parameters` for layers with a window; None if the config has no
        separate object for these layers.
      others: base, scaling and partial rotary factor of the other layers.
    """
    if not family.local_rope:
        return None
    theta, scaling, factor = others
    if local is None:
        local_theta = read_number(config, "rope_local_base_freq", theta)
        local_scaling = None
    else:
        local_theta = read_number(local, "rope_theta", config.get("rope_local_base_freq") or theta)
        local_scaling = _read_scaling(local, config)
    local_factor = 1.0 if local is None else read_number(local, "partial_rotary_factor", 1.0)
    if (local_theta, local_scaling, local_factor) == others:
        return None
    is_proportional = scaling is not None and scaling.rope_type == "proportional"
    if local_factor != (1 if is_proportional else factor):
        raise UnsupportedConfigError(
            f"LlamaConfig: partial_rotary_factor of {SLIDING!r} must be "
            f"{1 if is_proportional else factor!r}, got {local_factor!r}."
        )
    if local_scaling is not None:
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_parameters of {SLIDING!r} must have rope_type 'default', or equal "
            f"the rope_parameters of {FULL!r}, got rope_type {local_scaling.rope_type!r}."
        )
    return local_theta


def _partial_factor(config: Mapping[str, Any], family: Family) -> float:
    factor = read_number(config, "partial_rotary_factor", 1.0)
    if config.get("rotary_dim") is not None and config.get("partial_rotary_factor") is None:
        # Files of MiniMax M2 contain the number of rotated elements instead of a factor.
        head_dim = read_integer(config, "head_dim", 1)
        check_positive("LlamaConfig", head_dim=head_dim)
        factor = read_number(config, "rotary_dim") / head_dim
    if factor != 1 and not family.partial_rope:
        raise UnsupportedConfigError(
            f"LlamaConfig: partial_rotary_factor must be 1 for {family.architecture}, got "
            f"{factor!r}."
        )
    return factor


def _is_interleaved(config: Mapping[str, Any], family: Family) -> bool:
    if family.has_latent:
        return read_boolean(config, "rope_interleave", family.rope_interleaved)
    given = config.get("rope_interleaved")
    if given is not None and given != family.rope_interleaved:
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_interleaved must be {family.rope_interleaved!r} for "
            f"{family.architecture}, got {given!r}."
        )
    return family.rope_interleaved


def _attention_factor(rope_type: str, rope: Mapping[str, Any], fields: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return read_number(rope, "attention_factor")
    factor = fields["factor"]
    if rope_type == "longrope":
        original = fields["original_max_position_embeddings"]
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    # DeepSeek's generalisation of the YaRN formula.
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _yarn_scale(factor, read_number(rope, "mscale")) / _yarn_scale(
            factor, read_number(rope, "mscale_all_dim")
        )
    return _yarn_scale(factor)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def _context_length(key: str, value: Any) -> int:
    if not is_int(value) or not 2 <= value < 2**31:
        raise ValueError(f"LlamaConfig: {key} must be an integer of at least 2, got {value!r}.")
    return value


def _positive_numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list) or not all(is_real(value) and value > 0 for value in values):
        raise ValueError(f"LlamaConfig: {key} must be a list of positive numbers, got {values!r}.")
    return tuple(map(float, values))
