# pyright: strict, reportUnknownMemberType=false
"""`LlamaConfig`: a `ModelConfig` built from fields like those of a Hugging Face ``config.json``."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_jax.arguments import names_arguments
from paged_jax.models.codecs.quantisation import find_quantisation
from paged_jax.models.config import Family, ModelConfig, PerLayerTable, check_num_layers
from paged_jax.models.config_json import ConfigEntries
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.multimodal import check_head, text_config
from paged_jax.models.families.registry import FAMILIES, find_family
from paged_jax.models.known_keys import check_unread
from paged_jax.models.layer_groups import (
    CHUNKED,
    DENSE,
    FULL,
    HYBRID,
    LAYER_TYPES,
    MLP_TYPES,
    NOTHING,
    RECURRENT,
    RECURRENT_TYPES,
    SLIDING,
    SPARSE,
    KVShape,
)
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.model_folder import read_config_json
from paged_jax.models.parts.activation import Activation, ClampedSwiGLU, SparseGate, Ungated
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.experts import SOFTMAX_ROUTER, Experts, Router
from paged_jax.models.parts.latent import LatentAttention, LatentSizes
from paged_jax.models.parts.mixer import Mixer
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import AttentionPart, Part
from paged_jax.models.parts.residual import (
    LaurelSublayer,
    LayerScalar,
    Parallel,
    PerLayerEmbedding,
    SeparateExperts,
    Sublayer,
)
from paged_jax.models.parts.streams import ResidualStreams, Streams
from paged_jax.models.rope import QueryScale, Rope, RopeScaling


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """Factors of activations in a layer, as in muP (Yang et al., arXiv 2203.03466).

    Attributes:
      attention_in: factor of the input of attention.
      key: factor of the keys.
      attention_out: factor of the output of attention, after the projection.
      mlp_gate: factor of the gate of the MLP, before the activation.
      mlp_out: factor of the output of the MLP.

    Raises:
      ValueError: a factor is not finite.
    """

    attention_in: float = 1.0
    key: float = 1.0
    attention_out: float = 1.0
    mlp_gate: float = 1.0
    mlp_out: float = 1.0

    def __post_init__(self) -> None:
        for name, factor in dataclasses.asdict(self).items():
            if not math.isfinite(factor):
                raise ValueError(f"Multipliers: {name} must be finite, got {factor!r}.")


NO_MULTIPLIERS = Multipliers()


@names_arguments
@dataclasses.dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """Sizes and options of a decoder, as flat fields.

    The fields describe Llama and the many families that differ from it in a few options. `layers`
    and the other fields of `ModelConfig` are built from them. Fields that exist in Hugging Face's
    ``config.json`` have the same names.

    Attributes:
      vocab_size, hidden_size: vocabulary size (V), and width of the residual stream (E).
      intermediate_size: features of the dense MLP (F).
      intermediate_sizes: features of the dense MLP of each layer; empty if all layers have
        `intermediate_size` features.
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
      model_type: key of the family in `families.registry.FAMILIES`.
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
    layers: tuple[LayerSpec, ...] = dataclasses.field(init=False, repr=False)
    norm: Norm = dataclasses.field(init=False, repr=False)
    streams: ResidualStreams | None = dataclasses.field(init=False, repr=False)
    per_layer: PerLayerTable | None = dataclasses.field(init=False, repr=False)
    family: Family | None = dataclasses.field(init=False, repr=False, compare=False)
    intermediate_size: int
    num_hidden_layers: int = dataclasses.field()  # pyright: ignore[reportIncompatibleVariableOverride]
    num_attention_heads: int = dataclasses.field()  # pyright: ignore[reportIncompatibleVariableOverride]
    num_key_value_heads: int = dataclasses.field()  # pyright: ignore[reportIncompatibleVariableOverride]
    head_dim: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]
    num_global_key_value_heads: int = 0
    global_head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float | None = None
    rope_layers: tuple[bool, ...] = ()
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
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
    attn_logit_softcapping: float | None = None
    attention_sinks: bool = False
    num_experts: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]
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

    def __post_init__(self) -> None:
        if not self.head_dim:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    "LlamaConfig: hidden_size must be a multiple of num_attention_heads when "
                    f"head_dim is not given, got hidden_size {self.hidden_size} and "
                    f"num_attention_heads {self.num_attention_heads}."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _check_fields(self)
        self._normalise()
        streams, per_layer = self.residual_streams, None
        if size := self.hidden_size_per_layer_input:
            per_layer = PerLayerTable(size, self.vocab_size_per_layer_input)
        norm = Norm(self.rms_norm_eps, self.norm_offset, self.norm_type)
        family = FAMILIES.get(self.model_type)
        derived = {"norm": norm, "streams": streams, "per_layer": per_layer, "family": family}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "layers", build_layers(self))
        super().__post_init__()

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
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
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
        family, entries = find_family(ConfigEntries(text_config(config)))
        find_quantisation(entries, has_mxfp4=family.is_mxfp4)
        parsed = family.read(entries)
        check_unread(entries, family.ignored, family.architecture, parsed.num_hidden_layers)
        check_head(config, parsed)
        return parsed

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
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
            `model_type`, or the family is unknown.
        """
        if self.family is None:
            raise ValueError(
                f"LlamaConfig: model_type must be one of {', '.join(FAMILIES)}, got "
                f"{self.model_type!r}."
            )
        return super().to_dict()

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Type of each layer. If `layer_types` is empty, all layers have the same type."""
        kind = FULL if self.sliding_window is None else SLIDING
        return self.layer_types or (kind,) * self.num_hidden_layers


