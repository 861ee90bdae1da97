"""Entries of a ``config.json`` about recurrent layers, which several lineages share.

As in `common`, a function ``read_...`` has a counterpart ``write_...``.
"""

from collections.abc import Mapping
from typing import Any

from paged_jax.arguments import check_positive, is_real
from paged_jax.models.config import ModelConfig
from paged_jax.models.config_json import (
    ConfigEntries,
    read_boolean,
    read_integer,
    read_names,
    read_number,
)
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.common import read_activation, read_num_layers, read_size
from paged_jax.models.layer_groups import FULL, RECURRENT
from paged_jax.models.parts.delta_net import GatedDeltaNet
from paged_jax.models.parts.state_space import Mamba2


def read_layer_types(
    entries: ConfigEntries,
    recurrent: tuple[str, ...] = (RECURRENT,),
    full: tuple[str, ...] = (FULL,),
) -> list[bool] | None:
    """Return whether each layer is recurrent instead of attention, from ``layer_types``.

    Args:
      entries: content of the ``config.json``.
      recurrent: names of recurrent layers in the list.
      full: names of layers with attention.

    Returns:
      A bool for each layer; None if the list is missing.
    """
    names = read_names(entries, "layer_types", read_num_layers(entries))
    if names is None:
        return None
    if unsupported := {*names} - {*recurrent, *full}:
        raise UnsupportedConfigError(
            "LlamaConfig: layer_types must only contain "
            f"{', '.join(map(repr, (*recurrent, *full)))}, got {min(unsupported)!r}."
        )
    return [name in recurrent for name in names]


def write_layer_types(config: ModelConfig, recurrent: str = RECURRENT) -> dict[str, Any]:
    """Return the entry for `read_layer_types`. `recurrent` is the name of recurrent layers."""
    return {"layer_types": [recurrent if spec.states else FULL for spec in config.layers]}


def read_interval(entries: ConfigEntries) -> list[bool]:
    """Return whether each layer is recurrent, if every n-th layer has attention.

    n is the entry ``full_attention_interval``, by default 4.
    """
    interval = read_integer(entries, "full_attention_interval", 4)
    check_positive("LlamaConfig", full_attention_interval=interval)
    return [(layer + 1) % interval > 0 for layer in range(read_num_layers(entries))]


def read_delta_net(entries: ConfigEntries, norm_eps: float) -> GatedDeltaNet:
    """Return a gated delta net, whose norm has the given constant."""
    return GatedDeltaNet(
        num_key_heads=read_size(entries, "linear_num_key_heads"),
        num_value_heads=read_size(entries, "linear_num_value_heads"),
        key_dim=read_size(entries, "linear_key_head_dim"),
        value_dim=read_size(entries, "linear_value_head_dim"),
        conv_width=read_size(entries, "linear_conv_kernel_dim"),
        conv_act=read_activation(entries),
        norm_eps=norm_eps,
    )


def write_delta_net(mixer: GatedDeltaNet | None) -> dict[str, Any]:
    """Return the entries for `read_delta_net`; nothing without a delta net."""
    if mixer is None:
        return {}
    return {
        "linear_num_key_heads": mixer.num_key_heads,
        "linear_num_value_heads": mixer.num_value_heads,
        "linear_key_head_dim": mixer.key_dim,
        "linear_value_head_dim": mixer.value_dim,
        "linear_conv_kernel_dim": mixer.conv_width,
    }


def read_mamba(entries: ConfigEntries, inner_size: int) -> Mamba2:
    """Return the Mamba-2 layer of Granite 4 and Falcon-H1.

    Args:
      entries: content of the ``config.json``.
      inner_size: number of elements of all heads, from which the head dimension follows if the file
        does not set it.
    """
    num_heads, head_dim = read_size(entries, "mamba_n_heads"), entries.get("mamba_d_head")
    if head_dim in (None, "auto"):
        entries = entries.replace({"mamba_d_head": inner_size // num_heads})
    has_bias = read_boolean(entries, "mamba_proj_bias", False)
    return Mamba2(
        num_heads=num_heads,
        num_groups=read_size(entries, "mamba_n_groups"),
        head_dim=read_size(entries, "mamba_d_head"),
        state_dim=read_size(entries, "mamba_d_state"),
        conv_width=read_size(entries, "mamba_d_conv"),
        conv_bias=read_boolean(entries, "mamba_conv_bias", False),
        conv_act=read_activation(entries),
        in_bias=has_bias,
        out_bias=has_bias,
        norm_eps=read_number(entries, "rms_norm_eps"),
        time_limits=read_time_limits(entries),
    )


def write_mamba(mixer: Mamba2) -> dict[str, Any]:
    """Return the entries for `read_mamba`."""
    return {
        "mamba_n_heads": mixer.num_heads,
        "mamba_n_groups": mixer.num_groups,
        "mamba_d_head": mixer.head_dim,
        "mamba_d_state": mixer.state_dim,
        "mamba_d_conv": mixer.conv_width,
        "mamba_conv_bias": mixer.conv_bias,
        "mamba_proj_bias": mixer.in_bias,
        "time_step_limit": mixer.time_limits,
    }


def name_mamba(module: str) -> dict[str, str]:
    """Return the tensor name of each parameter of a Mamba-2 layer.

    `module` is the name of the mixer in its layer.
    """
    return {
        "mixer_in_proj.*": f"{module}.in_proj.weight",
        "mixer_in_bias.*": f"{module}.in_proj.bias",
        "mixer_conv.*": f"{module}.conv1d.weight",
        "mixer_conv_bias.*": f"{module}.conv1d.bias",
        "mixer_decay": f"{module}.A_log",
        "mixer_time": f"{module}.dt_bias",
        "mixer_skip": f"{module}.D",
        "mixer_norm": f"{module}.norm.weight",
        "mixer_out_proj": f"{module}.out_proj.weight",
        "mixer_out_bias": f"{module}.out_proj.bias",
    }


def read_numbers(entries: ConfigEntries, key: str, count: int) -> tuple[float, ...]:
    """Return an entry that must be a list of `count` finite numbers."""
    values = entries.get(key)
    if not (isinstance(values, list) and len(values) == count and all(map(is_real, values))):
        raise ValueError(f"LlamaConfig: {key} must be a list of {count} numbers, got {values!r}.")
    return tuple(map(float, values))


def read_time_limits(entries: ConfigEntries) -> tuple[float, float]:
    """Return the range for clamping time steps, from ``time_step_limit``.

    JSON cannot express infinity, so transformers 5 writes it as an object with the key
    ``__float__``.
    """
    value: Any = entries.get("time_step_limit")
    limits: list[Any] = [*value] if isinstance(value, list | tuple) else []
    limits = [
        limit.get("__float__", "") if isinstance(limit, Mapping) else limit for limit in limits
    ]
    try:
        low, high = map(float, limits)
    except (TypeError, ValueError):
        raise ValueError(
            f"LlamaConfig: time_step_limit must be a list of 2 numbers, got {value!r}."
        ) from None
    return low, high
