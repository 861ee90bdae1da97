"""Rotary position embedding: the angles of every layer's queries and keys.

Kernels rotate the pairs ``(x[i], x[i + D/2])`` of whole heads. Heads of which only a part rotates,
or whose pairs are neighbours, are brought into that form when weights are loaded, by `head_order`;
what does not rotate has the frequency 0, a cosine of 1 and a sine of 0.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.models.rope_scaling import RopeScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """How a layer rotates its queries and keys. Layers with equal ones share their angles.

    A paged cache holds keys as they were rotated when their token came, for every later token and
    for every sequence that shares them. So a key's angles may depend on its position alone:

    - ``"longrope"`` has two sets of factors, and models choose by the length of the sequence so
      far, which would rotate all keys anew where it passes the original context. Here the choice
      follows from `max_position_embeddings`, the longest sequence of the model, as in vLLM: for one
      that does not pass the original context the short factors, else the long ones, for all
      sequences. A model that need not be long computes what it was first trained for with
      ``dataclasses.replace(config, max_position_embeddings=...)``.
    - ``"dynamic"`` enlarges the base for a sequence of n tokens, past the original context. Here
      the token at position p has the base for p + 1 tokens, and keeps it: what transformers
      computes token by token with its cache, which does not rotate old keys anew either. Within the
      original context all agree.

    Attributes:
      head_dim: D, even.
      rotary_dim: numbers of a head that rotate, even, at most D.
      theta: base of the frequencies.
      scaling: how they are stretched; None as they are.
      max_position_embeddings: longest sequence, tokens.

    Raises:
      ValueError: sizes or numbers of factors that do not fit.

    Example:
      >>> Rope(head_dim=8, rotary_dim=4, theta=100.0).frequencies()
      array([1. , 0.1, 0. , 0. ], dtype=float32)
    """

    head_dim: int
    rotary_dim: int
    theta: float
    scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                "LlamaConfig: an even number of each head's dimensions must rotate, got "
                f"{self.rotary_dim} of {self.head_dim} (partial_rotary_factor)."
            )
        if self.scaling is not None and self.scaling.rope_type == "longrope":
            for name in ("short_factor", "long_factor"):
                num_factors = len(getattr(self.scaling, name))
                if num_factors != self.rotary_dim // 2:
                    raise ValueError(
                        f"LlamaConfig: {name} must have {self.rotary_dim // 2} numbers, got "
                        f"{num_factors}."
                    )

    def frequencies(self) -> np.ndarray:
        """Radians per token of each pair, float32 ``[D / 2]`` (RoFormer, section 3.2.2)."""
        frequencies = self.theta ** -self._exponents()
        if self.scaling is not None:
            frequencies = _scale(frequencies, self.scaling, self)
        return self._padded(frequencies, 0.0)

    def scales(self) -> np.ndarray:
        """What cosine and sine of each pair are multiplied by, float32 ``[D / 2]``."""
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        return self._padded(np.full(self.rotary_dim // 2, factor), 1.0)

    def angles(self, positions: jax.Array) -> jax.Array:
        """Radians of every pair, float32 ``[..., D / 2]`` for positions ``[...]``."""
        lead = (1,) * positions.ndim + (-1,)
        angles = positions[..., None].astype(jnp.float32) * self.frequencies().reshape(lead)
        if self.scaling is None or self.scaling.rope_type != "dynamic":
            return angles
        # theta * s ** (R / (R - 2)) in place of theta, of which each frequency is a power: the last
        # of them is divided by s, and the first stays.
        original = self.scaling.original_max_position_embeddings
        past = jnp.maximum(positions + 1 - original, 0).astype(jnp.float32) / original
        stretch = self._exponents() * self.rotary_dim / max(self.rotary_dim - 2, 1)
        powers = self._padded(stretch, 0.0).reshape(lead)
        return angles * jnp.exp(-powers * jnp.log1p(self.scaling.factor * past)[..., None])

    def _exponents(self) -> np.ndarray:
        return np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim

    def _padded(self, values: np.ndarray, rest: float) -> np.ndarray:
        num_rest = (self.head_dim - self.rotary_dim) // 2
        return np.pad(values, (0, num_rest), constant_values=rest).astype(np.float32)


def _scale(frequencies: np.ndarray, scaling: RopeScaling, rope: Rope) -> np.ndarray:
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "longrope":
        is_long = rope.max_position_embeddings > scaling.original_max_position_embeddings
        return frequencies / np.array(scaling.long_factor if is_long else scaling.short_factor)
    if scaling.rope_type == "llama3":
        kept = _kept_by_llama3(frequencies, scaling)
    elif scaling.rope_type == "yarn":
        kept = _kept_by_yarn(rope, scaling)
    else:  # dynamic: past the original context only, see `Rope.angles`
        return frequencies
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _kept_by_llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """1 for wavelengths well inside the original context, 0 for those beyond it."""
    # Between the two the frequency changes linearly in the number of turns per context.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    return np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)


def _kept_by_yarn(rope: Rope, scaling: RopeScaling) -> np.ndarray:
    """1 for pairs that turn often in the original context, 0 for those that hardly turn."""

    def pair_of(turns: float) -> float:
        """Index, a fraction, of the pair that turns so often in the original context."""
        length = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return rope.rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bounds are those of YaRN's own code: of dimensions for the one, where there are half as
    # many pairs.
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001
    return 1 - np.clip((np.arange(rope.rotary_dim // 2) - first) / (last - first), 0.0, 1.0)


def rotations(
    positions: jax.Array, rope: Rope | None, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every angle, each float32 ``[..., D / 2]`` for positions ``[...]``.

    Args:
      positions: i32 ``[...]``.
      rope: None for a layer that does not rotate.
      head_dim: D.
    """
    if rope is None:
        shape = (*positions.shape, head_dim // 2)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    angles = rope.angles(positions)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    scales = rope.scales()
    if (scales == 1).all():
        return cos, sin
    scales = scales.reshape((1,) * positions.ndim + (-1,))
    return cos * scales, sin * scales


def all_rotations(
    positions: jax.Array, ropes: Iterable[Rope | None], head_dim: int
) -> dict[Rope | None, tuple[jax.Array, jax.Array]]:
    """The `rotations` of each of some layers' ropes, computed once for all that are equal."""
    return {rope: rotations(positions, rope, head_dim) for rope in dict.fromkeys(ropes)}


def head_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> tuple[int, ...] | None:
    """Which number of a checkpoint's head each number of ours is; None if they are the same.

    A head lies as ``[first of each pair, half of the rest, second of each pair, the rest]``, so
    that ``(x[i], x[i + D/2])`` is a pair, and rotates as a whole.

    Args:
      head_dim: D.
      rotary_dim: numbers of a head that rotate, its first ones in a checkpoint.
      interleaved: whether pairs are neighbours there; otherwise they are half of `rotary_dim`
        apart.

    Example:
      >>> head_order(8, 4, interleaved=False)
      (0, 1, 4, 5, 2, 3, 6, 7)
      >>> head_order(8, 4, interleaved=True)
      (0, 2, 4, 5, 1, 3, 6, 7)
    """
    rotated = list(range(rotary_dim))
    half = rotary_dim // 2
    first, second = (
        (rotated[::2], rotated[1::2]) if interleaved else (rotated[:half], rotated[half:])
    )
    middle = (rotary_dim + head_dim) // 2
    order = (*first, *range(rotary_dim, middle), *second, *range(middle, head_dim))
    return None if order == tuple(range(head_dim)) else order
