"""Matmuls and whole steps with quantised weights, compiled ahead of time for GPUs and TPUs.

`tests.support.aot_gpu` and `aot_tpu` compile in other processes and report figures, which are
checked here. The aim is that a step reads each weight once, as it is stored.
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paged_jax.kernels.weight_formats import BYTE_CODES
from tests.support.aot_cases import (
    QUANTISED,
    QUANTISED_EXPERTS,
    QUANTISED_STEPS,
    TPU_QUANTISED_STEPS,
    asked_for,
    compiled,
    exactly,
    has_gpu_compiler,
    run_script,
)
from tests.support.gpus import GPUS

needs_gpu_compiler = pytest.mark.skipif(
    not has_gpu_compiler(), reason='no compiler for GPUs: install the extra "aot"'
)
needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='no compiler for TPUs: install the extra "aot"',
)

# Formats that XLA multiplies by on GPUs, because it fuses their conversion into the matmul.
OF_ROWS = [name for name, case in QUANTISED.items() if case.format.group_size is None]
# Formats of the kernel, and the same for many rows, which are multiplied by XLA.
IN_GROUPS = [x for x in QUANTISED if x not in OF_ROWS and QUANTISED[x].num_rows <= 128]
MANY_ROWS = [x for x in QUANTISED if x not in OF_ROWS and x not in IN_GROUPS]

# For GPUs other than an H200: few rows, and a prompt.
OTHER_GPUS = ("a100", "l4", "b200", "rtx-pro-6000")
ON_OTHER_GPUS = [f"{name}, {rows} rows" for name in ("q4_0", "q4_1", "mxfp4", "q8_0", "nf4")
                 for rows in (8, 64, 128)]  # fmt: skip


@pytest.fixture(scope="module")
def results(request) -> dict[str, Any]:
    """Figures of the cases for an H200."""
    return run_script("aot_gpu", *exactly(asked_for(request, "name")))


@pytest.fixture(scope="module")
def on_other_gpus(request) -> dict[str, dict[str, Any]]:
    """Figures by GPU and case. Two GPUs are compiled for at the same time."""
    gpus, names = asked_for(request, "gpu"), asked_for(request, "case")
    with ThreadPoolExecutor(2) as threads:
        run = threads.map(lambda gpu: run_script("aot_gpu", f"--gpu={gpu}", *exactly(names)), gpus)
        return dict(zip(gpus, run, strict=True))


@pytest.fixture(scope="module")
def on_tpus(request) -> dict[str, dict[str, Any]]:
    """Figures by generation and case."""
    generations, names = (asked_for(request, what) for what in ("generation", "tpu_case"))
    with ThreadPoolExecutor(2) as threads:
        run = threads.map(lambda tpu: run_script("aot_tpu", tpu, *exactly(names)), generations)
        return dict(zip(generations, run, strict=True))


def assert_fits(kernel: dict[str, Any]) -> None:
    assert kernel["spills_in_loops"] == 0 and kernel["spilled_bytes"] <= 16, kernel
    assert kernel["tensor_core_products"] > 0, kernel
    assert kernel["async_copies"]["16 bytes"] > 0, kernel
    assert kernel["waits_first"] is True, kernel


@needs_gpu_compiler
@pytest.mark.parametrize("name", IN_GROUPS)
def test_weight_in_groups_is_read_once_on_h200(results, name) -> None:
    program, case = compiled(results, name), QUANTISED[name]
    [kernel] = program["kernels"]
    assert_fits(kernel)
    assert program["weight_reads"] <= 1.05 * case.weight_bytes
    # The kernel rounds no rows and adds no parts. XLA does that before and after it.
    launches = [launch["name"] for launch in program["launches"]]
    assert launches == ["wrapped_convert", "quantised_linear", "loop_add_fusion"]
    # Rounded rows and the parts of the result, not the weight as floats.
    rows = case.num_rows * case.num_inputs * 2
    parts = 8 * case.num_rows * case.num_outputs * 4
    assert program["temporary_bytes"] <= rows + parts + 1024


@needs_gpu_compiler
@pytest.mark.parametrize("name", MANY_ROWS)
def test_many_rows_convert_each_weight_once_on_h200(results, name) -> None:
    program, case = compiled(results, name), QUANTISED[name]
    assert not program["kernels"]
    assert program["weight_reads"] <= 1.05 * case.weight_bytes
    # One kernel writes the weight as floats, and one multiplies; rows are rounded in it or before.
    launches = [launch["name"] for launch in program["launches"]]
    assert len(launches) <= 3 and sum("gemm" in launch for launch in launches) == 1, launches
    rows = case.num_rows * case.num_inputs * 2
    assert program["temporary_bytes"] <= rows + case.float_bytes + 1024


@needs_gpu_compiler
@pytest.mark.parametrize("name", OF_ROWS)
def test_xla_fuses_the_conversion_of_8_bits_with_a_scale_per_row_on_h200(results, name) -> None:
    program, case = compiled(results, name), QUANTISED[name]
    assert not program["kernels"]
    assert program["weight_reads"] <= 1.05 * case.weight_bytes
    assert [x["name"] for x in program["launches"] if "gemm" in x["name"]], program["launches"]
    # Of split-K.
    assert program["temporary_bytes"] <= 64 * case.num_rows * case.num_outputs
    assert program["temporary_bytes"] < 0.5 * case.float_bytes


# Instructions per warp for 32 weights of 8 rows. An SM of an H200 reads 35 weights of 4 bits per
# cycle (4.3 TB/s for 132 SMs at 1.85 GHz), and issues 4 instructions of 32 threads: at most 3.6
# for 32 weights, and more if scales add to the bytes.
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("int4 in groups of 128, 8 rows", 2.9),
        ("awq, 8 rows", 3.0),
        ("q4_0, 8 rows", 3.1),
        ("q4_1, 8 rows", 3.6),
        ("q4_k, 8 rows", 3.5),
        ("q8_0, 8 rows", 5.5),
        ("q6_k, 8 rows", 5.4),
        ("fp8 in blocks of 128, 8 rows", 4.6),
        ("mxfp4, 8 rows", 4.5),
        ("nvfp4, 8 rows", 5.3),
        ("nf4, 8 rows", 5.8),
        ("iq4_nl, 8 rows", 6.0),
    ],
)
def test_conversion_takes_few_instructions_on_h200(results, name, most) -> None:
    [kernel] = compiled(results, name)["kernels"]
    inputs = 64 if QUANTISED[name].format.code in BYTE_CODES else 128
    weights_of_thread = 64 * inputs / 32 / 2  # 64 outputs, two warps
    assert max(kernel["loop_instructions"]) <= most * weights_of_thread
    # 8 program instances of two warps fit an SM, so that each scheduler has four warps. Codes whose
    # numbers come from a table need more registers.
    registers = 2 * -(-32 * kernel["registers"] // 256) * 256
    assert 65_536 // registers >= (6 if name.startswith(("nf4", "iq4")) else 8), kernel


@needs_gpu_compiler
@pytest.mark.parametrize("name", QUANTISED_STEPS)
def test_step_reads_each_weight_once_on_h200(results, name) -> None:
    program, step = compiled(results, name), QUANTISED_STEPS[name]
    stored = step.config.num_hidden_layers * step.layer_bytes + step.other_bytes
    assert 0.99 * stored <= program["weight_reads"] <= 1.05 * stored
    # No layer exists as floats.
    assert program["temporary_bytes"] < 0.05 * step.float_bytes
    kernels = [x for x in program["kernels"] if x["name"].startswith("quantised_linear")]
    launches = [x["name"] for x in program["launches"]]
    is_by_xla = step.format.group_size is None
    assert sum(x.startswith("quantised_linear") for x in launches) == (0 if is_by_xla else 8)
    for kernel in kernels:
        assert_fits(kernel)


@needs_gpu_compiler
@pytest.mark.parametrize("name", QUANTISED_EXPERTS)
def test_packed_experts_are_two_grouped_matmuls_on_h200(results, name) -> None:
    program, case = compiled(results, name), QUANTISED_EXPERTS[name]
    kernels = program["kernels"]
    assert [kernel["name"][:14] for kernel in kernels] == ["grouped_linear"] * 2
    for kernel in kernels:
        assert_fits(kernel)
    launches = [launch["name"] for launch in program["launches"]]
    assert not [launch for launch in launches if "gemm" in launch or "dot" in launch]
    # The packed weights of all experts have 70 MB or more. Nothing has the size of one of them.
    assert program["temporary_bytes"] < 1.5 * case.activation_bytes + 0.01 * case.weight_bytes


@needs_gpu_compiler
@pytest.mark.parametrize("gpu", OTHER_GPUS)
@pytest.mark.parametrize("case", ON_OTHER_GPUS)
def test_kernel_compiles_for_other_gpus(on_other_gpus, gpu, case) -> None:
    program = compiled(on_other_gpus[gpu], case)
    [kernel] = program["kernels"]
    assert kernel["spills_in_loops"] == 0 and kernel["spilled_bytes"] <= 64, kernel
    assert kernel["tensor_core_products"] > 0 and kernel["async_copies"], kernel
    for launch in program["launches"]:
        assert launch["shared_memory_bytes"] <= GPUS[gpu].block_memory, launch


@needs_gpu_compiler
@pytest.mark.parametrize(("gpu", "case"), [("a100", "fp8 in blocks of 128, 8 rows")])
def test_xla_multiplies_by_fp8_where_gpus_cannot_convert_it(on_other_gpus, gpu, case) -> None:
    program = compiled(on_other_gpus[gpu], case)
    assert not program["kernels"] and program["launches"]


# A v7x is not here: there XLA writes the floats of a tile of a weight to memory.
GENERATIONS = ["v5e", pytest.param("v6e", marks=pytest.mark.slow)]


@needs_tpu_compiler
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("tpu_case", [name for name in QUANTISED if name.endswith(", 8 rows")])
def test_xla_fuses_the_conversion_on_tpus(on_tpus, generation, tpu_case) -> None:
    program, case = compiled(on_tpus[generation], tpu_case), QUANTISED[tpu_case]
    assert program["kernels"] == 0
    assert program["temporary_bytes"] < 0.05 * case.float_bytes


@needs_tpu_compiler
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("tpu_case", TPU_QUANTISED_STEPS)
def test_step_converts_no_layer_on_tpus(on_tpus, generation, tpu_case) -> None:
    program, step = compiled(on_tpus[generation], tpu_case), TPU_QUANTISED_STEPS[tpu_case]
    assert program["aliased_bytes"] > 0.99 * step.pool_gigabytes * 10**9
    # XLA may copy an 8-bit matrix, one at a time, before it converts tiles of it.
    is_copied = step.format.code in BYTE_CODES and step.format.group_size is not None
    copied = step.largest_bytes if is_copied else 0
    assert program["temporary_bytes"] < 1.05 * copied + 0.05 * step.float_bytes
