"""Layout and metadata of GGUF files that several families share."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_jax.models.gguf_layout import Order
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.layer_groups import FULL, RECURRENT
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.attention import Attention


def pair_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Return the row in the file of each row of a projection whose pairs are neighbours there.

    llama.cpp rotates the elements (0, 1), (2, 3) and so on of each head. Hugging Face models rotate
    pairs at a distance of half of the head. So row i of the first half of a head is row 2 i of this
    head in the file, and row i of the second half is row 2 i + 1.

    Example:
      >>> pair_rows(num_heads=2, head_dim=4).tolist()
      [0, 2, 1, 3, 4, 6, 5, 7]
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _pair_queries(spec: LayerSpec) -> np.ndarray:
    attention = spec.get(Attention)
    return pair_rows(attention.num_heads, attention.head_dim)


def _pair_keys(spec: LayerSpec) -> np.ndarray:
    attention = spec.get(Attention)
    return pair_rows(attention.num_kv_heads, attention.head_dim)


# Row orders of families for which llama.cpp rotates pairs of neighbouring elements.
PAIRED_ROWS: Mapping[str, Order] = {"q_proj": _pair_queries, "k_proj": _pair_keys}


def read_recurrent_layers(metadata: GgufMetadata, recurrent: str = RECURRENT) -> dict[str, Any]:
    """Return the KV heads and the types of layers. Recurrent layers have 0 KV heads in the file.

    `recurrent` is the name of recurrent layers in ``layer_types``.
    """
    key = "attention.head_count_kv"
    counts = metadata.integers(key)
    heads = {count for count in counts if count}
    if len(heads) > 1:
        raise metadata.unsupported(key, "that differs between layers with attention")
    types = [FULL if count else recurrent for count in counts]
    return {"num_key_value_heads": max(counts, default=0) or None, "layer_types": types}


def check_no_window(metadata: GgufMetadata, entries: Mapping[str, Any]) -> None:
    """Check that the file has no sliding window, or one of the whole context.

    Raises:
      UnsupportedConfigError: it has a shorter one.
    """
    window = metadata.integer("attention.sliding_window", 0)
    if 0 < window < entries["max_position_embeddings"]:
        raise metadata.unsupported("attention.sliding_window", f"= {window}")
