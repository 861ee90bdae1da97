"""Parts of layers that only some families have."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.parts.activation import Activation, Ungated
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.experts import Experts, Router
from paged_jax.models.parts.latent import LatentAttention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.residual import (
    LaurelSublayer,
    LayerScalar,
    Parallel,
    PerLayerEmbedding,
    SeparateExperts,
    Sublayer,
)
from paged_jax.models.parts.streams import Streams
from paged_jax.models.rope import Rope, RopeScaling
from tests.support import references

# Parts whose kinds differ by their options, and what they consist of. Each other part, norm or
# activation is a kind of its own.
COMMON_PARTS = (
    Attention, LatentAttention, Dense, Experts, Parallel, Sublayer, SeparateExperts, LaurelSublayer,
    LayerScalar, PerLayerEmbedding, Streams, LayerSpec, Norm, HeadNorm, Activation, Ungated, Router,
    Rope, RopeScaling,
)  # fmt: skip


def own_parts(name: str) -> set[str]:
    """Return the classes of a stored model's parts that only some families have."""
    config = LlamaConfig.from_dict(references.stored(name).config)
    return {each.__name__ for each in _classes((config.norm, config.layers)) - {*COMMON_PARTS}}


def _classes(value: Any) -> set[type]:
    """Return the classes of a part and of everything in it."""
    if isinstance(value, tuple):
        return set[type]().union(*map(_classes, value))
    if not dataclasses.is_dataclass(value):
        return set()
    inner = (getattr(value, field.name) for field in dataclasses.fields(value))
    return {type(value)}.union(*map(_classes, inner))


def with_new_parts(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the stored models of `names` with a part that no model of `known` has."""
    parts = set[str]().union(*map(own_parts, known))
    return [name for name in names if name in references.names() and own_parts(name) - parts]
