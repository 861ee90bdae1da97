"""Rotary frequencies stretched for long contexts, as a config.json asks for them."""

import dataclasses
import math
from typing import Any

from paged_jax.models.families import UnsupportedConfigError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the training context.

    ``rope_type`` is ``"linear"`` (all frequencies divided by ``factor``) or ``"llama3"`` (only the
    slow ones, with a smooth passage between the two wavelengths; Llama 3.1 model card). The other
    fields are read by ``"llama3"`` alone.

    Raises:
      UnsupportedConfigError: another ``rope_type``.
      ValueError: a factor out of range.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check_rope_type(self.rope_type)
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


def check_rope_type(rope_type: Any) -> None:
    """Refuse a ``rope_type`` that this library does not build."""
    if rope_type not in ("linear", "llama3"):
        raise UnsupportedConfigError(
            f"LlamaConfig: rope_type {rope_type!r} is not supported, only 'default', 'linear' and "
            "'llama3'."
        )
