"""Rows of a pool of recurrent states, and the arrays of a step of a single token.

A row of a batch reads an entry of the pool and writes an entry. Both ids are equal while a sequence
owns its state. Several rows may read an entry, after a fork, but no two rows write the same entry::

    sources   [ 3  3  7  P ]      rows 0 and 1 read entry 3, row 3 reads zeros
    entries   [ 5  3  7  P ]      row 0 writes a new entry, row 1 writes in place, row 3 nothing

If a row writes an entry, only rows with the same source read that entry. A kernel that works in
place therefore loads a state once for all rows that read it, before it stores their new states.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """States of the rows of a batch in the pool of a group of layers.

    Attributes:
      pool: ``[L, P, ...]``: layer, entry, and the shape for a sequence.
      layer: i32 ``[]``, index of the layer in the pool.
      sources: i32 ``[B]``, the entry that each row reads; P for zeros.
      entries: i32 ``[B]``, the entry that each row writes, distinct; P for rows that write nothing.
      backend: backend of the ops that update the pool in place, see `dispatch` (static).
    """

    pool: jax.Array
    layer: int | jax.Array
    sources: jax.Array
    entries: jax.Array
    backend: str | None = field(default=None, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Number of rows (B)."""
        return self.entries.shape[0]

    def with_pool(self, pool: jax.Array) -> "StateRows":
        """Return the same rows in another pool."""
        return replace(self, pool=pool)


class ConvolutionStep(NamedTuple):
    """Arrays of a step of `paged_jax.kernels.recurrent.causal_convolution`.

    Attributes:
      rows: the states, in a pool ``[L, P, (w - 1) * F]``.
      x: float32 ``[B, F]``.
      weight: floating point ``[F, w]``.
      bias: floating point ``[F]`` or None.
      num_tokens: i32 ``[B]``, 1; or 0 for rows whose state does not change.
    """

    rows: StateRows
    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    num_tokens: jax.Array


class DeltaStep(NamedTuple):
    """Arrays of a step of `paged_jax.kernels.recurrent.delta_rule`.

    Attributes:
      rows: the states, in a pool ``[L, P, K * G, D, U]``.
      q: float32 ``[B, K, D]``.
      k: float32 ``[B, K, D]``.
      v: float32 ``[B, K, G, U]``.
      log_decay: float32 ``[B, K, G, D]``, or ``[B, K, G, 1]`` if all elements of a key decay
        equally.
      beta: float32 ``[B, K, G]``.
    """

    rows: StateRows
    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


class StateSpaceStep(NamedTuple):
    """Arrays of a step of `paged_jax.kernels.recurrent.state_space`.

    Attributes:
      rows: the states, in a pool ``[L, P, K * G, U, D]``.
      x: float32 ``[B, K, G, U]``.
      b: float32 ``[B, K, D]``.
      c: float32 ``[B, K, D]``.
      log_decay: float32 ``[B, K, G]``.
    """

    rows: StateRows
    x: jax.Array
    b: jax.Array
    c: jax.Array
    log_decay: jax.Array


StateStep = ConvolutionStep | DeltaStep | StateSpaceStep
