"""How devices that each compute a part of a model make a whole of it, within `jax.shard_map`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.linear import Weight
from paged_jax.models.embedding import look_up


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of one device: its heads, its features of the MLP, its experts, its rows of the
    vocabulary.

    The hidden states are whole on each device. So two sums over the devices are needed in a layer,
    after each product into the residual stream (Megatron-LM, arXiv 1909.08053), or one where both
    run in parallel; one for the embedding, and the logits are gathered. Norms over all heads of a
    token need a sum of two numbers besides.

    Attributes:
      axis_name: the axis of the mesh that the devices lie along.
      vocab_size: V, tokens that all devices know together.
      num_devices: along that axis.
    """

    axis_name: str
    vocab_size: int
    num_devices: int

    @property
    def index(self) -> jax.Array:
        """i32 ``[]``, which of the devices this one is."""
        return lax.axis_index(self.axis_name)

    def add_up(self, x: jax.Array) -> jax.Array:
        """The sum of all devices' results, on each of them."""
        return lax.psum(x, self.axis_name)

    def mean(self, x: jax.Array) -> jax.Array:
        """The mean of all devices' numbers, on each of them."""
        return lax.pmean(x, self.axis_name)

    def look_up(self, table: Weight, token_ids: jax.Array) -> jax.Array:
        """As `embedding.look_up`, in a table of which each device has an equal part of the rows."""
        num_rows = jax.tree.leaves(table)[0].shape[0]
        first = self.index * num_rows
        rows = jnp.clip(token_ids, 0, self.vocab_size - 1) - first
        is_here = (rows >= 0) & (rows < num_rows)
        found = look_up(table, jnp.where(is_here, rows, 0))
        return self.add_up(jnp.where(is_here[:, None], found, 0))

    def gather(self, logits: jax.Array) -> jax.Array:
        """The logits ``[..., V]`` of all tokens from those of each device's own."""
        axis = logits.ndim - 1
        return lax.all_gather(logits, self.axis_name, axis=axis, tiled=True)[..., : self.vocab_size]
