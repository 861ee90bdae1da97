"""What a family of models is: what it fixes in code, and what its config.json says.

The families that there are: `families.FAMILIES`. What one computes are switches of `LlamaConfig`:
some are fixed (`Family.fixed`), others are read. No code asks which family a model is of.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


class UnsupportedConfigError(ValueError):
    """The config is valid, and asks for something that this library does not build."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A factor of `LlamaConfig` that is a power of a number in config.json.

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
        """The factor."""
        return float(number**self.power)

    def write(self, factor: float) -> float:
        """The number that was read: an integer if it was one."""
        # Digits enough for any number that a person wrote, and too few for rounding to show.
        number = float(f"{factor ** (1 / self.power):.14g}")
        return int(number) if number.is_integer() else number


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family fixes in code rather than in its config.json.

    Attributes:
      architecture: its class in transformers.
      defaults: those of transformers for keys that a config.json may leave out.
      fixed: fields of `LlamaConfig`.
      window: which layers slide: ``"none"``; ``"all"`` where `sliding_window` is set;
        ``"switched"``, those of `layer_types` or from `max_window_layers` on, where
        `use_sliding_window` is true; ``"pattern"``, those of `layer_types`, or all but every n-th,
        where n is `sliding_window_pattern`; ``"unused"``: none, though a config has the keys of
        ``"switched"``.
      rope_layers: which layers rotate: ``"all"``; ``"sliding"``, those with a window;
        ``"listed"``, those with a 1 in `no_rope_layers`.
      local_rope: layers with a window have a base of their own, or at least no scaling.
      partial_rope: a config may have only a part of each head rotate.
      rope_interleaved: the numbers of a pair lie side by side.
      biases: fields that `attention_bias` turns on.
      experts: None, or fields of its experts that are read, beside their sizes.
      is_mxfp4: its experts may be stored in 4 bits, see `loading.mxfp4`.
      scales: factors that are read.
      caps: soft caps that are read.
      keys: names of fields in config.json, where they differ.
      tensors: names of parameters' tensors in a layer, where they differ, see `tensor_map`. Of a
        fused parameter it is the one tensor that all of it lies in; a * is the number of an expert.
      prefixes: what names in files may begin with, and what that stands for; None for parts of a
        larger model that are not read.
    """

    architecture: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    window: str = "none"
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
        """Keys of config.json that it knows, of those that change what is computed."""
        return frozenset({*self.caps, *(scale.key for scale in self.scales)})

    def key(self, field: str) -> str:
        """The name of a field of `LlamaConfig` in config.json."""
        return self.keys.get(field, field)
