"""Reading and writing the entries of a ``config.json`` about layer types and experts.

Functions that read take the content of the file, completed by the family's defaults, and raise the
errors of `LlamaConfig.from_dict`. Functions that write take all fields of a `LlamaConfig` by name,
and omit fields that the family's ``config.json`` cannot express.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_args

from paged_jax.arguments import check_positive, is_int
from paged_jax.models.family import Family, MixerKeys, Router, UnsupportedConfigError
from paged_jax.models.layer_groups import (
    CHUNKED,
    DENSE,
    FULL,
    NOTHING,
    RECURRENT,
    RECURRENT_TYPES,
    SLIDING,
    SPARSE,
)
from paged_jax.models.mixer_sizes import GatedDeltaNet, KimiDelta, Mamba2, Mixer, ShortConvolution
from paged_jax.models.model_folder import (
    REQUIRED,
    read_boolean,
    read_entry,
    read_integer,
    read_name,
    read_names,
    read_number,
    read_object,
)
from paged_jax.models.rope_json import read_rope_layers

# Classes of recurrent layers, by the name in `MixerKeys.kind`.
MIXERS: Mapping[str, type[Mixer]] = {
    "short_convolution": ShortConvolution,
    "gated_delta_net": GatedDeltaNet,
    "kimi_delta": KimiDelta,
    "mamba2": Mamba2,
}
# Other names of activations in files.
ACTIVATION_NAMES: Mapping[str, str] = {
    "swish": "silu",
    "gelu_python": "gelu",
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_pytorch_tanh"
    ),
}
# Keys that change the computation, each with the value that has no effect. A config with any other
# value is rejected, unless its family reads the key.
_NEUTRAL_FOR_EXPERTS: Mapping[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1,
    "clip_qkv": None,
    "qkv_bias": True,
}
# For each value of `Family.dense_layers`, the keys that tell which layers have a dense MLP.
_DENSE_KEYS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "first": ("first_k_dense_replace",),
    "listed": ("decoder_sparse_step", "mlp_only_layers"),
    "others": ("interleave_moe_layer_step", "moe_layers"),
}
_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
# Keys under which a file may store the number of experts. transformers accepts all of them.
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Functions that read certain fields, by field. All other fields are required integers.
_READERS: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
    "norm_topk_prob": read_boolean,
    "swiglu_alpha": read_number,
    "swiglu_limit": read_number,
    "factor": read_number,
    "has_correction_bias": read_boolean,
    "moe_latent_size": lambda config, key: read_integer(config, key, 0),
}


def expand_layers(
    config: Mapping[str, Any], keys: MixerKeys, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Convert the entries about layer types in old files to the entries of newer files."""
    key, entries = keys.nested
    nested = config.get(key)
    if isinstance(nested, Mapping):
        config = {**{entries[name]: nested[name] for name in entries if name in nested}, **config}
        full = nested.get("full_attn_layers")
        if isinstance(full, list) and all(map(is_int, full)):
            config = {keys.attention_layers: [layer - 1 for layer in full], **config}
    pattern = config.get(keys.pattern_key) if keys.pattern_key else None
    if pattern is not None and config.get(keys.layer_types_key) is None:
        if not isinstance(pattern, str) or set(pattern) - set(keys.pattern):
            raise ValueError(
                f"LlamaConfig: {keys.pattern_key} must be a string of the characters "
                f"{', '.join(keys.pattern)}, got {pattern!r}."
            )
        config = {**config, keys.layer_types_key: [keys.pattern[each] for each in pattern]}
    names = config.get(keys.layer_types_key) or defaults.get(keys.layer_types_key)
    if keys.mlp_types and isinstance(names, list):
        config = {**config, "num_hidden_layers": len(names)}
    return config


def read_layer_types(
    config: Mapping[str, Any], keys: MixerKeys, num_layers: int
) -> tuple[str, ...]:
    """Return the type of each layer, for a family that has recurrent layers."""
    names = read_names(config, keys.layer_types_key, num_layers)
    if names is None and keys.uniform_type is not None:
        return (keys.uniform_type,) * num_layers
    if names is None:
        return _default_layer_types(config, keys, num_layers)
    kinds: dict[str, str] = {keys.recurrent_type: RECURRENT, **keys.layer_types}
    kinds |= dict.fromkeys(keys.mlp_types, NOTHING)
    return tuple(kinds[name] if name in kinds else name for name in names)


