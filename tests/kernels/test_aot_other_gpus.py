"""The usual calls compiled for GPUs other than an H200, with less memory and other instructions."""

from typing import Any

import pytest

from paged_jax.kernels.triton import tuning
from tests.support.aot_cases import (
    GPU_OTHERS,
    compile_for_gpus,
    compiled,
    has_gpu_compiler,
)
from tests.support.gpus import GPUS

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason='no compiler for GPUs: install the extra "aot"'
)

# Of compute capability 8.0, 8.9, 10.0 and 12.0.
TARGETS = ("a100", "l4", "b200", "rtx-pro-6000")


@pytest.fixture(scope="module")
def compilations(request) -> dict[str, dict[str, Any]]:
    return compile_for_gpus(request)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GPU_OTHERS)
def test_op_compiles_for_other_gpus(compilations, target, name) -> None:
    program, gpu = compiled(compilations[target], name), GPUS[target]
    assert program["kernels"]
    for kernel in program["kernels"]:
        assert kernel["spills_in_loops"] == 0, kernel
        # A few values are spilled once, before a loop.
        assert kernel["spilled_bytes"] <= 160, kernel
        # The previous kernel may still run. Older GPUs start a kernel after the previous one ended.
        waits = gpu.device.compute_capability >= (9, 0)
        assert kernel["waits_first"] is (True if waits else None), kernel
    for launch in program["launches"]:
        assert launch["shared_memory_bytes"] <= gpu.block_memory, launch
    for kernel in program["kernels"]:
        if kernel["name"] in ("paged_decode", "paged_prefill"):
            assert kernel["tensor_core_products"] > 0, kernel
            assert set(kernel["async_copies"]) == {"16 bytes"}, kernel


@pytest.mark.parametrize("target", ["a10"])
@pytest.mark.parametrize("name", ["decode, fp8"])
def test_fp8_is_refused_where_gpus_cannot_convert_it(compilations, target, name) -> None:
    assert "compute capability 8.9 and later" in compilations[target][name]["error"]


@pytest.mark.parametrize("target", ["t4"])
@pytest.mark.parametrize("name", GPU_OTHERS)
def test_op_is_refused_for_gpus_before_ampere(compilations, target, name) -> None:
    assert "Tesla T4 has 7.5" in compilations[target][name]["error"]


@pytest.mark.parametrize("target", ["t4"])
@pytest.mark.parametrize("name", ["decode by XLA", "prefill by XLA", "write by XLA"])
def test_op_compiles_without_triton_for_gpus_before_ampere(compilations, target, name) -> None:
    program = compiled(compilations[target], name)
    assert program["launches"] and not program["kernels"]


def test_described_gpus_have_the_shared_memory_that_rules_count_on() -> None:
    for gpu in GPUS.values():
        if gpu.device.compute_capability >= (8, 0):
            assert gpu.shared_memory == 1024 * tuning._shared_kilobytes(gpu.device)
