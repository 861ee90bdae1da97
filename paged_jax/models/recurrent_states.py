"""Recurrences of layers over the states in the pools of a cache.

A step reads and writes the state of each row once, in the entries of its `StateMetadata`. If each
row has one token, a layer may update the states in place in their pools, see `StateRows`.

When draft tokens are verified, it is not known yet which of them will be accepted, and the effect
of a token on a state cannot be undone. So the recurrence runs twice. `run_without_writing` computes
the outputs of all tokens, but does not change the states S. Later, `DraftStates.advance` applies
only the accepted tokens to the states::

    score T drafts      run_without_writing    read S, compute the outputs of T tokens, and keep the
                                               inputs of the recurrence
    accept n of them
    update states       DraftStates.advance    read S, apply the first n tokens, write S
"""

from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from paged_jax.cache.attention_metadata import AttentionMetadata
from paged_jax.cache.groups import StateGroup, find_layer
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op import is_exact
from paged_jax.kernels.padding import padded_state_shape
from paged_jax.kernels.rows import set_states, take_states
from paged_jax.kernels.state_rows import StateRows
from paged_jax.models.config import ModelConfig
from paged_jax.models.layer_attention import Recurrence, States

# The pools of each group of the cache, in the order of `PagedCache.groups`: the `Pools` of a group
# of attention layers, or a tuple of `StatePools`.
GroupPools = tuple[Any, ...]


def advance_states(
    metadata: AttentionMetadata,
    layer: int | jax.Array,
    recurrence: Recurrence,
    carry: GroupPools,
    num_tokens: jax.Array,
    backend: str | None,
) -> tuple[jax.Array, GroupPools]:
    """Run the recurrence of a layer on the states in the pools, and write the new states.

    Args:
      metadata: entries that the rows read and write.
      layer: index of the layer in the model.
      recurrence: inputs of the layer, and the function that computes its outputs.
      carry: pools of all groups of the cache.
      num_tokens: i32 ``[B]``, number of tokens of each row to apply.
      backend: backend of steps in which each row has one token, see `paged_jax.kernels.op`.

    Returns:
      The output of the layer ``[N, features]``, and the new pools.

    Raises:
      ValueError: the cache has no states.
    """
    group, kind, rows = _state_rows(metadata, layer, carry, backend)
    has_one_token = recurrence.inputs[0].shape[0] == num_tokens.shape[0]
    if recurrence.takes_rows and has_one_token:
        out, new_rows = recurrence.run(rows, num_tokens)
        pools = tuple(state_rows.pool for state_rows in new_rows)
    else:
        out, states = _run_over_states(rows, recurrence, num_tokens, backend)
        pools = tuple(map(set_states, rows, states))
    pools = (*carry[group][:kind], pools, *carry[group][kind + 1 :])
    return out, (*carry[:group], pools, *carry[group + 1 :])


def run_without_writing(
    metadata: AttentionMetadata,
    layer: int | jax.Array,
    recurrence: Recurrence,
    carry: GroupPools,
    backend: str | None,
) -> jax.Array:
    """Run the recurrence of a layer over all new tokens, and drop the new states.

    For the arguments and the errors, see `advance_states`.

    Returns:
      The output of the layer ``[N, features]``.
    """
    _, _, rows = _state_rows(metadata, layer, carry, backend)
    out, _ = _run_over_states(rows, recurrence, metadata.num_tokens, backend)
    return out


def _state_rows(
    metadata: AttentionMetadata, layer: int | jax.Array, carry: GroupPools, backend: str | None
) -> tuple[int, int, tuple[StateRows, ...]]:
    """Return the index of the layer's group, of its pools in the group, and its states in them."""
    if not metadata.recurrent_layers:
        raise ValueError(
            f"attend: cache must have states for the recurrent layer {layer}, got a cache without "
            "states. Make the cache with create_cache."
        )
    group, kind, index = find_layer(metadata.recurrent_layers, layer)
    sources, entries = metadata.groups[group]
    pools = carry[group][kind]
    return group, kind, tuple(StateRows(pool, index, sources, entries, backend) for pool in pools)


def _run_over_states(
    rows: tuple[StateRows, ...], recurrence: Recurrence, num_tokens: jax.Array, backend: str | None
) -> tuple[jax.Array, States]:
    """Run a recurrence on copies of the states in the pools; return outputs and new states."""
    states = tuple(map(take_states, rows, (array.shape for array in recurrence.arrays)))
    if is_exact(backend):
        return recurrence.run_in_order(states, num_tokens, backend)
    return recurrence.run(states, num_tokens)


class DraftRecurrence(NamedTuple):
    """A layer and its recurrence over draft tokens, which was run without writing states."""

    layer: int | jax.Array
    recurrence: Recurrence


class DraftStates(NamedTuple):
    """States of recurrent layers that wait until it is known which draft tokens are accepted.

    Attributes:
      metadata: metadata of the step that scored the draft tokens.
      recurrences: the recurrences of the step.
      backend: backend of the step.
    """

    metadata: AttentionMetadata
    recurrences: tuple[DraftRecurrence, ...]
    backend: str | None

    def advance(self, pools: GroupPools, num_tokens: jax.Array) -> GroupPools:
        """Apply the first `num_tokens` i32 ``[B]`` draft tokens of each row to the states.

        Returns:
          The new pools.
        """
        backend = self.backend if is_exact(self.backend) else None
        for layer, recurrence in self.recurrences:
            _, pools = advance_states(self.metadata, layer, recurrence, pools, num_tokens, backend)
        return pools


def create_states(
    config: ModelConfig,
    num_entries: int,
    num_slots: int,
    block_size: int,
    dtype: DTypeLike,
    platform: str,
) -> StateGroup:
    """Create the state pools of a cache for a model with recurrent layers."""
    default_dtype = KVDtype.of(dtype).query_dtype
    arrays = [
        [
            (
                len(group.layers),
                padded_state_shape(array.shape, platform),
                array.dtype or default_dtype,
            )
            for array in group.states
        ]
        for group in config.state_groups
    ]
    return StateGroup.create(
        arrays, num_entries=num_entries, num_slots=num_slots, block_size=block_size
    )
