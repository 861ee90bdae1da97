"""Checks of a step's arguments: token ids, slots and numbers of tokens.

Shapes and dtypes are always checked. Values are checked only outside of `jit`, because they are
unknown while a function is traced. Inside `jit`, a token id outside of the vocabulary is clamped,
and rows with the same slot overwrite each other's tokens.
"""

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from paged_jax.dims import bind
from paged_jax.kernels.checks import as_arrays, as_int32

# Arguments of a step: token ids i32 [B, T] or [B], slots i32 [B], numbers of tokens i32 [B].
StepArrays = tuple[jax.Array, jax.Array, jax.Array]


def as_step_arrays(
    function: str,
    vocab_size: int,
    token_ids: ArrayLike,
    slots: ArrayLike,
    num_tokens: ArrayLike | None = None,
    *,
    has_tiles: bool = False,
) -> StepArrays:
    """Check the arguments of a step and convert them to int32.

    Args:
      function: function name for error messages.
      vocab_size: vocabulary size (V).
      token_ids: integers ``[B, T]``, or ``[B]`` if `num_tokens` is None.
      slots: integers ``[B]``, slot of each row.
      num_tokens: integers ``[B]``, number of tokens in each row; None if each row has one token.
      has_tiles: whether several rows may have the same slot.

    Returns:
      `token_ids`, `slots` and `num_tokens`, each i32.

    Raises:
      ValueError: shapes do not fit together, or a dtype is not an integer dtype. Outside of `jit`,
        also if a slot appears twice or a token is not in the vocabulary.
    """
    if num_tokens is None:
        letters, num_tokens = {"token_ids": "B", "slots": "B"}, np.ones(np.shape(slots), np.int32)
    else:
        letters = {"token_ids": "BT", "slots": "B", "num_tokens": "B"}
    arrays = as_arrays(function, token_ids=token_ids, slots=slots, num_tokens=num_tokens)
    bind(function, **{name: (arrays[name], dims) for name, dims in letters.items()})
    rows = as_int32(function, **arrays)
    if not has_tiles:
        check_distinct_slots(function, slots)
    if not isinstance(slots, Tracer) and not isinstance(num_tokens, Tracer):
        num_tokens = np.where(np.asarray(slots) < 0, 0, np.asarray(num_tokens))
        check_token_ids(function, vocab_size, token_ids, num_tokens)
    return rows[0], rows[1], rows[2]


def as_token_ids(function: str, vocab_size: int, token_ids: ArrayLike) -> jax.Array:
    """Check the token ids ``[B, T]`` of whole sequences, and convert them to int32.

    Padding must consist of valid token ids, too.

    Raises:
      ValueError: the shape is not ``[B, T]``, or the dtype is not an integer dtype. Outside of
        `jit`, also if a token is not in the vocabulary.
    """
    arrays = as_arrays(function, token_ids=token_ids)
    sizes = bind(function, token_ids=(arrays["token_ids"], "BT"))
    [rows] = as_int32(function, **arrays)
    check_token_ids(function, vocab_size, token_ids, np.full(sizes["B"], sizes["T"]))
    return rows


def check_distinct_slots(function: str, slots: ArrayLike) -> None:
    """Check that all slots ``[B]`` except negative ones are distinct. Do nothing inside `jit`."""
    if isinstance(slots, Tracer):
        return
    distinct_slots, counts = np.unique(np.asarray(slots), return_counts=True)
    if duplicates := distinct_slots[(distinct_slots >= 0) & (counts > 1)].tolist():
        raise ValueError(
            f"{function}: slots must be distinct, got slot {duplicates[0]} more than once. Put all "
            "tokens of a slot into one row."
        )


def check_token_ids(
    function: str,
    vocab_size: int,
    token_ids: ArrayLike,
    num_tokens: ArrayLike,
    *,
    name: str = "token_ids",
) -> None:
    """Check that token ids are in the vocabulary, except inside `jit`.

    Args:
      function: function name for error messages.
      vocab_size: vocabulary size (V).
      token_ids: integers ``[B, T]`` or ``[B]``.
      num_tokens: integers ``[B]``. Only the first `num_tokens` tokens of each row are checked.
      name: name of the argument `token_ids` in error messages.

    Raises:
      ValueError: a token is not in the vocabulary.
    """
    if isinstance(token_ids, Tracer) or isinstance(num_tokens, Tracer):
        return
    rows = np.asarray(token_ids)
    rows = rows.reshape(rows.shape[0], -1)
    counts = np.arange(rows.shape[1]) < np.asarray(num_tokens)[:, None]
    if (wrong := rows[counts & ((rows < 0) | (rows >= vocab_size))]).size:
        raise ValueError(
            f"{function}: {name} must be in 0..{vocab_size - 1}, the vocabulary, got {wrong[0]}."
        )
