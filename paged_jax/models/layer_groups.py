"""Types of layers, the shapes of their data in a cache, and groups of layers.

Imports no JAX, because the scheduler uses it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from paged_jax.arguments import check_positive
from paged_jax.models.family import SOFTMAX_ROUTER

FULL = "full_attention"
SLIDING = "sliding_attention"
# Attention to the tokens of the same chunk of consecutive positions.
CHUNKED = "chunked_attention"
RECURRENT = "linear_attention"
# Full attention and a recurrence in the same layer. Their outputs are added.
HYBRID = "hybrid"
# In `layer_types` a layer that has only an MLP; in `mlp_layer_types` a layer without an MLP.
NOTHING = "none"
ATTENTION_TYPES = (FULL, SLIDING)
RECURRENT_TYPES = (RECURRENT, HYBRID)
LAYER_TYPES = (*ATTENTION_TYPES, CHUNKED, *RECURRENT_TYPES, NOTHING)
# Types of a layer's MLP: dense, or experts.
DENSE = "dense"
SPARSE = "sparse"
MLP_TYPES = (DENSE, SPARSE, NOTHING)
# Fields of a `LlamaConfig` for the sizes of experts.
_EXPERT_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


class KVShape(NamedTuple):
    """Keys and values that a layer keeps of each token.

    Attributes:
      num_kv_heads: number of KV heads (K).
      head_dim: elements of a key (D).
      value_dim: elements of a value; 0 if the values are a part of the keys, which are kept once.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int


class LatentSizes(NamedTuple):
    """Sizes of latent attention, see `layer_attention`, with the names of ``config.json``.

    Attributes:
      q_lora_rank: elements of the latent vector of queries; 0 if there is none.
      kv_lora_rank: elements of the latent vector of keys and values.
      qk_nope_head_dim: elements of a head's queries and keys that do not rotate.
      qk_rope_head_dim: elements that rotate.
      v_head_dim: elements of a head's values.
      num_copies: number of devices that each keep the vectors of all tokens.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_copies: int = 1

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_shape(self) -> KVShape:
        """Shape of the vectors that a layer keeps: all heads of a device share them."""
        return KVShape(self.num_copies, self.kv_lora_rank + self.qk_rope_head_dim, 0)

    def num_features(self, num_heads: int) -> int:
        """Return the number of activations of a token in attention, for memory estimates."""
        kept = self.kv_lora_rank + self.qk_rope_head_dim
        return num_heads * (self.query_dim + kept + self.kv_lora_rank) + self.q_lora_rank + kept

    def check(self, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
        """Check the sizes, and the fields of a `LlamaConfig` that describe heads.

        Raises:
          ValueError: a size is out of range, or they do not fit together.
        """
        sizes = self._asdict()
        q_lora_rank = sizes.pop("q_lora_rank")
        check_positive("LlamaConfig", **sizes)
        if q_lora_rank < 0:
            raise ValueError(f"LlamaConfig: q_lora_rank must be 0 or more, got {q_lora_rank}.")
        if head_dim != self.qk_rope_head_dim or num_heads != num_kv_heads:
            raise ValueError(
                "LlamaConfig: head_dim must be qk_rope_head_dim, and num_key_value_heads must be "
                f"num_attention_heads with latent attention, got {head_dim} and {num_kv_heads}."
            )


class ResidualStreams(NamedTuple):
    """Residual streams of each token, see `residual`.

    Attributes:
      count: number of streams (n), at least 2.
      active: index of the stream that the layers compute.
      scales_active: whether the active stream is multiplied by a weight before it gates the
        embedding of a layer, see `residual.add_stream_weights`.
    """

    count: int
    active: int = 0
    scales_active: bool = True


class StateShape(NamedTuple):
    """An array that a recurrent layer keeps of each sequence.

    Attributes:
      name: name of the array in its layer.
      shape: shape for one sequence.
      dtype: name of the dtype; None for the dtype of K and V, or of queries if K and V are
        quantised.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None


class LayerKind(NamedTuple):
    """Properties that may differ between the layers of a model, except the rotation.

    Attributes:
      kind, mlp_kind: type of the layer and of its MLP.
      window: number of last tokens that a query attends to; None for all tokens. In chunked
        attention it is the size of a chunk.
      kv: keys and values that the layer keeps, or None.
      shares_kv: whether it reads the keys and values of another layer.
      norm_placement: where its norms are, see `LlamaConfig`.
      has_qk_norm: whether it normalises queries and keys.
      sparsity: fraction of the features of its MLP that are 0.
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
        """Return the fields to change in `config`, so that all of its layers equal this layer."""
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
    """Layers that keep the same number of tokens, in the same shapes.

    Attributes:
      sliding_window: number of last tokens that a query attends to, including its own; None for
        all tokens.
      layers: indices of the layers, ascending.
      kv: keys and values of each token; None for layers without keys and values.
      states: arrays of each sequence; empty for attention layers.
    """

    sliding_window: int | None
    layers: tuple[int, ...]
    kv: KVShape | None = None
    states: tuple[StateShape, ...] = ()

    @property
    def num_values(self) -> int:
        """Number of values that all layers keep of a token; the number of layers if unknown."""
        if self.kv is None:
            return len(self.layers)
        per_head = self.kv.head_dim + self.kv.value_dim
        return len(self.layers) * self.kv.num_kv_heads * per_head

    @property
    def num_state_values(self) -> int:
        """Number of values in the states of a sequence; float32 values count twice."""
        sizes = (math.prod(each.shape) * (1 + (each.dtype == "float32")) for each in self.states)
        return len(self.layers) * sum(sizes)


def group_layers(
    windows: Sequence[int | None], kv_shapes: Sequence[KVShape | None]
) -> tuple[LayerGroup, ...]:
    """Group layers by the keys and values they keep, with the group that keeps the most first.

    Layers without keys and values are in no group.

    Args:
      windows: sliding window of each layer in tokens; None for layers that attend to all tokens.
      kv_shapes: keys and values of each layer, or None.

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
    """Group recurrent layers by the arrays they keep.

    Args:
      states: arrays of each layer; empty for layers that are not recurrent.

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
    """Return for each layer the index of its group and its index in the group, or None.

    Args:
      groups: the groups.
      kv_sources: see `LlamaConfig.kv_sources`.

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
