"""The C++ kernels for weights with interleaved rows: the same bits as for rows in their order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.linear import Stack, Weight, linear
from paged_jax.kernels.native.layouts import InterleavedRows
from paged_jax.kernels.platforms import weight_store
from paged_jax.kernels.weight_formats import Layout, WeightArrays, WeightFormat
from tests.support.compiler import needs_compiler, needs_vnni
from tests.support.covering import all_pairs, once_in_core
from tests.support.weights import FORMATS, make_weight, random_arrays

pytestmark = needs_compiler

# Whole panels of all sizes, incomplete panels, several panels, and several chunks of panels.
NUM_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 64, 256, 300)
# 4-bit values in groups of 16 end within a unit.
SUPPORTED = [name for name in FORMATS if name not in ("nvfp4", "q2_k")]
NOT_ROUNDED = ("float8_e4m3fn", "nf4", "iq4")
INT8_INPUTS = [name for name in SUPPORTED if FORMATS[name].code not in NOT_ROUNDED]


def both_weights(format: WeightFormat, arrays: WeightArrays, dtype: str) -> tuple[Weight, Weight]:
    """Return the same matrix with rows in their order, and with interleaved rows."""
    plain, bundled = (
        make_weight(arrays, format, dtype, layout=layout) for layout in (None, InterleavedRows())
    )
    return plain, bundled


def layout_of(format: WeightFormat, shape: tuple[int, ...]) -> Layout | None:
    [layout] = weight_store("cpu").layouts([(format, shape)], "float32")
    return layout


def check_bits(
    format: WeightFormat, num_outputs: int, dtype: str, *, int8_inputs: bool = False
) -> None:
    # Units of 16 or 32 inputs; several strips; the last segment of a row is shorter than others.
    num_inputs = 1536 if format.has_sections else 1344
    arrays = random_arrays(format, (num_outputs, num_inputs), np.random.default_rng(num_outputs))
    plain, bundled = both_weights(format, arrays, dtype)
    assert layout_of(format, plain.shape) == bundled.layout
    x = np.random.default_rng(0).normal(size=(NUM_ROWS[-1], num_inputs)).astype(np.float32)
    x[11] = 0

    @jax.jit
    def run(x, plain, bundled):
        plain, bundled = (dataclasses.replace(w, int8_inputs=int8_inputs) for w in (plain, bundled))
        multiply = functools.partial(linear, backend="cpu")
        return [(multiply(x[:num], plain), multiply(x[:num], bundled)) for num in NUM_ROWS]

    lowered = run.lower(x, plain, bundled)
    calls = lowered.as_text().count("custom_call @paged_jax_quantised_linear")
    assert calls == 2 * len(NUM_ROWS)
    for want, got in lowered.compile()(x, plain, bundled):
        assert np.abs(want).max() > 1
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    ("name", "dtype", "num_outputs"),
    once_in_core(
        row.values()
        for row in all_pairs(
            {"name": SUPPORTED, "dtype": ["bfloat16", "float32"], "num_outputs": [32, 96]}
        )
    ),
)
def test_linear_gives_the_same_bits(name, dtype, num_outputs) -> None:
    check_bits(FORMATS[name], num_outputs, dtype)


# One format of each width and kind of scales.
INT8_CORE = ("q4_1", "q5_0", "q8_0", "q4_k")


@needs_vnni
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in INT8_CORE else pytest.mark.slow)
        for name in INT8_INPUTS
    ],
)
def test_int8_inputs_give_the_same_bits(name) -> None:
    check_bits(FORMATS[name], 96, "bfloat16", int8_inputs=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_and_minima_of_every_dtype(dtype) -> None:
    check_bits(WeightFormat("uint4", 32, dtype, dtype), 64, "bfloat16")


@pytest.mark.parametrize(("group_size", "min_dtype"), [(32, "float16"), (64, "int8")])
def test_scales_of_two_levels(group_size, min_dtype) -> None:
    check_bits(WeightFormat("uint5", group_size, "int8", min_dtype), 64, "bfloat16")


@pytest.mark.parametrize("name", ["q4_1", "q8_0"])
def test_linear_reads_a_layer_of_the_stack(name) -> None:
    """Outputs have two dimensions. Layers are interleaved separately."""
    format, rng = FORMATS[name], np.random.default_rng(0)
    arrays = [random_arrays(format, (3, 32, 64), rng) for _ in range(3)]
    layers = [both_weights(format, each, "bfloat16") for each in arrays]
    stack = jax.tree.map(lambda *each: jnp.stack(each), *(bundled.arrays for _, bundled in layers))
    x = rng.normal(size=(5, 64)).astype(np.float32)
    program = jax.jit(linear)
    for layer, (plain, bundled) in enumerate(layers):
        w = dataclasses.replace(bundled, stack=Stack(stack, jnp.int32(layer)))
        np.testing.assert_array_equal(program(x, w), program(x, plain))


@pytest.mark.parametrize(
    ("format", "shape", "is_supported"),
    [
        (FORMATS["q4_0"], (64, 96), True),
        (FORMATS["q4_0"], (2, 3, 16, 96), True),
        (FORMATS["q4_0"], (48, 96), False),
        (FORMATS["nvfp4"], (64, 96), False),
        (FORMATS["q6_k"], (64, 256), True),
        (FORMATS["q2_k"], (64, 256), False),
        (WeightFormat("int8", 8, "float32"), (64, 96), False),
        (FORMATS["int8 of a row"], (64, 80), True),
        (FORMATS["int8 of a row"], (64, 77), False),
    ],
    ids=str,
)
def test_interleaved_rows_need_whole_bundles_and_units(format, shape, is_supported) -> None:
    assert layout_of(format, shape) == (InterleavedRows() if is_supported else None)


def test_floats_are_plain() -> None:
    assert layout_of(WeightFormat("float32"), (32, 64)) is None


def test_results_of_rows_do_not_depend_on_other_rows() -> None:
    arrays = random_arrays(FORMATS["q4_1"], (64, 96), np.random.default_rng(64))
    w = make_weight(arrays, FORMATS["q4_1"], "bfloat16", layout=InterleavedRows())
    x = np.random.default_rng(0).normal(size=(40, 96)).astype(np.float32)
    program = jax.jit(linear)
    together = np.asarray(program(x, w))
    for num_rows in (1, 5, 16, 25):
        np.testing.assert_array_equal(program(x[:num_rows], w), together[:num_rows])
