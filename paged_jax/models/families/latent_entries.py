"""Entries of a ``config.json`` about latent attention, for families of several lineages.

A function ``read_...`` has a counterpart ``write_...`` that returns the entries for it. The errors
are those of `LlamaConfig.from_dict`.
"""

import math
from typing import Any

from paged_jax.arguments import check_positive
from paged_jax.models.config import Family
from paged_jax.models.config_json import ConfigEntries, read_integer, read_number
from paged_jax.models.families.common import read_length, read_rope_scaling, write_rope
from paged_jax.models.families.rope_entries import (
    check_no_query_scale,
    check_rope_keys,
    check_same_for_all,
    choose_object,
    yarn_scale,
)
from paged_jax.models.parts.latent import LatentAttention, LatentSizes
from paged_jax.models.rope import Rope

# Required keys with the sizes of latent attention. One more key, `q_lora_rank`, may be null.
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Entries that the files contain, although they follow from the sizes.
IGNORED_HEAD_KEYS = ("head_dim", "num_key_value_heads")


def read_num_heads(entries: ConfigEntries) -> int:
    """Return the number of heads, all of which read the same latent vectors."""
    num_heads = read_integer(entries, "num_attention_heads")
    check_positive("LlamaConfig", num_attention_heads=num_heads)
    return num_heads


def read_latent_sizes(entries: ConfigEntries) -> LatentSizes:
    """Return the sizes of latent attention."""
    sizes = {name: read_integer(entries, name) for name in _SIZES}
    check_positive("LlamaConfig", **sizes)
    if sizes["qk_rope_head_dim"] % 2:
        raise ValueError(
            f"LlamaConfig: qk_rope_head_dim must be even, got {sizes['qk_rope_head_dim']}."
        )
    q_lora_rank = read_integer(entries, "q_lora_rank", None) or 0
    if q_lora_rank < 0:
        raise ValueError(f"LlamaConfig: q_lora_rank must be 0 or more, got {q_lora_rank}.")
    return LatentSizes(q_lora_rank, **sizes)


def write_latent_sizes(sizes: LatentSizes) -> dict[str, Any]:
    """Return the entries for `read_latent_sizes`."""
    written = {name: getattr(sizes, name) for name in _SIZES}
    return {"q_lora_rank": sizes.q_lora_rank or None, **written}


def read_latent_rope(
    family: Family, entries: ConfigEntries, sizes: LatentSizes, *, has_query_scale: bool = False
) -> Rope:
    """Return the rotary embedding of the rotated part of each head.

    This part is rotated completely, also if ``partial_rotary_factor`` is its fraction of the head.

    Args:
      family: family of the model.
      entries: content of the ``config.json``.
      sizes: sizes of latent attention.
      has_query_scale: whether the family reads ``llama_4_scaling_beta``, see `read_query_scale`.
    """
    rope_object = choose_object(entries, family)
    check_same_for_all(rope_object, family.architecture)
    check_rope_keys(rope_object, family.architecture)
    if not has_query_scale:
        check_no_query_scale(entries, rope_object, family.architecture)
    merged = entries.replace(
        {key: value for key, value in rope_object.items() if value is not None}
    )
    return Rope(
        head_dim=sizes.qk_rope_head_dim,
        rotary_dim=sizes.qk_rope_head_dim,
        theta=read_number(merged, "rope_theta", 10000.0),
        scaling=read_rope_scaling(entries, rope_object),
        max_position_embeddings=read_length(family, entries),
    )


def read_latent_scale(
    family: Family, entries: ConfigEntries, rope: Rope, sizes: LatentSizes
) -> float | None:
    """Return the factor of the attention scores; None for ``query_dim ** -0.5``.

    With ``mscale_all_dim``, the scaling of `rope` increases it, in addition to its factor of
    queries and keys.
    """
    rope_object = choose_object(entries, family)
    if rope.scaling is None or not rope_object.get("mscale_all_dim"):
        return None
    scale = yarn_scale(rope.scaling.factor, read_number(rope_object, "mscale_all_dim"))
    return sizes.query_dim**-0.5 * scale**2


def write_latent_rope(family: Family, attention: LatentAttention) -> dict[str, Any]:
    """Return the entries for `read_latent_rope` and `read_latent_scale`."""
    rope, scale = attention.rope, attention.scale
    written = write_rope(family, rope)
    if (
        rope is None
        or rope.scaling is None
        or scale is None
        or (factor := rope.scaling.factor) <= 1
    ):
        return written
    root = math.sqrt(scale * attention.sizes.query_dim**0.5)
    # Rounding to 12 digits hides rounding errors, and keeps every number that a person would write.
    mscale = float(f"{(root - 1) / (0.1 * math.log(factor)):.12g}")
    if mscale:
        written["rope_scaling"]["mscale_all_dim"] = mscale
    return written
