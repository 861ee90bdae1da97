"""Checks of arguments: what counts as an integer, as a number, and as a size. Imports no jax."""

import math
import numbers
from typing import Any


def is_int(value: Any) -> bool:
    """Whether a value is an integer, of Python or NumPy, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold, and no bool."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer or a fraction beyond a float's range
        return False


def check_positive(function: str, **sizes: Any) -> None:
    """Check that sizes are positive integers.

    Args:
      function: the name that the message begins with.
      **sizes: arguments of that function, by their names.

    Raises:
      ValueError: naming the first that is not.

    Example:
      >>> check_positive("Engine", block_size=0)
      Traceback (most recent call last):
      ValueError: Engine: block_size must be a positive integer, got 0. Pass at least 1.
    """
    for name, size in sizes.items():
        if not is_int(size) or size < 1:
            raise ValueError(
                f"{function}: {name} must be a positive integer, got {size!r}. Pass at least 1."
            )
