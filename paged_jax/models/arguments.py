"""What a model over a paged cache refuses: shapes and types always, values where they are known.

Inside `jit` values are not known, and nothing can be raised. There a token id outside of the
vocabulary reads the row at its nearer end, and rows with the same slot spoil each other's tokens.
"""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from paged_jax.dims import bind
from paged_jax.kernels.checks import as_arrays, as_int32

Rows = tuple[jax.Array, jax.Array, jax.Array]


def as_rows(
    function: str, vocab_size: int, token_ids: Any, slots: Any, num_tokens: Any = None
) -> Rows:
    """The arguments of a step, i32, unless they do not fit together.

    Args:
      function: the name that messages begin with.
      vocab_size: V.
      token_ids: integer [B, T], or [B] for one token a row.
      slots: integer [B].
      num_tokens: integer [B]; None for one token a row.

    Returns:
      `token_ids`, `slots` and `num_tokens` i32 [B].

    Raises:
      ValueError: shapes do not agree, an array is not of integers, or, outside of `jit`, a slot
        appears twice or a token that counts is outside of the vocabulary.
    """
    if num_tokens is None:
        letters, num_tokens = {"token_ids": "B", "slots": "B"}, np.ones(np.shape(slots), np.int32)
    else:
        letters = {"token_ids": "BT", "slots": "B", "num_tokens": "B"}
    arrays = as_arrays(function, token_ids=token_ids, slots=slots, num_tokens=num_tokens)
    bind(function, **{name: (arrays[name], each) for name, each in letters.items()})
    rows = as_int32(function, **arrays)
    check_distinct(function, slots)
    if not isinstance(slots, Tracer) and not isinstance(num_tokens, Tracer):
        num_tokens = np.where(np.asarray(slots) < 0, 0, np.asarray(num_tokens))
        check_token_ids(function, vocab_size, token_ids, num_tokens)
    return rows[0], rows[1], rows[2]


def as_tokens(function: str, vocab_size: int, token_ids: Any) -> jax.Array:
    """The tokens i32 [B, T] of whole sequences, padding included.

    Raises:
      ValueError: they are not [B, T], not integers or, outside of `jit`, not in the vocabulary.
    """
    arrays = as_arrays(function, token_ids=token_ids)
    sizes = bind(function, token_ids=(arrays["token_ids"], "BT"))
    [rows] = as_int32(function, **arrays)
    check_token_ids(function, vocab_size, token_ids, np.full(sizes["B"], sizes["T"]))
    return rows


def check_distinct(function: str, slots: Any) -> None:
    """Refuse slots [B] of which one appears twice, where they are known; below 0 is padding."""
    if isinstance(slots, Tracer):
        return
    used, counts = np.unique(np.asarray(slots), return_counts=True)
    if twice := used[(used >= 0) & (counts > 1)].tolist():
        raise ValueError(
            f"{function}: slots must be distinct, got {twice[0]} more than once. Append the tokens "
            "of a slot in one row."
        )


def check_token_ids(
    function: str, vocab_size: int, token_ids: Any, num_tokens: Any, *, name: str = "token_ids"
) -> None:
    """Refuse tokens outside of the vocabulary, where they are known.

    Args:
      function: the name that the message begins with.
      vocab_size: V.
      token_ids: integer [B, T] or [B].
      num_tokens: integer [B], how many tokens of each row count.
      name: the name of the argument.
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
