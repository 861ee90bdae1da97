"""Entries of a ``config.json`` about rotary embeddings.

The errors are those of `LlamaConfig.from_dict`.
"""

import math
from collections.abc import Mapping
from typing import Any

from paged_jax.arguments import is_int, is_real
from paged_jax.models.config import Family
from paged_jax.models.config_json import (
    ConfigEntries,
    as_integer,
    read_number,
    read_object,
    warn_of_unknown,
)
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.layer_groups import ATTENTION_TYPES, FULL, SLIDING
from paged_jax.models.rope import SCALING_FIELDS, QueryScale, RopeScaling

# Keys of the objects `rope_scaling` and `rope_parameters` that are read, or have no effect.
_KNOWN_KEYS = frozenset((
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "truncate", "mscale", "mscale_all_dim", "short_factor", "long_factor",
    "llama_4_scaling_beta",
    # The three positions of a token are equal in a text.
    "mrope_section", "mrope_interleaved",
    # Repeats a key of the file.
    "max_position_embeddings",
))  # fmt: skip


def read_query_scale(config: Mapping[str, Any], rope: Mapping[str, Any]) -> QueryScale | None:
    """Return the `QueryScale` of Mistral's files; None if they have none.

    `rope` is the entry ``rope_parameters``, or its default.
    """
    merged = _merge_query_scale(config, rope)
    if (beta := _find_beta(merged)) is None:
        return None
    length = _context_length(
        "original_max_position_embeddings", merged.get("original_max_position_embeddings")
    )
    return QueryScale(read_number({"llama_4_scaling_beta": beta}, "llama_4_scaling_beta"), length)


def check_no_query_scale(
    config: Mapping[str, Any], rope: Mapping[str, Any], architecture: str
) -> None:
    """Check that a file has no `QueryScale`, see `read_query_scale`."""
    if (beta := _find_beta(_merge_query_scale(config, rope))) is not None:
        raise UnsupportedConfigError(
            f"LlamaConfig: llama_4_scaling_beta must be null for {architecture}, got {beta!r}."
        )


def _merge_query_scale(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    # In early files of Mistral, these values are in a separate entry.
    return {**rope, **read_object(config, "llama_4_scaling")}


def _find_beta(values: Mapping[str, Any]) -> Any:
    return values.get("beta", values.get("llama_4_scaling_beta"))


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
    # Sections of each head rotate by one of three positions, which are equal in a text.
    if rope_type == "default" or rope_type == "mrope" and "mrope_section" in rope:
        return None
    if rope_type not in tuple(SCALING_FIELDS):
        return RopeScaling(rope_type, 1.0)  # raises UnsupportedConfigError
    fields: dict[str, Any] = {"original_max_position_embeddings": max_position_embeddings}
    if rope_type != "dynamic":  # its original context is max_position_embeddings
        length = rope.get("original_max_position_embeddings") if original is None else original
        if length is not None:
            fields["original_max_position_embeddings"] = _context_length(
                "original_max_position_embeddings", length
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


def check_rope_keys(rope: Mapping[str, Any], architecture: str) -> None:
    """Warn of unknown keys in an object `rope_scaling` or `rope_parameters`."""
    warn_of_unknown("rope_parameters", {*rope} - _KNOWN_KEYS, architecture)


def choose_object(
    config: ConfigEntries, family: Family, *, has_local_rope: bool = False
) -> Mapping[str, Any]:
    """Return the entry `rope_scaling` or `rope_parameters`.

    If the config has both, check that they agree. With `has_local_rope`, `rope_parameters` must
    have an object for each layer type.
    """
    scaling = read_object(config, "rope_scaling")
    parameters = read_object(config, "rope_parameters")
    if not parameters or config.is_default("rope_parameters"):
        return scaling or parameters
    if has_local_rope and not is_nested(parameters):
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_parameters must have the keys {FULL!r} and {SLIDING!r} for "
            f"{family.architecture}, each with an object, got {dict(parameters)!r}."
        )
    if not scaling:
        return parameters
    full_parameters, theta = parameters, config.get("rope_theta", 10000.0)
    if is_nested(parameters):
        full_parameters = read_object(parameters, FULL, f"rope_parameters of {FULL!r}")
        theta = full_parameters.get("rope_theta")
    kind = scaling.get("rope_type", scaling.get("type"))
    merged = {"rope_theta": theta, **scaling, "rope_type": kind, "type": kind}
    if any(merged.get(key) != value for key, value in full_parameters.items()):
        raise UnsupportedConfigError(
            "LlamaConfig: rope_scaling must be null or agree with rope_parameters, got "
            f"rope_scaling {dict(scaling)!r} and rope_parameters {dict(full_parameters)!r}. "
            "Remove one of them."
        )
    return parameters if is_nested(parameters) else scaling


def is_nested(rope: Mapping[str, Any]) -> bool:
    """Return whether an entry ``rope_parameters`` has an object for each layer type."""
    return any(isinstance(value, Mapping) for value in rope.values())


def check_same_for_all(rope: Mapping[str, Any], architecture: str) -> None:
    """Check that an entry ``rope_parameters`` does not have an object for each layer type.

    Raises:
      UnsupportedConfigError: it does.
    """
    if is_nested(rope):
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_parameters must be the same for all layers of {architecture}, got "
            "an object for each layer type."
        )


def split_by_layer_type(rope: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return two objects: for layers without a sliding window, and for layers with a window.

    `rope` is an entry ``rope_parameters`` with one object for each layer type.
    """
    if unsupported := set(rope) - set(ATTENTION_TYPES):
        raise UnsupportedConfigError(
            "LlamaConfig: the keys of rope_parameters must be "
            f"{' and '.join(map(repr, ATTENTION_TYPES))}, got {min(unsupported)!r}."
        )
    full, sliding = (
        read_object(rope, kind, f"rope_parameters of {kind!r}") for kind in ATTENTION_TYPES
    )
    return full, sliding


def _attention_factor(rope_type: str, rope: Mapping[str, Any], fields: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return read_number(rope, "attention_factor")
    factor = fields["factor"]
    if rope_type == "longrope":
        original = fields["original_max_position_embeddings"]
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    # DeepSeek's generalisation of the YaRN formula.
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_scale(factor, read_number(rope, "mscale")) / yarn_scale(
            factor, read_number(rope, "mscale_all_dim")
        )
    return yarn_scale(factor)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return the factor that "yarn" scaling by `factor` applies to queries and keys."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def _context_length(key: str, value: Any) -> int:
    value = as_integer(value)
    if not is_int(value) or not 2 <= value < 2**31:
        raise ValueError(f"LlamaConfig: {key} must be an integer of at least 2, got {value!r}.")
    return value


def _positive_numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list) or not all(is_real(value) and value > 0 for value in values):
        raise ValueError(f"LlamaConfig: {key} must be a list of positive numbers, got {values!r}.")
    return tuple(map(float, values))
