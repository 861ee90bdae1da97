"""Pool entries with the states of a step's rows, and the update of these states.

A step reads and writes the state of each row once. If each row has one token, a layer may update
the states in place in their pools, see `StateRows`.

When draft tokens are verified, it is not known yet which of them will be accepted, and the effect
of a token on a state cannot be undone. So the recurrence runs twice. `advance` computes the outputs
of all tokens, but does not change the states S. Later, `advance_postponed` applies only the
accepted tokens to the states::

    score T drafts      advance              read S, compute the outputs of T tokens, and keep the
                                             inputs of the recurrence
    accept n of them
    update states       advance_postponed    read S, apply the first n tokens, write S
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.cache.groups import LayerPlaces, StateGroup, find_layer
from paged_jax.kernels.backend import StateRows
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op import is_exact
from paged_jax.kernels.opaque_call import take_or_fill
from paged_jax.kernels.padding import padded_state_shape
from paged_jax.kernels.rows import set_states, take_states
from paged_jax.models.layer_groups import layer_places

if TYPE_CHECKING:  # types in annotations only
    from paged_jax.cache.paged_cache import PagedCache
    from paged_jax.models.config import ModelConfig
    from paged_jax.models.layer_attention import Recurrence

# `Pools` of each group of attention layers, then `StatePools` of each group of recurrent layers.
GroupPools = tuple[Any, ...]


class StatePlaces(NamedTuple):
    """Pool entries that the rows of a step read states from and write states to.

    See `StateTables`. P is the number of entries.

    Attributes:
      sources: i32 ``[B]``, entry that each row reads; P for rows that start with a state of zeros.
      entries: i32 ``[B]``, entry that each row writes; P for rows that write nothing.
      switch_lengths: i32 ``[B]``. When the sequence of a row has this length, the row starts to
        write to `next_entries` instead of `entries`, see `state_tables.plan_states`.
      next_entries: i32 ``[B]``, entry that each row switches to; P for rows that do not switch.
      num_entries: number of entries in the pools (P).
      layers: for each layer, the index of its group of recurrent layers and its index in this
        group; None for other layers.
      first_pools: position of the first group of recurrent layers in the tuple of all pools.
      postponed: list of the layers, with their recurrences and backends, for which `advance` has
        computed outputs but not written states. It is filled while a program is traced. None if
        `advance` writes the states.
    """

    sources: jax.Array
    entries: jax.Array
    switch_lengths: jax.Array
    next_entries: jax.Array
    num_entries: int
    layers: LayerPlaces
    first_pools: int
    postponed: list[tuple[int | jax.Array, "Recurrence", str | None]] | None = None

    @classmethod
    def of_rows(
        cls, cache: "PagedCache", rows: jax.Array, postpones: bool = False
    ) -> "StatePlaces | None":
        """Return the pool entries that `paged_cache.reserve` or `plan` has chosen for the rows.

        Args:
          cache: the cache after the call of that function.
          rows: slot of each row. Rows to skip have a slot that does not exist.
          postpones: whether `advance` must not write states, see `postponed`.

        Returns:
          The entries; None if the cache has no states of recurrent layers.
        """
        if cache.states is None:
            return None
        tables, P = cache.states.tables, cache.states.num_entries
        sources, entries, switch_lengths, next_entries = (
            take_or_fill(x, rows, fill_value=P)
            for x in (tables.sources, tables.entries, tables.switch_lengths, tables.next_entries)
        )
        layers, first = cache.states.layers, len(cache.groups)
        ids = sources, entries, switch_lengths, next_entries
        return cls(*ids, P, layers, first, [] if postpones else None)

    def at_step(
        self, step: int | jax.Array, active: jax.Array, lengths: jax.Array
    ) -> "StatePlaces":
        """Return the entries that one decode step of a dispatch reads and writes.

        The first step reads the source entries. Each later step reads the entries that the previous
        step has written.

        Args:
          step: i32 ``[]``, index of the step in its dispatch, from 0.
          active: bool ``[B]``, False for rows that get no token.
          lengths: i32 ``[B]``, sequence length of each row before the step.
        """
        P, is_switching = self.num_entries, self.next_entries < self.num_entries
        first = jnp.where(step == 0, self.sources, self.entries)
        entries = jnp.where(
            is_switching & (lengths >= self.switch_lengths), self.next_entries, self.entries
        )
        return self._replace(
            sources=jnp.where(
                is_switching & (lengths > self.switch_lengths), self.next_entries, first
            ),
            entries=jnp.where(active, entries, P),
        )

    def advance(
        self,
        layer: int | jax.Array,
        recurrence: "Recurrence",
        carry: GroupPools,
        num_tokens: jax.Array,
        backend: str | None = None,
    ) -> tuple[jax.Array, GroupPools]:
        """Run the recurrence of a layer on the states in the pools.

        It writes the new states to the pools. If `postponed` is not None, it adds the layer to
        `postponed` instead, and `advance_postponed` writes the states.

        Args:
          layer: index of the layer in the model.
          recurrence: inputs of the layer, and the function that computes its outputs.
          carry: pools of all groups of layers.
          num_tokens: i32 ``[B]``, number of new tokens of each row.
          backend: backend of steps in which each row has one token, see
            `paged_jax.kernels.op`.

        Returns:
          The output of the layer ``[N, features]``, and the new pools.
        """
        group, index = find_layer(self.layers, layer)
        group += self.first_pools
        rows = tuple(
            StateRows(pool, index, self.sources, self.entries, backend) for pool in carry[group]
        )
        has_one_token = recurrence.inputs[0].shape[0] == num_tokens.shape[0]
        if recurrence.takes_rows and has_one_token and self.postponed is None:
            out, new = recurrence.run(rows, num_tokens)
            pools = tuple(each.pool for each in new)
        else:
            shapes = (array.shape for array in recurrence.arrays)
            states = tuple(map(take_states, rows, shapes))
            if is_exact(backend):
                out, new = recurrence.run_in_order(states, num_tokens, backend)
            else:
                out, new = recurrence.run(states, num_tokens)
            if self.postponed is not None:
                self.postponed.append((layer, recurrence, backend))
                return out, carry
            pools = tuple(map(set_states, rows, new))
        return out, (*carry[:group], pools, *carry[group + 1 :])

    def advance_postponed(self, carry: GroupPools, num_tokens: jax.Array) -> GroupPools:
        """Advance the states of all postponed layers by the first `num_tokens` tokens of each row.

        Returns:
          The new pools.
        """
        places = self._replace(postponed=None)
        for layer, recurrence, backend in self.postponed or ():
            exact = backend if is_exact(backend) else None
            _, carry = places.advance(layer, recurrence, carry, num_tokens, exact)
        return carry


def create_states(
    config: "ModelConfig",
    num_entries: int,
    num_slots: int,
    block_size: int,
    dtype: DTypeLike,
    platform: str,
) -> StateGroup | None:
    """Create the state pools of a cache; None if the model has no recurrent layers."""
    if not config.state_groups:
        return None
    other = KVDtype.of(dtype).query_dtype
    arrays = [
        [
            (len(group.layers), padded_state_shape(array.shape, platform), array.dtype or other)
            for array in group.states
        ]
        for group in config.state_groups
    ]
    return StateGroup.create(
        arrays,
        layers=layer_places(config.state_groups, range(config.num_hidden_layers)),
        num_entries=num_entries,
        num_slots=num_slots,
        block_size=block_size,
    )
