# pyright: strict, reportUnknownMemberType=false
"""Interface of layers to their cache.

A layer passes its inputs to a function of the type `Attend`. Attention layers pass queries, keys
and values, as `Projection` or `Heads`. The function decides to which tokens the queries attend.
Recurrent layers pass a `Recurrence`. The function reads the states from their storage, and writes
the new states back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from paged_jax.cache.attention_metadata import SlotMapping
from paged_jax.cache.retention import Retention, retention
from paged_jax.formatting import short_repr
from paged_jax.kernels import paged_rope_write, paged_write
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.norm_rope import split_and_rotate
from paged_jax.kernels.op import backend_for, is_exact
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.state_rows import StateRows
from paged_jax.models.layer_groups import StateShape


class Projection(NamedTuple):
    """Projected queries, keys and values, before they are normalised and rotated.

    Attributes:
      qkv: float32 ``[..., K, G + 2, D]``: for each KV head its G queries, its key and its value.
      cos: float32 ``[..., D / 2]``, cosines of the rotation angles.
      sin: float32 ``[..., D / 2]``, sines of the rotation angles.
      norms: weights of the RMS norms of queries and of keys, each ``[D]``; None if they are not
        normalised.
      norm_eps: constant added to the mean square of a head in these norms.
      scale: factor of the attention scores; None for ``D ** -0.5``.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None for no cap.
      sinks: floating point ``[H]``, one additional logit in the softmax of each head; None for no
        sinks.
    """

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    norms: tuple[jax.Array, jax.Array] | None
    norm_eps: float
    scale: float | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None

    # None means that a value has as many elements as a key (D), see `Heads.value_dim`.
    value_dim = None

    def split(self, backend: str | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normalise and rotate; return queries ``[..., H, D]``, keys and values ``[..., K, D]``.

        For `backend`, see `sum_rows`.
        """
        return split_and_rotate(
            self.qkv, self.cos, self.sin, self.norms, norm_eps=self.norm_eps, backend=backend
        )

    def write(
        self, pools: Pools, slot_mapping: SlotMapping, index: int | jax.Array, backend: str | None
    ) -> tuple[jax.Array, Pools]:
        """Normalise, rotate, and write keys and values into the pools, in one launch if possible.

        Args:
          pools: the pools of the layer's group.
          slot_mapping: where each token is written.
          index: index of the layer in the pools.
          backend: backend of the model's ops, see `paged_write`.

        Returns:
          Queries ``[N, H, D]`` ready for attention, and the new pools.

        Raises:
          ValueError: the pools have no V.
        """
        if pools.v is None:
            raise ValueError(
                "PagedModel: cache must have a V pool for layers that have keys and values, got a "
                "cache with only a K pool. Make the cache with create_cache."
            )
        if is_exact(backend):
            # The sums of the norms must be those of the exact backend.
            heads = Heads(*self.split(backend), self.scale, self.soft_cap, self.sinks)
            return heads.write(pools, slot_mapping, index, backend)
        q_norm, k_norm = self.norms or (None, None)
        return paged_rope_write(
            pools.k,
            pools.v,
            self.qkv,
            self.cos,
            self.sin,
            *slot_mapping,
            layer=index,
            k_scale=pools.k_scale,
            v_scale=pools.v_scale,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=self.norm_eps,
            backend=backend_for("rope_write", backend),
        )


