"""Description of a model family: the properties that its code fixes, and how to read its files.

The families themselves are in `families.FAMILIES`. Switches of `LlamaConfig` express how a family
computes. They are fixed (`Family.fixed`) or read from ``config.json``. No other code depends on the
family of a model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


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


@dataclasses.dataclass(frozen=True)
class Family:
    """Properties of a model family that are not in its ``config.json``.

    Attributes:
      architecture: class in transformers.
      defaults: values that transformers uses for keys that are missing in ``config.json``.
      fixed: fields of `LlamaConfig` with the same value in the whole family.
      sliding_layers: which layers have a sliding window. ``"none"``: no layer; ``"all"``: all
        layers if `sliding_window` is set; ``"switched"``: if `use_sliding_window` is true, the
        layers in `layer_types`, by default those from `max_window_layers` on; ``"pattern"``: the
        layers in `layer_types`, by default all but every n-th, where n is
        `sliding_window_pattern`; ``"unused"``: no layer, although configs have the keys of
        ``"switched"``.
      rope_layers: which layers rotate queries and keys. ``"all"``; ``"sliding"``: layers with a
        sliding window; ``"listed"``: layers with a 1 in `no_rope_layers`.
      local_rope: whether layers with a sliding window have their own base without scaling.
      partial_rope: whether a config may rotate only a part of each head.
      rope_interleaved: whether the two elements of a rotated pair are neighbours.
      biases: fields of `LlamaConfig` that `attention_bias` sets.
      experts: fields of `LlamaConfig` to read for the experts, in addition to their sizes; None for
        a family without experts.
      is_mxfp4: whether checkpoints may store experts in MXFP4, see `Mxfp4Tensor`.
      scales: factors to read from ``config.json``.
      caps: soft caps to read from ``config.json``.
      keys: key in ``config.json`` of each `LlamaConfig` field whose key differs from its name.
      tensors: tensor names of a layer that differ from those in `tensor_map`, by parameter. A fused
        parameter such as ``qkv_proj`` is one tensor in the files if it is listed here. A * stands
        for the number of an expert.
      prefixes: prefixes of tensor names and their replacements; None if the tensors belong to
        another part of a larger model and are not read.
    """

    architecture: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sliding_layers: str = "none"
    rope_layers: str = "all"
    local_rope: bool = False
    partial_rope: bool = False
    rope_interleaved: bool = False
    biases: tuple[str, ...] = ()
    experts: tuple[str, ...] | None = None
    is_mxfp4: bool = False
    scales: tuple[Scale, ...] = ()
    caps: tuple[str, ...] = ()
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefixes: Mapping[str, str | None] = dataclasses.field(default_factory=dict)

    @property
    def reads(self) -> frozenset[str]:
        """Keys of ``config.json`` that change the computation and that this family reads."""
        return frozenset({*self.caps, *(scale.key for scale in self.scales)})

    def key(self, field: str) -> str:
        """Return the key of a `LlamaConfig` field in ``config.json``."""
        return self.keys.get(field, field)
