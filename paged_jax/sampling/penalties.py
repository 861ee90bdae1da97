"""Changes of logits before the filters: biases, penalties, masks, allowed tokens and bad words."""

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.sampling.conditions import apply_first
from paged_jax.sampling.constraints import Constraints, mask_logits
from paged_jax.sampling.filters import count_true
from paged_jax.sampling.state import SlotSampling


def change_logits(
    logits: jax.Array,
    is_changed: jax.Array,
    rows: SlotSampling,
    positions: jax.Array,
    active: jax.Array,
    slots: jax.Array,
    constraints: Constraints | None,
) -> jax.Array:
    """Apply biases, penalties, masks, bad words and allowed tokens. Return logits f32[B, V].

    `is_changed`, bool[B], says whether any of these settings changes the logits of a row. The other
    arguments are as for `sample`.
    """

    def adjust(z: jax.Array) -> jax.Array:
        return mask(adjust_logits(z, rows, positions, active, slots))

    def restrict(z: jax.Array) -> jax.Array:
        z = adjust_logits(z, rows, positions, active, slots)
        return mask(restrict_logits(z, rows, positions, slots))

    def mask(z: jax.Array) -> jax.Array:
        return z if constraints is None else constraints.mask(z, positions, active, slots)

    is_restricted = jnp.any(rows.is_restricted & active)
    return apply_first([(is_restricted, restrict), (jnp.any(is_changed), adjust)], logits)


def adjust_logits(
    logits: jax.Array,
    rows: SlotSampling,
    positions: jax.Array,
    active: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """Apply biases and penalties to logits, and exclude stop tokens before min_tokens.

    Return logits f32[B, V]. Settings with neutral values leave a row bitwise unchanged. So the
    result of a row does not depend on whether other rows need this function.
    """
    vocab_size = logits.shape[1]
    is_held = active & (positions < rows.held_until)
    held_ids = jnp.where(is_held[:, None], rows.held_ids, vocab_size)
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    column = lax.broadcasted_iota(jnp.int32, rows.bias_ids.shape, 1)
    is_over = (column < rows.num_start_ids[:, None]) & (positions >= rows.start_until)[:, None]
    bias = jnp.where(is_over, 0.0, rows.bias_values)
    z = logits.at[row, rows.bias_ids].add(bias, mode="drop")
    z = z.at[row, held_ids].set(-jnp.inf, mode="drop")
    is_prompt = rows.prompt_mask.at[slots].get(mode="clip")
    counts = rows.output_counts.at[slots].get(mode="clip")
    is_sampled = counts > 0
    r = rows.repetition_penalty[:, None]
    z = jnp.where(is_prompt | is_sampled, jnp.where(z > 0, z / r, z * r), z)
    z = z - rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return z - jnp.where(is_sampled, rows.presence_penalty[:, None], 0.0)


def restrict_logits(
    z: jax.Array, rows: SlotSampling, positions: jax.Array, slots: jax.Array
) -> jax.Array:
    """Exclude tokens that are not allowed or would complete a bad word.

    Return logits f32[B, V], which are -inf for excluded tokens. If only some tokens are allowed, a
    logit of -inf of an allowed token becomes the lowest finite number, so that a token can be
    drawn. If the bad words would exclude every token of a row, they are ignored for this row.
    """
    masks = rows.allowed_masks.at[slots].get(mode="clip")
    is_limited = jnp.any(masks != -1, axis=1, keepdims=True)
    z = jnp.where(is_limited, mask_logits(z, masks), z)
    words = rows.bad_words.at[slots].get(mode="clip")
    first, last = words[..., :-1], words[..., -1]
    num_recent = rows.recent_ids.shape[1]
    # Columns of `recent_ids` with the tokens of the last L - 1 positions, the oldest first.
    columns = positions[:, None] + jnp.arange(1, num_recent, dtype=jnp.int32)[None]
    recent = jnp.take_along_axis(rows.recent_ids, columns % num_recent, axis=1)
    is_prefix_match = jnp.all((first < 0) | (first == recent[:, None]), axis=2)
    completing_ids = jnp.where(is_prefix_match, last, z.shape[1])
    row = jnp.arange(z.shape[0], dtype=jnp.int32)[:, None]
    # The bad words must not exclude all possible tokens of a row. So count the possible tokens that
    # they exclude, each token once. It would be simpler to compare the logits before and after the
    # exclusion, but this needs a copy of the logits.
    is_possible = z.at[row, completing_ids].get(mode="fill", fill_value=-jnp.inf) > -jnp.inf
    is_same = completing_ids[:, :, None] == completing_ids[:, None]
    is_repeated = jnp.any(is_same & jnp.tri(is_same.shape[1], k=-1, dtype=jnp.bool_)[None], axis=2)
    has_alternatives = count_true(z > -jnp.inf) > count_true(is_possible & ~is_repeated)
    completing_ids = jnp.where(has_alternatives[:, None], completing_ids, z.shape[1])
    return z.at[row, completing_ids].set(-jnp.inf, mode="drop")


def next_recent_ids(
    rows: SlotSampling, token_ids: jax.Array, positions: jax.Array, active: jax.Array
) -> jax.Array:
    """Return the updated `recent_ids` of the rows, i32[B, L].

    Args:
      rows: the sampling state of each row.
      token_ids: i32[B], the new tokens.
      positions: i32[B], their positions in the sequences.
      active: bool[B]; inactive rows do not change.
    """
    column = lax.broadcasted_iota(jnp.int32, rows.recent_ids.shape, 1)
    is_new = (column == (positions % column.shape[1])[:, None]) & active[:, None]
    return jnp.where(is_new, token_ids[:, None], rows.recent_ids)
