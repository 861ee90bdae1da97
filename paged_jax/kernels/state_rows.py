# pyright: strict, reportUnknownMemberType=false
"""Recurrent states in a pool: rows that share an entry advance from one read of it.

`StateRows` says which entry each row reads and writes. The steps are the arguments of the op
`advance_rows`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """Recurrent states of a batch, which are entries in a pool.

    Each row of the batch reads its old state from an entry of the pool, and writes its new state to
    an entry. If the sequence owns its state, both entries are the same. After a fork, several rows
    may read the same entry, but no two rows write the same entry::

        sources   [ 3  3  7  P ]      rows 0 and 1 read entry 3, row 3 reads zeros
        entries   [ 5  3  7  P ]      row 0 writes a new entry, row 1 in place, row 3 nothing

    If an entry is both read and written, one of the rows that read it writes it. A kernel can
    therefore update the pool in place: it loads a state once for all rows that read it, and then
    stores their new states.

    Attributes:
      pool: ``[L, P, ...]``, the states by layer and entry, for a group of recurrent layers.
      layer: i32 ``[]``, index of the layer in the pool.
      sources: i32 ``[B]``, the entry that each row reads; P for a state of zeros.
      entries: i32 ``[B]``, the entry that each row writes, all different; P for rows that write
        nothing.
      backend: name of the backend that updates the pool in place, see `op` (static).
    """

    pool: jax.Array
    layer: int | jax.Array
    sources: jax.Array
    entries: jax.Array
    backend: str | None = field(default=None, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch (B)."""
        return self.entries.shape[0]


class ConvolutionStep(NamedTuple):
    """Arguments of `paged_jax.kernels.recurrent.causal_convolution` for one token per row.

    Attributes:
      rows: the states, in a pool ``[L, P, (w - 1) * F]``.
      x: inputs, float32 ``[B, F]``.
      weight: filters of w tokens, floating point ``[F, w]``.
      bias: floating point ``[F]`` or None.
      num_tokens: i32 ``[B]``, 1; or 0 for rows that keep their state.
    """

    rows: StateRows
    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    num_tokens: jax.Array

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of a row."""
        return self.rows.pool.shape[2:]


class RecurrentStep(NamedTuple):
    """Arguments of `delta_rule` or `state_space` in `paged_jax.kernels.recurrent`, for one token.

    Attributes:
      rows: the states, in a pool ``[L, P, K * G, D, U]``, or ``[L, P, K * G, U, D]`` without beta.
        The pool may pad D and U.
      q: vectors that read from the state, float32 ``[B, K, D]``.
      k: vectors that write to the state, float32 ``[B, K, D]``.
      v: values to write, float32 ``[B, K, G, U]``.
      log_decay: logarithm of the decay of the state, float32 ``[B, K, G, D]``, or ``[B, K, G, 1]``
        if all elements of a key decay equally.
      beta: step size of the delta rule, float32 ``[B, K, G]``. With None, the value that a key
        reads from the state is not subtracted before `v` is written, as in Mamba-2.
    """

    rows: StateRows
    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None

    @property
    def key_axis(self) -> int:
        """Dimension of keys in the state of a head: 0 for ``[D, U]``, 1 for ``[U, D]``.

        The delta rule reads a state twice, so its sums are over the dimension that is cheaper to
        sum over. Values of Mamba-2 usually have 64 elements, which would fill half of the lanes of
        a TPU.
        """
        return 1 if self.beta is None else 0

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of a row, without the padding in the pool."""
        D, U = self.k.shape[-1], self.v.shape[-1]
        return self.rows.pool.shape[2], *((U, D) if self.key_axis else (D, U))


StateStep = ConvolutionStep | RecurrentStep
