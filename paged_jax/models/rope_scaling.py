"""Rotary frequencies stretched for long contexts, as a config.json asks for them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from paged_jax.checks import is_int, is_real
from paged_jax.models.family import UnsupportedConfigError

# The fields that each kind reads, beside its own name.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "attention_factor", "beta_fast", "beta_slow", "truncate",
        "original_max_position_embeddings",
    ),
    "longrope": (
        "factor", "attention_factor", "short_factor", "long_factor",
        "original_max_position_embeddings",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the training context.

    A kind reads the fields that are named with it, all of them `factor`:

    - ``"linear"``: all frequencies are divided by it (Chen et al., arXiv 2306.15595).
    - ``"llama3"``: only the slow ones, with a smooth passage between two wavelengths (Llama 3.1
      model card): `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`.
    - ``"yarn"``: only those that turn less than `beta_slow` times in the original context, with a
      passage up to `beta_fast` turns, whose ends are whole dimensions if `truncate`; cosines and
      sines are multiplied by `attention_factor` (YaRN, arXiv 2309.00071, section 3.4).
    - ``"longrope"``: each is divided by a number of its own, in `short_factor` for models whose
      sequences end within the original context, else in `long_factor`; cosines and sines are
      multiplied by `attention_factor` (LongRoPE, arXiv 2402.13753).
    - ``"dynamic"``: tokens past the original context are rotated by a larger base, which grows with
      their position, see `Rope`.

    Raises:
      UnsupportedConfigError: another ``rope_type``.
      ValueError: a factor out of range.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in tuple(_FIELDS):  # it may be anything, of no hash
            raise UnsupportedConfigError(
                f"LlamaConfig: rope_type {self.rope_type!r} is not supported, only 'default', "
                f"{', '.join(map(repr, _FIELDS))}."
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"LlamaConfig: rope factor must be positive, got {self.factor!r}.")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                "LlamaConfig: low_freq_factor must be positive and less than high_freq_factor, "
                f"got {self.low_freq_factor!r} and {self.high_freq_factor!r}."
            )
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                "LlamaConfig: original_max_position_embeddings must be positive, "
                f"got {self.original_max_position_embeddings!r}."
            )
        if not (math.isfinite(self.attention_factor) and self.attention_factor > 0):
            raise ValueError(
                f"LlamaConfig: attention_factor must be positive, got {self.attention_factor!r}."
            )
        if not 0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ValueError(
                "LlamaConfig: beta_slow must be positive and at most beta_fast, got "
                f"{self.beta_slow!r} and {self.beta_fast!r}."
            )

    @classmethod
    def from_dict(
        cls, rope: Mapping[str, Any], max_position_embeddings: int, original: int | None = None
    ) -> "RopeScaling | None":
        """Read ``rope_scaling`` of a config.json, or one entry of ``rope_parameters``.

        Args:
          rope: the JSON object.
          max_position_embeddings: of the same config.
          original: the config's own ``original_max_position_embeddings``, which Phi-3 has there.

        Returns:
          None if frequencies are not scaled.

        Raises:
          UnsupportedConfigError: a ``rope_type`` that this library does not build.
          ValueError: a number is missing, or not one.

        Example:
          >>> RopeScaling.from_dict({"rope_type": "linear", "factor": 8}, 32768)
          RopeScaling(rope_type='linear', factor=8.0, ...)
        """
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type == "default":
            return None
        if rope_type not in tuple(_FIELDS):
            return cls(rope_type, 1.0)  # refused there
        fields: dict[str, Any] = {"original_max_position_embeddings": max_position_embeddings}
        if rope_type != "dynamic":  # whose original context is that of the config
            given = rope.get("original_max_position_embeddings") if original is None else original
            if given is not None:
                fields["original_max_position_embeddings"] = _integer(
                    "original_max_position_embeddings", given
                )
        read = _FIELDS[rope_type]
        if rope_type == "llama3":
            fields |= {k: _number(rope, k) for k in ("low_freq_factor", "high_freq_factor")}
        if rope.get("factor") is not None or rope_type in ("linear", "dynamic", "llama3"):
            fields["factor"] = _number(rope, "factor")
        else:
            # Phi-3 and DeepSeek give the two contexts instead.
            fields["factor"] = max_position_embeddings / fields["original_max_position_embeddings"]
        for key in ("beta_fast", "beta_slow"):
            if key in read and rope.get(key):  # null and 0 stand for the default, as there
                fields[key] = _number(rope, key)
        if "truncate" in read:
            fields["truncate"] = bool(rope.get("truncate", True))  # null is false, as there
        for key in ("short_factor", "long_factor"):
            if key in read:
                fields[key] = _numbers(rope, key)
        if "attention_factor" in read:
            fields["attention_factor"] = _attention_factor(rope_type, rope, fields)
        if "original_max_position_embeddings" not in read:
            del fields["original_max_position_embeddings"]
        return cls(rope_type, **fields)

    def longest_sequence(self, length: int) -> int:
        """Tokens of the longest sequence of a model whose config says `length`.

        Qwen's cards add ``"yarn"`` to a config, whose length stays that of the training: there the
        product of factor and original context counts if it is more, as in vLLM.
        """
        if self.rope_type != "yarn":
            return length
        return max(length, int(self.factor * self.original_max_position_embeddings))

    def to_dict(self) -> dict[str, Any]:
        """Return the ``rope_scaling`` that `from_dict` and transformers read."""
        written: dict[str, Any] = {"rope_type": self.rope_type}
        for name in _FIELDS[self.rope_type]:
            value = getattr(self, name)
            written[name] = list(value) if isinstance(value, tuple) else value
        if self.rope_type == "dynamic":
            del written["original_max_position_embeddings"]
        return written


def _attention_factor(rope_type: str, rope: Mapping[str, Any], fields: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    factor = fields["factor"]
    if rope_type == "longrope":
        original = fields["original_max_position_embeddings"]
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    # DeepSeek's two numbers, of which YaRN's own is the case of none.
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _yarn_scale(factor, _number(rope, "mscale")) / _yarn_scale(
            factor, _number(rope, "mscale_all_dim")
        )
    return _yarn_scale(factor)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def _number(rope: Mapping[str, Any], key: str) -> float:
    value = rope.get(key)
    if value is None:
        raise ValueError(f"LlamaConfig: {key} is missing.")
    if not is_real(value):
        raise ValueError(f"LlamaConfig: {key} must be a number, got {value!r}.")
    return float(value)


def _integer(key: str, value: Any) -> int:
    if not is_int(value) or not 2 <= value < 2**31:
        raise ValueError(f"LlamaConfig: {key} must be an integer of at least 2, got {value!r}.")
    return value


def _numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list) or not all(is_real(value) and value > 0 for value in values):
        raise ValueError(f"LlamaConfig: {key} must be a list of positive numbers, got {values!r}.")
    return tuple(map(float, values))
