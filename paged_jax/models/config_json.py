"""Entries of a ``config.json``: read and check a value, and record which entries are read."""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paged_jax.arguments import is_int, is_real

# Value of the argument `default` for entries that must not be missing.
REQUIRED: Any = object()


class ConfigEntries(Mapping[str, Any]):
    """Entries of a ``config.json`` that record which of them are read.

    Copies made by `replace` and `complete` share the record. Do not unpack the entries into a dict:
    this reads all of them.

    Args:
      values: the entries, by key.
      keys_read: the record, which is shared.
      default_keys: keys of entries that the file does not contain.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        keys_read: set[str] | None = None,
        default_keys: Iterable[str] = (),
    ):
        self._values = dict(values)
        self._keys_read = set[str]() if keys_read is None else keys_read
        self._default_keys = frozenset(default_keys)

    def __getitem__(self, key: str) -> Any:
        self._keys_read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def replace(self, values: Mapping[str, Any]) -> "ConfigEntries":
        """Copy the entries, with other values for some keys."""
        default_keys = self._default_keys - {*values}
        return ConfigEntries(self._values | dict(values), self._keys_read, default_keys)

    def complete(self, defaults: Mapping[str, Any]) -> "ConfigEntries":
        """Copy the entries, and add defaults for keys that are missing."""
        default_keys = self._default_keys | {*defaults} - {*self._values}
        return ConfigEntries(dict(defaults) | self._values, self._keys_read, default_keys)

    def is_default(self, key: str) -> bool:
        """Return whether an entry is a default that `complete` has added."""
        return key in self._default_keys

    def find_unread(self) -> set[str]:
        """Find the keys that nobody has read, except entries that are null."""
        return {key for key, value in self._values.items() if value is not None} - self._keys_read


def warn_of_unknown(source: str, keys: Iterable[str], architecture: str) -> None:
    """Warn of entries that are not read; without keys, do nothing.

    Args:
      source: file or object that contains the entries.
      keys: keys of the entries.
      architecture: class of the model in transformers.
    """
    if names := ", ".join(sorted(keys)):
        warnings.warn(
            f"LlamaConfig: {source} must only contain known entries, got {names}. They are "
            f"ignored: check that {architecture} works without them.",
            stacklevel=3,
        )


def read_entry(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return an entry of a ``config.json``. If it is missing or null, return the default."""
    value = config.get(key)
    if value is not None:
        return value
    if default is REQUIRED:
        raise ValueError(f"LlamaConfig: {key} is missing.")
    return default


def read_integer(config: Mapping[str, Any], key: str, default: Any = REQUIRED) -> Any:
    """Return an entry of a ``config.json`` that must be an integer; see `read_entry`."""
    value = read_entry(config, key, default)
    if value is not None and not is_int(value):
        raise ValueError(f"LlamaConfig: {key} must be an integer, got {value!r}.")
    return value


def as_json(value: Any) -> str:
    """Return an entry as it stands in the file, for error messages."""
    return json.dumps(value, default=repr)


def as_integer(value: Any) -> Any:
    """Convert a float with an integral value to int; return any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_number(config: Mapping[str, Any], key: str, default: Any = REQUIRED) -> float:
    """Return an entry of a ``config.json`` that must be a finite number; see `read_entry`."""
    value = read_entry(config, key, default)
    if not is_real(value):
        raise ValueError(f"LlamaConfig: {key} must be a number, got {value!r}.")
    return float(value)


def read_boolean(config: Mapping[str, Any], key: str, default: Any = REQUIRED) -> bool:
    """Return an entry of a ``config.json`` that must be true or false; see `read_entry`."""
    value = read_entry(config, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"LlamaConfig: {key} must be true or false, got {value!r}.")
    return value


def read_token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return an entry of a ``config.json`` that is a token id, a list of them, or null."""
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_int(token) and token >= 0 for token in values):
        raise ValueError(
            f"LlamaConfig: {key} must be a token id or a list of token ids (integers of at least "
            f"0), got {value!r}."
        )
    return tuple(values)


def write_token_ids(token_ids: tuple[int, ...]) -> int | list[int] | None:
    """Return the entry for `read_token_ids`."""
    return token_ids[0] if len(token_ids) == 1 else [*token_ids] or None


def read_name(config: Mapping[str, Any], key: str, default: str) -> str:
    """Return an entry of a ``config.json`` that must be a string; see `read_entry`."""
    value = read_entry(config, key, default)
    if not isinstance(value, str):
        raise ValueError(f"LlamaConfig: {key} must be a string, got {value!r}.")
    return value


def read_object(config: Mapping[Any, Any], key: Any, name: str | None = None) -> Mapping[str, Any]:
    """Return an entry that must be a JSON object; an empty dict if it is missing or null.

    `name` is the name of the object in error messages, by default the key.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"LlamaConfig: {name or key} must be an object or null, got {value!r}.")
    return value or {}


def read_names(config: Mapping[str, Any], key: str, count: int | None = None) -> list[str] | None:
    """Return an entry that must be a list of strings; None if it is missing or null.

    Args:
      config: content of the file.
      key: key of the list.
      count: required length of the list, which is the number of layers; None for any length.
    """
    names = config.get(key)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"LlamaConfig: {key} must be a list of strings, got {names!r}.")
    if count is not None and len(names) != count:
        raise ValueError(
            f"LlamaConfig: {key} must have one name for each of the {count} layers, got {names!r}."
        )
    return names
