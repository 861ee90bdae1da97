"""Defaults of transformers for keys that may be missing in a ``config.json``."""

import json
from collections.abc import Mapping
from typing import Any

from paged_jax.models.config import DEFAULTS_FILE, stored_defaults
from paged_jax.models.config_json import ConfigEntries
from paged_jax.models.families.registry import FAMILIES, OTHER_NAMES, OtherName
from paged_jax.models.layer_groups import FULL, SLIDING
from tests.support.attempts import compute_each
from tests.support.saved_configs import save

# Every file has these keys. Two values of each: what differs between them is no default.
_SIZES: dict[str, tuple[int, int]] = {
    "vocab_size": (262144, 300000),
    "hidden_size": (4096, 12288),
    "intermediate_size": (8192, 16384),
    "num_hidden_layers": (8, 12),
    "num_attention_heads": (64, 96),
}
# The same of keys that some families require.
_MORE_SIZES: dict[str, dict[str, tuple[int, int]]] = {
    "deepseek_v2": {"num_experts_per_tok": (4, 8)},
    # It has fewer layers with keys and values of their own than by default.
    "gemma3n_text": {"num_hidden_layers": (36, 48)},
    "dots1": {"n_routed_experts": (64, 128), "num_experts_per_tok": (4, 8)},
}
# Every `model_type` that has defaults. transformers has no class of its own for Kimi K2.
MODEL_TYPES = sorted({*FAMILIES, *OTHER_NAMES} - {"kimi_k2"})
# Keys that follow from others, also if their values are equal for both sizes.
_DERIVED = ("layer_types", "layers_block_type", "mamba_d_head", "per_layer_config")


def compute(model_type: str) -> Mapping[str, Any]:
    """Return the defaults of a `model_type`: entries that are read and do not follow from sizes."""
    sizes = {**_SIZES, **_MORE_SIZES.get(model_type, {})}
    first, second = (
        _unpack(_saved(model_type, {key: pair[index] for key, pair in sizes.items()}))
        for index in range(2)
    )
    other = OTHER_NAMES.get(model_type, OtherName(model_type))
    entries = ConfigEntries(first).complete(other.fixed)
    FAMILIES[other.family].read(entries)
    ignored = {*entries.find_unread(), *sizes, *_DERIVED}
    return {
        key: value
        for key, value in first.items()
        if value is not None and value == second.get(key) and key not in ignored
    }


def _saved(model_type: str, sizes: dict[str, int]) -> dict[str, Any]:
    import transformers

    return save(transformers.AutoConfig.for_model(model_type, **sizes))


def _unpack(config: dict[str, Any]) -> dict[str, Any]:
    """Give entries of ``rope_parameters`` keys of their own, as in files of transformers 4."""
    rope = config.pop("rope_parameters", {})
    if FULL in rope:
        return config | _unpack_by_layer_type(rope)
    own = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope.get("rope_type", "default") == "default":
        return config | own
    # This base of the frequencies belongs to the whole object. A file with another object gets the
    # base of the class.
    import transformers

    theta = transformers.AutoConfig.for_model(config["model_type"]).default_theta
    return config | own | {"rope_theta": theta, "rope_parameters": rope}


def _unpack_by_layer_type(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of transformers 4 for the rotary parameters of two types of layers.

    These keys cannot express everything. If they cannot, ``rope_parameters`` stays.
    """
    theta, local_theta = (rope[kind]["rope_theta"] for kind in (FULL, SLIDING))
    if any(rope[kind].keys() - {"rope_theta"} != {"rope_type"} for kind in (FULL, SLIDING)):
        return {"rope_parameters": rope}
    # Without a default, the base of layers with a window is that of the others.
    local = {} if local_theta == theta else {"rope_local_base_freq": local_theta}
    return {"rope_theta": theta, **local}


def write() -> list[str]:
    """Write the defaults into the package, a line for each `model_type`.

    The result has a line for each one that fails.
    """
    values, failures = compute_each(MODEL_TYPES, compute, stored_defaults)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    DEFAULTS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return failures
