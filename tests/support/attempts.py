"""Compute a value for each name, and go on with the others if one fails."""

import sys
import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

Value = TypeVar("Value")


def compute_each(
    names: Iterable[str], compute: Callable[[str], Value], stored: Callable[[str], Value | None]
) -> tuple[dict[str, Value], list[str]]:
    """Compute a value for each name. The traceback of an error is printed.

    Args:
      names: the names.
      compute: computes the value of a name, and may raise.
      stored: returns the stored value of a name, which replaces one that cannot be computed; None
        without a stored value.

    Returns:
      The values by name, and a line for each name whose value could not be computed. Such a name
      has no value if none is stored.
    """
    values: dict[str, Value] = {}
    failures: list[str] = []
    for name in names:
        try:
            values[name] = compute(name)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            failures.append(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            if (value := stored(name)) is not None:
                values[name] = value
    return values, failures
