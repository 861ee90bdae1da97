"""Attention of a layer over the paged cache, for decode steps, prompts and drafts.

A model gets an instance of one of these classes as its function `attend`, and calls it once in each
layer::

    output, carry = attend(layer, heads, carry)

    1.  write K and V of the new tokens into the pools of the layer's group
    2.  attend to the blocks in the block tables

`carry` is `PagedCache.group_pools`, the pools of each group. `heads` holds the queries, keys and
values of the layer. A recurrent layer passes a `Recurrence` instead, see `recurrent_states`. The
`AttentionMetadata` says where the tokens are in the pools, and which blocks a row attends to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from paged_jax.cache.attention_metadata import AttentionMetadata
from paged_jax.cache.groups import find_layer
from paged_jax.kernels import (
    Pools,
    backend_for,
    cascade_attention,
    num_shared_blocks,
    paged_attention,
    paged_prefill_attention,
)
from paged_jax.kernels.attention import chunked_attention, chunked_prefill_attention
from paged_jax.kernels.cascade import is_sharing_possible
from paged_jax.models.config import ModelConfig
from paged_jax.models.layer_attention import LayerInputs, Reach, Recurrence
from paged_jax.models.recurrent_states import (
    DraftRecurrence,
    GroupPools,
    advance_states,
    run_without_writing,
)


@dataclass(frozen=True)
class _CachedAttention:
    """What decode and prefill steps have in common, see `layer_attention.Attend`.

    Attributes:
      metadata: places of the tokens in the cache.
      config: configuration of the model.
      backend: backend of the attention, see `paged_attention`.
    """

    metadata: AttentionMetadata
    config: ModelConfig
    backend: str | None

    def __call__(
        self, layer: int | jax.Array, inputs: LayerInputs, carry: GroupPools
    ) -> tuple[jax.Array, GroupPools]:
        """Run the attention or the recurrence of a layer."""
        metadata = self.metadata
        if isinstance(inputs, Recurrence):
            num_tokens = metadata.num_tokens
            return advance_states(metadata, layer, inputs, carry, num_tokens, self.backend)
        group, index = find_layer(metadata.layers, layer)
        blocks: Any = metadata.groups[group]
        q, pools = inputs.write(carry[group], blocks.slot_mapping, index, self.backend)
        options = {
            "layer": index,
            "scale": inputs.scale,
            "soft_cap": inputs.soft_cap,
            "sinks": inputs.sinks,
            "value_dim": inputs.value_dim,
            "k_scale": pools.k_scale,
            "v_scale": pools.v_scale,
        }
        out = self.attend(q, pools, blocks, self.config.reach(layer), options)
        return out, (*carry[:group], pools, *carry[group + 1 :])

    def attend(
        self, q: jax.Array, pools: Pools, blocks: Any, reach: Reach, options: dict[str, Any]
    ) -> jax.Array:
        """Attend to the blocks of a group, which have the keys and values of the new tokens.

        Args:
          q: queries ``[N, H, D]``.
          pools: the pools of the group.
          blocks: the `BlockMetadata` of the group.
          reach: the tokens that the layer attends to.
          options: other arguments of the attention ops.

        Returns:
          The output, ``[N, H, U]``.
        """
        raise NotImplementedError


class DecodeAttention(_CachedAttention):
    """Attention of a decode step, with one new token per row.

    Layers that attend to all tokens read the common blocks of the metadata, if any, only once per
    step, instead of once for each row.
    """

    def attend(
        self, q: jax.Array, pools: Pools, blocks: Any, reach: Reach, options: dict[str, Any]
    ) -> jax.Array:
        """Attend with one query per row."""
        arrays = q, pools.k, pools.v, blocks.block_tables, self.metadata.seq_lens
        options = {**options, "backend": backend_for("decode", self.backend)}
        window, chunk = reach
        if chunk is not None:
            return chunked_attention(*arrays, chunk=chunk, **options)
        if window is None and blocks.num_common_blocks is not None:
            return cascade_attention(*arrays, blocks.num_common_blocks, **options)
        return paged_attention(*arrays, sliding_window=window, **options)


class PrefillAttention(_CachedAttention):
    """Attention of a prefill step, with up to T new tokens per row."""

    def attend(
        self, q: jax.Array, pools: Pools, blocks: Any, reach: Reach, options: dict[str, Any]
    ) -> jax.Array:
        """Attend with up to T queries per row."""
        lengths = self.metadata.seq_lens, self.metadata.num_tokens
        q_BTHD = q.reshape(lengths[1].shape[0], -1, *q.shape[1:])
        arrays = q_BTHD, pools.k, pools.v, blocks.block_tables, *lengths
        options = {**options, "backend": backend_for("prefill", self.backend)}
        window, chunk = reach
        if chunk is not None:
            out = chunked_prefill_attention(*arrays, chunk=chunk, **options)
        else:
            out = paged_prefill_attention(*arrays, sliding_window=window, **options)
        return out.reshape(*q.shape[:2], out.shape[-1])


class DraftCarry(NamedTuple):
    """Carry of the layers while draft tokens are scored.

    Attributes:
      pools: pools of each group.
      recurrences: the recurrences of the layers so far, which have not changed the pools.
    """

    pools: GroupPools
    recurrences: tuple[DraftRecurrence, ...]


@dataclass(frozen=True)
class DraftAttention:
    """Attention of a step that scores draft tokens, without a change of recurrent states.

    Attributes:
      prefill: the same step as a prefill step, whose recurrences would change the states.
    """

    prefill: PrefillAttention

    def __call__(
        self, layer: int | jax.Array, inputs: LayerInputs, carry: DraftCarry
    ) -> tuple[jax.Array, DraftCarry]:
        """Run the attention of a layer, or its recurrence, which is added to the carry."""
        if isinstance(inputs, Recurrence):
            metadata, backend = self.prefill.metadata, self.prefill.backend
            out = run_without_writing(metadata, layer, inputs, carry.pools, backend)
            draft = DraftRecurrence(layer, inputs)
            return out, carry._replace(recurrences=(*carry.recurrences, draft))
        out, pools = self.prefill(layer, inputs, carry.pools)
        return out, carry._replace(pools=pools)


def count_common_blocks(metadata: AttentionMetadata, config: ModelConfig) -> AttentionMetadata:
    """Add the number of blocks that all rows share, see `cascade_attention`.

    It is the same in all layers of a group, so it is computed once per group. Groups get none if no
    layer of them attends to all tokens, or if they are too small to save time.
    """
    windows = enumerate(config.sliding_windows)
    places = [metadata.layers[layer] for layer, window in windows if window is None]
    groups: list[Any] = list(metadata.groups)
    for group in dict.fromkeys(place[0] for place in places if place is not None):
        tables, C = groups[group].block_tables, metadata.block_size
        B, M = tables.shape
        if is_sharing_possible(B, M, C):
            count = num_shared_blocks(tables, metadata.seq_lens, C)
            groups[group] = replace(groups[group], num_common_blocks=count)
    return replace(metadata, groups=tuple(groups))


def check_layers(
    function: str, metadata: AttentionMetadata, sliding_windows: Sequence[int | None]
) -> None:
    """Check that the cache has the model's layers, and keeps all tokens that they need.

    Raises:
      ValueError: the cache has another number of layers than the model, or it keeps fewer tokens
        than a layer attends to.
    """
    num_layers = len(sliding_windows)
    if len(metadata.layers) != num_layers:
        raise ValueError(
            f"{function}: cache must have {num_layers} layers, got {len(metadata.layers)}. Make "
            "the cache with create_cache."
        )
    for layer, sliding_window in enumerate(sliding_windows):
        place = metadata.layers[layer]
        if place is None:
            continue  # not an attention layer
        blocks: Any = metadata.groups[place[0]]
        if not blocks.retention.serves(sliding_window):
            needed = "all" if sliding_window is None else sliding_window
            raise ValueError(
                f"{function}: cache must keep {needed} tokens for layer {layer}, got a cache that "
                f"keeps the last {blocks.retention.num_tokens}. Make the cache with create_cache."
            )
