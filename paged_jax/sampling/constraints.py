"""The tokens that grammars allow next, for every slot, and how they bind what is drawn.

The host knows the grammars. Before a dispatch it writes, for each slot that has one, the tokens
that must come next and, for the position after those, a bit for each token that may:

    position      start         start + 1     start + 2             start + 3
                  forced_ids[0] forced_ids[1] drawn from the mask   nothing is known: the dispatch
                                                                    ends before it
"""

import dataclasses

import jax
import jax.numpy as jnp

from paged_jax.short_repr import short_repr


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constraints:
    """What may be drawn in each slot, on the device.

    Attributes:
      starts: i32[S], the position of the first token that is bound; -1 where none is.
      num_forced: i32[S], tokens from there on that are known.
      forced_ids: i32[S, N], those tokens.
      masks: i32[S, V / 32], rounded up: bits of the tokens that may follow them, the lowest bit of
        the first number that of token 0.

    Memory: a bit for each slot and token of the vocabulary, 16 KB a slot at V = 128,000.
    """

    starts: jax.Array
    num_forced: jax.Array
    forced_ids: jax.Array
    masks: jax.Array

    @classmethod
    def create(cls, num_slots: int, vocab_size: int, max_forced: int) -> "Constraints":
        """No slot is bound.

        Args:
          num_slots: S.
          vocab_size: V; 0 where no slot will ever be bound.
          max_forced: N, most tokens that are known of a slot.
        """
        return cls(
            starts=jnp.full(num_slots, -1, jnp.int32),
            num_forced=jnp.zeros(num_slots, jnp.int32),
            forced_ids=jnp.zeros((num_slots, max_forced), jnp.int32),
            masks=jnp.zeros((num_slots, num_words(vocab_size)), jnp.int32),
        )

    @property
    def can_bind(self) -> bool:
        """Whether there is room for masks."""
        return self.masks.shape[1] > 0

    def of_rows(self, slots: jax.Array) -> "Constraints":
        """Those of the rows of a batch, but for the masks, which are not copied.

        Args:
          slots: i32[B], the slots of the rows; for rows that are never active anything.
        """
        parts = self.starts, self.num_forced, self.forced_ids
        parts = [x.at[slots].get(mode="clip") for x in parts]
        return Constraints(*parts, masks=self.masks)

    def write(
        self,
        slots: jax.Array,
        starts: jax.Array,
        num_forced: jax.Array,
        forced_ids: jax.Array,
        masks: jax.Array,
    ) -> "Constraints":
        """Bind some slots anew: as many rows as there are slots, those of slots below 0 ignored."""
        num_slots = self.starts.shape[0]
        slots = jnp.where(slots >= 0, slots, num_slots)
        new = Constraints(starts, num_forced, forced_ids, masks)
        return jax.tree.map(lambda old, x: old.at[slots].set(x, mode="drop"), self, new)

    def is_masked(self, positions: jax.Array) -> jax.Array:
        """Which rows draw from a mask at these positions i32[B], bool[B]."""
        return (self.starts >= 0) & (positions == self.starts + self.num_forced)

    def mask(
        self, logits: jax.Array, positions: jax.Array, active: jax.Array, slots: jax.Array
    ) -> jax.Array:
        """Drop what the masks of active rows do not allow, f32[B, V].

        A token that a mask allows can be drawn, however improbable: -inf becomes the lowest number.
        """
        vocab_size = logits.shape[1]
        words = self.masks.at[slots].get(mode="clip")
        bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
        allowed = bits.reshape(words.shape[0], -1)[:, :vocab_size] == 1
        lowest = jnp.finfo(logits.dtype).min
        bound = jnp.where(allowed, jnp.maximum(logits, lowest), -jnp.inf)
        return jnp.where((active & self.is_masked(positions))[:, None], bound, logits)

    def force(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """The tokens that are known in the place of drawn ones, i32[B]."""
        place = positions - self.starts
        is_forced = (self.starts >= 0) & (place >= 0) & (place < self.num_forced)
        place = jnp.clip(place, 0, self.forced_ids.shape[1] - 1)
        known = jnp.take_along_axis(self.forced_ids, place[:, None], axis=1)[:, 0]
        return jnp.where(is_forced, known, token_ids)


def num_words(vocab_size: int) -> int:
    """Numbers of 32 bits that hold a bit for each token.

    Example:
      >>> num_words(64), num_words(65)
      (2, 3)
    """
    return -(-vocab_size // 32)