# Fields with one value for each layer. They are empty if all layers have the same value.
_OF_LAYERS = (
    "layer_types", "mlp_layer_types", "norm_placements", "qk_norm_layers", "activation_sparsity",
    "intermediate_sizes", "rope_layers",
)  # fmt: skip
_PLACEMENTS = ("pre", "sandwich", "post", "parallel")


def _check_fields(config: LlamaConfig) -> None:
    """Check that the fields fit together. The parts that are built from them check each value.

    Raises:
      UnsupportedConfigError: the name of an option or the type of a layer is unknown.
      ValueError: fields do not fit together.
    """
    check_num_layers(config.num_hidden_layers)
    for field in _OF_LAYERS:
        if (count := len(getattr(config, field))) not in (0, config.num_hidden_layers):
            raise ValueError(
                f"LlamaConfig: {field} must have one value for each of the "
                f"{config.num_hidden_layers} layers, got {count} values."
            )
    if not 0 <= config.num_kv_shared_layers <= config.num_hidden_layers:
        raise ValueError(
            "LlamaConfig: num_kv_shared_layers must be 0 to num_hidden_layers, got "
            f"{config.num_kv_shared_layers}."
        )
    if not config.num_experts and (config.num_experts_per_tok or config.moe_intermediate_size):
        raise ValueError(
            "LlamaConfig: num_experts must be positive if num_experts_per_tok or "
            f"moe_intermediate_size is, got {config.num_experts}."
        )
    if config.separate_expert_norms and config.num_experts and config.norm_placement != "sandwich":
        raise ValueError(
            "LlamaConfig: norm_placement must be 'sandwich' if separate_expert_norms is true, got "
            f"{config.norm_placement!r}."
        )
    for placement in (config.norm_placement, *config.norm_placements):
        if placement not in _PLACEMENTS:
            raise UnsupportedConfigError(
                f"LlamaConfig: norm_placement must be one of {', '.join(_PLACEMENTS)}, got "
                f"{placement!r}."
            )
    heads = config.num_attention_heads, config.num_key_value_heads
    rotated = None if config.latent is None else config.latent.qk_rope_head_dim
    if rotated is not None and (config.head_dim != rotated or heads[0] != heads[1]):
        raise ValueError(
            "LlamaConfig: with latent attention, head_dim must equal qk_rope_head_dim, and "
            f"num_key_value_heads must equal num_attention_heads, got head_dim {config.head_dim} "
            f"and num_key_value_heads {heads[1]}."
        )
    _check_layer_types(config)


def _check_layer_types(config: LlamaConfig) -> None:
    kinds, mlp_kinds, chunk = (
        config.layer_types,
        config.mlp_layer_types,
        config.attention_chunk_size,
    )
    if (config.mixer is not None) != bool({*RECURRENT_TYPES} & {*kinds}):
        raise UnsupportedConfigError(
            f"LlamaConfig: mixer must be set if and only if layer_types contains {RECURRENT!r} or "
            f"{HYBRID!r}, got mixer {config.mixer} and layer_types {list(kinds)}."
        )
    if unsupported := set(kinds) - set(LAYER_TYPES):
        raise UnsupportedConfigError(
            f"LlamaConfig: layer_types must only contain {', '.join(map(repr, LAYER_TYPES))}, got "
            f"{min(unsupported)!r}."
        )
    if SLIDING in kinds and config.sliding_window is None:
        raise ValueError(
            f"LlamaConfig: sliding_window must be an integer if layer_types contains {SLIDING!r}, "
            "got null."
        )
    if (CHUNKED in kinds) != (chunk is not None):
        raise UnsupportedConfigError(
            "LlamaConfig: attention_chunk_size must be an integer if layer_types contains "
            f"{CHUNKED!r}, otherwise null, got {chunk} and layer_types {list(kinds)}."
        )
    if unsupported := set(mlp_kinds) - set(MLP_TYPES):
        raise ValueError(
            f"LlamaConfig: mlp_layer_types must have {' or '.join(map(repr, MLP_TYPES))} for each "
            f"layer, got {min(unsupported)!r}."
        )
    if mlp_kinds and (SPARSE in mlp_kinds) != bool(config.num_experts):
        raise ValueError(
            f"LlamaConfig: mlp_layer_types must contain {SPARSE!r} if and only if num_experts is "
            f"positive, got {list(mlp_kinds)} and num_experts {config.num_experts}."
        )
    kinds_with_kv = config.layer_kinds[: config.num_hidden_layers - config.num_kv_shared_layers]
    if kinds_with_kv and (missing := set(config.layer_kinds) - set(kinds_with_kv)):
        raise ValueError(
            "LlamaConfig: num_kv_shared_layers must leave at least one layer of type "
            f"{min(missing)!r} that computes keys and values, got {config.num_kv_shared_layers}."
        )


