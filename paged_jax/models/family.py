"""Description of a model family: its fixed properties, and how to read its files.

The families themselves are in `families.FAMILIES`. Fields of `LlamaConfig` select the computation.
A family fixes some of them (`Family.fixed`), the others are read from ``config.json``. The forward
pass depends only on these fields, not on the name of the family.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

# Fields of `LlamaConfig` for the biases of attention, which many families have.
BIASES = ("qkv_bias", "o_bias")


class UnsupportedConfigError(ValueError):
    """The config is valid but needs a feature that this library does not support."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A factor of `LlamaConfig` that is a power of a number in ``config.json``.

    Attributes:
      field: field of `LlamaConfig`.
      key: key in ``config.json``.
      power: exponent of the number.

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
        """Return the number in ``config.json`` for a factor, as an integer if possible."""
        # 14 digits keep every number that a person wrote, and hide rounding errors.
        number = float(f"{factor ** (1 / self.power):.14g}")
        return int(number) if number.is_integer() else number


# Factors of Granite models of all kinds.
GRANITE_SCALES = (
    Scale("embedding_multiplier", "embedding_multiplier"),
    Scale("attention_multiplier", "attention_multiplier"),
    Scale("residual_multiplier", "residual_multiplier"),
    Scale("logit_scale", "logits_scaling", -1),
)


@dataclasses.dataclass(frozen=True)
class InnerTextModel:
    """Text model inside of a model that also reads images, audio or video.

    Attributes:
      architecture: class of the whole model in transformers.
      model_type: key of the text model in `families.FAMILIES`, if the config does not contain it.
      defaults: values that transformers uses for keys that are missing in the config of the text
        model, if they differ from the defaults of its family.
      is_tied: whether the head is tied to the embeddings if the outer config does not say it.
      has_cap: whether transformers applies ``final_logit_softcapping`` to the whole model.
      key: key of the text model's config.
    """

    architecture: str
    model_type: str | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_tied: bool = True
    has_cap: bool = True
    key: str = "text_config"


