# pyright: strict, reportUnknownMemberType=false
"""`AttentionMetadata`: where a step's new tokens are in the cache, and what their rows attend to.

A step appends up to T tokens to each of B sequences, its rows. The model sees them as N = B * T
flattened tokens, including padding tokens. All layers of the step use the same metadata::

                  row 0: length 9, 2 new tokens            row 1: length 5, 1 new token

    positions     [ 7  8 ]                                 [ 4 -1 ]              -1: padding
    block_tables  [ 3  0  6  P ]                           [ 2  5  P  P ]        C = 4
    slot_mapping  blocks [ 0  6 ], offsets [ 3  0 ]        blocks [ 5  P ], offsets [ 0  1 ]

`paged_cache.reserve_rows` builds the metadata of prompts and of single decode steps,
`paged_cache.PlannedRows.at_step` that of a decode step whose blocks were planned together with
those of other steps. `models.paged_attention` uses it in every layer.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from paged_jax.cache.retention import Retention
from paged_jax.formatting import short_repr

# One entry per layer of a model: the index of the layer's group in the cache and, last, the index
# of the layer in the pools of the group; None if the layer keeps nothing of the kind.
LayerPlaces = tuple[tuple[int, ...] | None, ...]


class SlotMapping(NamedTuple):
    """Where the keys and values of each new token are written, as two arguments of `paged_write`.

    Attributes:
      blocks: i32 ``[N]``, block of each token; P (the number of blocks) for padding tokens. P is
        out of range, so they are not written.
      offsets: i32 ``[N]``, offset of each token in its block.
    """

    blocks: jax.Array
    offsets: jax.Array


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMetadata:
    """Metadata of a group of attention layers, whose K and V are in blocks.

    Attributes:
      block_tables: i32 ``[B, M]``, block table of each row, padded with P.
      slot_mapping: block and offset of each new token.
      retention: rule for the tokens that the group keeps (static).
      num_common_blocks: i32 ``[]``, number of leading blocks that all rows share, for cascade
        attention; None without.
    """

    block_tables: jax.Array
    slot_mapping: SlotMapping
    retention: Retention = field(metadata={"static": True})
    num_common_blocks: jax.Array | None = None


class StateMetadata(NamedTuple):
    """Metadata of a group of recurrent layers, which have a state per sequence.

    Attributes:
      sources: i32 ``[B]``, pool entry that each row reads; P (the number of entries) for rows that
        start with a state of zeros.
      entries: i32 ``[B]``, pool entry that each row writes; P for rows that write nothing.
    """

    sources: jax.Array
    entries: jax.Array


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Lengths of a step's rows, positions of its new tokens, and their places in each group.

    Attributes:
      seq_lens: i32 ``[B]``, sequence lengths, including the new tokens; 0 in skipped rows (rows
        with a negative slot, or all rows if there are not enough blocks).
      num_tokens: i32 ``[B]``, number of new tokens, at most T; 0 in skipped rows.
      positions: i32 ``[N]``, position of each token in its sequence; -1 for padding.
      groups: metadata of each group of the cache, in the order of `PagedCache.groups`.
      layers: for each layer, its group and its index in the pools of the group; None for layers
        without attention (static).
      recurrent_layers: the same for the states of recurrent layers, see
        `PagedCache.recurrent_layers` (static).
      block_size: tokens per block (C, static).
    """

    seq_lens: jax.Array
    num_tokens: jax.Array
    positions: jax.Array
    groups: tuple[BlockMetadata | StateMetadata, ...]
    layers: LayerPlaces = field(metadata={"static": True})
    recurrent_layers: LayerPlaces = field(metadata={"static": True})
    block_size: int = field(metadata={"static": True})
