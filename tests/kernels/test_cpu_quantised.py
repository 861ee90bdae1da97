"""The C++ kernels for quantised weights: values, bits, bounds of arrays, other processors."""

import dataclasses
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.linear import Stack, grouped_linear, linear
from paged_jax.kernels.native import library
from paged_jax.kernels.native.compiler import find_compiler
from paged_jax.kernels.native.kernels import NativeKernel
from paged_jax.kernels.weight_formats import (
    CODES,
    INT8_CODES,
    WeightArrays,
    WeightFormat,
    dequantise,
)
from paged_jax.kernels.weight_packing import pack, unpack
from tests.support.compiler import needs_compiler, needs_vnni
from tests.support.covering import all_pairs, once_in_core
from tests.support.weights import elements, make_weight, random_arrays

pytestmark = needs_compiler

LINEAR = jax.jit(linear)


def linear_int8(x, w):
    return linear(x, dataclasses.replace(w, int8_inputs=True))


LINEAR_INT8 = jax.jit(linear_int8)
F32, BF16, S8 = (jnp.dtype(each) for each in (jnp.float32, jnp.bfloat16, jnp.int8))

# Inputs and the size of groups. Groups of 4-bit values in units of 32 inputs, several segments,
# parts of units, and several strips; groups of 8-bit values that end within a unit.
PACKED_SIZES = [(32, None), (96, 32), (64, 16), (288, 144), (160, 4), (576, None), (1312, 32)]
CODES_OF_5_BITS = ["int5", "uint5"]
SIZES_OF_5_BITS = [(32, None), (96, 32), (192, 64), (576, None), (1312, 32)]
BYTE_SIZES = [(1, None), (77, None), (30, 6), (26, 2), (64, 16), (576, None), (1312, 32)]


def flags_of_processor() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return {flag for line in text.splitlines() if line.startswith("flags") for flag in line.split()}


def cases():
    floats = ["float32", "bfloat16", "float16"]
    codes_of_4_bits = [code for code in CODES if code not in CODES_OF_5_BITS]
    for codes, sizes in (
        (codes_of_4_bits, PACKED_SIZES),
        (CODES_OF_5_BITS, SIZES_OF_5_BITS),
        (["int8", "float8_e4m3fn"], BYTE_SIZES),
    ):
        factors = {
            "code": codes,
            "sizes": sizes,
            "scale_dtype": floats,
            "min_dtype": [None, *floats],
            "has_order": [False, True],
            "num_outputs": [1, 16, 35],
            "dtype": ["bfloat16", "float32", "float16"],
        }
        yield from (tuple(row.values()) for row in all_pairs(factors))
    two_levels = {
        "code": ["uint4", "int8", "uint5"],
        "sizes": [(512, 32), (768, 64)],
        "scale_dtype": ["int8"],
        "min_dtype": ["int8", "float16", None],
        "has_order": [False, True],
        "num_outputs": [16, 35],
        "dtype": ["bfloat16", "float32"],
    }
    yield from (tuple(row.values()) for row in all_pairs(two_levels))
    yield "int4", (256, 16), "int8", None, False, 35, "bfloat16"


def problem(case, num_rows):
    """Return a weight, its elements in float64, and rows; some rows are zeros."""
    code, (num_inputs, group_size), scale_dtype, min_dtype, has_order, num_outputs, dtype = case
    rng = np.random.default_rng(num_inputs)
    format = WeightFormat(code, group_size, scale_dtype, min_dtype, has_order)
    arrays = random_arrays(format, (num_outputs, num_inputs), rng)
    x = rng.normal(size=(num_rows, num_inputs)).astype(dtype).astype(np.float32)
    x[1::4] = 0
    return make_weight(arrays, format, dtype), elements(arrays, format), x


def multiply_parts(program, x, w):
    """Multiply all rows, the last 18 rows and the last row. Return the text of the program too."""

    @jax.jit
    def run(x, w):
        return [program(x[-num_rows:], w) for num_rows in (len(x), 18, 1)]

    lowered = run.lower(x, w)
    return [np.asarray(out) for out in lowered.compile()(x, w)], lowered.as_text()


