"""Read and write the entries about recurrent layers of a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paged_jax.arguments import is_int, is_real
from paged_jax.models.family import Family, MixerKeys
from paged_jax.models.layer_groups import FULL, RECURRENT
from paged_jax.models.mixers import GatedDeltaNet, KimiDelta, Mamba2, Mixer, ShortConvolution

# Kinds of recurrent layers by the name in `MixerKeys.kind`.
MIXERS: Mapping[str, type[Mixer]] = {
    "short_convolution": ShortConvolution,
    "gated_delta_net": GatedDeltaNet,
    "kimi_delta": KimiDelta,
    "mamba2": Mamba2,
}


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
    return tuple(keys.layer_types.get(name, name) for name in names)


def _default_layer_types(
    config: Mapping[str, Any], keys: MixerKeys, num_layers: int
) -> tuple[str, ...]:
    """Return the layer types of files that do not list them."""
    layers, value = range(num_layers), config.get(keys.attention_layers)
    if is_int(value) and value > 0:
        return tuple(RECURRENT if (layer + 1) % value else FULL for layer in layers)
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
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    values = {name: _read(config, key, types[name]) for name, key in keys.keys.items()}
    return kind(**keys.fixed, **values)


def _read(config: Mapping[str, Any], key: str, kind: Any) -> Any:
    value = config.get(key)
    if value is None:
        raise ValueError(f"LlamaConfig: {key} is missing.")
    is_valid, name = {
        int: (is_int(value) and value > 0, "a positive integer"),
        float: (is_real(value), "a number"),
        bool: (isinstance(value, bool), "true or false"),
    }[kind]
    if not is_valid:
        raise ValueError(f"LlamaConfig: {key} must be {name}, got {value!r}.")
    return value


def write_mixer(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the entries of a ``config.json`` that the functions above and transformers can read.

    Args:
      fields: all fields of a `LlamaConfig` by name.
      family: family of the model.
    """
    keys, mixer = family.mixer, fields["mixer"]
    if keys is None:
        return {}
    names = {kind: name for name, kind in keys.layer_types.items()}
    kinds = fields["layer_types"] or (FULL,) * fields["num_hidden_layers"]
    written: dict[str, Any] = {keys.layer_types_key: [names.get(kind, kind) for kind in kinds]}
    if mixer is not None:
        written |= {key: getattr(mixer, name) for name, key in keys.keys.items()}
    return written
