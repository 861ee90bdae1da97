"""Read and write the entries about types of layers of a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from paged_jax.arguments import check_positive, is_int, is_real
from paged_jax.models.family import Family, MixerKeys, UnsupportedConfigError
from paged_jax.models.layer_groups import (
    CHUNKED,
    FULL,
    NOTHING,
    RECURRENT,
    RECURRENT_TYPES,
    SLIDING,
    ResidualStreams,
)
from paged_jax.models.mixer_sizes import (
    GatedDeltaNet,
    KimiDelta,
    Mamba2,
    Mixer,
    ShortConvolution,
)
from paged_jax.models.model_folder import read_boolean, read_integer
from paged_jax.models.rope_json import read_rope_layers

# Sparsity of the first layers of Gemma 3n, if the file does not have it.
_NUM_SPARSE, _SPARSITY = 10, 0.95
# Kinds of recurrent layers by the name in `MixerKeys.kind`.
MIXERS: Mapping[str, type[Mixer]] = {
    "short_convolution": ShortConvolution,
    "gated_delta_net": GatedDeltaNet,
    "kimi_delta": KimiDelta,
    "mamba2": Mamba2,
}


def expand_layers(
    config: Mapping[str, Any], keys: MixerKeys, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a config with the entries of today where old files have others.

    Args:
      config: content of the file.
      keys: how the family describes recurrent layers.
      defaults: defaults of the family.

    Raises:
      ValueError: the string has an unknown character.
    """
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
                f"LlamaConfig: {keys.pattern_key} must be a string of {''.join(keys.pattern)}, got "
                f"{pattern!r}."
            )
        config = {**config, keys.layer_types_key: [keys.pattern[each] for each in pattern]}
    names = config.get(keys.layer_types_key) or defaults.get(keys.layer_types_key)
    if keys.mlp_types and isinstance(names, list):
        config = {**config, "num_hidden_layers": len(names)}
    return config


def read_layer_types(
    config: Mapping[str, Any], keys: MixerKeys, num_layers: int
) -> tuple[str, ...]:
    """Return the type of each layer of a model that may have recurrent layers.

    Args:
      config: content of the file, with the family's defaults.
      keys: how the family describes recurrent layers.
      num_layers: number of layers (L).

    Raises:
      ValueError: the entry has another type or length.
    """
    names = config.get(keys.layer_types_key)
    if names is None and keys.uniform_type is not None:
        return (keys.uniform_type,) * num_layers
    if names is None:
        return _default_layer_types(config, keys, num_layers)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"LlamaConfig: {keys.layer_types_key} must be a list of names, got {names!r}."
        )
    if len(names) != num_layers:
        raise ValueError(
            f"LlamaConfig: {keys.layer_types_key} must name {num_layers} layers, got {names!r}."
        )
    kinds: dict[str, str] = {keys.recurrent_type: RECURRENT, **keys.layer_types}
    kinds |= dict.fromkeys(keys.mlp_types, NOTHING)
    return tuple(kinds[name] if name in kinds else name for name in names)


def read_mlp_types(config: Mapping[str, Any], keys: MixerKeys) -> tuple[str, ...]:
    """Return the MLP type of each layer, if the family has layers with only an MLP."""
    names: list[str] = config.get(keys.layer_types_key) or []
    return tuple(keys.mlp_types.get(name, NOTHING) for name in names) if keys.mlp_types else ()


def _default_layer_types(
    config: Mapping[str, Any], keys: MixerKeys, num_layers: int
) -> tuple[str, ...]:
    """Return the layer types of files that do not list them."""
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
        f"LlamaConfig: {keys.attention_layers} must be a positive integer or a list of layers, "
        f"got {value!r}."
    )


