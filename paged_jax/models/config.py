# pyright: strict, reportUnknownMemberType=false
"""Configuration of a Llama-family model, in memory and as a Hugging Face ``config.json``."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_jax.arguments import names_arguments
from paged_jax.formatting import shortened
from paged_jax.models.config_checks import check_config
from paged_jax.models.config_json import read_fields, write_fields
from paged_jax.models.family import NO_MULTIPLIERS, SOFTMAX_ROUTER, Multipliers, Router
from paged_jax.models.layer_groups import (
    CHUNKED,
    DENSE,
    FULL,
    HYBRID,
    NOTHING,
    RECURRENT_TYPES,
    SLIDING,
    SPARSE,
    KVShape,
    LatentSizes,
    LayerGroup,
    LayerKind,
    ResidualStreams,
    StateShape,
    group_layers,
    group_states,
)
from paged_jax.models.mixer_sizes import Mixer
from paged_jax.models.model_folder import read_config_json
from paged_jax.models.rope import QueryScale, Rope, RopeScaling


@names_arguments
@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and options of a decoder of the Llama family.

    Fields that exist in Hugging Face's ``config.json`` have the same names.

    Attributes:
      vocab_size, hidden_size: vocabulary size (V), and width of the residual stream (E).
      intermediate_size: features of the dense MLP (F).
      intermediate_sizes: features of the dense MLP of each layer; empty if all layers have
        `intermediate_size` features. `intermediate_size` must be the largest of them.
      num_hidden_layers: number of layers (L).
      num_attention_heads, num_key_value_heads: number of query heads (H) and of KV heads (K).
      head_dim: elements per head (D), even; 0 for ``hidden_size // num_attention_heads``.
      num_global_key_value_heads, global_head_dim: number of KV heads and head dimension of layers
        without a sliding window; 0 if they do not differ from the other layers.
      max_position_embeddings: maximum length of a sequence in tokens.
      rms_norm_eps: constant added to the mean square (or variance) in norms.
      rope_theta, rope_scaling: base and scaling of the rotary frequencies.
      rope_local_base_freq: base of the rotary frequencies in layers with a sliding window, without
        scaling; None if these layers rotate like the others.
      rope_layers: for each layer, whether it rotates queries and keys; empty if all layers do.
      partial_rotary_factor: fraction of each head's elements that rotates, 0 to 1. The first
        elements rotate. With "proportional" scaling, layers with `rope_local_base_freq` rotate
        whole heads.
      rope_interleaved: whether the elements of a rotated pair are neighbours in checkpoints.
        Otherwise their distance is half of the rotated part.
      tie_word_embeddings: whether the embedding table is also the output head.
      qkv_bias, o_bias, mlp_bias: whether the input projections of attention (in latent attention
        only ``latent_proj``), its output projection, and MLPs (also `moe_latent_size`) have biases.
      qk_norm: whether queries and keys are normalised.
      qk_norm_weight: whether these norms have weights.
      qk_norm_layers: for each layer, whether it normalises queries and keys; empty if `qk_norm`
        applies to all layers.
      value_norm: whether the values of each head are normalised, without a weight.
      attention_k_eq_v: whether layers without a sliding window have no projection of values. Their
        values are equal to the projected keys before normalisation and rotation.
      num_kv_shared_layers: number of layers at the end of the model that compute no keys and
        values. Each of them reads the keys and values of the last layer of the same type that
        computes them.
      attention_gate: whether the output of each query head is multiplied by the sigmoid of a gate,
        which is computed by the same projection as the query.
      query_scale: factor of queries that depends on their position, or None.
      latent: sizes of latent attention, or None. `head_dim` is then the size of the rotated part.
      qk_norm_scope: ``"head"`` normalises each head separately, with the same weights for all
        heads; ``"own"`` with different weights; ``"projection"`` all heads of a token together.
      norm_placement: ``"pre"``: norms before attention and the MLP; ``"sandwich"``: before and
        after; ``"post"``: after; ``"parallel"``: one norm before both, which run in parallel.
      norm_placements: `norm_placement` of each layer; empty if it is the same in all layers.
      norm_type: ``"rms"`` or ``"layer"``.
      norm_offset: number added to the weights of norms.
      hidden_act: activation of the gate, one of `norm_rope.ACTIVATIONS`.
      embedding_multiplier: factor of the embeddings. The factor itself is rounded to the dtype of
        the weights.
      attention_multiplier: factor of the attention scores; None for ``head_dim ** -0.5``.
      residual_multiplier: factor of the outputs of attention and the MLP.
      multipliers: factors of other activations in a layer, see `Multipliers`.
      layer_scalar: whether each layer multiplies its output by a learned scalar.
      hidden_size_per_layer_input: size of the per-layer embeddings (Gemma 3n): each layer has its
        own embedding of each token, and adds it to the residual stream through a gate; 0 for models
        without them.
      vocab_size_per_layer_input: number of tokens with a per-layer embedding, from token 0; 0 if
        all tokens of the vocabulary have one. Other tokens use the embedding of token 0.
      residual_streams: number and options of the residual streams; None for a single stream.
      laurel_rank: rank of the low-rank projection that is added to the residual stream after
        attention, see `residual.add_low_rank`; 0 for none.
      activation_sparsity: for each layer, the fraction of the MLP's gates that is set to 0 if the
        gates have a normal distribution; empty if no layer sets gates to 0.
      use_double_wide_mlp: whether the MLPs of the last `num_kv_shared_layers` layers have twice as
        many features.
      logit_scale: factor of the logits.
      attn_logit_softcapping, final_logit_softcapping: scores and logits become
        ``cap * tanh(x / cap)``; None for no cap.
      attention_sinks: whether each head has a learned score that takes part in the softmax but
        contributes no value.
      num_experts, num_experts_per_tok: number of experts (0 for a dense MLP), and number of experts
        chosen for each token.
      moe_intermediate_size: features of each expert.
      moe_latent_size: size of the vectors that experts read and write, if they are projections of
        the hidden states; 0 if experts read and write hidden states.
      shared_expert_intermediate_size: features of the shared expert; 0 for none.
      shared_expert_gate: whether the output of the shared expert is multiplied by a gate.
      norm_topk_prob: whether the weights of the chosen experts are divided by their sum.
      router: options for choosing and weighting experts.
      expert_bias: whether router and experts have biases.
      separate_expert_norms: whether the inputs of the router and of the experts have separate
        norms, and the outputs of the experts and of the shared expert have separate norms before
        they are added. Requires the norm placement ``"sandwich"``.
      swiglu_alpha, swiglu_limit: parameters of the activation of gpt-oss, see `mlp.clamped_swiglu`;
        if `swiglu_limit` is None, experts use `hidden_act`.
      sliding_window: number of last tokens that a query attends to in layers with a sliding window;
        None if no layer has a window.
      attention_chunk_size: in layers of type ``"chunked_attention"``, number of consecutive tokens
        that attend only to each other; None if there are no such layers.
      layer_types: ``"full_attention"``, ``"sliding_attention"``, ``"chunked_attention"``,
        ``"linear_attention"``, ``"hybrid"`` (full and linear attention, added) or ``"none"`` (only
        an MLP) for each layer; empty if all are attention layers with the same `sliding_window`.
      mixer: sizes of the recurrent layers (linear attention); None if no layer is recurrent.
      mlp_layer_types: ``"dense"`` (an MLP of `intermediate_size`), ``"sparse"`` (experts) or
        ``"none"`` for each layer; empty if all layers have the same kind of MLP.
      gated_mlp: whether MLPs and experts have a gate: they multiply ``activation(gate)`` by their
        up projection. If False, there is no gate, and the activation is applied to the up
        projection.
      initializer_range: standard deviation of initial weights.
      bos_token_id, eos_token_ids: special tokens.
      model_type: key of the family in `families.FAMILIES`.
      dtype: dtype of the weights in the files: float32, bfloat16 or float16.

    Raises:
      ValueError: a value is out of range, or fields do not fit together.

    Example:
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=172,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
      >>> config.head_dim
      8
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0
    num_global_key_value_heads: int = 0
    global_head_dim: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float | None = None
    rope_layers: tuple[bool, ...] = ()
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_weight: bool = True
    qk_norm_layers: tuple[bool, ...] = ()
    qk_norm_scope: str = "head"
    value_norm: bool = False
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    attention_gate: bool = False
    latent: LatentSizes | None = None
    query_scale: QueryScale | None = None
    norm_placement: str = "pre"
    norm_placements: tuple[str, ...] = ()
    norm_type: str = "rms"
    norm_offset: float = 0.0
    hidden_act: str = "silu"
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    multipliers: Multipliers = NO_MULTIPLIERS
    layer_scalar: bool = False
    intermediate_sizes: tuple[int, ...] = ()
    vocab_size_per_layer_input: int = 0
    residual_streams: ResidualStreams | None = None
    laurel_rank: int = 0
    activation_sparsity: tuple[float, ...] = ()
    hidden_size_per_layer_input: int = 0
    use_double_wide_mlp: bool = False
    logit_scale: float = 1.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_sinks: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    moe_latent_size: int = 0
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = True
    norm_topk_prob: bool = False
    router: Router = SOFTMAX_ROUTER
    expert_bias: bool = False
    separate_expert_norms: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    layer_types: tuple[str, ...] = ()
    mixer: Mixer | None = None
    mlp_layer_types: tuple[str, ...] = ()
    gated_mlp: bool = True
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"
    dtype: str = "float32"

    def __str__(self) -> str:
        """Return a text like `repr`, but only with the fields that differ from their defaults."""
        return shortened(self)

    def __post_init__(self) -> None:
        if not self.head_dim:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    "LlamaConfig: hidden_size must be a multiple of num_attention_heads when "
                    f"head_dim is not given, got hidden_size {self.hidden_size} and "
                    f"num_attention_heads {self.num_attention_heads}."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        check_config(self)
        self._normalise()
        _ = self.ropes  # `Rope` checks the sizes

    def _normalise(self) -> None:
        """Replace per-layer tuples that repeat the default by (), so that equal models are `==`."""
        values = {
            "norm_placements": self.norm_placement,
            "qk_norm_layers": self.qk_norm,
            "intermediate_sizes": self.intermediate_size,
            "activation_sparsity": 0.0,
            "rope_layers": True,
        }
        uniform = [name for name, value in values.items() if set(getattr(self, name)) == {value}]
        if set(self.layer_types) in ({FULL}, {SLIDING}):
            if FULL in self.layer_types:
                object.__setattr__(self, "sliding_window", None)
            uniform.append("layer_types")
        if set(self.mlp_layer_types) in ({DENSE}, {SPARSE}):
            uniform.append("mlp_layer_types")
        for name in uniform:
            object.__setattr__(self, name, ())

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Return the config described by a Hugging Face ``config.json`` of transformers 4 or 5.

        Missing optional keys get the default values that transformers uses for the model family.

        Raises:
          UnsupportedConfigError: the config needs an unsupported feature. The message names it.
          ValueError: a required key is missing, or a value has the wrong type or is out of range.

        Example:
          >>> LlamaConfig.from_dict({
          ...     "model_type": "llama", "vocab_size": 32, "hidden_size": 16,
          ...     "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
          ... }).num_key_value_heads
          2
        """
        return cls(**read_fields(config))

    @classmethod
    def from_file(cls, path: str | Path) -> "LlamaConfig":
        """Return the config in a ``config.json``.

        `path` is the file, or the folder that contains it.

        Raises:
          FileNotFoundError: the file does not exist.
          ValueError: the file does not hold a JSON object, or its content is invalid, see
            `from_dict`.
        """
        return cls.from_dict(read_config_json(Path(path)))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` that transformers and `from_dict` can read.

        Raises:
          ValueError: transformers cannot represent this combination of options in the family
            `model_type`.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        written = write_fields(fields)
        read = LlamaConfig.from_dict(written)
        for name, value in fields.items():
            expected = getattr(read, name)
            if value != expected and not _are_close(value, expected):
                raise ValueError(
                    f"LlamaConfig: {name} must be {expected!r} for model_type "
                    f"{self.model_type!r}, because its config.json cannot express another value, "
                    f"got {value!r}."
                )
        return written

    @functools.cached_property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Sliding window or chunk size of each layer, in tokens; None for layers without either."""
        windows = {SLIDING: self.sliding_window, CHUNKED: self.attention_chunk_size}
        return tuple(windows.get(kind) for kind in self.layer_kinds)

    @functools.cached_property
    def attention_chunks(self) -> tuple[int | None, ...]:
        """Chunk size of each layer with chunked attention, in tokens; None for other layers."""
        size = self.attention_chunk_size
        return tuple(size if kind == CHUNKED else None for kind in self.layer_kinds)

    @functools.cached_property
    def kv_shapes(self) -> tuple[KVShape | None, ...]:
        """Shape of a token's keys and values in each layer; None for layers without attention."""
        D, K = self.head_dim, self.num_key_value_heads
        local = KVShape(K, D, D)
        global_D = self.global_head_dim or D
        whole = KVShape(self.num_global_key_value_heads or K, global_D, global_D)
        if self.latent is not None:
            local = whole = self.latent.kv_shape
        shapes = {FULL: whole, HYBRID: whole, SLIDING: local, CHUNKED: local}
        return tuple(shapes.get(kind) for kind in self.layer_kinds)

    @property
    def shares_kv(self) -> tuple[bool, ...]:
        """For each layer, whether it reads the keys and values of an earlier layer."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        return tuple(layer >= first for layer in range(self.num_hidden_layers))

    @functools.cached_property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer, index of the layer that computes its keys and values (often itself)."""
        owners = {
            kind: layer for layer, kind in enumerate(self.layer_kinds) if not self.shares_kv[layer]
        }
        layers = enumerate(zip(self.layer_kinds, self.shares_kv, strict=True))
        return tuple(owners.get(kind, i) if shares else i for i, (kind, shares) in layers)

    @functools.cached_property
    def state_shapes(self) -> tuple[tuple[StateShape, ...], ...]:
        """For each layer, the arrays of a sequence's state; empty for attention layers."""
        states = () if self.mixer is None else self.mixer.states
        return tuple(states if kind in RECURRENT_TYPES else () for kind in self.layer_kinds)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Type of each layer. If `layer_types` is empty, all layers have the same type."""
        kind = FULL if self.sliding_window is None else SLIDING
        return self.layer_types or (kind,) * self.num_hidden_layers

    @property
    def _mlp_kinds(self) -> tuple[str, ...]:
        kind = SPARSE if self.num_experts else DENSE
        return self.mlp_layer_types or (kind,) * self.num_hidden_layers

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts instead of a dense MLP."""
        return tuple(kind == SPARSE for kind in self._mlp_kinds)

    @functools.cached_property
    def layer_configs(self) -> tuple["LlamaConfig", ...]:
        """For each layer, the config of a model in which all layers are like this layer.

        Layers with the same properties have the same config object.

        Example:
          >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
          ...     num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
          ...     global_head_dim=16, sliding_window=4,
          ...     layer_types=("sliding_attention", "full_attention"))
          >>> [layer.head_dim for layer in config.layer_configs]
          [8, 16]
        """
        L = self.num_hidden_layers
        placements = self.norm_placements or (self.norm_placement,) * L
        properties = (
            self.layer_kinds, self._mlp_kinds, self.sliding_windows, self.kv_shapes,
            self.shares_kv, placements, self.qk_norm_layers or (self.qk_norm,) * L,
            self.activation_sparsity or (0.0,) * L,
            self.intermediate_sizes or (self.intermediate_size,) * L,
        )  # fmt: skip
        kinds = tuple(LayerKind(*each) for each in zip(*properties, strict=True))
        distinct = dict.fromkeys(kinds)
        configs = {kind: dataclasses.replace(self, **kind.changes(self)) for kind in distinct}
        return tuple(configs[kind] for kind in kinds)

    @functools.cached_property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Rotary embedding of each layer; None for layers that do not rotate queries and keys."""
        rotates = self.rope_layers or (True,) * self.num_hidden_layers
        kinds = tuple(zip(self.sliding_windows, self.kv_shapes, rotates, strict=True))
        ropes = {kind: self._rope(*kind) for kind in dict.fromkeys(kinds)}
        return tuple(ropes[kind] for kind in kinds)

    def _rope(self, window: int | None, kv: KVShape | None, rotates: bool) -> Rope | None:
        if kv is None or not rotates:
            return None
        local_theta = None if window is None else self.rope_local_base_freq
        is_local = local_theta is not None
        scaling = self.rope_scaling
        is_proportional = scaling is not None and scaling.rope_type == "proportional"
        factor = 1.0 if is_local and is_proportional else self.partial_rotary_factor
        head_dim = kv.head_dim if self.latent is None else self.head_dim
        return Rope(
            head_dim=head_dim,
            rotary_dim=int(head_dim * factor),
            theta=self.rope_theta if local_theta is None else local_theta,
            scaling=None if is_local else scaling,
            max_position_embeddings=self.max_position_embeddings,
        )

    @functools.cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of layers with the same window and KV shape, see `layer_groups.group_layers`."""
        shapes = zip(self.kv_shapes, self.shares_kv, strict=True)
        kept = [None if shares else kv for kv, shares in shapes]
        if any(kept):
            return group_layers(self.sliding_windows, kept)
        num_heads = self.num_key_value_heads if self.latent is None else self.latent.num_copies
        return (LayerGroup(None, (), KVShape(num_heads, 1, 0)),)

    @functools.cached_property
    def state_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of recurrent layers with states of equal shapes; empty without such layers."""
        return group_states(self.state_shapes)

    @property
    def can_scan_layers(self) -> bool:
        """Whether all layers have the same config, so that `Llama` supports `scan_layers`."""
        kinds = {*zip(self.layer_configs, self.ropes, strict=True)}
        is_special = self.mixer is not None or self.residual_streams is not None
        return len(kinds) == 1 and not is_special and not self.hidden_size_per_layer_input

    @property
    def dense_intermediate_size(self) -> int:
        """Number of features of the dense MLP or of the shared expert; 0 if there is neither."""
        if NOTHING in self.mlp_layer_types and len({*self.mlp_layer_types}) == 1:
            return 0
        return self.shared_expert_intermediate_size if self.num_experts else self.intermediate_size

    @property
    def expert_inputs(self) -> int:
        """Size of the vectors that experts read and write."""
        return self.moe_latent_size or self.hidden_size

    @property
    def num_kv_rows(self) -> int:
        """Number of key and value rows per KV head in the fused projection ``qkv_proj``.

        It is usually 2: a key and a value. It is 1 if the keys are also used as values, and 0 if no
        layer projects keys and values.
        """
        if all(self.shares_kv):
            return 0
        return 1 if self.attention_k_eq_v else 2

    @property
    def value_features(self) -> int:
        """Number of input features of the output projection of attention."""
        per_head = self.head_dim if self.latent is None else self.latent.v_head_dim
        return self.num_attention_heads * per_head

    @property
    def qkv_features(self) -> int:
        """Number of output features of ``qkv_proj``: ``(H + 2 K) D`` without gates."""
        queries = self.num_attention_heads * (2 if self.attention_gate else 1)
        return (queries + self.num_kv_rows * self.num_key_value_heads) * self.head_dim


def _are_close(a: Any, b: Any) -> bool:
    """Return whether two floats are equal up to rounding; False for other types.

    Some fields are stored in ``config.json`` as their reciprocal, which changes the last digits.
    """
    return isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-12)