def build_layers(config: LlamaConfig) -> tuple[LayerSpec, ...]:
    """Build the layers that the fields of a config describe. Equal layers are the same object."""
    specs = [_LayerBuilder(config, layer).build() for layer in range(config.num_hidden_layers)]
    distinct = {spec: spec for spec in specs}
    return tuple(distinct[spec] for spec in specs)


@dataclasses.dataclass(frozen=True)
class _LayerBuilder:
    """Builder of a single layer.

    Attributes:
      config: fields of the model.
      layer: index of the layer.
    """

    config: LlamaConfig
    layer: int

    def build(self) -> LayerSpec:
        """Return the parts of the layer."""
        config = self.config
        steps = self._sublayers()
        embedding = None
        if size := config.hidden_size_per_layer_input:
            embedding = PerLayerEmbedding(size=size, activation=config.hidden_act, norm=self._norm)
        if config.residual_streams is not None:
            streams = Streams(
                streams=config.residual_streams,
                steps=tuple(steps),
                norm=self._norm,
                embedding=embedding,
                deviation=config.initializer_range,
            )
            return LayerSpec((streams,))
        if embedding is not None:
            steps.append(embedding)
        if config.layer_scalar:
            steps.append(LayerScalar())
        return LayerSpec(tuple(steps))

    def _sublayers(self) -> list[Part]:
        """Return the steps with attention or a mixer, and with the MLP."""
        config, tokens, mlp = self.config, self._tokens(), self._mlp()
        placement = _value(config.norm_placements, self.layer, config.norm_placement)
        names: dict[str, Any]
        options: dict[str, Any] = {"norm": self._norm, "multiplier": config.residual_multiplier}
        if placement == "parallel":
            parts = tuple(part for part in (tokens, mlp) if part is not None)
            return [Sublayer(part=Parallel(parts), input_norm="input_norm", **options)]
        has_input, has_output = placement != "post", placement != "pre"
        steps: list[Part] = []
        if tokens is not None:
            names = {
                "input_norm": "input_norm" if has_input else None,
                "output_norm": "attention_out_norm" if has_output else None,
            }
            if config.laurel_rank:
                rank = config.laurel_rank
                steps.append(LaurelSublayer(part=tokens, rank=rank, **names, **options))
            else:
                steps.append(Sublayer(part=tokens, **names, **options))
        if mlp is not None:
            names = {
                "input_norm": "post_attention_norm" if has_input else None,
                "output_norm": "mlp_out_norm" if has_output else None,
            }
            if config.separate_expert_norms and isinstance(mlp, Experts):
                steps.append(SeparateExperts(part=mlp, **names, **options))
            else:
                steps.append(Sublayer(part=mlp, **names, **options))
        return steps

    @property
    def _norm(self) -> Norm:
        return self.config.norm

    @property
    def _kind(self) -> str:
        return self.config.layer_kinds[self.layer]

    def _tokens(self) -> Part | None:
        """Return the part that mixes tokens: attention, a recurrence, both, or neither."""
        attention = None if self._kv is None else self._attention(self._kv)
        mixer = self.config.mixer if self._kind in RECURRENT_TYPES else None
        if mixer is not None and attention is not None:
            return Parallel((mixer, attention))
        return mixer or attention

    @property
    def _kv(self) -> KVShape | None:
        """Shape of the layer's keys and values, without regard to latent attention."""
        config = self.config
        D, K = config.head_dim, config.num_key_value_heads
        local = KVShape(K, D, D)
        global_D = config.global_head_dim or D
        full = KVShape(config.num_global_key_value_heads or K, global_D, global_D)
        return {FULL: full, HYBRID: full, SLIDING: local, CHUNKED: local}.get(self._kind)

    def _attention(self, kv: KVShape) -> AttentionPart:
        config, kind = self.config, self._kind
        rope = self._rope(kv)
        scale = config.query_scale
        if scale is not None and scale.only_without_rope and rope is not None:
            scale = None
        options: dict[str, Any] = {
            "num_heads": config.num_attention_heads,
            "rope": rope,
            "rope_interleaved": config.rope_interleaved,
            "o_bias": config.o_bias,
            "scale": config.attention_multiplier,
            "query_scale": scale,
            "out_multiplier": config.multipliers.attention_out,
        }
        if config.latent is not None:
            return LatentAttention(sizes=config.latent, latent_bias=config.qkv_bias, **options)
        norm = None
        if _value(config.qk_norm_layers, self.layer, config.qk_norm):
            norm = HeadNorm(self._norm, config.qk_norm_scope, config.qk_norm_weight)
        window = config.sliding_window if kind == SLIDING else None
        chunk = config.attention_chunk_size if kind == CHUNKED else None
        return Attention(
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            window=window,
            chunk=chunk,
            source=self._source,
            values_are_keys=config.attention_k_eq_v and window is None and chunk is None,
            normalises_values=config.value_norm,
            norm=norm,
            eps=config.rms_norm_eps,
            has_gate=config.attention_gate,
            has_sinks=config.attention_sinks,
            qkv_bias=config.qkv_bias,
            soft_cap=config.attn_logit_softcapping,
            in_multiplier=config.multipliers.attention_in,
            key_multiplier=config.multipliers.key,
            **options,
        )

    @property
    def _source(self) -> int | None:
        """Index of the layer whose keys and values this layer reads; None if it is this layer."""
        first = self.config.num_hidden_layers - self.config.num_kv_shared_layers
        if self.layer < first:
            return None
        kinds = self.config.layer_kinds
        return max(layer for layer in range(first) if kinds[layer] == self._kind)

    def _rope(self, kv: KVShape) -> Rope | None:
        config = self.config
        if not _value(config.rope_layers, self.layer, True):
            return None
        is_limited = self._kind in (SLIDING, CHUNKED)
        local_theta = config.rope_local_base_freq if is_limited else None
        is_local = local_theta is not None
        scaling = config.rope_scaling
        is_proportional = scaling is not None and scaling.rope_type == "proportional"
        factor = 1.0 if is_local and is_proportional else config.partial_rotary_factor
        head_dim = kv.head_dim if config.latent is None else config.head_dim
        return Rope(
            head_dim=head_dim,
            rotary_dim=int(head_dim * factor),
            theta=config.rope_theta if local_theta is None else local_theta,
            scaling=None if is_local else scaling,
            max_position_embeddings=config.max_position_embeddings,
        )

    def _mlp(self) -> Part | None:
        """Return the MLP or the experts; None in layers without either."""
        config = self.config
        kind = _value(config.mlp_layer_types, self.layer, SPARSE if config.num_experts else DENSE)
        if kind == NOTHING:
            return None
        if kind == SPARSE:
            return self._experts()
        features = _value(config.intermediate_sizes, self.layer, config.intermediate_size)
        if config.use_double_wide_mlp and self._source is not None:
            features *= 2
        return self._dense(features, "intermediate_size")

    def _dense(self, features: int, size_name: str) -> Dense:
        config = self.config
        return Dense(
            features=features,
            activation=self._activation(),
            has_bias=config.mlp_bias,
            gate_multiplier=config.multipliers.mlp_gate,
            out_multiplier=config.multipliers.mlp_out,
            size_name=size_name,
        )

    def _activation(self) -> Activation:
        config = self.config
        if not config.gated_mlp:
            return Ungated(config.hidden_act)
        if sparsity := _value(config.activation_sparsity, self.layer, 0.0):
            return SparseGate(config.hidden_act, sparsity)
        return Activation(config.hidden_act)

    def _experts(self) -> Experts:
        config = self.config
        activation = Activation(config.hidden_act)
        if not config.gated_mlp:
            activation = Ungated(config.hidden_act)
        elif config.swiglu_limit is not None:
            activation = ClampedSwiGLU(
                config.hidden_act, alpha=config.swiglu_alpha, limit=config.swiglu_limit
            )
        shared = None
        if size := config.shared_expert_intermediate_size:
            shared = self._dense(size, "shared_expert_intermediate_size")
        return Experts(
            num_experts=config.num_experts,
            num_chosen=config.num_experts_per_tok,
            features=config.moe_intermediate_size,
            latent_size=config.moe_latent_size,
            router=config.router,
            renormalises=config.norm_topk_prob,
            activation=activation,
            has_bias=config.expert_bias,
            has_latent_bias=config.mlp_bias and bool(config.moe_latent_size),
            shared=shared,
            gates_shared=config.shared_expert_gate and shared is not None,
        )


def _value(values: tuple[Any, ...], layer: int, default: Any) -> Any:
    """Return the value of a layer; the default if the tuple is empty."""
    return values[layer] if values else default