@short_repr
class Heads(NamedTuple):
    """Queries, keys and values of a layer, already normalised and rotated.

    Arrays are ``[N, ...]`` with a cache, where N is the number of tokens of any sequences, and
    ``[B, T, ...]`` without.

    Attributes:
      q: ``[N, H, D]``, floating point.
      k: ``[N, K, D]``. Query heads ``g * H / K`` to ``(g + 1) * H / K - 1`` share KV head ``g``.
        `k` and `v` are None if the layer reads the keys and values of an earlier layer.
      v: ``[N, K, D]``. Only `v` is None if the values are the first `value_dim` elements of the
        keys. A cache then stores only the keys.
      scale, soft_cap, sinks: see `Projection`.
      value_dim: if only `v` is None, number of elements of a value (U), which is also the output
        size of a head.
    """

    q: jax.Array
    k: jax.Array | None
    v: jax.Array | None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None
    value_dim: int | None = None

    def split(self, backend: str | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries ``[..., H, D]``, keys ``[..., K, D]``, and values ``[..., K, U]``."""
        del backend  # nothing is summed
        assert self.k is not None
        return self.q, self.k, self.k[..., : self.value_dim] if self.v is None else self.v

    def write(
        self, pools: Pools, slot_mapping: SlotMapping, index: int | jax.Array, backend: str | None
    ) -> tuple[jax.Array, Pools]:
        """Write keys and values into the pools, unless the layer has none.

        For the arguments and the result, see `Projection.write`.
        """
        if self.k is not None:
            pools = paged_write(
                pools.k,
                pools.v,
                self.k,
                self.v,
                *slot_mapping,
                layer=index,
                k_scale=pools.k_scale,
                v_scale=pools.v_scale,
                backend=backend_for("write", backend),
            )
        return self.q.astype(KVDtype.of(pools.dtype).query_dtype), pools


# States of a recurrent layer: an array ``[B, *shape]`` for each `StateShape`, where B is the number
# of sequences in the batch. If each sequence has one new token, they may instead be `StateRows`,
# which refer to rows of the pools.
States = tuple[Any, ...]


@short_repr
class Recurrence(NamedTuple):
    """Inputs of a recurrent layer, and the function that computes outputs and new states.

    The function `advance` is pure, so a caller may run it several times, for example with other
    states or with fewer tokens.

    Attributes:
      inputs: inputs of the recurrence, each float32 ``[N, features]``, or ``[B, T, features]``
        without a cache.
      advance: function that runs the recurrence. It takes the inputs ``[B, T, features]``, the
        states before the first token of each row, and the number of tokens in each row, i32
        ``[B]``. The tokens of a row come first. Padding after them changes no state, and its
        outputs are arbitrary. The function returns the outputs, float32 ``[B, T, features]``, and
        the states after the last token of each row, in the dtypes of the given states.
      arrays: shape and dtype of each state array. The state of a new sequence is zero.
      takes_rows: whether `advance` accepts `StateRows` instead of arrays if each row has one token.
        It then updates the states in their pools, and returns `StateRows` with the new pools.
    """

    inputs: tuple[jax.Array, ...]
    advance: Callable[[tuple[jax.Array, ...], States, jax.Array], tuple[jax.Array, States]]
    arrays: tuple[StateShape, ...]
    takes_rows: bool = False

    def run(self, states: States, num_tokens: jax.Array) -> tuple[jax.Array, States]:
        """Run the recurrence over the tokens of each row.

        Args:
          states: states before the first token of each row, ``[B, *shape]`` for each array, or
            `StateRows`.
          num_tokens: i32 ``[B]``, number of tokens in each row, at most T. The inputs have T
            positions per row, including padding. If they are ``[N, features]``, T is N / B.

        Returns:
          The outputs, float32 ``[N, features]`` or ``[B, T, features]`` like the inputs, and the
          new states.
        """
        B = num_tokens.shape[0]
        rows = tuple(x.reshape(B, -1, x.shape[-1]) for x in self.inputs)
        out, states = self.advance(rows, states, num_tokens)
        return out.reshape(*self.inputs[0].shape[:-1], -1), states

    def run_in_order(
        self, states: States, num_tokens: jax.Array, backend: str | None
    ) -> tuple[jax.Array, States]:
        """Run the recurrence over one token after the other, as decode steps do.

        The results have the bits of decode steps. It takes more time than `run`.

        Args:
          states: states before the first token of each row, ``[B, *shape]`` for each array.
          num_tokens: i32 ``[B]``, number of tokens in each row, see `run`.
          backend: backend of a decode step.

        Returns:
          The same as `run`.
        """
        assert self.takes_rows
        B = num_tokens.shape[0]
        inputs = (jnp.swapaxes(x.reshape(B, -1, x.shape[-1]), 0, 1) for x in self.inputs)
        entries = jnp.arange(B, dtype=jnp.int32)

        def advance(pools: States, token: Any) -> tuple[States, jax.Array]:
            inputs, index = token
            rows = tuple(StateRows(pool, 0, entries, entries, backend) for pool in pools)
            count = (index < num_tokens).astype(jnp.int32)
            out, new_rows = self.advance(tuple(x[:, None] for x in inputs), rows, count)
            return tuple(state_rows.pool for state_rows in new_rows), out[:, 0]

        tokens = tuple(inputs)
        steps = jnp.arange(tokens[0].shape[0], dtype=jnp.int32)
        pools = tuple(state[None] for state in states)
        pools, out = lax.scan(advance, pools, (tokens, steps))
        out = jnp.swapaxes(out, 0, 1).reshape(*self.inputs[0].shape[:-1], -1)
        return out, tuple(pool[0] for pool in pools)

    def initial_states(self, batch_size: int, dtype: DTypeLike) -> States:
        """Return the states of new sequences, which are zero.

        Args:
          batch_size: number of sequences (B).
          dtype: dtype of the state arrays that have no dtype of their own, see `StateShape`.
        """
        return tuple(
            jnp.zeros((batch_size, *array.shape), array.dtype or dtype) for array in self.arrays
        )


# Inputs that a layer passes to its `attend` function.
LayerInputs = Projection | Heads | Recurrence

# Value that each layer passes on to the next: the pools of the cache, or an empty tuple without a
# cache.
Carry = TypeVar("Carry")

# Function that connects a layer to its cache. It takes the layer's index, the layer's inputs and
# the carry. It returns the output and the new carry. The output is floating point ``[..., H, U]``,
# or ``[..., features]`` for a `Recurrence`. The index is traced if the layers run in a scan.
Attend = Callable[[int | jax.Array, LayerInputs, Carry], tuple[jax.Array, Carry]]


class Reach(NamedTuple):
    """Limits on the tokens that a layer's queries attend to. None means no limit.

    Attributes:
      sliding_window: number of last tokens that the query attends to, including its own token.
      chunk: chunk size. A query attends only to tokens of its own chunk.
    """

    sliding_window: int | None
    chunk: int | None

    @property
    def retention(self) -> Retention:
        """The rule for the tokens that a cache must keep for the layer."""
        return retention(self.sliding_window)
