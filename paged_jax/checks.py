"""What counts as an integer and as a number in what users pass."""

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
