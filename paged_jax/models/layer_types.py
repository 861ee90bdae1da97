"""Which layers of a model attend alike, and so keep the same tokens in a cache."""

from collections.abc import Sequence
from typing import NamedTuple

from paged_jax.checks import check_positive

FULL = "full_attention"
SLIDING = "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)
_MAX_LAYERS = 10_000  # far above any model: a typing error must not fill the memory


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


class LayerGroup(NamedTuple):
    """Layers that share a kind of attention.

    Attributes:
      window: how many last tokens they attend to, the query's own included; None for all.
      layers: their numbers, ascending.
    """

    window: int | None
    layers: tuple[int, ...]


def group_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Layers by their windows, the group that keeps most tokens first.

    Args:
      windows: that of each layer, in tokens; None where a layer attends to all.

    Example:
      >>> for group in group_layers([4, None, 4, 8]):
      ...     print(group.window, group.layers)
      None (1,)
      8 (3,)
      4 (0, 2)
    """
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    by_size = sorted(layers, key=lambda window: (window is not None, -(window or 0)))
    return tuple(LayerGroup(window, tuple(layers[window])) for window in by_size)
