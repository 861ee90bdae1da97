"""Formatting of text: short `repr`s of arrays, lists of names, sizes in bytes, line ends."""

import dataclasses
import reprlib
from typing import Any, TypeVar

import numpy as np

# Maximum characters of a short `repr`. They fill two lines of a terminal with 100 columns.
_MAX_CHARS = 200

LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Maps Unicode line ends that JSON does not escape to their escapes.

Readers that use `str.splitlines` would split a JSON text at these characters.
"""

C = TypeVar("C")


def short_repr(cls: C) -> C:
    """Give a dataclass or NamedTuple a short `repr`: a single line of at most 200 characters.

    Arrays are shown as dtype and shape, so nothing is copied from a device. Long texts are
    truncated. A long list shows its first elements and its length. Fields of dataclasses that have
    their default value are omitted.

    Place this decorator above ``@dataclass``. Do not use it if the `repr` of the class is part of a
    cache key or a digest, because two different values may have the same `repr`.

    Example:
      >>> @short_repr
      ... @dataclasses.dataclass
      ... class Pair:
      ...     array: np.ndarray
      ...     numbers: list[int]
      ...     name: str = ""
      >>> Pair(np.zeros((2, 3)), [*range(40)])
      Pair(array=float64[2, 3], numbers=[0, 1, 2, 3, ... 40 in all])
    """
    target: Any = cls
    target.__repr__ = shortened
    return cls


def shortened(value: Any) -> str:
    """Return the short `repr` of any value, in the form that `short_repr` describes."""
    return cut(_SHORT.repr(value))


def cut(text: str) -> str:
    """Join the lines of a text with spaces, and truncate it to 200 characters."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 5]} ...)"


def listed(*names: str) -> str:
    """Join names to the alternatives of an error message.

    Example:
      >>> listed("int8"), listed("float32", "float16", "int8")
      ('int8', 'float32, float16 or int8')
    """
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text with a binary unit, such as MiB.

    Example:
      >>> format_bytes(131072), format_bytes(16060522496), format_bytes(7)
      ('128.00 KiB', '14.96 GiB', '7 B')
    """
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**exponent:
            return f"{num_bytes / 1024**exponent:.2f} {unit}"
    return f"{num_bytes} B"


def integers(array: Any, ndim: int) -> np.ndarray | None:
    """Return an array as NumPy array, for a `repr`; None if its values cannot be read.

    A `repr` must not fail. The values cannot be read if the array is traced, was donated, or is
    partly on devices of other processes. None is also returned if the array does not have `ndim`
    dimensions or is not of integers or bools.
    """
    try:
        values = np.asarray(array)
    except Exception:
        return None
    return values if values.ndim == ndim and values.dtype.kind in "iub" else None


class _Short(reprlib.Repr):
    """`reprlib.Repr` that implements the rules of `short_repr`."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 50
        self.maxlevel, self.maxlist = 3, 4

    def repr_list(self, x: Any, level: int) -> str:
        return f"[{self._items(x, level)}]"

    def repr_tuple(self, x: Any, level: int) -> str:
        return f"({self._items(x, level)}{',' if len(x) == 1 else ''})"

    def repr_instance(self, x: Any, level: int) -> str:
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return self._fields(x, _changed(x), level)
        names = getattr(x, "_fields", None)
        if names is not None and isinstance(x, tuple):
            return self._fields(x, zip(names, x, strict=True), level)
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if isinstance(shape, tuple) and dtype is not None:
            return f"{dtype}{[*shape]}"
        return super().repr_instance(x, level)

    def _fields(self, x: Any, fields: Any, level: int) -> str:
        if level <= 0:
            return f"{type(x).__name__}(...)"
        parts = (f"{name}={self.repr1(value, level - 1)}" for name, value in fields)
        return f"{type(x).__name__}({', '.join(parts)})"

    def _items(self, x: Any, level: int) -> str:
        if level <= 0 and x:
            return f"... {len(x)} in all"
        items = [self.repr1(item, level - 1) for item in x[: self.maxlist]]
        omitted = [f"... {len(x)} in all"] if len(x) > self.maxlist else []
        return ", ".join([*items, *omitted])


_SHORT = _Short()


def _changed(x: Any) -> list[tuple[str, Any]]:
    """Return the names and values of a dataclass's fields that differ from their defaults."""
    changes = []
    for field in dataclasses.fields(x):
        value = getattr(x, field.name, None)
        if field.repr and not _is_default(field, value):
            changes.append((field.name, value))
    return changes


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return isinstance(value, list | dict | tuple | str) and not value
    if isinstance(value, tuple) and not value and field.default is None:
        return True
    # Plain values only: arrays have no single truth value.
    is_plain = isinstance(value, bool | int | float | str | tuple) or value is None
    return is_plain and type(value) is type(field.default) and bool(value == field.default)
