"""`Constraints`: the forced tokens and the token masks of slots with a grammar."""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.formatting import short_repr
from paged_jax.sampling.state import num_mask_words


def mask_logits(z: jax.Array, masks: jax.Array) -> jax.Array:
    """Set logits of excluded tokens to -inf. Return logits f32[B, V].

    Args:
      z: f32[B, V], the logits. A logit of -inf of an allowed token becomes the lowest finite
        number, so that the token can be drawn.
      masks: i32[B, ceil(V / 32)], one bit for each allowed token, see `mask_of`.
    """
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : z.shape[1]] == 1
    return jnp.where(allowed, jnp.maximum(z, jnp.finfo(z.dtype).min), -jnp.inf)


NEVER = 2**31 - 1
"""A number that is larger than the position of any token."""


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constraints:
    """Restrictions by the grammars of structured outputs, for the next tokens of each slot.

    The host computes them. Before a step, it writes for each slot with a grammar: the forced
    tokens, to which the grammar allows no alternative, and a mask of the tokens that may follow the
    forced tokens. For example, with two forced tokens:

        position      start         start + 1     start + 2               start + 3
                      forced_ids[0] forced_ids[1] sampled with the mask   the row waits here until
                                                                          the host writes again

    Attributes:
      starts: i32[S], position of the first forced or masked token; -1 for a slot without a grammar.
      num_forced: i32[S], number of forced tokens, from position `starts` on.
      waits_at: i32[S], position at which the row waits until the host has written new restrictions;
        `NEVER` if the grammar has ended.
      forced_ids: i32[S, N], the forced tokens.
      masks: i32[S, ceil(V / 32)], a bit for each token, which is set if the token may follow the
        forced tokens. Token 0 is the lowest bit of the first word.

    Memory: one bit per slot and token of the vocabulary, 16 KB per slot at V = 128,000.
    """

    starts: jax.Array
    num_forced: jax.Array
    waits_at: jax.Array
    forced_ids: jax.Array
    masks: jax.Array

    @classmethod
    def create(cls, num_slots: int, vocab_size: int, max_forced: int) -> "Constraints":
        """Return constraints for slots without grammars.

        Args:
          num_slots: S.
          vocab_size: V; 0 if no slot will ever have a grammar.
          max_forced: N, maximum number of forced tokens of a slot.
        """
        return cls(
            starts=jnp.full(num_slots, -1, jnp.int32),
            num_forced=jnp.zeros(num_slots, jnp.int32),
            waits_at=jnp.full(num_slots, NEVER, jnp.int32),
            forced_ids=jnp.zeros((num_slots, max_forced), jnp.int32),
            masks=jnp.zeros((num_slots, num_mask_words(vocab_size)), jnp.int32),
        )

    @property
    def can_bind(self) -> bool:
        """Whether slots may have grammars: `create` was called with a `vocab_size` above 0."""
        return self.masks.shape[1] > 0

    def of_rows(self, slots: jax.Array) -> "Constraints":
        """Gather the constraints of the rows of a batch.

        `masks` is not gathered: it keeps its S rows, and `mask` indexes it by slot.

        Args:
          slots: i32[B], the slot of each row; any value for rows that are never active.
        """
        parts = self.starts, self.num_forced, self.waits_at, self.forced_ids
        parts = [x.at[slots].get(mode="clip") for x in parts]
        return Constraints(*parts, masks=self.masks)

    def write(
        self,
        slots: jax.Array,
        starts: jax.Array,
        num_forced: jax.Array,
        waits_at: jax.Array,
        forced_ids: jax.Array,
        masks: jax.Array,
    ) -> "Constraints":
        """Replace the rows of some slots. Return the new constraints.

        `slots`, i32[S], has the slots to replace, padded with negative numbers. Each other argument
        has S new rows for the attribute of the same name.
        """
        num_slots = self.starts.shape[0]
        slots = jnp.where(slots >= 0, slots, num_slots)
        new = Constraints(starts, num_forced, waits_at, forced_ids, masks)
        return jax.tree.map(lambda old, x: old.at[slots].set(x, mode="drop"), self, new)

    def limit(self, max_lengths: jax.Array) -> jax.Array:
        """Return `max_lengths` i32[B], limited to `waits_at` for rows with a grammar."""
        return jnp.where(self.starts >= 0, jnp.minimum(max_lengths, self.waits_at), max_lengths)

    def is_masked(self, positions: jax.Array) -> jax.Array:
        """Return, for each row, whether its mask applies at its position, bool[B]."""
        return (self.starts >= 0) & (positions == self.starts + self.num_forced)

    def mask(
        self, logits: jax.Array, positions: jax.Array, active: jax.Array, slots: jax.Array
    ) -> jax.Array:
        """Set logits of tokens that the masks exclude to -inf. Return logits f32[B, V].

        A row is changed only if it is active and its mask applies at its position. A logit of -inf
        of an allowed token then becomes the lowest finite number, so that the token can be drawn.
        """
        bound = mask_logits(logits, self.masks.at[slots].get(mode="clip"))
        return jnp.where((active & self.is_masked(positions))[:, None], bound, logits)

    def force(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Return `token_ids` i32[B], replaced in rows at the position of a forced token."""
        index = positions - self.starts
        is_forced = (self.starts >= 0) & (index >= 0) & (index < self.num_forced)
        index = jnp.clip(index, 0, self.forced_ids.shape[1] - 1)
        forced_tokens = jnp.take_along_axis(self.forced_ids, index[:, None], axis=1)[:, 0]
        return jnp.where(is_forced, forced_tokens, token_ids)
