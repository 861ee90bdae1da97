"""Rotary position embedding: the rotation angles of every layer's queries and keys.

Kernels rotate the pairs ``(x[i], x[i + D/2])`` of whole heads. In some checkpoints, only a part of
each head rotates, or the elements of a pair are neighbours. They are permuted into this form when
they are loaded, see `head_order`. Pairs that do not rotate have frequency 0: a cosine of 1 and a
sine of 0.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.models.family import UnsupportedConfigError

# Fields of `RopeScaling` that each type uses.
SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
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
    "proportional": ("factor",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than the training context.

    Each ``rope_type`` uses `factor` and the fields that its description names:

    - ``"linear"`` divides all frequencies by `factor` (Chen et al., arXiv 2306.15595).
    - ``"llama3"`` divides only low frequencies, with a smooth transition (Llama 3.1 model card):
      `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`.
    - ``"yarn"`` divides frequencies that make less than `beta_slow` turns in the original context,
      with a transition up to `beta_fast` turns. If `truncate`, the transition starts and ends at
      whole pairs. Cosines and sines are multiplied by `attention_factor` (YaRN, arXiv 2309.00071,
      section 3.4).
    - ``"longrope"`` divides each frequency by its own factor, from `short_factor` if the longest
      sequence of the model fits into the original context, otherwise from `long_factor`. Cosines
      and sines are multiplied by `attention_factor` (LongRoPE, arXiv 2402.13753).
    - ``"proportional"`` spreads the frequencies over the whole head, also if only a part of it
      rotates. That part is the first elements of both halves of the head, see `Rope`. All
      frequencies are divided by `factor` (Gemma 4).
    - ``"dynamic"`` rotates tokens after the original context with a larger base, which grows with
      their position, see `Rope`.

    Raises:
      UnsupportedConfigError: the ``rope_type`` is unknown.
      ValueError: a factor is out of range.
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
        # Search a tuple, because a value from JSON may not be hashable.
        if self.rope_type not in tuple(SCALING_FIELDS):
            raise UnsupportedConfigError(
                f"LlamaConfig: rope_type {self.rope_type!r} is not supported, only 'default', "
                f"{', '.join(map(repr, SCALING_FIELDS))}."
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"LlamaConfig: rope factor must be positive, got {self.factor!r}.")
        if not 0 < self.low_freq_factor <= self.high_freq_factor < math.inf:
            raise ValueError(
                "LlamaConfig: low_freq_factor must be positive and at most high_freq_factor, "
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


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """Factor of queries that grows with their position, for contexts beyond the training length.

    It is ``1 + beta * log(1 + floor((position + offset) / length))``.

    Attributes:
      beta: slope of the factor.
      length: number of positions with the same factor; the first of them have factor 1.
      offset: number that is added to positions.
      only_without_rope: whether the factor applies only to layers that do not rotate.

    Raises:
      ValueError: a number is out of range.

    Example:
      >>> scale = QueryScale(beta=0.1, length=16)
      >>> [f"{x:.3f}" for x in scale.factors(jnp.array([0, 15, 16, 48]))]
      ['1.000', '1.000', '1.069', '1.139']
    """

    beta: float
    length: int
    offset: int = 0
    only_without_rope: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta) and self.beta > 0 and self.length > 0):
            raise ValueError(
                "LlamaConfig: the scale of queries must have a positive beta and length, got "
                f"{self.beta!r} and {self.length!r}."
            )

    def factors(self, positions: jax.Array) -> jax.Array:
        """Return the factor of each query, float32 ``[...]`` for positions i32 ``[...]``."""
        turns = jnp.maximum(positions + self.offset, 0) // self.length
        return 1 + self.beta * jnp.log1p(turns.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotation of a layer's queries and keys. Layers with equal `Rope` share their angles.

    A paged cache holds rotated keys. They serve all later tokens and all sequences that share
    them, so the angles of a key may only depend on its position:

    - ``"longrope"`` has two sets of factors. The original models switch between them when a
      sequence grows beyond the original context, which would change the rotation of all earlier
      keys. Here `max_position_embeddings`, the maximum length of a sequence, decides for all
      sequences, as in vLLM. For short sequences with the short factors, use
      ``dataclasses.replace(config, max_position_embeddings=...)``.
    - ``"dynamic"`` enlarges the base with the length of the sequence, beyond the original context.
      Here the token at position p always has the base for p + 1 tokens. transformers computes the
      same when it generates token by token with its cache. Within the original context both agree
      in any case.

    Attributes:
      head_dim: head dimension (D), even.
      rotary_dim: number of elements of a head that rotate, even, at most D.
      theta: base of the frequencies.
      scaling: scaling of the frequencies, or None.
      max_position_embeddings: maximum length of a sequence in tokens.

    Raises:
      ValueError: `rotary_dim` or the number of longrope factors does not fit.

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
        """Return the frequency of each pair in radians per token, float32 ``[D / 2]``.

        See RoFormer, section 3.2.2.
        """
        frequencies = self.theta ** -self._exponents()
        if self.scaling is not None:
            frequencies = _scale(frequencies, self.scaling, self)
        return self._pad(frequencies, 0.0)

    def scales(self) -> np.ndarray:
        """Return the factor of each pair's cosine and sine, float32 ``[D / 2]``."""
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        return self._pad(np.full(self.rotary_dim // 2, factor), 1.0)

    def angles(self, positions: jax.Array) -> jax.Array:
        """Return the angle of every pair, float32 ``[..., D / 2]`` for positions ``[...]``."""
        lead = (1,) * positions.ndim + (-1,)
        angles = positions[..., None].astype(jnp.float32) * self.frequencies().reshape(lead)
        if self.scaling is None or self.scaling.rope_type != "dynamic":
            return angles
        # With R = rotary_dim, and n = position + 1 above the original context, the base becomes
        # theta * s ** (R / (R - 2)) for s = 1 + factor * (n / original - 1). Each frequency is a
        # power of the base: the last frequency is divided by s, and the first does not change.
        original = self.scaling.original_max_position_embeddings
        past = jnp.maximum(positions + 1 - original, 0).astype(jnp.float32) / original
        stretch = self._exponents() * self.rotary_dim / max(self.rotary_dim - 2, 1)
        powers = self._pad(stretch, 0.0).reshape(lead)
        return angles * jnp.exp(-powers * jnp.log1p(self.scaling.factor * past)[..., None])

    @property
    def paired_dim(self) -> int:
        """Number of elements of a head that form pairs. Their distance is half of it."""
        is_whole = self.scaling is not None and self.scaling.rope_type == "proportional"
        return self.head_dim if is_whole else self.rotary_dim

    def _exponents(self) -> np.ndarray:
        return np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.paired_dim

    def _pad(self, values: np.ndarray, fill_value: float) -> np.ndarray:
        num_fixed = (self.head_dim - self.rotary_dim) // 2
        return np.pad(values, (0, num_fixed), constant_values=fill_value).astype(np.float32)


def _scale(frequencies: np.ndarray, scaling: RopeScaling, rope: Rope) -> np.ndarray:
    if scaling.rope_type in ("linear", "proportional"):
        return frequencies / scaling.factor
    if scaling.rope_type == "longrope":
        is_long = rope.max_position_embeddings > scaling.original_max_position_embeddings
        return frequencies / np.array(scaling.long_factor if is_long else scaling.short_factor)
    if scaling.rope_type == "llama3":
        kept = _kept_by_llama3(frequencies, scaling)
    elif scaling.rope_type == "yarn":
        kept = _kept_by_yarn(rope, scaling)
    else:  # "dynamic" scales in `Rope.angles`
        return frequencies
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _kept_by_llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Return the fraction of each frequency that is not scaled, 0 to 1.

    It is 1 for pairs with at least `high_freq_factor` turns in the original context, 0 for pairs
    with at most `low_freq_factor` turns, and linear in the number of turns between them.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    if span == 0:
        return (turns >= scaling.low_freq_factor).astype(np.float64)
    return np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)


def _kept_by_yarn(rope: Rope, scaling: RopeScaling) -> np.ndarray:
    """Return the fraction of each frequency that is not scaled, 0 to 1.

    It is 1 for pairs with at least `beta_fast` turns in the original context, 0 for pairs with at
    most `beta_slow` turns, and linear in the index of the pair between them.
    """

    def find_pair(turns: float) -> float:
        """Return the fractional index of the pair with this number of turns."""
        length = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return rope.rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    first, last = find_pair(scaling.beta_fast), find_pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # Limit `last` to the number of elements, although it is the index of a pair and there are only
    # half as many pairs: the reference YaRN code does so too.
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001
    return 1 - np.clip((np.arange(rope.rotary_dim // 2) - first) / (last - first), 0.0, 1.0)


def rotations(
    positions: jax.Array, rope: Rope | None, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of every angle, each float32 ``[..., D / 2]``.

    They are 1 and 0 for a layer that does not rotate, for which `rope` is None.
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
    positions: jax.Array, ropes: Sequence[Rope | None], head_dims: Sequence[int]
) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Return the `rotations` of each layer. Equal rotations are computed once."""
    kinds = tuple(zip(ropes, head_dims, strict=True))
    computed = {kind: rotations(positions, *kind) for kind in dict.fromkeys(kinds)}
    return tuple(computed[kind] for kind in kinds)


def head_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> tuple[int, ...] | None:
    """Return each element's index in the checkpoint's head, or None if the order is the same.

    A head becomes ``[first of each pair, half of the rest, second of each pair, the rest]``, so
    that ``(x[i], x[i + D/2])`` is a pair and the whole head rotates.

    Args:
      head_dim: head dimension (D).
      rotary_dim: number of elements that rotate. They come first in the checkpoint.
      interleaved: whether the two elements of a pair are neighbours in the checkpoint. Otherwise
        their distance is half of `rotary_dim`.

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
