"""Packing of quantised weights: values of 4 and 5 bits, and scales of two levels."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.kernels.weight_packing import (
    count_columns,
    count_groups,
    join_levels,
    pack,
    round_levels,
    scale_floats,
    split_levels,
    unpack,
)


@given(st.sampled_from([4, 5]), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_unpack_is_the_inverse_of_pack(bits, num_blocks, seed) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << bits, (3, 2, 32 * num_blocks)).astype(np.uint8)
    packed = pack(values, bits)
    assert packed.shape == (3, 2, 4 * bits * num_blocks) and packed.dtype == np.uint8
    np.testing.assert_array_equal(pack(jnp.asarray(values), bits), packed)
    np.testing.assert_array_equal(unpack(packed, bits), values)
    np.testing.assert_array_equal(unpack(jnp.asarray(packed), bits), values)
    # The order of GGUF: input j of 32 in the low bits of byte j, input 16 + j in the high bits.
    for j in range(16):
        np.testing.assert_array_equal(packed[..., j] & 15, values[..., j] & 15)
        np.testing.assert_array_equal(packed[..., j] >> 4, values[..., 16 + j] & 15)
    for j in range(32 * (bits == 5)):  # bit i of byte j belongs to input 4 i + j
        np.testing.assert_array_equal(packed[..., 16 + j % 4] >> j // 4 & 1, values[..., j] >> 4)


@given(st.sampled_from([4, 8, 16, 32]), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_split_levels_is_the_inverse_of_join_levels(num_groups, num_rows, seed) -> None:
    """A section of 256 inputs has the numbers of its groups, then the bytes of its factor."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-128, 128, (2, num_rows, 3 * num_groups)).astype(np.int8)
    factors = rng.normal(size=(2, num_rows, 3)).astype(np.float32)
    scales = join_levels(numbers, factors)
    columns = count_columns(3 * num_groups, 768, scales.dtype)
    assert scales.shape == (2, num_rows, columns) and scales.dtype == np.int8
    assert count_groups(scales, 768) == 3 * num_groups
    sections = scales.reshape(2, num_rows, 3, num_groups + 4)
    np.testing.assert_array_equal(sections[..., :-4].reshape(numbers.shape), numbers)
    assert sections[..., -4:].tobytes() == factors.tobytes()
    np.testing.assert_array_equal(join_levels(jnp.asarray(numbers), jnp.asarray(factors)), scales)
    for as_array in (np.asarray, jnp.asarray):
        got = split_levels(as_array(scales), 768)
        np.testing.assert_array_equal(got[0], numbers)
        np.testing.assert_array_equal(got[1], factors)
        products = numbers.reshape(2, num_rows, 3, num_groups) * factors[..., None]
        floats = scale_floats(as_array(scales), 768)
        np.testing.assert_array_equal(floats, products.reshape(numbers.shape))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_floats_have_one_level(dtype) -> None:
    scales = jnp.ones((3, 8), dtype)
    assert count_groups(scales, 256) == count_columns(8, 256, scales.dtype) == 8
    assert scale_floats(scales, 256).dtype == np.float32


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_round_levels_is_off_by_half_a_factor(as_array) -> None:
    """The largest number of a section is 127. The second section is zeros, the third is tiny."""
    floats = np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32)
    floats[:, 1], floats[:, 2] = 0, floats[:, 2] * np.float32(1e-42)
    scales = round_levels(as_array(floats.reshape(5, 24)), 768)
    numbers, factors = map(np.asarray, split_levels(scales, 768))
    assert np.abs(numbers[:, :8].astype(np.int32)).max(-1).tolist() == [127] * 5
    assert not numbers[:, 8:].any()
    error = np.abs(scale_floats(np.asarray(scales), 768).reshape(floats.shape) - floats)
    assert (error <= 0.5001 * factors[..., None]).all()
