"""Types of layers, the shapes of the data they keep in a cache, and groups of layers.

This module does not import JAX, because the scheduler uses it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from paged_jax.arguments import check_positive
from paged_jax.models.family import SOFTMAX_ROUTER

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
# Fields of a `LlamaConfig` that hold the number and sizes of experts.
_EXPERT_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_latent_size",
    "shared_expert_intermediate_size",
)


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


class LatentSizes(NamedTuple):
    """Sizes of latent attention, named as in ``config.json``. See `layer_attention`.

    Attributes:
      q_lora_rank: elements of the latent vector of queries; 0 if there is none.
      kv_lora_rank: elements of the latent vector of keys and values.
      qk_nope_head_dim: number of elements of a query or key that are not rotated.
      qk_rope_head_dim: number of elements of a query or key that are rotated.
      v_head_dim: number of elements of a head's value.
      num_copies: number of copies of the cached vectors. With tensor parallelism, each device has a
        copy of the vectors of all tokens.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_copies: int = 1

    @property
    def query_dim(self) -> int:
        """Number of elements of a head's query, both rotated and unrotated."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_shape(self) -> KVShape:
        """Shape of the cached vectors ``[c | rotated]``. All heads of a device share one vector."""
        return KVShape(self.num_copies, self.kv_lora_rank + self.qk_rope_head_dim, 0)

    def num_features(self, num_heads: int) -> int:
        """Return the number of activations per token in attention, for memory estimates."""
        kept = self.kv_lora_rank + self.qk_rope_head_dim
        return num_heads * (self.query_dim + kept + self.kv_lora_rank) + self.q_lora_rank + kept

    def check(self, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
        """Check these sizes and whether they fit the head fields of a `LlamaConfig`.

        Raises:
          ValueError: a size is out of range, or the sizes do not fit the heads.
        """
        sizes = self._asdict()
        q_lora_rank = sizes.pop("q_lora_rank")
        check_positive("LlamaConfig", **sizes)
        if q_lora_rank < 0:
            raise ValueError(f"LlamaConfig: q_lora_rank must be 0 or more, got {q_lora_rank}.")
        if head_dim != self.qk_rope_head_dim or num_heads != num_kv_heads:
            raise ValueError(
                "LlamaConfig: with latent attention, head_dim must equal qk_rope_head_dim, and "
                f"num_key_value_heads must equal num_attention_heads, got head_dim {head_dim} and "
                f"num_key_value_heads {num_kv_heads}."
            )


class ResidualStreams(NamedTuple):
    """Number and options of a token's residual streams, see `residual`.

    Attributes:
      count: number of streams (n), at least 2.
      active: index of the stream on which attention and MLP run.
      scales_active: whether the active stream is multiplied by the parameter ``stream_factor``
        before it gates the layer's token embeddings, see `residual.add_to_streams`.
    """

    count: int
    active: int = 0
    scales_active: bool = True


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


class LayerKind(NamedTuple):
    """Properties of a layer that may differ between layers, except the rotary embedding.

    Attributes:
      kind, mlp_kind: type of the layer, and type of its MLP.
      window: number of last tokens that a query attends to; None for all tokens. In layers with
        chunked attention, it is the chunk size.
      kv: shape of its keys and values; None for layers without attention.
      shares_kv: whether it reads the keys and values of an earlier layer.
      norm_placement: placement of its norms, see `LlamaConfig`.
      has_qk_norm: whether it normalises queries and keys.
      sparsity: fraction of the MLP's gates to set to 0, see `LlamaConfig.activation_sparsity`.
      intermediate_size: features of its dense MLP.
    """

    kind: str
    mlp_kind: str
    window: int | None
    kv: KVShape | None
    shares_kv: bool
    norm_placement: str
    has_qk_norm: bool
    sparsity: float
    intermediate_size: int

    def changes(self, config: Any) -> dict[str, Any]:
        """Return the changes to `config` after which all layers are of this kind.

        The result maps the names of config fields to their new values.
        """
        L, is_recurrent = config.num_hidden_layers, self.kind in RECURRENT_TYPES
        is_special = self.kv is None or is_recurrent or self.kind == CHUNKED
        changes: dict[str, Any] = {
            "layer_types": (self.kind,) * L if is_special else (),
            "mlp_layer_types": (NOTHING,) * L if self.mlp_kind == NOTHING else (),
            "rope_layers": (),
            "norm_placement": self.norm_placement,
            "norm_placements": (),
            "mixer": config.mixer if is_recurrent else None,
            "o_bias": config.o_bias and self.kv is not None,
            "num_kv_shared_layers": L if self.shares_kv else 0,
            "use_double_wide_mlp": False,
            "activation_sparsity": (self.sparsity,) * L if self.sparsity else (),
            "intermediate_size": self.intermediate_size,
            "intermediate_sizes": (),
            "sliding_window": None if self.kind == CHUNKED else self.window,
            "attention_chunk_size": self.window if self.kind == CHUNKED else None,
            "qk_norm": self.has_qk_norm,
            "qk_norm_layers": (),
            "global_head_dim": 0,
            "num_global_key_value_heads": 0,
        }
        if self.shares_kv and config.use_double_wide_mlp:
            changes["intermediate_size"] = 2 * self.intermediate_size
        if self.kv is not None and config.latent is None:
            changes |= {"num_key_value_heads": self.kv.num_kv_heads, "head_dim": self.kv.head_dim}
        if self.mlp_kind != SPARSE:
            changes |= dict.fromkeys(_EXPERT_FIELDS, 0)
            changes |= {"expert_bias": False, "router": SOFTMAX_ROUTER}
            changes |= {"separate_expert_norms": False}
        if self.window is not None:
            changes["attention_k_eq_v"] = False
        return changes


class LayerGroup(NamedTuple):
    """Group of layers that keep the same tokens, or states of the same shapes.

    Attributes:
      sliding_window: number of last tokens that a query attends to, including its own; None for
        all tokens.
      layers: indices of the layers, ascending. A model without attention has a group without
        layers: its blocks only count tokens, for the scheduler and the prefix cache.
      kv: shape of the keys and values of each token; None for recurrent layers.
      states: state arrays of each sequence; empty for attention layers.
    """

    sliding_window: int | None
    layers: tuple[int, ...]
    kv: KVShape | None = None
    states: tuple[StateShape, ...] = ()

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
        sizes = (math.prod(each.shape) * (1 + (each.dtype == "float32")) for each in self.states)
        return len(self.layers) * sum(sizes)


def group_layers(
    windows: Sequence[int | None], kv_shapes: Sequence[KVShape | None]
) -> tuple[LayerGroup, ...]:
    """Group the layers with the same window and KV shape, with the largest window first.

    Layers that keep no keys and values are in no group.

    Args:
      windows: sliding window of each layer in tokens; None for layers that attend to all tokens.
      kv_shapes: shape of the keys and values of each layer; None for layers that keep none.

    Example:
      >>> small, large = KVShape(2, 64, 64), KVShape(1, 128, 128)
      >>> for group in group_layers([4, None, 4, 8], [small, large, small, small]):
      ...     print(group.sliding_window, group.layers, group.kv.head_dim)
      None (1,) 128
      8 (3,) 64
      4 (0, 2) 64
    """
    layers: dict[tuple[int | None, KVShape], list[int]] = {}
    for layer, (window, kv) in enumerate(zip(windows, kv_shapes, strict=True)):
        if kv is not None:
            layers.setdefault((window, kv), []).append(layer)
    groups = [LayerGroup(window, tuple(own), kv) for (window, kv), own in layers.items()]
    # The sort is stable: among groups of the same window, the group of the first layer is first.
    return tuple(sorted(groups, key=_rank))


def _rank(group: LayerGroup) -> tuple[bool, int]:
    return group.sliding_window is not None, -(group.sliding_window or 0)


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
    return tuple(LayerGroup(None, tuple(own), None, arrays) for arrays, own in layers.items())


def layer_places(
    groups: Sequence[LayerGroup], kv_sources: Sequence[int]
) -> tuple[tuple[int, int] | None, ...]:
    """Return the position of each layer: the index of its group, and its index in the group.

    The result is None for layers that are in no group. A layer that reads the keys and values of
    another layer has the position of that layer.

    Args:
      groups: the groups.
      kv_sources: for each layer, the layer whose keys and values it reads, see
        `LlamaConfig.kv_sources`.

    Example:
      >>> layer_places([LayerGroup(None, (1,)), LayerGroup(8, (0, 3))], [0, 1, 2, 3, 1])
      ((1, 0), (0, 0), None, (1, 1), (0, 0))
    """
    places = {
        layer: (index, number)
        for index, group in enumerate(groups)
        for number, layer in enumerate(group.layers)
    }
    return tuple(places.get(layer) for layer in kv_sources)