def round_to_int8(x, w):
    """Return rows as the kernels round them, in float64: a scale for up to 64 inputs of a group."""
    rounded = np.zeros(x.shape)
    size = w.format.group_size or w.shape[-1]
    step = size if w.code in CODES and size % 32 else 64
    places = np.arange(x.shape[-1]) if w.order is None else np.asarray(w.order)
    for begin in range(0, x.shape[-1], size):
        for start in range(begin, begin + size, step):
            segment = places[start : min(start + step, begin + size)]
            largest = np.abs(x[:, segment]).max(-1, keepdims=True)
            factor = np.where(largest < 1e-30, 0, np.float32(127) / np.maximum(largest, 1e-30))
            scale = (largest / np.float32(127)).astype(np.float64)
            rounded[:, segment] = np.rint(x[:, segment] * factor.astype(np.float32)) * scale
    return rounded


FACTORS = "code, sizes, scale_dtype, min_dtype, has_order, num_outputs, dtype"


@pytest.mark.parametrize(FACTORS, once_in_core(cases()), ids=str)
def test_linear_matches_float64_and_does_not_depend_on_other_rows(
    code, sizes, scale_dtype, min_dtype, has_order, num_outputs, dtype
) -> None:
    """Rows are already rounded to the dtype of the model, so only sums are rounded."""
    case = code, sizes, scale_dtype, min_dtype, has_order, num_outputs, dtype
    w, exact_w, x = problem(case, 39)
    (together, *parts), text = multiply_parts(linear, x, w)
    assert text.count("custom_call @paged_jax_quantised_linear") == 3
    exact, terms = x.astype(np.float64) @ exact_w.T, np.abs(x) @ np.abs(exact_w).T
    assert (np.abs(together - exact) <= 2e-6 * terms).all()
    np.testing.assert_array_equal(together[1::4], 0)
    for part in parts:
        np.testing.assert_array_equal(part, together[-len(part) :])


@pytest.mark.parametrize("code", ["uint4", "int8"])
def test_linear_divides_many_rows_into_chunks(code) -> None:
    """A block of weights multiplies at most 264 rows before the next block."""
    case = code, (64, 32), "float16", "float16" if code == "uint4" else None, False, 35, "bfloat16"
    w, _, x = problem(case, 800)  # 600 rows without zeros
    together = np.asarray(LINEAR(x, w))
    parts = [LINEAR(part, w) for part in np.split(x, 8)]
    np.testing.assert_array_equal(together, np.concatenate(parts))