@dataclasses.dataclass(frozen=True)
class Router:
    """How the experts of a token are chosen and weighted. Weights are scores of chosen experts.

    Attributes:
      scores: ``"softmax"`` of the logits of all experts, or ``"sigmoid"`` of each logit.
      has_correction_bias: whether a float32 bias per expert is added to the scores to choose
        experts. The weights do not contain it.
      num_groups: number of groups of consecutive experts with equal numbers of experts.
      num_chosen_groups: number of groups that a token chooses first. It chooses its experts within
        these groups.
      group_score: score of a group: ``"max"`` or ``"top2"``, the sum of the two largest scores of
        its experts, with the correction bias.
      epsilon: constant added to the sum of weights by which renormalised weights are divided.
      factor: factor of the weights.
      has_expert_scale: whether weights are multiplied by a parameter per expert.
      scales_inputs: whether weights are factors of the experts' inputs instead of their outputs.

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
                f"{self.num_chosen_groups} and {self.num_groups}."
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"Router: factor must be positive, got {self.factor!r}.")

    @property
    def follows_logits(self) -> bool:
        """Whether the chosen experts are those with the largest logits."""
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
    """Return the tensor names of a dense MLP in a module of a layer."""
    return {f"{name}_proj": f"{module}.{name}_proj.weight" for name in ("gate", "up", "down")}


def name_experts(module: str) -> dict[str, str]:
    """Return the tensor names of experts whose matrices are called w1, w2 and w3."""
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
    """How the ``config.json`` of a family describes recurrent layers.

    Attributes:
      kind: kind of recurrent layers, see `layers_json.MIXERS`.
      keys: key in ``config.json`` of each field of the `Mixer` that the file determines.
      fixed: fields of the `Mixer` with the same value in the whole family.
      ratios: for keys that files may lack, two other keys and a factor. The value is the factor
        times the entry of the first key, divided by the entry of the second key (unless the key is
        None), rounded down.
      norm_switches: keys that tell whether the mixer has a norm, and whether the norm is before
        the gate of the output; None if `fixed` or a default determines it.
      layer_types_key: key of the list of the layers' types.
      uniform_type: type of all layers in a family whose files do not list the types, or None.
      recurrent_type: type of recurrent layers in this list.
      layer_types: other names of types that files may have, with their names in `layer_groups`.
      mlp_types: types of layers that have only an MLP, with the type of the MLP. If there are any,
        all other layers have no MLP, and the list determines the number of layers.
      pattern_key: key of a string with a character for each layer that old files have instead of
        the list, or None.
      pattern: type of each character.
      attention_layers: key that is read if there is no list: an integer n if every n-th layer has
        attention, or a list of the layers that have attention.
      has_attention: whether the last layer has attention if the integer in `attention_layers`
        would leave no layer with attention.
      nested: key of an object that old files have, and for each entry of this object the key that
        replaces it in newer files. Its list `full_attn_layers` counts layers from 1.
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
      architecture: class in transformers.
      defaults: values that transformers uses for keys that are missing in ``config.json``.
      fixed: fields of `LlamaConfig` with the same value in the whole family.
      sliding_layers: which layers have a sliding window. ``"none"``: no layer; ``"all"``: all
        layers if `sliding_window` is set; ``"switched"``: if `use_sliding_window` is true, the
        layers in `layer_types`, by default those from `max_window_layers` on; ``"last"``: the same
        without the switch `use_sliding_window`; ``"pattern"``: the layers in `layer_types`, by
        default all but every n-th, where n is `sliding_window_pattern`;
        ``"pattern from the first"``: the same, but the first layer and every n-th after it have no
        window; ``"pattern and the last"``: as ``"pattern"``, but the last layer never has a window;
        ``"unused"``: no layer, although configs have the keys of ``"switched"``; ``"chunked"``: no
        layer; the layers in `layer_types` attend to chunks, by default those that rotate.
      rope_layers: which layers rotate queries and keys. ``"all"``; ``"none"``; ``"sliding"``:
        layers with a sliding window; ``"listed"``: layers with a 1 in `no_rope_layers`;
        ``"switched"``: all if `position_embedding_type` is ``"rope"``, otherwise none;
        ``"with a base"``: all, unless `rope_theta` is null.
      local_rope: whether layers with a sliding window have their own base without scaling.
      query_scale: where ``config.json`` has the factor of queries by position. ``"none"``: nowhere;
        ``"rope_parameters"``: in this object, as `llama_4_scaling_beta`;
        ``"attn_temperature_tuning"``: in keys of Llama 4, for layers that do not rotate.
      norms_rotated: whether only layers that rotate queries and keys may normalise them.
      global_heads: whether layers without a sliding window may have another head dimension and
        number of KV heads.
      has_latent: whether attention is latent, see `LatentSizes`.
      partial_rope: whether a config may rotate only a part of each head.
      rope_interleaved: whether the two elements of a rotated pair are neighbours.
      biases: fields of `LlamaConfig` that `attention_bias` sets.
      sizes: fields of `LlamaConfig` to read as integers, 0 if they are missing.
      switches: key in ``config.json`` of each field of `LlamaConfig` that it turns on or off.
      experts: fields of `LlamaConfig` to read for the experts, in addition to their sizes; None for
        a family without experts.
      experts_switch: key in ``config.json`` that tells whether the model has experts, or None.
      router: how experts are chosen and weighted.
      router_keys: key of each field of `Router` that ``config.json`` has.
      groups_switch: key in ``config.json``, and its value for which experts have groups; None if
        they always have groups.
      shared_experts: key in ``config.json`` of the number of shared experts, which form one MLP;
        None if the file has the size of this MLP instead.
      dense_layers: which layers have a dense MLP instead of experts. ``"none"``; ``"first"``: the
        first `first_k_dense_replace` layers; ``"listed"``: layers in `mlp_only_layers`, and layers
        that `decoder_sparse_step` leaves out; ``"others"``: layers that are not in `moe_layers`, by
        default all but every n-th, where n is `interleave_moe_layer_step`. A list
        `mlp_layer_types` has precedence.
      is_mxfp4: whether checkpoints may store experts in MXFP4, see `Mxfp4Experts`.
      mixer: how configs describe recurrent layers; None for a family without them.
      recurrent_norm_placement: `norm_placement` of recurrent layers, if it differs from the others.
      has_streams: whether layers have several residual streams, and lists may describe the MLPs.
      has_adjusted_mlp: whether `block_auto_adjust_ff_dim` may change `intermediate_size`.
      aliases: other keys that files have, with the key that this library reads.
      scales: factors to read from ``config.json``.
      multipliers: key of each field of `Multipliers`, with an index if the entry is a list.
      caps: soft caps to read from ``config.json``.
      only: keys in ``config.json`` that change the computation, with the only supported value.
      replacements: for fields of `LlamaConfig`, values of files and their replacements.
      keys: key in ``config.json`` of each `LlamaConfig` field whose key differs from its name.
      tensors: tensor names of a layer, and of the last norm (``norm``), that differ from those in
        `tensor_map`, by parameter. A piece of a parameter follows a dot (``mixer_conv.q``).
        ``mixer_conv.*`` stands for all pieces that are not listed. A * in the tensor's name is
        replaced by the name of the piece. A fused parameter such as ``qkv_proj`` is one tensor in
        the files if it is listed here. In the names of experts, a * stands for the number of an
        expert. ``shared_expert`` is the module of the shared expert.
      renamed: parts of tensor names that some files have, and their replacements.
      in_memory: parts of names in `tensors`, and their replacements in transformers' models, which
        may fuse several tensors of the files.
      written_prefixes: prefixes of this library's names, and their replacements in files that it
        writes.
      prefixes: prefixes of tensor names and their replacements; None if the tensors belong to
        another part of a larger model and are not read.
      has_draft_layers: whether files may have more layers than the model. These layers predict
        further tokens, and are not read.
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
        """Keys of ``config.json`` that change the computation and that this family reads."""
        scales = (scale.key for scale in self.scales)
        shared = () if self.shared_experts is None else (self.shared_experts,)
        return frozenset({*self.caps, *self.switches.values(), *scales, *shared})

    def key(self, field: str) -> str:
        """Return the key of a `LlamaConfig` field in ``config.json``."""
        return self.keys.get(field, field)
