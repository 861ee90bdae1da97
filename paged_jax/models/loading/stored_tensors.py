"""Reading of tensors in weight files.

`StoredTensor` reads a tensor of a safetensors file. `QuantisedTensor` is the base class of matrices
in a quantised format, which may consist of several tensors, such as values and scales.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat, dequantise
from paged_jax.models.errors import WeightsError

# Dtype in which the model uses a tensor, for each floating-point dtype in a file. Models do not
# compute in float64.
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
# NumPy dtype for each dtype name of safetensors. Tensors with other dtypes cannot be read.
_NUMPY_DTYPES = {
    name: jnp.dtype(dtype)
    for name, dtype in {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
        "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
        "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    }.items()
}  # fmt: skip
_CHECKED = 1 << 16  # number of floats that `is_finite` checks at a time
_EXPONENT_BITS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
      path: file that contains the tensor.
      name: name of the tensor in the file.
      shape: shape of the tensor.
      dtype: name of the dtype in safetensors, or name of a quantised format.
      offset: position of the tensor's first byte in the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = dataclasses.field(default=0, kw_only=True)

    @property
    def is_floating(self) -> bool:
        """Whether the tensor can be read as floating-point numbers."""
        return self.dtype in FLOAT_DTYPES

    @property
    def format(self) -> WeightFormat:
        """Format of the arrays that `read_arrays` returns."""
        return WeightFormat(FLOAT_DTYPES[self.dtype])

    def read_arrays(self, rows: slice) -> WeightArrays:
        """Read rows of the tensor in its `format`.

        Args:
          rows: slice of the first dimension to read.

        Raises:
          WeightsError: the file cannot be read, or a scale or number is not finite.
        """
        return WeightArrays(self.read((rows,), jnp.dtype(self.format.code)))

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Read a part of the tensor as floats, and check that they are finite.

        Args:
          index: slices of the first dimensions; other dimensions are read completely.
          dtype: floating-point dtype of the result.

        Raises:
          WeightsError: the file cannot be read, or a number is not finite in `dtype`.
        """
        with np.errstate(over="ignore"):  # infinity is reported below
            values = self._read(index).astype(dtype, copy=False)
        if not is_finite(values):
            raise WeightsError(f"load_weights: {self.name} must be finite in {dtype.name}.")
        return values

    def read_raw(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a part of the tensor in the dtype of the file. Its values are not checked.

        Args:
          index: slices of the first dimensions; other dimensions are read completely.

        Raises:
          WeightsError: the file cannot be read, or its dtype is not supported.
        """
        if (dtype := _NUMPY_DTYPES.get(self.dtype)) is None:
            raise WeightsError(f"load_weights: {self.name} has unsupported dtype {self.dtype}.")
        rows, columns = index[:1], index[1:]
        full = self.shape[1 : len(index)]
        if all(
            part.indices(size) == (0, size, 1) for part, size in zip(columns, full, strict=True)
        ):
            return self._read_rows(rows[0] if rows else slice(None), dtype)
        try:
            # Map the file only during this call. Mapped pages count as memory of the process, and
            # would otherwise add up to a second copy of the weights.
            return np.array(np.memmap(self.path, dtype, "r", self.offset, self.shape)[index])
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"load_weights: cannot read {self.name} from {self.path}: {error}."
            ) from None

    def _read_rows(self, rows: slice, dtype: np.dtype) -> np.ndarray:
        start, stop, shape = 0, 1, self.shape
        if self.shape:
            start, stop, _ = rows.indices(self.shape[0])
            shape = max(stop - start, 0), *self.shape[1:]
        row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        return read_elements(self, start * row_bytes, dtype, math.prod(shape)).reshape(shape)

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.read_raw(index)


def read_elements(
    tensor: StoredTensor, byte_offset: int, dtype: np.dtype, count: int
) -> np.ndarray:
    """Read `count` elements that begin `byte_offset` bytes after the first byte of a tensor.

    The file is not mapped into memory, because mapped pages count as memory of the process, and
    because the process would crash if a mapped file became shorter.

    Raises:
      WeightsError: the file cannot be read, or is too short.
    """
    try:
        values = np.fromfile(tensor.path, dtype, count, offset=tensor.offset + byte_offset)
    except OSError as error:
        raise WeightsError(
            f"load_weights: cannot read {tensor.name} from {tensor.path}: {error}."
        ) from None
    if values.size != count:
        raise WeightsError(
            f"load_weights: cannot read {tensor.name}, because the file {tensor.path} has become "
            "shorter."
        )
    return values


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedTensor(StoredTensor):
    """Tensor that is the concatenation of several small tensors along their first dimension.

    Attributes:
      pieces: the tensors to concatenate.
    """

    pieces: tuple[StoredTensor, ...] = ()

    @classmethod
    def of_pieces(cls, name: str, pieces: tuple[StoredTensor, ...]) -> "JoinedTensor":
        """Create a joined tensor. All pieces must have rows of the same dtype and shape."""
        first = pieces[0]
        shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:])
        return cls(first.path, name, shape, first.dtype, pieces)

    def read_raw(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a part of the joined tensor, by reading all pieces."""
        return np.concatenate([piece.read_raw() for piece in self.pieces])[index]


@dataclasses.dataclass(frozen=True, eq=False)
class QuantisedTensor(StoredTensor):
    """Base class of matrices ``[*out, in]`` in a quantised format.

    A subclass defines `format` and `read_arrays`. It must also override `_dequantise` if the tool
    that defines the format rounds weights in another way than `dequantise`.
    """

    @property
    def is_floating(self) -> bool:
        """True, because all quantised tensors can be read as floating-point numbers."""
        return True

    @property
    def format(self) -> WeightFormat:
        """Format of the arrays that `read_arrays` returns."""
        raise NotImplementedError

    def read_arrays(self, rows: slice) -> WeightArrays:
        """Read rows of the matrix in its `format`.

        Args:
          rows: slice of the first dimension to read.

        Raises:
          WeightsError: the file cannot be read, or a scale is not finite.
        """
        raise NotImplementedError

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, *columns = index or (slice(None),)
        return self._dequantise(rows)[(slice(None), *columns)]

    def _dequantise(self, rows: slice) -> np.ndarray:
        """Return rows in float32, with the same rounding as the tool that defines the format."""
        return dequantise(self.read_arrays(rows), self.format.code)


class CountedTensors(Mapping[str, StoredTensor]):
    """Mapping of tensors by name that reports which tensors are used, for a progress bar.

    Several threads may use it.

    Args:
      tensors: the tensors by name.
      report: function that is called with the size of a tensor in bytes when it is first looked up.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], report: Callable[[int], None]):
        self._tensors = tensors
        self._report = report
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> StoredTensor:
        tensor = self._tensors[name]
        with self._lock:
            if name not in self._seen:
                self._seen.add(name)
                self._report(tensor.format.num_bytes(tensor.shape))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def find_dtype(tensors: Iterable[StoredTensor]) -> str | None:
    """Return the dtype of the first floating-point tensor; None if there is none.

    transformers determines the dtype of a model in the same way.
    """
    return next((FLOAT_DTYPES[x.dtype] for x in tensors if x.dtype in FLOAT_DTYPES), None)


def is_finite(values: np.ndarray) -> bool:
    """Return whether all floats of an array are finite.

    To save memory, only a part of the array is checked at a time.
    """
    # Compare bits, because NumPy has no fast isfinite for bfloat16.
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.itemsize}")
    mask = bits.dtype.type(_EXPONENT_BITS[values.dtype.name])
    parts = (bits[start : start + _CHECKED] for start in range(0, bits.size, _CHECKED))
    return not any(((part & mask) == mask).any() for part in parts)
