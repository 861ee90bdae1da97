"""Rotary position embedding, with the frequency scalings of the Llama family."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.models.config import LlamaConfig
from paged_jax.models.rope_scaling import RopeScaling


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per token of each rotated pair, float32 ``[D / 2]`` (RoFormer, section 3.2.2)."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = _scale(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def _scale(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # llama3: wavelengths well inside the original context stay, those beyond it are stretched,
    # and between the two the frequency changes linearly in the number of turns per context.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / scaling.factor)


def rotations(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every angle, each float32 ``[..., D / 2]`` for positions ``[...]``."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies).reshape(
        (1,) * positions.ndim + (-1,)
    )
    return jnp.cos(angles), jnp.sin(angles)
