"""`GgufMetadata`: typed reading of the entries of a GGUF file about its model."""

from typing import Any

import numpy as np

from paged_jax.arguments import is_int, is_real
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.gguf_file import GgufError, GgufFile
from paged_jax.models.layer_groups import FULL, SLIDING

_REQUIRED: Any = object()


class GgufMetadata:
    """Reader of the entries whose keys begin with the architecture of a file, like "llama.".

    Arguments `key` are keys without the architecture. The reader records which entries were read,
    so that unread entries can be rejected.

    Args:
      file: the GGUF file.

    Attributes:
      file: the GGUF file.
      architecture: entry ``general.architecture``.
      keys_read: keys that were read.
    """

    def __init__(self, file: GgufFile):
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise GgufError(
                f"{file.path}: general.architecture must be a string with the name of an "
                "architecture."
            )
        kind = file.metadata.get("general.type", "model")
        if kind != "model":
            raise UnsupportedConfigError(
                f"{file.path}: general.type must be 'model', got {kind!r}. Give the file of the "
                "language model."
            )
        self.architecture = architecture
        self.keys_read: set[str] = set()

    @property
    def num_layers(self) -> int:
        """Number of layers, without the draft layers for multi-token prediction."""
        return self.integer("block_count") - self.num_drafts

    @property
    def num_drafts(self) -> int:
        """Number of draft layers, which follow the other layers. They are not read."""
        return self.integer("nextn_predict_layers", 0)

    def has_tensor(self, suffix: str) -> bool:
        """Return whether any layer has a tensor such as ``"attn_q.bias"``."""
        return any(name.endswith(f".{suffix}") for name in self.file.tensors)

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        """Return an integer entry. The file may also store it as an array of equal integers."""
        value = self._uniform(key)
        if value is None and default is not _REQUIRED:
            return default
        if not is_int(value) or not 0 <= value < 2**31:
            raise self.wrong(key, "an integer", value)
        return value

    def integers(self, key: str) -> list[int]:
        """Return an integer for each layer. The file may store a single one for all layers."""
        values = self._value(key)
        if isinstance(values, np.ndarray) and np.issubdtype(values.dtype, np.integer):
            return self._of_layers(key, values).tolist()
        return [self.integer(key)] * self.num_layers

    def booleans(self, key: str) -> list[bool] | None:
        """Return a boolean for each layer; None if the file has no such list."""
        values = self._value(key)
        return (
            None
            if not isinstance(values, np.ndarray)
            else [*map(bool, self._of_layers(key, values))]
        )

    def _of_layers(self, key: str, values: np.ndarray) -> np.ndarray:
        if len(values) < self.num_layers:
            raise self.wrong(key, f"an array of {self.num_layers}", len(values))
        return values[: self.num_layers]

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """Return a number."""
        value = self._uniform(key)
        if value is None and default is not _REQUIRED:
            return default
        if not is_real(value):
            raise self.wrong(key, "a number", value)
        # Files store numbers as float32. The shortest decimal number that rounds to this float32 is
        # the number that the author wrote, such as 1e-6.
        return float(str(np.float32(value)))

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "a boolean", value)
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._value(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text", value)
        return default if value is None else value

    def rope_divisors(self, name: str, count: int) -> list[float] | None:
        """Return the `count` divisors of rotary frequencies in a tensor; None if it is missing."""
        entry = self.file.tensors.get(name)
        if entry is None:
            return None
        if entry.type != "F32" or entry.shape != (count,):
            raise GgufError(
                f"{self.file.path}: tensor {name} must be F32 [{count}], got {entry.type} "
                f"{list(entry.shape)}."
            )
        return np.fromfile(entry.path, "<f4", count, offset=entry.offset).tolist()

    def check(self, key: str, *supported: int) -> None:
        """Check that an integer entry is missing or has a supported value."""
        value = self.integer(key, supported[0])
        if value not in supported:
            raise self.unsupported(key, f"= {value}")

    def windows(self, window: int, interval: int = 0) -> dict[str, Any]:
        """Return the entries of a ``config.json`` about sliding windows.

        Args:
          window: number of last tokens that layers with a window attend to; 0 if no layer has a
            window.
          interval: if the file does not say which layers have a window, every n-th layer has none,
            where n is `interval`; 0 if all layers have a window.
        """
        key = "attention.sliding_window_pattern"
        is_sliding = self.booleans(key)
        if is_sliding is None:
            interval = self.integer(key, interval)
            layers = range(self.num_layers)
            is_sliding = [interval == 0 or layer % interval < interval - 1 for layer in layers]
        kinds = [SLIDING if window and sliding else FULL for sliding in is_sliding]
        return {"sliding_window": window or None, "layer_types": kinds}

    def unsupported(self, name: str, detail: str = "") -> UnsupportedConfigError:
        """Return the error for an unsupported metadata entry or tensor.

        `name` is the name of the entry or tensor, and `detail` describes the unsupported value.
        """
        return UnsupportedConfigError(
            f"{self.file.path}: {name}{' ' * bool(detail)}{detail} is not supported for "
            f"architecture {self.architecture}."
        )

    def wrong(self, key: str, kind: str, value: Any) -> GgufError:
        """Return the error for an entry that is missing, or has the wrong type or range."""
        description = "nothing" if value is None else repr(value)[:100]
        return GgufError(
            f"{self.file.path}: {self.architecture}.{key} must be {kind}, got {description}."
        )

    def _value(self, key: str) -> Any:
        self.keys_read.add(key)
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def _uniform(self, key: str) -> Any:
        value = self._value(key)
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise self.unsupported(key, "that differs between layers")
            return value[0].item()
        return value
