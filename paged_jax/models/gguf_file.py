"""Reader for the header of llama.cpp's GGUF files: metadata, and a list of tensors.

    magic, version | number of tensors | number of entries
    entries         key, type, value                    config, tokenizer and chat template
    tensors         name, shape, type, offset           for each tensor
    padding         up to a multiple of general.alignment
    data            the tensors, in blocks of quantised values

Files are not trusted: every length is compared with the number of remaining bytes before anything
is read or allocated. The types of values and tensors come from the `gguf` package. Its reader is
not used, because it does not check lengths, and because it makes an array for each string, which
takes 4 to 20 s for a vocabulary.
"""

import dataclasses
import functools
import math
import mmap
import re
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
# Keys and names of tensors are short. A longer name means that the file is damaged.
_MAX_NAME_BYTES = 256
# Minimum number of bytes of a metadata entry, and of the description of a tensor.
_MIN_ENTRY_BYTES, _MIN_TENSOR_BYTES = 13, 24
_LENGTH = struct.Struct("<Q")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GgufError(ValueError):
    """Error for a GGUF file that is damaged or not supported."""


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Description of a tensor in a GGUF file.

    Attributes:
      path: file that contains the tensor.
      name: name of the tensor in the file, such as ``"blk.0.attn_q.weight"``.
      shape: shape with the input dimension last, ``[..., out, in]``.
      type: name of the GGML type of its values, such as ``"Q4_K"``.
      offset: position of the tensor's first byte in the file.
      num_bytes: size of the tensor in the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Header of a GGUF file.

    Attributes:
      path: the file, or the first file of a model that is split into several files.
      metadata: metadata entries by key. Arrays of numbers are NumPy arrays, arrays of strings are
        `Texts`.
      tensors: tensors by name, from all files of the model.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, path: str | Path) -> "GgufFile":
        """Read the header of a file, and of all other files of a split model.

        Raises:
          GgufError: the package `gguf` is missing, a file is damaged or has an unsupported version,
            or the files of a split model do not belong together.
          OSError: a file does not exist or cannot be read.
        """
        path = Path(path)
        first = _open(path)
        count = first.metadata.get("split.count", 1)
        if not isinstance(count, int):
            raise GgufError(f"{path}: split.count must be an integer, got {count!r}.")
        if count <= 1:
            return first
        match = _SPLIT.fullmatch(path.name)
        if match is None or int(match[3]) != count or first.metadata.get("split.no") != 0:
            raise GgufError(
                f"{path}: must be the first of the {count} files of this split model, with a name "
                f"such as NAME-00001-of-{count:05}.gguf. Pass the first file, and keep the other "
                "files in the same folder."
            )
        tensors = dict(first.tensors)
        for number in range(2, count + 1):
            part = _open(path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf"))
            if part.metadata.get("split.no") != number - 1:
                raise GgufError(
                    f"{part.path}: split.no must be {number - 1}, because this is file {number} of "
                    "a split model."
                )
            if duplicates := tensors.keys() & part.tensors.keys():
                raise GgufError(
                    f"{part.path}: tensor {min(duplicates)} is also in another file of this "
                    "split model."
                )
            tensors |= part.tensors
        return cls(path, first.metadata, tensors)


def warn_of_unknown(path: Path, keys: Iterable[str]) -> None:
    """Warn of metadata entries that are not read; without keys, do nothing."""
    if names := ", ".join(sorted(keys)):
        warnings.warn(
            f"{path}: the metadata must only contain known entries, got {names}. They are ignored: "
            "check that the model works without them.",
            stacklevel=3,
        )


class Texts(Sequence[str]):
    """Array of strings in a GGUF file. A string is decoded when it is accessed.

    Args:
      data: bytes of the array, in which each string is preceded by its length.
      starts: position of the first byte of each string in `data`, int64 ``[n]``.
      stops: position after the last byte of each string, int64 ``[n]``.
    """

    def __init__(self, data: bytes, starts: np.ndarray, stops: np.ndarray):
        self._data = data
        self._starts = starts
        self._stops = stops

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return one string, or a list of strings for a slice. Invalid UTF-8 becomes U+FFFD."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._data[self._starts[index] : self._stops[index]].decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        data = self._data
        for start, stop in zip(self._starts.tolist(), self._stops.tolist(), strict=True):
            yield data[start:stop].decode(errors="replace")


def is_gguf(path: str | Path) -> bool:
    """Return whether a path has the suffix of a GGUF file, and is not a folder."""
    return Path(path).suffix.lower() == ".gguf" and not Path(path).is_dir()


def _open(path: Path) -> GgufFile:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file.")
    status = path.stat()
    return _read(path.absolute(), status.st_size, status.st_mtime_ns)


# The header is cached, because the config, the tokenizer and the weights are read separately.
@functools.lru_cache(maxsize=4)
def _read(path: Path, num_bytes: int, _: int) -> GgufFile:
    try:
        import gguf
    except ImportError as error:
        raise GgufError(
            f"{path}: the package gguf is required to read this file ({error}). Install it with: "
            "pip install 'paged-jax[gguf]'."
        ) from error
    if not num_bytes:
        raise GgufError(f"{path}: must be a GGUF file, got an empty file.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _HeaderReader(path, data, gguf).read()


class _HeaderReader:
    """Reader of the header of one file. It never reads beyond the end of the file.

    Args:
      path: the file, for error messages.
      data: the mapped bytes of the file.
      gguf: the module `gguf`, which is imported only if a file is read.
    """

    def __init__(self, path: Path, data: mmap.mmap, gguf: Any):
        self._path = path
        self._data = data
        self._gguf = gguf
        self._position = 0

    def read(self) -> GgufFile:
        if self._take(4, "the magic number") != MAGIC:
            raise self._error("must be a GGUF file, but its first four bytes are not 'GGUF'")
        version = self._number("<I", "the version")
        if version & 0xFFFF == 0:
            raise self._error("is a big-endian file, which is not supported")
        if version not in _VERSIONS:
            raise self._error(f"must have version 2 or 3 of GGUF, got {version}")
        num_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        num_entries = self._count("entries", _MIN_ENTRY_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._name("a key")
            if key in metadata:
                raise self._error(f"metadata key {key!r} occurs more than once")
            metadata[key] = self._value(key, self._number("<I", key))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two, got {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise self._error(f"tensor {name!r} occurs more than once")
            tensors[name] = self._entry(name, shape, kind, data_start + offset)
        return GgufFile(self._path, metadata, tensors)

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
        try:
            gguf_type = self._gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise self._error(f"tensor {name} has the unknown type {kind}") from None
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[gguf_type]
        # llama.cpp omits trailing dimensions of size 1, but no other dimensions.
        if math.prod(shape) == 0 or shape[-1] % block:
            raise self._error(
                f"tensor {name} has type {gguf_type.name}, so the length of its rows must be a "
                f"positive multiple of {block}, got shape {list(shape)}"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        if offset + num_bytes > len(self._data):
            raise self._error(
                f"tensor {name} should be at bytes {offset} to {offset + num_bytes}, but the file "
                f"has {len(self._data)} bytes. Download the file again"
            )
        return TensorEntry(self._path, name, shape, gguf_type.name, offset, num_bytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("the name of a tensor")
        num_dims = self._number("<I", name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"tensor {name!r} must have 1 to {_MAX_DIMS} dims, got {num_dims}")
        shape = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, name))
        return name, shape[::-1], self._number("<I", name), self._number("<Q", name)

    def _value(self, key: str, kind: int) -> Any:
        types = self._gguf.GGUFValueType
        if kind == types.STRING:
            return self._text(key)
        if kind == types.ARRAY:
            return self._array(key, self._number("<I", key))
        [value] = self._numbers(key, kind, 1).tolist()
        return value

    def _array(self, key: str, kind: int) -> Any:
        count = self._number("<Q", key)
        if kind == self._gguf.GGUFValueType.STRING:
            return self._texts(key, count)
        return self._numbers(key, kind, count)

    def _texts(self, key: str, count: int) -> Texts:
        self._require(_LENGTH.size * count, f"the {count} strings of {key}")
        position, end = self._position, len(self._data)
        bounds = [position]
        unpack, data = _LENGTH.unpack_from, self._data
        for _ in range(count):
            if position + _LENGTH.size <= end:
                position += unpack(data, position)[0]
            position += _LENGTH.size
            if position > end:
                raise self._error(
                    f"must contain the {count} strings of {key}, but the file is too short. "
                    "Download it again"
                )
            bounds.append(position)
        self._position = position
        offsets = np.array(bounds, np.int64) - bounds[0]
        return Texts(data[bounds[0] : position], offsets[:-1] + _LENGTH.size, offsets[1:])

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        types = self._gguf.GGUFValueType
        dtypes = {
            types.UINT8: "<u1", types.INT8: "<i1", types.UINT16: "<u2", types.INT16: "<i2",
            types.UINT32: "<u4", types.INT32: "<i4", types.UINT64: "<u8", types.INT64: "<i8",
            types.FLOAT32: "<f4", types.FLOAT64: "<f8", types.BOOL: "?",
        }  # fmt: skip
        if kind not in dtypes:
            raise self._error(
                f"metadata key {key} has a value of type {kind}, which is not supported"
            )
        dtype = np.dtype(dtypes[kind])
        return np.frombuffer(self._take(dtype.itemsize * count, key), dtype)

    def _count(self, name: str, least_bytes: int) -> int:
        count = self._number("<Q", f"the number of {name}")
        num_left = len(self._data) - self._position
        if count * least_bytes > num_left:
            raise self._error(
                f"declares {count} {name}, which do not fit into the remaining {num_left} bytes. "
                "The file is damaged"
            )
        return count

    def _number(self, form: str, name: str) -> int:
        [number] = struct.unpack(form, self._take(struct.calcsize(form), name))
        return number

    def _name(self, kind: str) -> str:
        length = self._number("<Q", kind)
        if length > _MAX_NAME_BYTES:
            raise self._error(f"{kind} must have at most {_MAX_NAME_BYTES} bytes, got {length}")
        name = self._take(length, kind).decode(errors="replace")
        if not name.isprintable():
            raise self._error(f"{kind} must be printable, got {name!r}")
        return name

    def _text(self, name: str) -> str:
        return self._take(self._number("<Q", name), name).decode(errors="replace")

    def _take(self, num_bytes: int, name: str) -> bytes:
        self._require(num_bytes, name)
        self._position += num_bytes
        return self._data[self._position - num_bytes : self._position]

    def _require(self, num_bytes: int, name: str) -> None:
        num_left = len(self._data) - self._position
        if num_bytes > num_left:
            raise self._error(
                f"must contain {num_bytes} bytes of {name}, but only {num_left} are left. "
                "Download the file again"
            )

    def _error(self, problem: str) -> GgufError:
        return GgufError(f"{self._path}: {problem}.")
