"""The kernels of the backend `mosaic_gpu`, compiled for GPUs of compute capability 9.0 and 10.0."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paged_jax.kernels.mosaic_gpu import launch
from tests.support.aot_cases import (
    MOSAIC_UPDATES,
    asked_for,
    compiled,
    exactly,
    has_gpu_compiler,
    parameters,
    run_script,
)

pytestmark = [
    pytest.mark.skipif(
        not has_gpu_compiler(), reason='no compiler for GPUs: install the extra "aot"'
    ),
    pytest.mark.skipif(
        launch.refusal(interpret=True) is not None, reason="this jax is too old for Mosaic GPU"
    ),
]

TARGETS = {"h200": "sm_90a", "b200": "sm_100a"}


@pytest.fixture(scope="module")
def compilations(request) -> dict[str, dict[str, Any]]:
    """Results of the script by GPU and case. Both GPUs are compiled for at the same time."""
    names, targets = (asked_for(request, what) for what in ("name", "target"))

    def compile_for(target: str) -> dict[str, Any]:
        return run_script("aot_gpu", f"--gpu={target}", *exactly(names))

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(targets, threads.map(compile_for, targets), strict=True))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", parameters(MOSAIC_UPDATES))
def test_update_is_one_launch_of_bulk_copies_in_place(compilations, target, name) -> None:
    program = compiled(compilations[target], name)
    assert len(program["launches"]) == 1, program["launches"]
    [kernel] = program["kernels"]
    assert kernel["target"] == TARGETS[target]
    assert kernel["spilled_bytes"] == 0 and kernel["registers"] <= 128, kernel
    # Into and out of shared memory.
    assert kernel["bulk_copies"].keys() == {"global", "shared"}, kernel
    # XLA's table of the output buffers.
    assert program["temporary_bytes"] <= 64
    assert program["aliased_bytes"] == MOSAIC_UPDATES[name].pool_bytes
