"""Reader of quantisation configs that leaves no entry unread."""

from collections.abc import Iterable, Mapping
from typing import Any

from paged_jax.arguments import is_int
from paged_jax.models.errors import UnsupportedConfigError

# Keys about a quantised KV cache, which several tools write. Its scales are not used.
KV_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method")


class Entries:
    """Reader of a JSON object. It records which entries were read, to reject the others.

    Args:
      content: the JSON object.
      where: description of the object's place, for error messages.
      method: `method` of a config without an entry ``quant_method``.
    """

    def __init__(self, content: Any, where: str, method: str | None = None):
        if not isinstance(content, Mapping):
            raise UnsupportedConfigError(f"{where} must be a JSON object, got {content!r}.")
        self.content, self.where = content, where
        self._read: set[str] = set()
        self._method = method

    @property
    def method(self) -> Any:
        """Quantisation method: the entry ``quant_method``, or the default."""
        return self.get("quant_method") or self._method

    def get(self, *keys: str) -> Any:
        """Return the first value under `keys` that is not null; None if all are missing or null."""
        self._read |= {*keys}
        return next((self.content[key] for key in keys if self.content.get(key) is not None), None)

    def choice(self, *keys: str, choices: Iterable[Any], default: Any = None) -> Any:
        """Check that a value is one of `choices`, and return it. Strings become lower case."""
        value = self.get(*keys)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        choices = [*choices]
        if not any(value == option and type(value) is type(option) for option in choices):
            names = ", ".join("null" if option is None else str(option) for option in choices)
            raise self.error(keys[0], f"must be {names}", value)
        return value

    def size(self, *keys: str, default: int | None = None) -> int | None:
        """Return a positive integer, or None for -1. If the entry is missing, return `default`."""
        value = self.get(*keys)
        value = default if value is None else value
        if value is None or is_int(value) and value == -1:
            return None
        if not is_int(value) or not 0 < value < 1 << 31:
            raise self.error(keys[0], "must be a positive integer or -1", value)
        return value

    def block(self, key: str) -> tuple[int, int]:
        """Return the size of a block (outputs, inputs), given as a list or as ``"128x128"``."""
        block = self.get(key)
        if isinstance(block, str):
            block = [int(size) if size.isdecimal() else 0 for size in block.split("x")]
        is_valid = isinstance(block, list | tuple) and len(block) == 2 and all(map(is_int, block))
        if not is_valid or not all(0 < size < 1 << 31 for size in block):
            raise self.error(key, "must be two positive sizes", block)
        return block[0], block[1]

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return all names in the lists under several keys."""
        names: list[str] = []
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise self.error(key, "must be a list of names", value)
            names += value
        return tuple(names)

    def section(self, key: str) -> "Entries | None":
        """Return a reader of the object under a key; None if the key is missing or null."""
        value = self.get(key)
        return None if value is None else Entries(value, f"{self.where}.{key}")

    def sections(self, key: str) -> "dict[str, Entries]":
        """Return readers of the objects in the object under a key, without null entries."""
        outer = self.section(key)
        if outer is None:
            return {}
        by_name = {name: outer.section(name) for name in outer.content}
        return {name: section for name, section in by_name.items() if section is not None}

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Reject unread entries, unless their key is harmless, or they are empty, false or 0."""
        for key, value in self.content.items():
            if key not in self._read and key not in harmless and value not in (None, False, "", 0):
                if value != {} and value != []:
                    raise self.error(key, "is not supported and must be null", value)

    def error(self, key: str, rule: str, value: Any) -> UnsupportedConfigError:
        """Return the error for the value of an entry that violates a rule."""
        text = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
        return UnsupportedConfigError(f"{self.where}.{key} {rule}, got {text}.")
