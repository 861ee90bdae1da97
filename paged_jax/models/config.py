"""The sizes and switches of a Llama-family model, in memory and as a ``config.json``."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_jax.argument_names import names_arguments
from paged_jax.checks import check_positive
from paged_jax.models.config_json import read_fields
from paged_jax.models.config_writing import write_fields
from paged_jax.models.family import UnsupportedConfigError
from paged_jax.models.layer_types import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    LayerGroup,
    check_num_layers,
    group_layers,
)
from paged_jax.models.model_folder import read_config_json
from paged_jax.models.rope import Rope
from paged_jax.models.rope_scaling import RopeScaling

# The values of fields that name a kind.
_CHOICES = {
    "qk_norm_scope": ("head", "projection"),
    "norm_placement": ("pre", "sandwich", "post", "parallel"),
    "norm_type": ("rms", "layer"),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh"),
    "dtype": ("float32", "bfloat16", "float16"),
}
_FACTORS = (
    "rms_norm_eps",
    "rope_theta",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logit_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "swiglu_alpha",
    "swiglu_limit",
)
_OPTIONAL = (
    "attention_multiplier",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "swiglu_limit",
)
_MAX_HEAD_DIM = 1 << 16  # far above any model: a typing error must not fill the memory
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@names_arguments
@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes and switches of one Llama-family decoder.

    Field names are those of Hugging Face's ``config.json`` where it has one. ``head_dim`` is in
    elements, ``max_position_embeddings`` and ``sliding_window`` in tokens. ``dtype`` is that of
    the weights in the files that the config lies beside.

    ``layer_types`` names, for each layer, ``"full_attention"`` or ``"sliding_attention"``, those
    with the `sliding_window`; empty where all layers attend alike, and then the window, if there is
    one, is that of all.

    `rope_theta` and `rope_scaling` are those of all layers, but for those with a window where
    `rope_local_base_freq` is set: that is their base, and nothing scales their frequencies.
    ``rope_layers`` says of each layer whether it rotates; empty where all do. Of each head the
    first `partial_rotary_factor` rotates, in pairs that lie in a checkpoint half of it apart or,
    if `rope_interleaved`, side by side. See `ropes`.

    Switches, of which the defaults are Llama's:

    - ``norm_placement``: ``"pre"``, before attention and the MLP; ``"sandwich"``, after each too;
      ``"post"``, only after; ``"parallel"``, one for both, side by side. ``norm_type``: ``"rms"``
      or ``"layer"``, and a norm multiplies by ``norm_offset + weight``.
    - ``qk_norm``: queries and keys are normed, over a ``"head"`` or the whole ``"projection"``
      (``qk_norm_scope``).
    - ``hidden_act``: that of the gate, ``"silu"``, ``"gelu"`` or ``"gelu_pytorch_tanh"``.
    - ``embedding_multiplier`` (rounded to the type of the weights), ``residual_multiplier`` (of
      what attention and MLP add) and ``logit_scale`` are factors; ``attention_multiplier`` is that
      of the scores, by default ``head_dim ** -0.5``.
    - ``attn_logit_softcapping``, ``final_logit_softcapping``: scores and logits become
      ``cap * tanh(x / cap)``. ``attention_sinks``: each head has a score that takes weight and
      gives nothing.
    - ``num_experts`` (0: the MLP is dense) with ``moe_intermediate_size`` features each, of which a
      token passes through ``num_experts_per_tok``, weighed by a softmax over all or, with
      ``norm_topk_prob``, over those; ``shared_expert_intermediate_size``, if not 0, is that of one
      that all tokens pass through, behind a gate. ``expert_bias``: router and experts have biases.
      ``swiglu_limit``: they have the activation of gpt-oss with this limit and ``swiglu_alpha``,
      see `experts.clamped_swiglu`.

    Raises:
      ValueError: sizes that do not fit together.

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
    head_dim: int = 0  # 0: hidden_size // num_attention_heads
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
    qk_norm: bool = False
    qk_norm_scope: str = "head"
    norm_placement: str = "pre"
    norm_type: str = "rms"
    norm_offset: float = 0.0
    hidden_act: str = "silu"
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_sinks: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    expert_bias: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.head_dim:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    "LlamaConfig: hidden_size must be a multiple of num_attention_heads when "
                    f"head_dim is not given, got {self.hidden_size} and {self.num_attention_heads}."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        check_positive("LlamaConfig", **{name: getattr(self, name) for name in _SIZES})
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "LlamaConfig: num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}."
            )
        if self.head_dim % 2 or self.head_dim > _MAX_HEAD_DIM:
            raise ValueError(
                f"LlamaConfig: head_dim must be even and at most {_MAX_HEAD_DIM}, got "
                f"{self.head_dim}."
            )
        for field in _FACTORS:
            value = getattr(self, field)
            if value is None and field in _OPTIONAL:
                continue
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"LlamaConfig: {field} must be positive, got {value!r}.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"LlamaConfig: sliding_window must be positive or null, got {self.sliding_window}."
            )
        check_num_layers(self.num_hidden_layers)
        self._check_layer_types()
        self._check_experts()
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise UnsupportedConfigError(
                    f"LlamaConfig: {field} must be one of {', '.join(choices)}, got "
                    f"{getattr(self, field)!r}."
                )
        self._check_ropes()

    def _check_layer_types(self) -> None:
        if not self.layer_types:
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"LlamaConfig: layer_types must name {self.num_hidden_layers} layers, got "
                f"{len(self.layer_types)}."
            )
        if others := set(self.layer_types) - set(LAYER_TYPES):
            raise UnsupportedConfigError(
                f"LlamaConfig: layer type {min(others)!r} is not supported, only "
                f"{' and '.join(map(repr, LAYER_TYPES))}."
            )
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ValueError(
                f"LlamaConfig: sliding_window must be an integer where layer_types has {SLIDING!r},"
                " got null."
            )
        # One form of each model, so that equal models have equal configs.
        if len(set(self.layer_types)) == 1:
            if FULL in self.layer_types:
                object.__setattr__(self, "sliding_window", None)
            object.__setattr__(self, "layer_types", ())

    def _check_ropes(self) -> None:
        if self.rope_layers and len(self.rope_layers) != self.num_hidden_layers:
            raise ValueError(
                f"LlamaConfig: rope_layers must speak of {self.num_hidden_layers} layers, got "
                f"{len(self.rope_layers)}."
            )
        if all(self.rope_layers):
            object.__setattr__(self, "rope_layers", ())
        _ = self.ropes  # which refuse what does not fit

    def _check_experts(self) -> None:
        sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        if any(getattr(self, name) for name in sizes):
            check_positive("LlamaConfig", **{name: getattr(self, name) for name in sizes})
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                "LlamaConfig: num_experts_per_tok must be at most num_experts, got "
                f"{self.num_experts_per_tok} and {self.num_experts}."
            )
        if self.shared_expert_intermediate_size < 0:
            raise ValueError(
                "LlamaConfig: shared_expert_intermediate_size must be 0 or more, got "
                f"{self.shared_expert_intermediate_size}."
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Read the content of a Hugging Face ``config.json``, of transformers 4 or 5.

        A missing optional key takes the value that transformers gives it in that family.

        Raises:
          UnsupportedConfigError: the config asks for something that this library does not build:
            it is named, never ignored.
          ValueError: a required key is missing, or a value is of the wrong type or out of range.

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
        """Read a ``config.json``, or the one in a folder.

        Raises:
          FileNotFoundError: there is none.
          ValueError: it is not a JSON object, or see `from_dict`.
        """
        return cls.from_dict(read_config_json(Path(path)))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` that transformers and `from_dict` read.

        Raises:
          ValueError: no family of transformers computes this combination of switches.
        """
        written = write_fields(self)
        read = LlamaConfig.from_dict(written)
        for field in dataclasses.fields(self):
            asked, has = getattr(self, field.name), getattr(read, field.name)
            if asked != has and not _are_close(asked, has):
                raise ValueError(
                    f"LlamaConfig: {field.name} must be {has!r} for model_type "
                    f"{self.model_type!r} with all else as it is, got {asked!r}."
                )
        return written

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many last tokens each layer attends to, the query's own included; None: all."""
        if not self.layer_types:
            return (self.sliding_window,) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @functools.cached_property
    def ropes(self) -> tuple[Rope | None, ...]:
        """How each layer rotates queries and keys; None where it does not."""
        rope = Rope(
            head_dim=self.head_dim,
            rotary_dim=int(self.head_dim * self.partial_rotary_factor),
            theta=self.rope_theta,
            scaling=self.rope_scaling,
            max_position_embeddings=self.max_position_embeddings,
        )
        theta = self.rope_local_base_freq
        local = rope if theta is None else dataclasses.replace(rope, theta=theta, scaling=None)
        of_layers = [rope if window is None else local for window in self.windows]
        rotates = self.rope_layers or (True,) * self.num_hidden_layers
        return tuple(rope if has else None for rope, has in zip(of_layers, rotates, strict=True))

    @functools.cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Layers that share a kind of attention, the group that keeps most tokens first.

        Example:
          >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
          ...     num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
          ...     sliding_window=4,
          ...     layer_types=("sliding_attention", "sliding_attention", "full_attention"))
          >>> config.layer_groups
          (LayerGroup(window=None, layers=(2,)), LayerGroup(window=4, layers=(0, 1)))
        """
        return group_layers(self.windows)

    @property
    def num_layer_groups(self) -> int:
        """Kinds of attention; 1 where all layers keep the same tokens."""
        return len(self.layer_groups)

    @property
    def can_scan_layers(self) -> bool:
        """Whether all layers compute alike, and so can be stacked: see `Llama`'s `scan_layers`."""
        return self.num_layer_groups == 1 and len(set(self.ropes)) == 1

    @property
    def dense_intermediate_size(self) -> int:
        """F of the MLP that all tokens of a layer pass through; 0 if there is none."""
        return self.shared_expert_intermediate_size if self.num_experts else self.intermediate_size

    @property
    def qkv_features(self) -> int:
        """Rows of the fused query, key and value projection, ``(H + 2 K) D``."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim


def _are_close(a: Any, b: Any) -> bool:
    """Whether numbers are equal but for rounding, as where a file has the inverse of one."""
    return isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-12)
