"""Groups of layers in a cache, and the shapes of what each layer keeps there.

`CacheSpec` is the contract of the groups of a model's cache on the host: `LayerGroup` keeps tokens,
`RecurrentLayers` keep a state. On the device, it is `cache.groups.Group`.

Layers that read the keys and values of another layer are in no group: `ModelConfig.kv_sources` says
which, from the `source` that a family gives to a layer's attention.

This module does not import JAX, because the scheduler uses it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paged_jax.cache.retention import LastState, Retention

FULL = "full_attention"
SLIDING = "sliding_attention"
# Attention in which a query attends only to tokens of its own chunk of consecutive positions.
CHUNKED = "chunked_attention"
RECURRENT = "linear_attention"
# Layers that compute full attention and a recurrence, and add their outputs.
HYBRID = "hybrid"
# In `layer_types`: a layer that consists of only an MLP. In `mlp_layer_types`: a layer without an
# MLP.
NOTHING = "none"
ATTENTION_TYPES = (FULL, SLIDING)
RECURRENT_TYPES = (RECURRENT, HYBRID)
LAYER_TYPES = (*ATTENTION_TYPES, CHUNKED, *RECURRENT_TYPES, NOTHING)
# Types of a layer's MLP: a dense MLP, or experts.
DENSE = "dense"
SPARSE = "sparse"
MLP_TYPES = (DENSE, SPARSE, NOTHING)


class KVShape(NamedTuple):
    """Shape of the keys and values that a layer keeps for each token.

    Attributes:
      num_kv_heads: number of KV heads (K).
      head_dim: elements of a key (D).
      value_dim: elements of a value; 0 if values are a part of the keys, so that only keys are
        kept.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int


class StateShape(NamedTuple):
    """Description of an array that a recurrent layer keeps for each sequence.

    Attributes:
      name: name of the array, unique in its layer.
      shape: shape for one sequence.
      dtype: name of the dtype. None means the dtype of the K and V pools, or of the queries if the
        pools are quantised.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None


class CacheSpec(Protocol):
    """What a group of layers keeps in the cache for each sequence, and what a swap of it copies."""

    @property
    def num_layers(self) -> int:
        """Number of layers in the group."""
        ...

    @property
    def retention(self) -> Retention:
        """The rule for the tokens that the layers keep."""
        ...

    @property
    def has_snapshots(self) -> bool:
        """Whether the prefix cache needs snapshots of what the layers keep.

        Prompt chunks then end at multiples of the interval of snapshots, and each chunk takes one
        row of a program.
        """
        ...

    @property
    def num_values(self) -> int:
        """Number of elements of K and V per token, summed over the layers of the group."""
        ...

    def num_copied_values(self, num_tokens: int, block_size: int) -> int:
        """Return the number of elements that a swap copies; a state counts 2-byte elements."""
        ...


class LayerGroup(NamedTuple):
    """Group of layers that keep the same tokens, or states of the same shapes.

    Attributes:
      retention: the rule for the tokens that the layers keep.
      layers: indices of the layers, ascending. A model without attention has a group without
        layers: its blocks only count tokens, for the scheduler and the prefix cache.
      kv: shape of the keys and values of each token; None for recurrent layers.
      states: state arrays of each sequence; empty for attention layers.
    """

    retention: Retention
    layers: tuple[int, ...]
    kv: KVShape | None = None
    states: tuple[StateShape, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of layers in the group."""
        return len(self.layers)

    @property
    def has_snapshots(self) -> bool:
        """Whether the layers are recurrent."""
        return bool(self.states)

    def num_copied_values(self, num_tokens: int, block_size: int) -> int:
        """Return the number of elements in the blocks that a sequence keeps."""
        return self.retention.num_kept(num_tokens, block_size) * block_size * self.num_values

    @property
    def num_pool_layers(self) -> int:
        """Size of the layer dimension of the group's pools; 1 if the group has no layers."""
        return max(len(self.layers), 1)

    @property
    def num_values(self) -> int:
        """Number of elements of K and V per token, summed over the layers of the group.

        If `kv` is None, return the number of layers, as if each layer had one element.
        """
        if self.kv is None:
            return len(self.layers)
        per_head = self.kv.head_dim + self.kv.value_dim
        return self.num_pool_layers * self.kv.num_kv_heads * per_head

    @property
    def num_state_values(self) -> int:
        """Size of a sequence's states in all layers, in 2-byte elements.

        A float32 element counts as two of them.
        """
        sizes = (math.prod(state.shape) * (1 + (state.dtype == "float32")) for state in self.states)
        return len(self.layers) * sum(sizes)


