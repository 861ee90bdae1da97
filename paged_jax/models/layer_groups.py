"""Types of attention layers, and groups of layers that keep the same tokens in a cache.

Imports no JAX, because the scheduler uses it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paged_jax.arguments import check_positive

FULL = "full_attention"
SLIDING = "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)
# Far above any real model: a mistyped number fails here, before it exhausts the memory.
_MAX_LAYERS = 10_000


class LayerGroup(NamedTuple):
    """Layers with the same sliding window.

    Attributes:
      sliding_window: number of last tokens that a query attends to, including its own; None for
        all tokens.
      layers: indices of the layers, ascending.
    """

    sliding_window: int | None
    layers: tuple[int, ...]


def group_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Group layers by sliding window, with the group that keeps the most tokens first.

    Args:
      windows: sliding window of each layer in tokens; None for layers that attend to all tokens.

    Example:
      >>> for group in group_layers([4, None, 4, 8]):
      ...     print(group.sliding_window, group.layers)
      None (1,)
      8 (3,)
      4 (0, 2)
    """
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    by_size = sorted(layers, key=lambda window: (window is not None, -(window or 0)))
    return tuple(LayerGroup(window, tuple(layers[window])) for window in by_size)


def check_num_layers(num_layers: int) -> None:
    """Check the number of layers, before memory is allocated for each layer.

    Raises:
      ValueError: the number is not positive, or exceeds `_MAX_LAYERS`.
    """
    check_positive("LlamaConfig", num_hidden_layers=num_layers)
    if num_layers > _MAX_LAYERS:
        raise ValueError(
            f"LlamaConfig: num_hidden_layers must be at most {_MAX_LAYERS}, got {num_layers}."
        )
