"""Checks of arguments: what counts as an integer, as a number, and as a size. Imports no jax."""

import math
import numbers
from typing import Any


class ArgumentError(ValueError):
    """An argument breaks a rule; the message reads ``FUNCTION: FIELD must RULE, got VALUE.``

    Its parts can be read one by one, as a server does that names fields but no functions.

    Args:
      function: the function or class that refuses.
      problem: what is wrong and what to do; begins with the verb where there is a field.
      field: the name of the argument; None where it is not a single one.

    Example:
      >>> error = ArgumentError("request", "must be an integer, got 'x'.", "priority")
      >>> str(error)
      "request: priority must be an integer, got 'x'."
      >>> error.field, error.message
      ('priority', "priority must be an integer, got 'x'.")
    """

    def __init__(self, function: str, problem: str, field: str | None = None):
        super().__init__(function, problem, field)
        self.function = function
        self.problem = problem
        self.field = field

    @property
    def message(self) -> str:
        """The sentence without the function's name."""
        return self.problem if self.field is None else f"{self.field} {self.problem}"

    def __str__(self) -> str:
        return f"{self.function}: {self.message}"


def is_int(value: Any) -> bool:
    """Whether a value is an integer, of Python or NumPy, and no bool."""
    # A request has dozens of numbers, and to ask an abstract class takes ten times as long.
    if type(value) is int:
        return True
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold, and no bool."""
    if type(value) is float:  # see `is_int`
        return math.isfinite(value)
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
      ArgumentError: naming the first that is not.

    Example:
      >>> check_positive("Engine", block_size=0)
      Traceback (most recent call last):
      paged_jax.checks.ArgumentError: Engine: block_size must be a positive integer, got 0. ...
    """
    for name, size in sizes.items():
        if not is_int(size) or size < 1:
            # An array that `jax.jit` traces, known by its abstract value: sizes shape the program.
            advice = "Name it in static_argnames" if hasattr(size, "aval") else "Pass at least 1"
            rule = f"must be a positive integer, got {size!r}. {advice}."
            raise ArgumentError(function, rule, name)
