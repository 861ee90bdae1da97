"""Rows of quantised matrices: each range of rows equals the rows of the whole matrix.

The matrices are packed by `tests.support.quantised_files`, and those of GGUF files expanded by the
package gguf. Ranges begin and end at every row: within a word of packed values, within a block of
scales that several rows share, and within a byte.
"""

from collections.abc import Iterator

import gguf
import numpy as np
import pytest

from paged_jax.kernels.weight_formats import dequantise
from paged_jax.models.codecs.gguf_types import GGUF_TYPES
from paged_jax.models.codecs.quantisation import CODECS, combine_quantised, find_quantisation
from paged_jax.models.gguf_file import GgufFile
from paged_jax.models.loading.gguf_tensors import GgufTensor
from paged_jax.models.loading.safetensors_files import list_tensors
from tests.support import gguf_files
from tests.support.quantised_files import FORMATS, write_tensors

F32 = np.dtype(np.float32)
# Formats that the tool rounds more than once. The arrays then differ from its result in the last
# bits.
ROUNDED = ("bitsandbytes-8", "mlx")


def ranges(num_rows: int) -> Iterator[slice]:
    """Yield ranges of one row, of 9 rows and of all further rows, from each row on."""
    for start in range(num_rows):
        for stop in {start + 1, min(start + 9, num_rows), num_rows}:
            yield slice(start, stop)


def check_ranges(stored, want: np.ndarray, *, is_rounded: bool = False) -> None:
    """Check `read` and `read_arrays` of a tensor, whole and for ranges of its rows."""
    assert stored.shape == want.shape
    np.testing.assert_array_equal(stored.read((), F32), want)
    arrays, code = stored.read_arrays(slice(None)), stored.format.code
    rows_first = want.swapaxes(-1, -2) if want.ndim > 2 else want
    atol = 2**-22 * np.abs(want).max() if is_rounded else 0
    np.testing.assert_allclose(dequantise(arrays, code), rows_first, rtol=0, atol=atol)
    for rows in ranges(len(want)):
        assert np.array_equal(stored.read((rows,), F32), want[rows]), rows
        part, expected = stored.read_arrays(rows), arrays.map_rows(lambda x, rows=rows: x[rows])
        for field, array, wanted in zip(arrays._fields, part, expected, strict=True):
            assert (array is None) == (wanted is None), (rows, field)
            assert array is None or np.array_equal(array, wanted), (rows, field)


@pytest.mark.parametrize("name", FORMATS, ids=" ".join)
def test_ranges_of_a_published_format(tmp_path, name) -> None:
    format, _ = name
    matrix = FORMATS[name](np.random.default_rng(3))
    write_tensors(tmp_path, matrix.tensors, "m." if format != "mxfp4-experts" else "m")
    key = "quantization" if format.startswith("mlx") else "quantization_config"
    quantisation = find_quantisation({key: matrix.config}, has_mxfp4=True)
    assert quantisation is not None
    assert [each.name for each in quantisation.formats] == [format]
    [stored] = combine_quantised(list_tensors(tmp_path), quantisation)
    check_ranges(stored, matrix.want, is_rounded=format in ROUNDED)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_ranges_of_a_gguf_type(tmp_path, kind) -> None:
    """Read the rows in the order of the file, and as two heads whose rows llama.cpp reordered."""
    tensor = gguf_files.random_rows(kind, num_rows=12)
    path = gguf_files.write(
        tmp_path / "x.gguf", {"general.architecture": "llama"}, {"w": (tensor, kind)}
    )
    entry = GgufFile.open(path).tensors["w"]
    [each] = gguf.GGUFReader(path).tensors
    want = gguf.quants.dequantize(each.data, each.tensor_type)
    check_ranges(GgufTensor.of(entry), want)
    order = np.random.default_rng(0).permutation(len(want))
    check_ranges(GgufTensor.of(entry, row_order=order), want[order])


def test_every_format_of_a_codec_has_files() -> None:
    formats = {format.name for codec in CODECS for format in codec.formats}
    assert {name for name, _ in FORMATS} == formats