class RecurrentLayers(NamedTuple):
    """All recurrent layers of a model, which keep a state for each sequence.

    Attributes:
      groups: groups of layers with states of equal shapes.
    """

    groups: tuple[LayerGroup, ...]

    @property
    def num_layers(self) -> int:
        """Number of recurrent layers."""
        return sum(group.num_layers for group in self.groups)

    @property
    def retention(self) -> Retention:
        """The rule of all recurrent layers."""
        return LastState()

    @property
    def has_snapshots(self) -> bool:
        """True."""
        return True

    @property
    def num_values(self) -> int:
        """Return 0, because the layers keep no tokens."""
        return 0

    def num_copied_values(self, num_tokens: int, block_size: int) -> int:
        """Return the size of a state in 2-byte elements."""
        return sum(group.num_state_values for group in self.groups)


def group_layers(
    rules: Sequence[Retention], kv_shapes: Sequence[KVShape | None]
) -> tuple[LayerGroup, ...]:
    """Group the layers with the same rule and KV shape; those that keep most tokens are first.

    Layers that keep no keys and values are in no group.

    Args:
      rules: the rule for the tokens that each layer keeps.
      kv_shapes: shape of the keys and values of each layer; None for layers that keep none.

    Example:
      >>> from paged_jax.cache.retention import AllTokens, LastTokens
      >>> small, large = KVShape(2, 64, 64), KVShape(1, 128, 128)
      >>> rules = [LastTokens(4), AllTokens(), LastTokens(4), LastTokens(8)]
      >>> for group in group_layers(rules, [small, large, small, small]):
      ...     print(group.retention, group.layers, group.kv.head_dim)
      AllTokens() (1,) 128
      LastTokens(window=8) (3,) 64
      LastTokens(window=4) (0, 2) 64
    """
    layers: dict[tuple[Retention, KVShape], list[int]] = {}
    for layer, (rule, kv) in enumerate(zip(rules, kv_shapes, strict=True)):
        if kv is not None:
            layers.setdefault((rule, kv), []).append(layer)
    groups = [LayerGroup(rule, tuple(layer_ids), kv) for (rule, kv), layer_ids in layers.items()]
    # The sort is stable: of groups that keep equally many tokens, that of the first layer is first.
    return tuple(sorted(groups, key=lambda group: -group.retention.num_tokens))


def group_states(states: Sequence[tuple[StateShape, ...]]) -> tuple[LayerGroup, ...]:
    """Group recurrent layers with state arrays of the same shapes.

    Args:
      states: state arrays of each layer; empty for layers that are not recurrent.

    Example:
      >>> conv = (StateShape("conv", (2, 64), "float32"),)
      >>> [group.layers for group in group_states([conv, (), conv])]
      [(0, 2)]
    """
    layers: dict[tuple[StateShape, ...], list[int]] = {}
    for layer, arrays in enumerate(states):
        if arrays:
            layers.setdefault(arrays, []).append(layer)
    return tuple(
        LayerGroup(LastState(), tuple(layer_ids), None, arrays)
        for arrays, layer_ids in layers.items()
    )


def layer_places(
    groups: Sequence[LayerGroup], kv_sources: Sequence[int]
) -> tuple[tuple[int, int] | None, ...]:
    """Return the position of each layer: the index of its group, and its index in the group.

    The result is None for layers that are in no group. A layer that reads the keys and values of
    another layer has the position of that layer.

    Args:
      groups: the groups.
      kv_sources: for each layer, the layer whose keys and values it reads, see
        `ModelConfig.kv_sources`.

    Example:
      >>> from paged_jax.cache.retention import AllTokens
      >>> groups = LayerGroup(AllTokens(), (1,)), LayerGroup(AllTokens(), (0, 3))
      >>> layer_places(groups, [0, 1, 2, 3, 1])
      ((1, 0), (0, 0), None, (1, 1), (0, 0))
    """
    places = {
        layer: (index, position)
        for index, group in enumerate(groups)
        for position, layer in enumerate(group.layers)
    }
    return tuple(places.get(layer) for layer in kv_sources)