def read_mlp_types(config: Mapping[str, Any], keys: MixerKeys) -> tuple[str, ...]:
    """Return the MLP type of each layer; empty if the family has no layers with only an MLP."""
    names: list[str] = config.get(keys.layer_types_key) or []
    return tuple(keys.mlp_types.get(name, NOTHING) for name in names) if keys.mlp_types else ()


def _default_layer_types(
    config: Mapping[str, Any], keys: MixerKeys, num_layers: int
) -> tuple[str, ...]:
    """Return the layer types for a config that does not list them."""
    layers, value = range(num_layers), config.get(keys.attention_layers)
    if is_int(value) and value > 0:
        kinds = [RECURRENT if (layer + 1) % value else FULL for layer in layers]
        if keys.has_attention and FULL not in kinds:
            kinds[-1] = FULL
        return tuple(kinds)
    if isinstance(value, list) and all(is_int(layer) for layer in value):
        return tuple(FULL if layer in value else RECURRENT for layer in layers)
    if value is None:
        return (FULL,) * num_layers
    raise ValueError(
        f"LlamaConfig: {keys.attention_layers} must be a positive integer or a list of layer "
        f"indices, got {value!r}."
    )


def read_mixer(config: Mapping[str, Any], family: Family) -> Mixer:
    """Return the `Mixer` of a config, for a family with recurrent layers."""
    keys = family.mixer
    assert keys is not None
    kind = MIXERS[keys.kind]
    if config.get("mamba_d_head") == "auto":
        size = read_integer(config, "mamba_d_ssm", None)
        size = size or read_integer(config, "mamba_expand", 0) * read_integer(config, "hidden_size")
        num_heads = _read(config, "mamba_n_heads", int)
        config = {**config, "mamba_d_head": size // num_heads}
    for key, (first, second, factor) in keys.ratios.items():
        if config.get(key) is None:
            divisor = 1 if second is None else _read(config, second, int)
            config = {**config, key: int(factor * read_integer(config, first) / divisor)}
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    values = {name: _read(config, key, types[name]) for name, key in keys.keys.items()}
    if keys.norm_switches is not None:
        has_norm, is_before = (_read(config, key, bool) for key in keys.norm_switches)
        values["norm"] = ("before gate" if is_before else "after gate") if has_norm else "none"
    return kind(**keys.fixed, **values)


def _read(config: Mapping[str, Any], key: str, kind: Any) -> Any:
    """Read an entry for a field of a `Mixer`. `kind` is the type annotation of the field."""
    if kind is int:
        size = read_integer(config, key)
        check_positive("LlamaConfig", **{key: size})
        return size
    if kind is str:
        name = read_name(config, key, "silu")
        return ACTIVATION_NAMES.get(name, name)
    if kind in (float, bool):
        return read_number(config, key) if kind is float else read_boolean(config, key, False)
    return _read_numbers(key, read_entry(config, key, REQUIRED), len(get_args(kind)))


def _read_numbers(key: str, value: Any, count: int) -> tuple[float, ...]:
    """Return an entry as a tuple of `count` floats.

    JSON cannot express infinity, so transformers 5 writes it as an object with the key
    ``__float__``.
    """
    values = value if isinstance(value, list | tuple) else ()
    values = [each.get("__float__", "") if isinstance(each, Mapping) else each for each in values]
    try:
        numbers = tuple(map(float, values))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != count:
        raise ValueError(f"LlamaConfig: {key} must be a list of {count} numbers, got {value!r}.")
    return numbers


def write_mixer(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries about recurrent layers, for `read_mixer` and transformers."""
    keys, mixer = family.mixer, fields["mixer"]
    if keys is None:
        return {}
    kinds = fields["layer_types"] or (FULL,) * fields["num_hidden_layers"]
    names = [keys.recurrent_type if kind == RECURRENT else kind for kind in kinds]
    if keys.mlp_types:
        of_mlp = {kind: name for name, kind in keys.mlp_types.items()}
        both = zip(names, fields["mlp_layer_types"], strict=True)
        names = [of_mlp[mlp] if name == NOTHING else name for name, mlp in both]
    written: dict[str, Any] = {}
    if not keys.layer_types_key:
        written[keys.attention_layers] = [i for i, kind in enumerate(kinds) if kind == FULL]
    elif keys.uniform_type is None:
        written[keys.layer_types_key] = names
    if mixer is not None:
        written |= {key: getattr(mixer, name) for name, key in keys.keys.items()}
        if keys.norm_switches is not None:
            has_norm, is_before = keys.norm_switches
            written |= {has_norm: mixer.norm != "none", is_before: mixer.norm != "after gate"}
        if "mamba_d_ssm" in family.defaults:
            written["mamba_d_ssm"] = mixer.num_heads * mixer.head_dim
    return written


def read_sliding_window(
    config: Mapping[str, Any], family: Family, num_hidden_layers: int
) -> tuple[int | None, tuple[str, ...]]:
    """Return the fields `sliding_window` and `layer_types` of a `LlamaConfig`."""
    sliding_window = read_integer(config, "sliding_window", None)
    if family.sliding_layers == "none" and sliding_window is not None:
        raise UnsupportedConfigError(
            f"LlamaConfig: sliding_window must be null for {family.architecture}, got "
            f"{sliding_window}."
        )
    if family.sliding_layers in ("switched", "unused"):
        is_on = read_boolean(config, "use_sliding_window", False)
        if is_on and family.sliding_layers == "unused":
            raise UnsupportedConfigError(
                f"LlamaConfig: use_sliding_window must be false for {family.architecture}, got "
                "true."
            )
        sliding_window = sliding_window if is_on else None
    layer_types = _layer_types(config, family, sliding_window, num_hidden_layers)
    if FULL in layer_types and sliding_window is not None and family.sliding_layers == "all":
        raise ValueError(
            f"LlamaConfig: sliding_window must be null if layer_types contains {FULL!r}, got "
            f"{sliding_window}."
        )
    return sliding_window, layer_types


def _layer_types(
    config: Mapping[str, Any], family: Family, sliding_window: int | None, num_hidden_layers: int
) -> tuple[str, ...]:
    if family.mixer is not None:
        return read_layer_types(config, family.mixer, num_hidden_layers)
    layer_types = read_names(config, "layer_types", num_hidden_layers)
    if family.sliding_layers == "chunked" and layer_types is None:
        rotates = read_rope_layers(config, family, num_hidden_layers, ())
        kind = FULL if config.get("attention_chunk_size") is None else CHUNKED
        return tuple(kind if each else FULL for each in rotates or (True,) * num_hidden_layers)
    if layer_types is None:
        if sliding_window is None or family.sliding_layers == "all":
            return ()
        layer_types = _layer_types_by_default(config, family, num_hidden_layers)
    if family.sliding_layers == "pattern and the last":
        return (*layer_types[:-1], FULL)
    return tuple(layer_types)


def _layer_types_by_default(
    config: Mapping[str, Any], family: Family, num_hidden_layers: int
) -> tuple[str, ...]:
    """Return the layer types that transformers uses for a config without `layer_types`."""
    layers = range(num_hidden_layers)
    if family.sliding_layers.startswith("pattern"):
        every = read_integer(config, "sliding_window_pattern")
        check_positive("LlamaConfig", sliding_window_pattern=every)
        first_full = 0 if family.sliding_layers == "pattern from the first" else every - 1
        is_full = [layer % every == first_full for layer in layers]
    elif family.rope_layers == "listed":
        is_full = read_rope_layers(config, family, num_hidden_layers, ()) or [True for _ in layers]
    else:
        num_full = read_integer(config, "max_window_layers", 28)
        is_full = [layer < num_full for layer in layers]
    return tuple(FULL if full else SLIDING for full in is_full)


def read_global_heads(
    config: Mapping[str, Any], family: Family, layer_types: tuple[str, ...]
) -> dict[str, int]:
    """Return the two fields that describe the heads of layers without a sliding window.

    They are `global_head_dim` and `num_global_key_value_heads`.
    """
    if not family.global_heads:
        return {}
    head_dim = read_integer(config, "global_head_dim", 0)
    heads = read_integer(config, "num_global_key_value_heads", 0)
    if not config.get("attention_k_eq_v"):
        heads = 0
    if config.get("per_layer_config") is not None:
        given = read_object(config, "per_layer_config")
        layers = {str(x): read_object(given, x, f"per_layer_config of layer {x}") for x in given}
        full = [str(layer) for layer, kind in enumerate(layer_types) if kind == FULL]
        changes = [layers.get(layer, {}) for layer in full]
        others = {layer for layer, changed in layers.items() if changed} - {*full}
        if others or any(each != changes[0] for each in changes):
            raise UnsupportedConfigError(
                "LlamaConfig: per_layer_config must give the same values to all layers without a "
                f"sliding window, and give no values to other layers, got {given!r}."
            )
        [first, *_] = changes or [{}]
        head_dim, heads = (
            read_integer(first, key, 0) for key in ("head_dim", "num_key_value_heads")
        )
        if unknown := sorted({*first} - {"head_dim", "num_key_value_heads"}):
            raise UnsupportedConfigError(
                "LlamaConfig: per_layer_config must only contain head_dim and num_key_value_heads, "
                f"got {unknown[0]}."
            )
    head_dim = 0 if head_dim == config.get("head_dim") else head_dim
    heads = 0 if heads == config.get("num_key_value_heads") else heads
    return {"global_head_dim": head_dim, "num_global_key_value_heads": heads}


def write_sliding_window(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries about sliding windows or chunks, for `read_sliding_window`."""
    if family.sliding_layers in ("none", "unused"):
        return {}
    if family.sliding_layers == "chunked":
        kinds = [*fields["layer_types"]] or [FULL] * fields["num_hidden_layers"]
        return {"attention_chunk_size": fields["attention_chunk_size"], "layer_types": kinds}
    sliding_window = fields["sliding_window"]
    written: dict[str, Any] = {"sliding_window": sliding_window}
    if family.sliding_layers == "all":
        return written
    uniform = FULL if sliding_window is None else SLIDING
    layer_types = [*fields["layer_types"]] or [uniform] * fields["num_hidden_layers"]
    if family.sliding_layers == "switched":
        written["use_sliding_window"] = sliding_window is not None
        written["max_window_layers"] = [*layer_types, SLIDING].index(SLIDING)
    return written | {"layer_types": layer_types}


def read_chunk_size(
    config: Mapping[str, Any], family: Family, layer_types: tuple[str, ...]
) -> int | None:
    """Return the chunk size in tokens; None if no layer has chunked attention."""
    if family.sliding_layers != "chunked" or CHUNKED not in layer_types:
        return None
    return read_integer(config, "attention_chunk_size", None)


def read_norm_placements(family: Family, layer_types: tuple[str, ...]) -> tuple[str, ...]:
    """Return the `norm_placement` of each layer; empty if it is the same in all layers."""
    if family.recurrent_norm_placement is None:
        return ()
    of_others = family.fixed.get("norm_placement", "pre")
    return tuple(
        family.recurrent_norm_placement if kind in RECURRENT_TYPES else of_others
        for kind in layer_types
    )


def read_experts(config: Mapping[str, Any], family: Family, num_layers: int) -> dict[str, Any]:
    """Return the fields of a `LlamaConfig` that describe experts."""
    if family.experts is None:
        return {}
    if family.experts_switch is not None and not config.get(family.experts_switch):
        return {"separate_expert_norms": False}
    read = {*_DENSE_KEYS[family.dense_layers], *family.router_keys.values(), *family.only}
    check_neutral(config, family, {k: v for k, v in _NEUTRAL_FOR_EXPERTS.items() if k not in read})
    # The value under `own` may be the family's default. A value under another key must come from
    # the file, so it has precedence.
    own = family.key("num_experts")
    others = [config[name] for name in _NUM_EXPERTS_KEYS if name in config and name != own]
    config = {**config, own: others[0]} if others else config
    fields = {
        name: _READERS.get(name, read_integer)(config, family.key(name))
        for name in (*_SIZES, *family.experts)
    }
    if fields["num_experts"] == 0 and fields.get("shared_expert_intermediate_size"):
        # If there are no routed experts, the shared expert is simply a dense MLP.
        return {"intermediate_size": fields["shared_expert_intermediate_size"]}
    if family.shared_experts is not None:
        count = read_integer(config, family.shared_experts, 0)
        fields["shared_expert_intermediate_size"] = count * fields["moe_intermediate_size"]
    options = {
        name: _READERS.get(name, read_integer)(config, key)
        for name, key in _router_keys(config, family)
    }
    return fields | {
        "router": dataclasses.replace(family.router, **options),
        "mlp_layer_types": _read_mlp_layer_types(config, family, num_layers),
    }


def write_experts(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries of a ``config.json`` about experts, for `read_experts`."""
    if family.experts is None:
        return {}
    switch = family.experts_switch
    if switch is not None and not fields["num_experts"]:
        return {switch: False}
    if not fields["num_experts"] and "shared_expert_intermediate_size" in family.experts:
        shared = family.key("shared_expert_intermediate_size")
        return {family.key("num_experts"): 0, shared: fields["intermediate_size"]}
    router: Router = fields["router"]
    written = {family.key(name): fields[name] for name in (*_SIZES, *family.experts)}
    if "moe_latent_size" in family.experts:
        written["moe_latent_size"] = fields["moe_latent_size"] or None
    written |= {key: getattr(router, name) for name, key in family.router_keys.items()}
    if family.groups_switch is not None:
        key, value = family.groups_switch
        written[key] = value if router.num_groups > 1 else "greedy"
    written |= {} if switch is None else {switch: True}
    if family.shared_experts is not None:
        size = fields["moe_intermediate_size"]
        written[family.shared_experts] = fields["shared_expert_intermediate_size"] // size
    kinds = fields["mlp_layer_types"] or (SPARSE,) * fields["num_hidden_layers"]
    if family.dense_layers == "first":
        written[family.key("first_k_dense_replace")] = [*kinds, SPARSE].index(SPARSE)
        written["mlp_layer_types"] = list(kinds)  # some classes of transformers read this only
    if family.dense_layers == "listed":
        written["decoder_sparse_step"] = 1
        written["mlp_only_layers"] = [i for i, kind in enumerate(kinds) if kind == DENSE]
    if family.dense_layers == "others":
        written["moe_layers"] = [i for i, kind in enumerate(kinds) if kind == SPARSE]
    return written


def _router_keys(config: Mapping[str, Any], family: Family) -> list[tuple[str, str]]:
    """Return pairs of a field of `Router` and the key of ``config.json`` that determines it."""
    keys = list(family.router_keys.items())
    if family.groups_switch is None:
        return keys
    key, value = family.groups_switch
    method = config.get(key) or "greedy"
    if method not in ("greedy", value):
        raise UnsupportedConfigError(
            f"LlamaConfig: {key} must be 'greedy' or {value!r} for {family.architecture}, got "
            f"{method!r}."
        )
    return [pair for pair in keys if method == value or "groups" not in pair[0]]


def check_neutral(config: Mapping[str, Any], family: Family, neutral: Mapping[str, Any]) -> None:
    """Check that entries that the family does not read have no effect.

    `neutral` maps each key to the value that has no effect. Missing entries and null are allowed.
    """
    for key, value in neutral.items():
        if config.get(key) not in (None, value) and key not in family.reads:
            raise UnsupportedConfigError(
                f"LlamaConfig: {key} must be {value!r} for {family.architecture}, got "
                f"{config[key]!r}."
            )


def _read_mlp_layer_types(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> tuple[str, ...]:
    """Return the MLP type of each layer, ``"dense"`` or ``"sparse"`` (experts)."""
    kinds = read_names(config, "mlp_layer_types")
    if kinds is None:
        is_dense = _find_dense(config, family, num_layers)
        return tuple(DENSE if dense else SPARSE for dense in is_dense)
    if family.dense_layers == "none" and set(kinds) != {SPARSE}:
        raise UnsupportedConfigError(
            f"LlamaConfig: mlp_layer_types must only contain {SPARSE!r} for {family.architecture}, "
            f"got {kinds!r}."
        )
    return tuple(kinds)


def _find_dense(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    if family.dense_layers == "first":
        num_dense = read_integer(config, family.key("first_k_dense_replace"), 0)
        return [layer < num_dense for layer in range(num_layers)]
    if family.dense_layers == "none":
        return [False] * num_layers
    step_key, list_key = _DENSE_KEYS[family.dense_layers]
    step = read_integer(config, step_key, 1)
    check_positive("LlamaConfig", **{step_key: step})
    listed = read_entry(config, list_key, [])
    if not isinstance(listed, list) or not all(map(is_int, listed)):
        raise ValueError(
            f"LlamaConfig: {list_key} must be a list of layer indices, got {listed!r}."
        )
    if family.dense_layers == "others" and listed:
        return [layer not in listed for layer in range(num_layers)]
    return [layer in listed or (layer + 1) % step > 0 for layer in range(num_layers)]
