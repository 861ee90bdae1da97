"""Entries of a ``config.json`` about sliding windows, for families of several lineages.

A function ``read_...`` has a counterpart ``write_...`` that returns the entries for it. The errors
are those of `LlamaConfig.from_dict`.
"""

from collections.abc import Callable
from typing import Any

from paged_jax.arguments import check_positive
from paged_jax.models.config import ModelConfig
from paged_jax.models.config_json import (
    ConfigEntries,
    read_integer,
    read_names,
)
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.common import read_num_layers
from paged_jax.models.layer_groups import FULL, SLIDING


def read_windows(entries: ConfigEntries, is_full: Callable[[int], bool]) -> list[int | None]:
    """Return the sliding window of each layer in tokens; None for layers without a window.

    Args:
      entries: content of the ``config.json``, with ``sliding_window`` and ``layer_types``.
      is_full: function that tells whether the layer with an index has no window, if
        ``layer_types`` is missing.
    """
    num_layers, window = read_num_layers(entries), read_integer(entries, "sliding_window", None)
    if window is not None and window < 1:
        raise ValueError(f"LlamaConfig: sliding_window must be positive or null, got {window}.")
    names = read_names(entries, "layer_types", num_layers)
    if names is None:
        is_whole = [window is None or is_full(layer) for layer in range(num_layers)]
        return [None if is_full_layer else window for is_full_layer in is_whole]
    if unsupported := {*names} - {FULL, SLIDING}:
        raise UnsupportedConfigError(
            f"LlamaConfig: layer_types must only contain {FULL!r} and {SLIDING!r}, got "
            f"{min(unsupported)!r}."
        )
    if SLIDING in names and window is None:
        raise ValueError(
            f"LlamaConfig: sliding_window must be an integer if layer_types contains {SLIDING!r}, "
            "got null."
        )
    return [None if name == FULL else window for name in names]


def read_window(entries: ConfigEntries) -> int | None:
    """Return the sliding window of all layers in tokens; None without a window."""
    window = read_integer(entries, "sliding_window", None)
    windows = {*read_windows(entries, lambda layer: False)}
    if windows != {window}:
        raise ValueError(
            f"LlamaConfig: sliding_window must be null if layer_types contains {FULL!r}, got "
            f"{window}."
        )
    return window


def read_pattern_windows(
    entries: ConfigEntries, default: int, *, full: int = -1
) -> list[int | None]:
    """Return the windows of layers in a repeated pattern, see `read_windows`.

    Args:
      entries: content of the ``config.json``, with the length ``sliding_window_pattern``.
      default: length of the pattern if the entry is missing.
      full: index in the pattern of the layer without a window; the last one by default.
    """
    interval = read_integer(entries, "sliding_window_pattern", default)
    check_positive("LlamaConfig", sliding_window_pattern=interval)
    return read_windows(entries, lambda layer: layer % interval == full % interval)


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """Return the entries for `read_windows`."""
    windows = config.sliding_windows
    return {
        "sliding_window": next(filter(None, windows), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }
