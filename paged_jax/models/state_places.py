"""Where the states of a step's rows are in the pools of recurrent layers.

A step reads and writes each state once. If each row has one token, the layer may advance the states
in their pools, see `StateRows`.

When drafts are verified, it is not yet known which tokens are accepted, and a token cannot be
removed from a state. So the recurrence runs twice: `advance` computes the outputs of all tokens and
leaves the states unchanged, and `advance_postponed` then applies only the accepted tokens::

    score T drafts      read S, outputs of T tokens          inputs of all recurrent layers are kept
    accept n of them
    advance             read S, apply n tokens, write S
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.cache.groups import LayerPlaces, StateGroup, find_layer
from paged_jax.kernels.backend import StateRows
from paged_jax.kernels.opaque_call import take_or_fill
from paged_jax.kernels.pool_format import query_dtype
from paged_jax.kernels.rows import set_states, take_states
from paged_jax.models.layer_groups import layer_places

if TYPE_CHECKING:  # types in annotations only
    from paged_jax.cache.paged_cache import PagedCache
    from paged_jax.models.config import LlamaConfig
    from paged_jax.models.layer_attention import Recurrence

# `Pools` of each group of attention layers, then `StatePools` of each group of recurrent layers.
GroupPools = tuple[Any, ...]


class StatePlaces(NamedTuple):
    """Entries of the rows' states, see `StateTables`.

    Attributes:
      sources: i32 ``[B]``, the entry that each row reads; P, the number of entries, for zeros.
      entries: i32 ``[B]``, the entry that each row writes; P for rows that write nothing.
      spares: i32 ``[B]``, the entry that each row writes from `turns` tokens on, see
        `state_tables.plan_states`; P for rows that never switch.
      turns: i32 ``[B]``, number of tokens at which each row switches to its spare entry.
      num_entries: P.
      layers: group of each recurrent layer and the layer's index in the group.
      first_pools: index of the first group of recurrent layers in the pools of the cache.
      postponed: layers and recurrences that `advance` has run without writing their states; None
        if it writes all states. The list grows while a program is traced.
    """

    sources: jax.Array
    entries: jax.Array
    spares: jax.Array
    turns: jax.Array
    num_entries: int
    layers: LayerPlaces
    first_pools: int
    postponed: list[tuple[int | jax.Array, "Recurrence"]] | None = None

    @classmethod
    def of_rows(
        cls, cache: "PagedCache", rows: jax.Array, postpones: bool = False
    ) -> "StatePlaces | None":
        """Return the entries that `paged_cache.reserve` or `plan` has chosen.

        Rows that are left out have a slot that does not exist. With `postpones`, `advance` leaves
        the states as they are.

        Returns:
          The entries; None if the cache has no states.
        """
        if cache.states is None:
            return None
        tables, P = cache.states.tables, cache.states.num_entries
        sources, entries, spares, turns = (
            take_or_fill(x, rows, fill_value=P)
            for x in (tables.sources, tables.entries, tables.spares, tables.turns)
        )
        layers, first = cache.states.layers, len(cache.groups)
        ids = sources, entries, spares, turns
        return cls(*ids, P, layers, first, [] if postpones else None)

    def at_step(
        self, step: int | jax.Array, active: jax.Array, lengths: jax.Array
    ) -> "StatePlaces":
        """Return the entries of a decode step.

        Steps after the first read the entries that the previous step has written.

        Args:
          step: i32 ``[]``, number of the step in its dispatch, from 0.
          active: bool ``[B]``, False for rows that get no token.
          lengths: i32 ``[B]``, tokens of each row before the step.
        """
        P, has_spare = self.num_entries, self.spares < self.num_entries
        first = jnp.where(step == 0, self.sources, self.entries)
        entries = jnp.where(has_spare & (lengths >= self.turns), self.spares, self.entries)
        return self._replace(
            sources=jnp.where(has_spare & (lengths > self.turns), self.spares, first),
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
        """Advance the states of a recurrent layer, or only compute its output.

        Args:
          layer: index of the layer in the model.
          recurrence: the inputs of the layer and its recurrence.
          carry: the pools.
          num_tokens: i32 ``[B]``, number of tokens of each row.
          backend: backend of a step of one token, see `paged_jax.kernels.dispatch`.

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
            out, new = recurrence.run(tuple(map(take_states, rows)), num_tokens)
            if self.postponed is not None:
                self.postponed.append((layer, recurrence))
                return out, carry
            pools = tuple(map(set_states, rows, new))
        return out, (*carry[:group], pools, *carry[group + 1 :])

    def advance_postponed(self, carry: GroupPools, num_tokens: jax.Array) -> GroupPools:
        """Return the pools after all postponed layers have applied the first tokens of each row."""
        places = self._replace(postponed=None)
        for layer, recurrence in self.postponed or ():
            _, carry = places.advance(layer, recurrence, carry, num_tokens)
        return carry


def create_states(
    config: "LlamaConfig", num_entries: int, num_slots: int, block_size: int, dtype: DTypeLike
) -> StateGroup | None:
    """Return the states of recurrent layers; None if the model has none."""
    if not config.state_groups:
        return None
    other = query_dtype(dtype)
    arrays = [
        [(len(group.layers), array.shape, array.dtype or other) for array in group.states]
        for group in config.state_groups
    ]
    return StateGroup.create(
        arrays,
        layers=layer_places(config.state_groups, range(config.num_hidden_layers)),
        num_entries=num_entries,
        num_slots=num_slots,
        block_size=block_size,
    )