@pytest.mark.parametrize("code", ["e2m1", "nf4", "int5", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_linear_converts_every_value(code, dtype) -> None:
    """Each input alone, so that results are exact: all packed values, or all bytes except NaN.

    The values of 5 bits are at each place of a block of 32 inputs.
    """
    values = np.arange(256, dtype=np.uint8).reshape(4, 64)
    if code == "int5":
        values = (np.arange(32)[:, None] + np.arange(64)) % 32
        numbers, values = values - 16, pack(values.astype(np.uint8), 5)
    elif code in CODES:
        numbers = CODES[code][unpack(values)]
    else:
        values = values.view(code)
        values = np.where(np.isnan(values.astype(np.float32)), values[0, 0], values)
        numbers = values.astype(np.float32)
    scales = np.full((len(values), 1), 0.5, np.float32)
    w = make_weight(WeightArrays(values, scales), WeightFormat(code), dtype)
    rows = np.eye(numbers.shape[1], dtype=np.float32)
    np.testing.assert_array_equal(LINEAR(rows, w).T, numbers * 0.5)


def test_linear_rounds_rows_to_the_dtype_of_the_model() -> None:
    """Rows are rounded with nf4 too, although its kernel multiplies in float32 to stay exact."""
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    for code in ("int4", "nf4"):
        w, _, _ = problem((code, (64, 32), "float32", "float32", False, 5, "bfloat16"), 1)
        np.testing.assert_array_equal(LINEAR(x, w), LINEAR(x.astype(BF16).astype(np.float32), w))
        exactly = dataclasses.replace(w, dtype=F32)
        assert np.abs(LINEAR(x, w) - LINEAR(x, exactly)).max() > 1e-3


@pytest.mark.parametrize("code", ["int8", "float8_e4m3fn"])
def test_linear_reads_nothing_past_the_end_of_a_group_or_row(code) -> None:
    """The next group has NaN scales, and the next row NaN values."""
    w, exact, x = problem((code, (42, 14), "float32", None, False, 20, "bfloat16"), 3)
    values, scales = np.array(w.values), np.array(w.scales)
    if code != "int8":
        values[7] = np.nan
    scales[9, 1] = np.nan
    got = np.asarray(LINEAR(x, dataclasses.replace(w, values=values, scales=scales)))
    is_changed = np.isin(np.arange(20), [7, 9] if code != "int8" else [9])
    is_row = x.any(-1)
    assert np.isnan(got[is_row][:, is_changed]).all()
    np.testing.assert_allclose(
        got[:, ~is_changed], (x @ exact.T)[:, ~is_changed], rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("code", ["uint4", "int8"])
def test_kernels_read_weights_in_place_from_the_stack_of_all_layers(code) -> None:
    """Results are the same bits as without a stack; no array of the stack is copied."""
    format = WeightFormat(code, 32, "float16", "bfloat16", has_order=True)
    rng = np.random.default_rng(0)
    layers = [random_arrays(format, (3, 512, 512), rng) for _ in range(3)]
    stacked = WeightArrays(*(jnp.stack(arrays) for arrays in zip(*layers, strict=True)))
    x, sizes = rng.normal(size=(5, 512)).astype(np.float32), jnp.array([2, 0, 3])

    def run(x, stacked):
        def body(x, layer_and_arrays):
            layer, arrays = layer_and_arrays
            w = dataclasses.replace(
                make_weight(arrays, format, "bfloat16"), stack=Stack(stacked, layer)
            )
            experts = grouped_linear(x, w, sizes)
            whole = linear(x, dataclasses.replace(w, stack=Stack(stacked, layer)))
            return jnp.tanh(experts), (experts, whole)

        return jax.lax.scan(body, x, (jnp.arange(3), stacked))[1]

    compiled = jax.jit(run).lower(x, stacked).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < stacked.values[0].nbytes / 2
    experts, whole = compiled(x, stacked)
    x = np.tanh(experts[1])
    w = make_weight(layers[2], format, "bfloat16")
    np.testing.assert_array_equal(experts[2], jax.jit(grouped_linear)(x, w, sizes))
    np.testing.assert_array_equal(whole[2], LINEAR(x, w))


@pytest.mark.parametrize("code", ["int4", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grouped_linear_does_not_depend_on_other_rows(code, dtype) -> None:
    """`linear` with the weight of the expert gives the same bits."""
    format = WeightFormat(code, 32, "float16", "float16", has_order=True)
    rng = np.random.default_rng(0)
    arrays = random_arrays(format, (4, 35, 96), rng)
    w, sizes = make_weight(arrays, format, dtype), (20, 0, 1, 5)
    x = rng.normal(size=(28, 96)).astype(np.float32)
    x[[3, 20]] = 0
    x[26:] = np.nan
    got = np.asarray(jax.jit(grouped_linear)(x, w, jnp.array(sizes)))
    for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        if size:
            one = WeightArrays(*(each[group] for each in arrays[:3]), arrays.order)
            alone = LINEAR(x[end - size : end], make_weight(one, format, dtype))
            np.testing.assert_array_equal(got[end - size : end], alone)
    np.testing.assert_array_equal(got[26:], 0)
    assert np.abs(got).max() > 1


@pytest.mark.parametrize(("code", "group_size"), [("int4", 2), ("int5", 16)])
def test_linear_leaves_incomplete_groups_of_packed_values_to_xla(code, group_size) -> None:
    """The kernels would read bytes past the end of the last row."""
    case = code, (32, group_size), "float32", None, False, 5, "float32"
    w, exact, x = problem(case, 3)
    assert "custom_call" not in LINEAR.lower(x, w).as_text()
    np.testing.assert_allclose(LINEAR(x, w), x @ exact.T, rtol=1e-4, atol=1e-3)


@needs_vnni
@pytest.mark.parametrize(
    FACTORS, once_in_core(case for case in cases() if case[0] in INT8_CODES), ids=str
)
def test_int8_inputs_match_float64_and_do_not_depend_on_other_rows(
    code, sizes, scale_dtype, min_dtype, has_order, num_outputs, dtype
) -> None:
    """The reference rounds inputs in NumPy. Then products are exact, and only sums are rounded."""
    case = code, sizes, scale_dtype, min_dtype, has_order, num_outputs, dtype
    w, exact_w, x = problem(case, 39)
    (together, *parts), text = multiply_parts(LINEAR_INT8, x, w)
    assert (
        len(re.findall("custom_call @paged_jax_quantised_linear_(?:int8|packed[45])_int8_", text))
        == 3
    )
    rounded = round_to_int8(x, w)
    exact, terms = rounded @ exact_w.T, np.abs(rounded) @ np.abs(exact_w).T
    assert (np.abs(together - exact) <= 2e-6 * terms).all()
    np.testing.assert_array_equal(together[1::4], 0)
    for part in parts:
        np.testing.assert_array_equal(part, together[-len(part) :])


@needs_vnni
@pytest.mark.parametrize("code", ["uint4", "int8"])
def test_int8_inputs_of_every_panel(code) -> None:
    """Numbers of rows that fill panels of all sizes, partly or wholly, and several chunks."""
    w, exact_w, x = problem((code, (96, 32), "float16", "float16", True, 35, "bfloat16"), 320)
    x = x[x.any(-1)]
    together = np.asarray(LINEAR_INT8(np.concatenate([x, x]), w))
    rounded = round_to_int8(x, w)
    terms = np.abs(rounded) @ np.abs(exact_w).T
    assert (np.abs(together[: len(x)] - rounded @ exact_w.T) <= 2e-6 * terms).all()
    np.testing.assert_array_equal(together[len(x) :], together[: len(x)])
    for num_rows in (*range(1, 18), 24, 25, 40):
        np.testing.assert_array_equal(LINEAR_INT8(x[:num_rows], w), together[:num_rows])


@needs_vnni
@pytest.mark.parametrize("code", ["int4", "int8"])
def test_int8_inputs_in_plain_jax(code) -> None:
    """Programs without the kernels, such as batched ones, round in the same way."""
    w, _, x = problem((code, (288, 144), "bfloat16", "float32", True, 35, "bfloat16"), 9)
    want, terms = LINEAR_INT8(x, w), 2e-6 * (np.abs(x) @ np.abs(dequantise(w.arrays, code)).T)
    batched = jax.jit(jax.vmap(lambda x: linear_int8(x, w)))
    assert "custom_call" not in batched.lower(x[None]).as_text()
    assert (np.abs(batched(x[None])[0] - want) <= terms).all()
    derivative = jax.grad(lambda x: LINEAR_INT8(x, w).sum())(x)
    sums = jnp.broadcast_to(dequantise(w.arrays, code).sum(0), x.shape)
    np.testing.assert_allclose(derivative, sums, rtol=1e-4, atol=1e-2)


@needs_vnni
@pytest.mark.parametrize("code", ["uint4", "int8"])
def test_int8_inputs_of_any_size(code) -> None:
    """Segments of tiny and of large inputs; a row with NaN or infinity affects no other row."""
    w, exact_w, x = problem((code, (128, None), "float32", None, False, 5, "float32"), 12)
    x = x[x.any(-1)]
    x[1, 64:] *= 1e-38
    x[2, 64:] *= 1e-25
    x[3] *= 1e30
    x[4, 70], x[6, 3] = np.nan, np.inf
    got, rounded = np.asarray(LINEAR_INT8(x, w)), round_to_int8(x[:4], w)
    assert (
        np.abs(got[:4] - rounded @ exact_w.T) <= 2e-6 * np.abs(rounded) @ np.abs(exact_w).T
    ).all()
    assert np.isnan(got[4]).all() and not np.isfinite(got[6]).any()
    np.testing.assert_array_equal(got[[5, 7]], LINEAR_INT8(x[[5, 7]], w))
    assert np.isfinite(got[[5, 7]]).all()


@needs_vnni
@pytest.mark.parametrize("code", ["nf4", "fp4", "iq4", "float8_e4m3fn"])
def test_inputs_of_other_codes_are_not_rounded_to_int8(code) -> None:
    w, _, x = problem((code, (64, 32), "float32", None, False, 16, "bfloat16"), 3)
    np.testing.assert_array_equal(LINEAR_INT8(x, w), LINEAR(x, w))


@needs_vnni
@pytest.mark.parametrize("code", INT8_CODES)
def test_int8_inputs_of_experts(code) -> None:
    """`linear` with the weight of the expert gives the same bits."""
    format = WeightFormat(code, 32, "float16", "float16", has_order=True)
    rng = np.random.default_rng(0)
    arrays = random_arrays(format, (4, 35, 96), rng)
    w, sizes = make_weight(arrays, format, "bfloat16"), (20, 0, 1, 5)
    x = rng.normal(size=(28, 96)).astype(np.float32)
    w = dataclasses.replace(w, int8_inputs=True)
    experts = jax.jit(grouped_linear)
    got = np.asarray(experts(x, w, jnp.array(sizes)))
    for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        if size:
            one = WeightArrays(*(each[group] for each in arrays[:3]), arrays.order)
            alone = LINEAR_INT8(x[end - size : end], make_weight(one, format, "bfloat16"))
            np.testing.assert_array_equal(got[end - size : end], alone)
    np.testing.assert_array_equal(got[26:], 0)
    plain = jax.jit(jax.vmap(lambda x: experts(x, w, jnp.array(sizes))))(x[None])[0]
    np.testing.assert_allclose(plain, got, rtol=1e-4, atol=1e-4)


# Names of processors for the compiler. A processor with these instructions can run the code.
PROCESSORS = {
    "x86-64": "sse2",
    "haswell": "avx2",
    "skylake-avx512": "avx512vl",
    "cascadelake": "avx512_vnni",
    "cooperlake": "avx512_bf16",
}


@pytest.mark.parametrize(
    ("processor", "code", "dtype"),
    [
        ("x86-64", "packed4", F32),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("x86-64", "float8_e4m3fn", F32),
                ("haswell", "packed4", F32),
                ("x86-64", "packed5", F32),
                ("haswell", "packed5", F32),
                ("haswell", "int8", BF16),
                ("skylake-avx512", "packed4", BF16),
                ("skylake-avx512", "packed5", BF16),
                ("skylake-avx512", "float8_e4m3fn", F32),
                ("cooperlake", "int8", BF16),
                ("cascadelake", "int8", S8),
                ("cascadelake", "packed4", S8),
                ("cascadelake", "packed5", S8),
                ("haswell", None, BF16),
                ("cascadelake", None, BF16),
            )
        ),
    ],
)
def test_kernels_for_processors_with_fewer_instructions(
    processor, code, dtype, monkeypatch, tmp_path
) -> None:
    """`load` solves a problem with the kernel."""
    if PROCESSORS[processor] not in flags_of_processor():
        pytest.skip(f"this processor cannot run code for {processor}")
    command = library._command

    def for_processor(kernel):
        return [f"-march={processor}" if x == "-march=native" else x for x in command(kernel)]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_command", for_processor)
    op = "linear" if code is None else "quantised_linear"
    loaded = library._load.__wrapped__(NativeKernel(op, dtype, code))
    assert loaded.reason is None


# Multiplies arrays that end where a page begins that may not be read or written.
_PROGRAM = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <initializer_list>

void* guarded(size_t bytes) {
  size_t page = 1 << 16, size = (bytes + page - 1) / page * page;
  int access = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS;
  char* begin = (char*)mmap(0, size + page, access, kind, -1, 0);
  mprotect(begin + size, page, PROT_NONE);
  return begin + size - bytes;
}

void ignore(void*) {}

#define malloc guarded
#define aligned_alloc(alignment, bytes) guarded(bytes)
#define free ignore
#include "quantised_call.h"

int main() {
  const int64_t sizes[][2] = {SIZES};
  Decoder decoder((float*)guarded(Decoder::WORDS == 5 ? 128 : 64));
  for (auto& [K, groups] : sizes)
    for (int64_t N : {1, 16, 35, 64})
      for (int64_t M : {1, 5, 16, 21}) {
        int64_t row_bytes = K * DECODER_BYTES / Decoder::INPUTS;
        auto* values = (uint8_t*)guarded(N * row_bytes);
        auto* scales = (uint8_t*)guarded(N * groups * 2);
        auto* mins = (uint8_t*)guarded(N * groups * 4);
        Panels<Decoder, Cells> panels = {};
        auto* x = (float*)guarded(M * K * 4);
        for (int64_t i = 0; i < M * K; i++) x[i] = 1;
        panels.x = x, panels.out = (float*)guarded(M * N * 4), panels.N = N, panels.has_sums = true;
        panels.order = (int32_t*)guarded(K * 4), panels.is_rounded = ROUNDS<INPUT>;
        panels.groups = Groups::divide<Decoder>(K, groups);
        if (!panels.reserve(M, 1)) return 1;
        panels.add(0, M);
        for (int64_t i = 0; i < panels.num_panels; i++) panels.run(i);
        Matrix matrix = {
            {values, row_bytes, values + N * row_bytes},
            {scales, groups * 2, scales + N * groups * 2},
            {mins, groups * 4, mins + N * groups * 4},
            FLOAT16, FLOAT32, &decoder, N, panels.groups};
        matrix.is_interleaved = N == 64 && panels.groups.size % Decoder::INPUTS == 0;
        Product product = {matrix, panels.panels, panels.num_panels, panels.out};
        product.divide(2);
        for (int64_t i = 0; i < product.num_parts; i++) product.run(i);
      }
}
"""


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        ("packed4", BF16),
        pytest.param("packed5", BF16, marks=pytest.mark.slow),
        pytest.param("int8", BF16, marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", F32, marks=pytest.mark.slow),
        pytest.param("packed4", S8, marks=[needs_vnni, pytest.mark.slow]),
        pytest.param("packed5", S8, marks=[needs_vnni, pytest.mark.slow]),
        pytest.param("int8", S8, marks=[needs_vnni, pytest.mark.slow]),
    ],
    ids=str,
)
def test_kernels_stay_within_their_arrays(code, dtype, tmp_path) -> None:
    """Accesses outside of operands and of allocated arrays would end the program by a signal."""
    all_sizes = {"packed4": PACKED_SIZES, "packed5": SIZES_OF_5_BITS}.get(code, BYTE_SIZES)
    sizes = ", ".join(f"{{{K}, {K // (size or K)}}}" for K, size in all_sizes)
    (tmp_path / "program.cc").write_text(_PROGRAM)
    command = library._command(NativeKernel("quantised_linear", dtype, code))
    command = [x for x in command if x not in ("-shared", "-lm") and not x.endswith(".cc")]
    build = [*find_compiler(), *command, f"-I{library._SOURCE}", f"-DSIZES={sizes}"]
    program = str(tmp_path / "program")
    subprocess.run([*build, f"{program}.cc", "-o", program], check=True, timeout=120)
    subprocess.run([program], check=True, timeout=120)


def test_kernels_for_int8_inputs_need_their_instruction(monkeypatch, tmp_path) -> None:
    """Otherwise they would round nothing."""
    kernel, command = NativeKernel("quantised_linear", S8, "int8"), library._command
    plain = [x for x in command(kernel) if not x.startswith("-march")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_command", lambda kernel: plain)
    monkeypatch.setattr(library, "_MISSING", {})
    loaded = library._load.__wrapped__(kernel)
    assert loaded.target is None and "says" in (loaded.reason or "")
