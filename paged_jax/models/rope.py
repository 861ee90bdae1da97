"""Rotary position embedding: the rotation angles of every layer's queries and keys.

Kernels rotate all pairs ``(x[i], x[i + D/2])`` of a head. In some checkpoints, only a part of each
head is rotated, or the two elements of a pair are neighbours. The weights of such checkpoints are
permuted when they are loaded, so that the kernels can use them, see `head_order`. Pairs that must
not rotate have the frequency 0, which gives a cosine of 1 and a sine of 0.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.exact import rounded
from paged_jax.models.errors import UnsupportedConfigError

# Fields of `RopeScaling` that each `rope_type` uses.
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
    """Scaling of rotary frequencies for contexts that are longer than the original context.

    The original context is the context length of training, `original_max_position_embeddings`.

    The field `rope_type` selects the method. Each method uses `factor` and the fields named in its
    description:

    - ``"linear"`` divides all frequencies by `factor` (Chen et al., arXiv 2306.15595).
    - ``"llama3"`` divides only low frequencies (Llama 3.1 model card). Between `low_freq_factor`
      and `high_freq_factor` turns in the original context, there is a smooth transition.
    - ``"yarn"`` divides frequencies that make fewer than `beta_slow` turns in the original context,
      with a transition up to `beta_fast` turns. If `truncate` is True, the bounds of the transition
      are rounded to whole pairs. Cosines and sines are multiplied by `attention_factor` (YaRN,
      arXiv 2309.00071, section 3.4).
    - ``"longrope"`` divides each frequency by its own factor. The factors are `short_factor` if the
      maximum sequence length of the model is at most the original context, otherwise `long_factor`.
      Cosines and sines are multiplied by `attention_factor` (LongRoPE, arXiv 2402.13753).
    - ``"proportional"`` divides all frequencies by `factor` (Gemma 4). If only a part of a head
      rotates, the exponents of the frequencies are still relative to the whole head, and the
      rotated elements are the first elements of both halves of the head.
    - ``"dynamic"`` rotates tokens beyond the original context with a larger base, which grows with
      the position of the token, see `Rope`.

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
        # `rope_type` may be any value from JSON, for example a list, which cannot be looked up in a
        # dict.
        if self.rope_type not in tuple(SCALING_FIELDS):
            raise UnsupportedConfigError(
                "LlamaConfig: rope_type must be one of 'default', "
                f"{', '.join(map(repr, SCALING_FIELDS))}, got {self.rope_type!r}."
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"LlamaConfig: rope factor must be positive, got {self.factor!r}.")
        if not 0 < self.low_freq_factor <= self.high_freq_factor < math.inf:
            raise ValueError(
                "LlamaConfig: low_freq_factor must be positive and at most high_freq_factor, got "
                f"low_freq_factor {self.low_freq_factor!r} and high_freq_factor "
                f"{self.high_freq_factor!r}."
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
                "LlamaConfig: beta_slow must be positive and at most beta_fast, got beta_slow "
                f"{self.beta_slow!r} and beta_fast {self.beta_fast!r}."
            )


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """Factor of queries that grows with the position, for contexts beyond the training length.

    The factor is ``1 + beta * log(1 + floor((position + offset) / length))``.

    Attributes:
      beta: coefficient of the logarithm.
      length: number of consecutive positions that have the same factor. The factor of the first
        `length` positions is 1 (if `offset` is 0).
      offset: number that is added to the positions.
      only_without_rope: whether the factor applies only to layers that do not rotate queries and
        keys.

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
                "LlamaConfig: query_scale must have a positive beta and a positive length, got "
                f"beta {self.beta!r} and length {self.length!r}."
            )

    def factors(self, positions: jax.Array) -> jax.Array:
        """Return the factors of queries at positions i32 ``[...]``, float32 ``[...]``."""
        turns = jnp.maximum(positions + self.offset, 0) // self.length
        return 1 + self.beta * jnp.log1p(turns.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of a layer. Layers with an equal `Rope` have the same angles.

    A paged cache stores keys after rotation. All later tokens, and all sequences that share a
    block, use these keys. So the angle of a key must depend only on its position. This determines
    the behaviour of two types of scaling:

    - ``"longrope"`` has two sets of factors. The original models switch between them when a
      sequence grows beyond the original context, which would change the rotation of all earlier
      keys. Here, the maximum sequence length `max_position_embeddings` selects one set for all
      sequences, as in vLLM. To use the short factors, reduce it with
      ``dataclasses.replace(config, max_position_embeddings=...)``.
    - ``"dynamic"`` uses a base that grows with the sequence length beyond the original context.
      Here, the token at position p always uses the base for a length of p + 1. transformers does
      the same when it generates token by token with its cache. For a longer prompt, transformers
      uses the base of the whole prompt, so results differ beyond the original context.

    Attributes:
      head_dim: head dimension (D), even.
      rotary_dim: number of elements of a head that are rotated, even, at most D.
      theta: base of the frequencies.
      scaling: scaling of the frequencies; None for no scaling.
      max_position_embeddings: maximum length of a sequence in tokens, which selects the factors of
        ``"longrope"``. With other types of scaling it has no effect and becomes 0, so that equal
        angles have an equal `Rope`.

    Raises:
      ValueError: `rotary_dim` is odd or out of range, or the number of longrope factors is wrong.

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
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ValueError(f"LlamaConfig: rope_theta must be positive, got {self.theta!r}.")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                "LlamaConfig: partial_rotary_factor must select an even number of each head's "
                f"{self.head_dim} elements, got {self.rotary_dim}."
            )
        if self.scaling is None or self.scaling.rope_type != "longrope":
            object.__setattr__(self, "max_position_embeddings", 0)
        else:
            for name in ("short_factor", "long_factor"):
                num_factors = len(getattr(self.scaling, name))
                if num_factors != self.rotary_dim // 2:
                    raise ValueError(
                        f"LlamaConfig: {name} must have {self.rotary_dim // 2} numbers, one for "
                        f"each rotated pair, got {num_factors}."
                    )

    def frequencies(self) -> np.ndarray:
        """Return the rotary frequency of each pair in radians per token, float32 ``[D / 2]``.

        See RoFormer, section 3.2.2.
        """
        frequencies = self.theta ** -self._exponents()
        if self.scaling is not None:
            frequencies = _scale(frequencies, self.scaling, self)
        return self._pad(frequencies, 0.0)

    def scales(self) -> np.ndarray:
        """Return the factor of each pair's cosine and sine, float32 ``[D / 2]``.

        It is `attention_factor` for rotated pairs, and 1 for the other pairs.
        """
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        return self._pad(np.full(self.rotary_dim // 2, factor), 1.0)

    def angles(self, positions: jax.Array) -> jax.Array:
        """Return the rotation angles at positions ``[...]``, float32 ``[..., D / 2]``."""
        lead = (1,) * positions.ndim + (-1,)
        angles = positions[..., None].astype(jnp.float32) * self.frequencies().reshape(lead)
        if self.scaling is None or self.scaling.rope_type != "dynamic":
            return angles
        # Let R be rotary_dim, original the original context, and n = position + 1, which is larger
        # than original. The base becomes theta * s ** (R / (R - 2)) with s = 1 + factor * (n /
        # original - 1). Frequency i is base ** (-2 * i / R), so it is divided by
        # s ** (2 * i / (R - 2)): by 1 for the first frequency, and by s for the last.
        original = self.scaling.original_max_position_embeddings
        excess = jnp.maximum(positions + 1 - original, 0).astype(jnp.float32) / original
        stretch = self._exponents() * self.rotary_dim / max(self.rotary_dim - 2, 1)
        powers = self._pad(stretch, 0.0).reshape(lead)
        return angles * jnp.exp(-powers * jnp.log1p(self.scaling.factor * excess)[..., None])

    @property
    def paired_dim(self) -> int:
        """Number of elements of a head that form pairs, including pairs that do not rotate.

        If pairs are not interleaved in the checkpoint, the distance between the two elements of a
        pair is half of this number.
        """
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
        extrapolated = _llama3_extrapolation(frequencies, scaling)
    elif scaling.rope_type == "yarn":
        extrapolated = _yarn_extrapolation(rope, scaling)
    else:  # "dynamic" scales in `Rope.angles`
        return frequencies
    return frequencies * (extrapolated + (1 - extrapolated) / scaling.factor)


def _llama3_extrapolation(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Return the weight w of each pair's original frequency in "llama3" scaling, 0 to 1.

    The frequency after scaling is ``w * original + (1 - w) * original / factor``. w is 1 for pairs
    with at least `high_freq_factor` turns in the original context, and 0 for pairs with at most
    `low_freq_factor` turns. In between, it is linear in the number of turns.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    if span == 0:
        return (turns >= scaling.low_freq_factor).astype(np.float64)
    return np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)


def _yarn_extrapolation(rope: Rope, scaling: RopeScaling) -> np.ndarray:
    """Return the weight w of each pair's original frequency in "yarn" scaling, 0 to 1.

    The frequency after scaling is ``w * original + (1 - w) * original / factor``. w is 1 for pairs
    with at least `beta_fast` turns in the original context, and 0 for pairs with at most
    `beta_slow` turns. In between, it is linear in the index of the pair.
    """

    def find_pair(turns: float) -> float:
        """Return the index of the pair that makes `turns` turns in the original context.

        The index may be a fraction.
        """
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
    positions: jax.Array, rope: Rope | None, head_dim: int, backend: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines at positions ``[...]``, each float32 ``[..., D / 2]``.

    If `rope` is None, the layer does not rotate: all cosines are 1 and all sines are 0. For
    `backend`, see `rounded`.
    """
    if rope is None:
        shape = (*positions.shape, head_dim // 2)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    angles = rounded(rope.angles(positions), backend)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    scales = rope.scales()
    if (scales == 1).all():
        return cos, sin
    scales = scales.reshape((1,) * positions.ndim + (-1,))
    return cos * scales, sin * scales


class Rotation(NamedTuple):
    """What depends on the positions of tokens in the attention of a layer.

    Attributes:
      cos, sin: float32 ``[..., D / 2]``, cosines and sines of each token's rotation angles.
      query_scale: float32 ``[...]``, factor of each token's queries; None for 1.
    """

    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None = None


# Rotary embedding of a layer, its head dimension, and the factor of its queries.
RotationKind = tuple[Rope | None, int, QueryScale | None]


def all_rotations(
    positions: jax.Array, layers: Sequence[RotationKind | None], backend: str | None = None
) -> list[Rotation | None]:
    """Return the `Rotation` of each layer at positions i32 ``[...]``.

    Cosines, sines and factors are computed only once for layers that agree in them. The result is
    None for layers without attention, which are None in `layers`.
    """
    ropes = dict.fromkeys(kind[:2] for kind in layers if kind is not None)
    angles = {rope: rotations(positions, *rope, backend) for rope in ropes}
    scales = dict.fromkeys(kind[2] for kind in layers if kind is not None and kind[2] is not None)
    factors = {None: None} | {scale: scale.factors(positions) for scale in scales}
    return [kind and Rotation(*angles[kind[:2]], factors[kind[2]]) for kind in layers]


def head_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> tuple[int, ...] | None:
    """Return the order in which a checkpoint's head elements must be taken for the kernels.

    Element i of the reordered head is element ``order[i]`` of the head in the checkpoint. The new
    order is ``[first of each pair, half of the rest, second of each pair, the rest]``, so that
    ``(x[i], x[i + D/2])`` is a pair for all i. The result is None if the order does not change.

    Args:
      head_dim: head dimension (D).
      rotary_dim: number of elements that are rotated. They come first in the checkpoint.
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