def read_mixer(config: Mapping[str, Any], family: Family) -> Mixer:
    """Return the sizes of the recurrent layers.

    Args:
      config: content of the file, with the family's defaults.
      family: a family with recurrent layers.

    Raises:
      UnsupportedConfigError, ValueError: see `LlamaConfig.from_dict`.
    """
    keys = family.mixer
    assert keys is not None
    kind = MIXERS[keys.kind]
    size = config.get("mamba_d_ssm") or config.get("mamba_expand", 0) * config["hidden_size"]
    if config.get("mamba_d_head") == "auto" and config.get("mamba_n_heads"):
        config = {**config, "mamba_d_head": size // config["mamba_n_heads"]}
    for key, (first, second, factor) in keys.ratios.items():
        if config.get(key) is None:
            divisor = 1 if second is None else config[second]
            config = {**config, key: int(factor * config[first] / divisor)}
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    values = {name: _read(config, key, types[name]) for name, key in keys.keys.items()}
    if keys.norm_switches is not None:
        has_norm, is_before = (_read(config, key, bool) for key in keys.norm_switches)
        values["norm"] = ("before gate" if is_before else "after gate") if has_norm else "none"
    return kind(**keys.fixed, **values)


def _read(config: Mapping[str, Any], key: str, kind: Any) -> Any:
    value = config.get(key)
    if value is None:
        raise ValueError(f"LlamaConfig: {key} is missing.")
    if kind not in (int, float, bool):
        return _read_numbers(key, value, len(get_args(kind)))
    is_valid, name = {
        int: (is_int(value) and value > 0, "a positive integer"),
        float: (is_real(value), "a number"),
        bool: (isinstance(value, bool), "true or false"),
    }[kind]
    if not is_valid:
        raise ValueError(f"LlamaConfig: {key} must be {name}, got {value!r}.")
    return value


def _read_numbers(key: str, value: Any, count: int) -> tuple[float, ...]:
    """Read a list of numbers. JSON has no infinity; transformers 5 writes it as an object."""
    values = value if isinstance(value, list | tuple) else ()
    values = [each["__float__"] if isinstance(each, Mapping) else each for each in values]
    try:
        numbers = tuple(map(float, values))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != count:
        raise ValueError(f"LlamaConfig: {key} must be {count} numbers, got {value!r}.")
    return numbers


def write_mixer(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries of a ``config.json`` that the functions above and transformers can read.

    Args:
      fields: all fields of a `LlamaConfig` by name.
      family: family of the model.
    """
    keys, mixer = family.mixer, fields["mixer"]
    if keys is None:
        return {}
    kinds = fields["layer_types"] or (FULL,) * fields["num_hidden_layers"]
    names = [keys.recurrent_type if kind == RECURRENT else kind for kind in kinds]
    if keys.mlp_types:
        of_mlp = {kind: name for name, kind in keys.mlp_types.items()}
        both = zip(names, fields["mlp_layer_types"], strict=True)
        names = [of_mlp[mlp] if name == NOTHING else name for name, mlp in both]
    written: dict[str, Any] = {} if keys.uniform_type else {keys.layer_types_key: names}
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
    """Return `sliding_window` and `layer_types`."""
    sliding_window = read_integer(config, "sliding_window", None)
    if family.sliding_layers == "none" and sliding_window is not None:
        raise UnsupportedConfigError(
            f"LlamaConfig: sliding_window is not supported for {family.architecture}, "
            f"got {sliding_window}."
        )
    if family.sliding_layers in ("switched", "unused"):
        is_on = read_boolean(config, "use_sliding_window", False)
        if is_on and family.sliding_layers == "unused":
            raise UnsupportedConfigError(
                f"LlamaConfig: use_sliding_window is not supported for {family.architecture}."
            )
        sliding_window = sliding_window if is_on else None
    layer_types = _layer_types(config, family, sliding_window, num_hidden_layers)
    if FULL in layer_types and sliding_window is not None and family.sliding_layers == "all":
        raise ValueError(
            f"LlamaConfig: sliding_window must be null where layer_types has {FULL!r}, "
            f"got {sliding_window}."
        )
    return sliding_window, layer_types


def _layer_types(
    config: Mapping[str, Any], family: Family, sliding_window: int | None, num_hidden_layers: int
) -> tuple[str, ...]:
    if family.mixer is not None:
        return read_layer_types(config, family.mixer, num_hidden_layers)
    layer_types = config.get("layer_types")
    if family.sliding_layers == "chunked" and layer_types is None:
        rotates = read_rope_layers(config, family, num_hidden_layers, ())
        kind = FULL if config.get("attention_chunk_size") is None else CHUNKED
        return tuple(kind if each else FULL for each in rotates or (True,) * num_hidden_layers)
    ends_full = family.sliding_layers == "pattern and the last"
    if layer_types is None:
        if sliding_window is None or family.sliding_layers == "all":
            return ()
        layer_types = _layer_types_by_default(config, family, num_hidden_layers)
        return (*layer_types[:-1], FULL) if ends_full else layer_types
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise ValueError(f"LlamaConfig: layer_types must be a list of names, got {layer_types!r}.")
    if len(layer_types) != num_hidden_layers:
        raise ValueError(
            f"LlamaConfig: layer_types must name {num_hidden_layers} layers, got {layer_types!r}."
        )
    return (*layer_types[:-1], FULL) if ends_full else tuple(layer_types)


def _layer_types_by_default(
    config: Mapping[str, Any], family: Family, num_hidden_layers: int
) -> tuple[str, ...]:
    """Return the layer types that transformers assumes if `layer_types` is missing."""
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
    """Return the heads of layers without a sliding window, if they differ from the other layers."""
    if not family.global_heads:
        return {}
    head_dim = read_integer(config, "global_head_dim", 0)
    heads = read_integer(config, "num_global_key_value_heads", 0)
    if not config.get("attention_k_eq_v"):
        heads = 0
    if (layers := config.get("per_layer_config")) is not None:
        full = [str(layer) for layer, kind in enumerate(layer_types) if kind == FULL]
        changes = [{**layers.get(layer, layers.get(int(layer), {}))} for layer in full]
        others = {str(layer) for layer, changed in layers.items() if changed} - {*full}
        if others or any(each != changes[0] for each in changes):
            raise UnsupportedConfigError(
                "LlamaConfig: per_layer_config must change all layers without a sliding window in "
                f"the same way, and no others, got {layers!r}."
            )
        [first, *_] = changes or [{}]
        head_dim, heads = first.pop("head_dim", 0), first.pop("num_key_value_heads", 0)
        if first:
            raise UnsupportedConfigError(
                f"LlamaConfig: {min(first)} in per_layer_config is not supported."
            )
    head_dim = 0 if head_dim == config.get("head_dim") else head_dim
    heads = 0 if heads == config.get("num_key_value_heads") else heads
    return {"global_head_dim": head_dim, "num_global_key_value_heads": heads}


def write_sliding_window(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries of a ``config.json`` that `read_sliding_window` can read."""
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


def read_streams(
    config: Mapping[str, Any], family: Family, num_hidden_layers: int
) -> dict[str, Any]:
    """Return the fields of residual streams, and of MLPs that differ between layers.

    Args:
      config: content of the file, with the family's defaults.
      family: family of the model.
      num_hidden_layers: number of layers (L).

    Raises:
      ValueError: an entry has another type, or a list has another length.
    """
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
                f"LlamaConfig: {key} must list {num_hidden_layers} numbers, got {values!r}."
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


def write_streams(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries of a ``config.json`` that `read_streams` can read."""
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


def read_chunk_size(
    config: Mapping[str, Any], family: Family, layer_types: tuple[str, ...]
) -> int | None:
    """Return the number of tokens of a chunk of attention, or None if no layer has chunks."""
    if family.sliding_layers != "chunked" or CHUNKED not in layer_types:
        return None
    return read_integer(config, "attention_chunk_size", None)


def read_norm_placements(family: Family, layer_types: tuple[str, ...]) -> tuple[str, ...]:
    """Return `norm_placement` of each layer, or an empty tuple if it is the same in all layers."""
    if family.recurrent_norm_placement is None:
        return ()
    of_others = family.fixed.get("norm_placement", "pre")
    return tuple(
        family.recurrent_norm_placement if kind in RECURRENT_TYPES else of_others
        for kind in layer_types
    )
