"""Tensors of GGUF files, compared with the dequantisation of the package gguf."""

import gguf
import numpy as np
import pytest

from paged_jax.kernels.weight_formats import dequantise
from paged_jax.models.codecs.gguf_types import GGUF_TYPES
from paged_jax.models.errors import WeightsError
from paged_jax.models.gguf_file import GgufFile
from paged_jax.models.loading.gguf_tensors import GgufTensor
from tests.support.gguf_files import SCALE_PLACES, random_rows, write

_F32 = np.dtype(np.float32)
QUANTISED = [name for name in GGUF_TYPES if name not in ("F32", "F16", "BF16")]
NUM_ROWS, NUM_BLOCKS = 6, 3


def random_blocks(kind: str) -> np.ndarray:
    """Return random bytes for each block, with finite scales."""
    return random_rows(kind, NUM_ROWS, NUM_BLOCKS)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    tensors = {kind: (random_blocks(kind), kind) for kind in QUANTISED}
    rng = np.random.default_rng(2)
    tensors["F32"] = rng.standard_normal((6, 8), np.float32)
    tensors["F16"] = tensors["F32"].astype(np.float16)
    bits = tensors["F32"].view(np.uint16)[:, 1::2]
    tensors["BF16"] = (np.ascontiguousarray(bits).view(np.uint8), "BF16")
    tensors["experts"] = (np.stack([random_blocks("Q4_K"), random_blocks("Q4_K")[::-1]]), "Q4_K")
    tensors["norm"] = rng.standard_normal(8, np.float32)
    tensors["IQ3_S"] = (np.zeros((1, 110), np.uint8), "IQ3_S")
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return GgufFile.open(write(path, {"general.architecture": "llama"}, tensors))


@pytest.fixture(scope="module")
def expected(file):
    return {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type)
        for each in gguf.GGUFReader(file.path).tensors
        if each.name != "IQ3_S"
    }


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_read_equals_the_reference_bit_for_bit(file, expected, kind):
    tensor = GgufTensor.of(file.tensors[kind])
    whole = tensor.read((slice(None),), _F32)
    if kind == "MXFP4":  # the package has no negative zero
        whole = whole + np.float32(0)
    np.testing.assert_array_equal(whole.view(np.uint32), expected[kind].view(np.uint32))
    part = tensor.read((slice(2, 5), slice(3, 7)), _F32)
    np.testing.assert_array_equal(part, expected[kind][2:5, 3:7])


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_read_arrays_keep_the_format_of_the_file(file, expected, kind):
    tensor = GgufTensor.of(file.tensors[kind])
    arrays = tensor.read_arrays(slice(1, 4))
    shapes = tensor.format.shapes((3, tensor.shape[1]))
    for field, array in arrays._asdict().items():
        assert (None if array is None else (array.shape, array.dtype)) == shapes.get(field)
    np.testing.assert_array_equal(dequantise(arrays, tensor.format.code), expected[kind][1:4])


def test_part_is_the_matrix_of_an_expert(file, expected):
    tensor = GgufTensor.of(file.tensors["experts"])
    for index in range(2):
        found = tensor.part(index).read((slice(1, 6),), _F32)
        np.testing.assert_array_equal(found, expected["experts"][index, 1:6])


def test_rows_and_inputs_are_put_in_order(file, expected):
    order, inputs = np.array([0, 2, 4, 1, 3, 5]), np.roll(np.arange(768, dtype=np.int32), 32)
    tensor = GgufTensor.of(file.tensors["Q4_K"], row_order=order, input_order=inputs)
    ordered = np.empty_like(expected["Q4_K"])
    ordered[:, inputs] = expected["Q4_K"][order]  # column j of the file belongs to input inputs[j]
    np.testing.assert_array_equal(tensor.read((slice(None),), _F32), ordered)
    np.testing.assert_array_equal(tensor.read((slice(1, 5),), _F32), ordered[1:5])
    np.testing.assert_array_equal(
        tensor.read((slice(1, 5), slice(9, 70)), _F32), ordered[1:5, 9:70]
    )
    np.testing.assert_array_equal(tensor.read_arrays(slice(1, 3)).order, inputs)
    assert tensor.format.has_order
    with pytest.raises(WeightsError, match=r"must have 5 rows or inputs, which .* \[6, 768\]"):
        GgufTensor.of(file.tensors["Q4_K"], row_order=order[:5])


def test_one_dimension(file, expected):
    tensor = GgufTensor.of(file.tensors["norm"], undo=lambda weights: weights - 1)
    np.testing.assert_array_equal(tensor.read((slice(2, 7),), _F32), (expected["norm"] - 1)[2:7])
    order = np.array([0, 2, 1, 3, 4, 6, 5, 7])
    tensor = GgufTensor.of(file.tensors["norm"], row_order=order)
    found = tensor.read((slice(None),), _F32)
    np.testing.assert_array_equal(found, expected["norm"][order])


@pytest.mark.parametrize(("shape", "is_used"), [((4, 1, 2), False), ((1, 8), True), ((8, 1), True)])
def test_dimensions_of_size_one_are_added(file, expected, shape, is_used):
    """llama.cpp stores filters [rows, 1, width] without the middle dimension, for example."""
    tensor = GgufTensor.of(file.tensors["norm"], shape=shape)
    assert tensor.shape == (shape if is_used else (8,))
    found = tensor.read((slice(None),), _F32)
    np.testing.assert_array_equal(found, expected["norm"].reshape(tensor.shape))


def test_unsupported_types_are_named(file):
    with pytest.raises(WeightsError, match="type of tensor IQ3_S must be one of F32, .* got IQ3_S"):
        GgufTensor.of(file.tensors["IQ3_S"])


@pytest.mark.parametrize("kind", QUANTISED)
def test_scales_that_are_not_finite_are_rejected(tmp_path, kind):
    data = random_blocks(kind)
    place = max(SCALE_PLACES.get(kind, ()), default=0)
    data[:, place : place + 2] = [0, 0x7C] if kind != "MXFP4" else [0xFF, 0]
    path = write(tmp_path / "x.gguf", {"general.architecture": "llama"}, {"w": (data, kind)})
    tensor = GgufTensor.of(GgufFile.open(path).tensors["w"])
    with pytest.raises(WeightsError, match="the scales of w must be finite"):
        tensor.read_arrays(slice(None))


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
    tensors = {"w": np.ones((4, 8), np.float32)}
    path = write(tmp_path / "x.gguf", {"general.architecture": "llama"}, tensors)
    tensor = GgufTensor.of(GgufFile.open(path).tensors["w"])
    path.write_bytes(path.read_bytes()[:-32])
    with pytest.raises(WeightsError, match="the file .* has become shorter"):
        tensor.read((slice(None),), _F32)
