"""Description of a model family: its fixed properties, and the layout of its files.

The families themselves are in `families.FAMILIES`. The fields of a `LlamaConfig` determine the
computation. A family fixes some of them (`Family.fixed`), and the others are read from
``config.json``. The forward pass depends only on these fields, not on the name of the family.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

# Fields of `LlamaConfig` that turn on the attention biases. In many families `attention_bias` sets
# both.
BIASES = ("qkv_bias", "o_bias")
# Entry of `Family.switches` for the biases in MLPs.
MLP_BIAS = {"mlp_bias": "mlp_bias"}


class UnsupportedConfigError(ValueError):
    """The config is valid but needs a feature that this library does not support."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A factor in `LlamaConfig` that is a power of a number in ``config.json``.

    The factor is ``number ** power``.

    Attributes:
      field: field of `LlamaConfig` with the factor.
      key: key of the number in ``config.json``.
      power: exponent.

    Example:
      >>> Scale("attention_multiplier", "query_pre_attn_scalar", -0.5).read(256)
      0.0625
      >>> Scale("attention_multiplier", "query_pre_attn_scalar", -0.5).write(0.0625)
      256
    """

    field: str
    key: str
    power: float = 1

    def read(self, number: float) -> float:
        """Return the factor for a number in ``config.json``."""
        return float(number**self.power)

    def write(self, factor: float) -> float:
        """Return the number in ``config.json`` for a factor. A whole number becomes an int."""
        # Rounding to 14 digits hides the error of the power, and keeps every number that a person
        # would write.
        number = float(f"{factor ** (1 / self.power):.14g}")
        return int(number) if number.is_integer() else number


# Factors that all kinds of Granite models have.
GRANITE_SCALES = (
    Scale("embedding_multiplier", "embedding_multiplier"),
    Scale("attention_multiplier", "attention_multiplier"),
    Scale("residual_multiplier", "residual_multiplier"),
    Scale("logit_scale", "logits_scaling", -1),
)


@dataclasses.dataclass(frozen=True)
class InnerTextModel:
    """Text model that is part of a multimodal model, which also reads images, audio or video.

    Attributes:
      architecture: class of the multimodal model in transformers.
      model_type: key of the text model in `families.FAMILIES`; None if the text model's config
        contains it.
      defaults: default values of missing keys in the text model's config, for keys whose default in
        transformers differs from the family's default.
      is_tied: whether the output head is tied to the embeddings if the outer config has no
        `tie_word_embeddings`.
      has_cap: whether the multimodal model in transformers applies ``final_logit_softcapping``.
      key: key of the text model's config in the outer config.
    """

    architecture: str
    model_type: str | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_tied: bool = True
    has_cap: bool = True
    key: str = "text_config"


@dataclasses.dataclass(frozen=True)
class Router:
    """Options of a router, which chooses the experts of each token and computes their weights.

    The router computes a score for each expert. A token uses the experts with the highest scores,
    and their scores are the weights of their outputs.

    Attributes:
      scores: ``"softmax"`` of the logits of all experts, or ``"sigmoid"`` of each logit.
      has_correction_bias: whether a float32 bias per expert is added to the scores when experts are
        chosen. The weights are computed from the scores without the bias.
      num_groups: number of groups into which the experts are divided. A group is a range of
        consecutive experts, and all groups have the same size.
      num_chosen_groups: number of groups that are chosen for each token, before its experts are
        chosen from these groups only.
      group_score: score of a group: ``"max"``, the largest score of its experts, or ``"top2"``, the
        sum of the two largest. The correction bias is included.
      epsilon: constant added to the sum of the weights when the weights are divided by this sum.
      factor: factor that multiplies all weights at the end.
      has_expert_scale: whether each weight is also multiplied by a learned scalar of its expert.
      scales_inputs: whether the weights multiply the inputs of the experts instead of their
        outputs.

    Raises:
      UnsupportedConfigError: an option has an unknown value.
      ValueError: a number is out of range.
    """

    scores: str = "softmax"
    has_correction_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: str = "top2"
    epsilon: float = 0.0
    factor: float = 1.0
    has_expert_scale: bool = False
    scales_inputs: bool = False

    def __post_init__(self) -> None:
        for name, known in (("scores", ("softmax", "sigmoid")), ("group_score", ("max", "top2"))):
            if (value := getattr(self, name)) not in known:
                raise UnsupportedConfigError(
                    f"Router: {name} must be one of {', '.join(known)}, got {value!r}."
                )
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(
                "Router: num_chosen_groups must be at least 1 and at most num_groups, got "
                f"num_chosen_groups {self.num_chosen_groups} and num_groups {self.num_groups}."
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"Router: factor must be positive, got {self.factor!r}.")

    @property
    def follows_logits(self) -> bool:
        """Whether the router always chooses the experts with the largest logits."""
        return self.num_chosen_groups == self.num_groups and not self.has_correction_bias


# Router of most families.
SOFTMAX_ROUTER = Router()
# Router of DeepSeek V3 and its relatives, and the keys of its options in ``config.json``.
SIGMOID_ROUTER = Router("sigmoid", has_correction_bias=True, epsilon=1e-20)
GROUP_KEYS = {
    "num_groups": "n_group",
    "num_chosen_groups": "topk_group",
    "factor": "routed_scaling_factor",
}


def name_mlp(module: str) -> dict[str, str]:
    """Return the tensor name for each parameter of a dense MLP.

    `module` is the name of the MLP in its layer.
    """
    return {f"{name}_proj": f"{module}.{name}_proj.weight" for name in ("gate", "up", "down")}


def name_experts(module: str) -> dict[str, str]:
    """Return the tensor name for each parameter of experts, if files call them w1, w2 and w3.

    `module` is the name of the experts in their layer. A ``*`` in a tensor name stands for the
    number of an expert.
    """
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    return {f"experts_{kind}_proj": f"{module}.*.{name}.weight" for kind, name in names.items()}


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


@dataclasses.dataclass(frozen=True)
class MixerKeys:
    """Layout of the entries about recurrent layers in a family's ``config.json``.

    Attributes:
      kind: kind of recurrent layer, a key of `layers_json.MIXERS`.
      keys: for each field of the `Mixer` that is read from ``config.json``, its key in the file.
      fixed: fields of the `Mixer` with the same value in the whole family.
      ratios: for each key that may be missing, two other keys and a factor, which determine its
        default. The default is the factor times the entry of the first key, divided by the entry of
        the second key (if it is not None) and rounded down.
      norm_switches: two keys with booleans: whether the mixer has a norm, and whether this norm
        precedes the output gate. None if ``config.json`` does not determine the norm.
      layer_types_key: key of the list with the type of each layer, or ``""`` if files list only the
        layers with attention, see `attention_layers`.
      uniform_type: type of all layers, for a family without this list in its files; None otherwise.
      recurrent_type: name of recurrent layers in this list.
      layer_types: other type names that may occur in files, mapped to the names in `layer_groups`.
      mlp_types: types of layers that consist of only an MLP, mapped to the type of the MLP. If
        there are such types, layers of all other types have no MLP, and the number of layers is the
        length of the list of layer types.
      pattern_key: key of a string with one character for each layer, which old files have instead
        of the list; None if the family has no such files.
      pattern: layer type that each character stands for.
      attention_layers: key that is read if there is no list of types. Its entry is an integer n if
        every n-th layer has attention, or a list of the layers that have attention.
      has_attention: whether the last layer has attention if the integer in `attention_layers`
        would leave no layer with attention.
      nested: key of an object in old files, and a mapping from the keys in this object to the
        top-level keys of newer files. The list `full_attn_layers` in this object counts layers from
        1.
    """

    kind: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ratios: Mapping[str, tuple[str, str | None, float]] = dataclasses.field(default_factory=dict)
    norm_switches: tuple[str, str] | None = None
    layer_types_key: str = "layer_types"
    uniform_type: str | None = None
    recurrent_type: str = "linear_attention"
    layer_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mlp_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pattern_key: str | None = None
    pattern: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention_layers: str = "full_attention_interval"
    has_attention: bool = False
    nested: tuple[str, Mapping[str, str]] = ("", {})


@dataclasses.dataclass(frozen=True)
class Family:
    """Properties of a model family that are not in its ``config.json``.

    Attributes:
      architecture: name of the class in transformers.
      defaults: default values in transformers of keys that may be missing in ``config.json``.
      fixed: fields of `LlamaConfig` that have the same value in all models of the family.
      sliding_layers: which layers have a sliding window.

        - ``"none"``: no layer.
        - ``"all"``: all layers, if `sliding_window` is set.
        - ``"switched"``: no layer if `use_sliding_window` is false. Otherwise, the layers in
          `layer_types`, by default the layers from `max_window_layers` on. If `rope_layers` is
          ``"listed"``, the default is the layers that do not rotate.
        - ``"last"``: like ``"switched"``, but `use_sliding_window` is not read.
        - ``"pattern"``: the layers in `layer_types`, by default all layers except every n-th, where
          n is `sliding_window_pattern`.
        - ``"pattern from the first"``: like ``"pattern"``, but by default, the first layer and
          every n-th layer after it have no window.
        - ``"pattern and the last"``: like ``"pattern"``, but the last layer never has a window.
        - ``"unused"``: no layer, although configs contain the keys that ``"switched"`` reads.
        - ``"chunked"``: no layer. The layers in `layer_types`, by default all layers that rotate,
          have chunked attention.
      rope_layers: which layers rotate queries and keys.

        - ``"all"`` or ``"none"``: all layers, or no layer.
        - ``"sliding"``: the layers with a sliding window.
        - ``"listed"``: the layers with a 1 in `no_rope_layers`.
        - ``"switched"``: all layers if `position_embedding_type` is ``"rope"``, otherwise no layer.
        - ``"with a base"``: all layers, unless `rope_theta` is null.
      local_rope: whether layers with a sliding window have their own base of the rotary
        frequencies, without scaling.
      query_scale: entry of ``config.json`` that describes the `QueryScale`. ``"none"``: there is
        none; ``"rope_parameters"``: `llama_4_scaling_beta` in this object;
        ``"attn_temperature_tuning"``: the keys of Llama 4, which apply to layers that do not
        rotate.
      norms_rotated: whether queries and keys are normalised only in layers that rotate them.
      global_heads: whether layers without a sliding window may have another head dimension and
        number of KV heads.
      has_latent: whether attention is latent, see `LatentSizes`.
      partial_rope: whether a config may rotate only a part of each head.
      rope_interleaved: whether the two elements of a rotated pair are neighbours.
      biases: fields of `LlamaConfig` that the key `attention_bias` sets.
      sizes: fields of `LlamaConfig` that are read as integers from keys of the same name, by
        default 0.
      switches: boolean fields of `LlamaConfig` that are read from ``config.json``, mapped to their
        keys.
      experts: fields of `LlamaConfig` about experts that are read in addition to their sizes; None
        for a family without experts.
      experts_switch: key of a boolean in ``config.json`` that tells whether the model has experts;
        None if the family has no such key.
      router: router of the experts. Fields in `router_keys` are replaced by the values in
        ``config.json``.
      router_keys: fields of `Router` that are read from ``config.json``, mapped to their keys.
      groups_switch: key in ``config.json``, and the value of this key with which experts are
        divided into groups; None if no key turns the groups on or off.
      shared_experts: key in ``config.json`` of the number of shared experts. They are computed as
        one MLP. None if ``config.json`` contains the size of this MLP instead.
      dense_layers: which layers have a dense MLP instead of experts. If the config has a list
        `mlp_layer_types`, this list is used instead.

        - ``"none"``: no layer.
        - ``"first"``: the first `first_k_dense_replace` layers.
        - ``"listed"``: the layers in `mlp_only_layers`, and all layers except every n-th, where n
          is `decoder_sparse_step`.
        - ``"others"``: the layers that are not in `moe_layers`, by default all layers except every
          n-th, where n is `interleave_moe_layer_step`.
      is_mxfp4: whether checkpoints may store experts in MXFP4, see `Mxfp4Experts`.
      mixer: layout of the entries about recurrent layers; None for a family without such layers.
      recurrent_norm_placement: `norm_placement` of recurrent layers; None if it is the same as in
        other layers.
      has_streams: whether the model has several residual streams. `intermediate_size` may then be a
        list with a size for each layer.
      has_adjusted_mlp: whether `block_auto_adjust_ff_dim` may change `intermediate_size`.
      aliases: alternative keys in files, mapped to the keys that this library reads.
      scales: factors that are read from ``config.json``.
      multipliers: fields of `Multipliers` that are read from ``config.json``, mapped to their key
        and, if the entry is a list, their index in it.
      caps: fields of `LlamaConfig` with soft caps that are read from ``config.json``.
      only: keys in ``config.json`` that change the computation, mapped to the only supported value.
      ignored: keys in ``config.json`` that change the computation of other families only.
      replacements: for fields of `LlamaConfig`, a mapping from values in files to the values used
        here.
      keys: key in ``config.json`` of each `LlamaConfig` field whose key differs from its name.
      tensors: parameters of a layer, and the last norm (``norm``), mapped to the names of their
        tensors, if these differ from `tensor_map`. If a parameter is stored as several tensors, the
        name of a piece follows a dot (``mixer_conv.q``). ``mixer_conv.*`` stands for all pieces
        that are not listed, and a * in the tensor's name is replaced by the name of the piece. A
        fused parameter such as ``qkv_proj`` is one tensor in the files if it is listed here. In the
        names of experts, a * stands for the number of an expert. ``shared_expert`` is the module of
        the shared expert.
      renamed: substrings of tensor names that occur in some files, mapped to their replacements.
      in_memory: substrings of names in `tensors`, mapped to their replacements in the state dict of
        transformers' model, which may fuse several tensors of the files.
      written_prefixes: prefixes of tensor names that this library reads, mapped to the prefixes in
        files that it writes.
      prefixes: prefixes of tensor names, mapped to their replacements, or to None if these tensors
        belong to another part of a multimodal model and are not read.
      has_draft_layers: whether files may contain additional layers for multi-token prediction.
        These layers are not read.
    """

    architecture: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sliding_layers: str = "none"
    rope_layers: str = "all"
    local_rope: bool = False
    query_scale: str = "none"
    norms_rotated: bool = False
    global_heads: bool = False
    has_latent: bool = False
    partial_rope: bool = False
    rope_interleaved: bool = False
    biases: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    switches: Mapping[str, str] = dataclasses.field(default_factory=dict)
    experts: tuple[str, ...] | None = None
    experts_switch: str | None = None
    router: Router = SOFTMAX_ROUTER
    router_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    groups_switch: tuple[str, str] | None = None
    shared_experts: str | None = None
    dense_layers: str = "none"
    is_mxfp4: bool = False
    mixer: MixerKeys | None = None
    recurrent_norm_placement: str | None = None
    has_streams: bool = False
    has_adjusted_mlp: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scales: tuple[Scale, ...] = ()
    multipliers: Mapping[str, tuple[str, int | None]] = dataclasses.field(default_factory=dict)
    caps: tuple[str, ...] = ()
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    replacements: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_memory: Mapping[str, str] = dataclasses.field(default_factory=dict)
    written_prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefixes: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    has_draft_layers: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """Keys of ``config.json`` that `check_neutral` accepts with any value."""
        scales = (scale.key for scale in self.scales)
        shared = () if self.shared_experts is None else (self.shared_experts,)
        return frozenset({*self.caps, *self.switches.values(), *scales, *shared, *self.ignored})

    def key(self, field: str) -> str:
        """Return the key in ``config.json`` from which a field of `LlamaConfig` is read."""
        return self.keys.get(field, field)
