"""The kernels of the backend `mosaic_gpu`, compiled for GPUs of compute capability 9.0 and 10.0."""

from typing import Any

import pytest

from paged_jax.kernels.mosaic_gpu import launch
from tests.support.aot_cases import (
    MOSAIC_DECODE,
    MOSAIC_PREFILL,
    MOSAIC_RAGGED,
    MOSAIC_STEPS,
    MOSAIC_UPDATES,
    compile_for_gpus,
    compiled,
    has_gpu_compiler,
    parameters,
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
    return compile_for_gpus(request)


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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", parameters(MOSAIC_DECODE))
def test_decode_multiplies_blocks_from_bulk_copies(compilations, target, name) -> None:
    program, case = compiled(compilations[target], name), MOSAIC_DECODE[name]
    [kernel] = program["kernels"]
    assert kernel["target"] == TARGETS[target]
    assert kernel["spills_in_loops"] == 0 and kernel["spilled_bytes"] == 0, kernel
    # The same source for both generations, so neither `wgmma` nor `tcgen05`.
    assert kernel["tensor_core_products"] > 0 and kernel["warpgroup_products"] == 0, kernel
    assert kernel["bulk_copies"]["shared"] > 0, kernel
    # Earlier launches compute the list of parts, once for all layers of a step.
    assert [launch["name"] for launch in program["launches"]][-1:] == ["kCustomCall"]
    assert len(program["launches"]) <= 8, program["launches"]
    share = 0.001 if case.U is None else 0.012
    assert program["temporary_bytes"] <= share * case.pool_bytes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["mosaic: decode", "mosaic: decode of one sequence of 128K"])
def test_decode_stores_parts_before_it_counts_them(compilations, target, name) -> None:
    """All threads of a thread block store the part, and all threads of another may load it."""
    [kernel] = compiled(compilations[target], name)["kernels"]
    order = iter(kernel["counting"])
    for instruction in (
        "UBLKCP",  # the bulk copy of the part
        "BAR.SYNC",  # all threads have stored
        "MEMBAR.ALL.GPU",  # and the whole GPU sees it,
        "ATOMG.E.ADD.STRONG.GPU",  # before a thread counts
        "CCTL.IVALL",  # and invalidates the L1 cache,
        "BAR.SYNC",  # before any thread
        "LD",  # loads what the others have stored
    ):
        assert instruction in order, kernel["counting"]


@pytest.mark.parametrize("target", ["h200"])
@pytest.mark.parametrize(
    ("name", "step_tokens", "most"),
    [
        # The bound of Triton's kernel; see `test_aot_gpu`.
        ("mosaic: decode", 64, 420),
        # Each warp runs a quarter of the instructions that start copies.
        ("mosaic: decode, int8", 128, 870),
        ("mosaic: decode, fp8", 128, 780),
    ],
)
def test_decode_takes_few_instructions(compilations, target, name, step_tokens, most) -> None:
    """Two thread blocks fit an SM."""
    [kernel] = compiled(compilations[target], name)["kernels"]
    whole, *_ = kernel["loop_instructions"]
    assert whole <= most * step_tokens / 64
    assert 2 * 4 * 32 * kernel["registers"] <= 65_536


@pytest.mark.parametrize("target", ["h200"])
@pytest.mark.parametrize("name", parameters(MOSAIC_PREFILL | MOSAIC_RAGGED))
def test_prompts_are_multiplied_by_warpgroups(compilations, target, name) -> None:
    program = compiled(compilations[target], name)
    [kernel] = [x for x in program["kernels"] if x["name"] == "paged_prefill"]
    assert kernel["target"] == TARGETS[target]
    # The most that three warpgroups can have; those that compute then take them from the third.
    assert kernel["registers"] <= 168
    assert kernel["spills_in_loops"] == 0 and kernel["spilled_bytes"] == 0, kernel
    assert kernel["warpgroup_products"] == kernel["tensor_core_products"] > 0, kernel
    # Into and out of shared memory.
    assert kernel["bulk_copies"].keys() == {"global", "shared"}, kernel


@pytest.mark.parametrize("target", ["h200"])
@pytest.mark.parametrize(
    ("name", "most", "most_masked"),
    [
        ("mosaic: prefill of one chunk of 2048", 500, 720),
        # The scales of keys and values, and a mask of the scales.
        ("mosaic: prefill, int8", 650, 1050),
        ("mosaic: prefill, fp8", 650, 1050),
        # For 64 tokens: 36 products for scores, 4 for a half of the output.
        ("mosaic: prefill, latent", 500, 600),
    ],
)
def test_prompts_take_few_instructions(compilations, target, name, most, most_masked) -> None:
    """Triton's kernel takes about 320 for 64 tokens, this one 470 for 128, for the same rows.

    In latent attention, Triton's takes 603 for 32 rows and 32 tokens, this one 469 for 64 and 64.
    """
    program = compiled(compilations[target], name)
    [kernel] = program["kernels"]
    whole, masked = kernel["warpgroup_loops"]
    assert whole <= most and masked <= most_masked, kernel
    # The list of tiles, the kernel, and the transpose of the log-sum-exp.
    assert len(program["launches"]) <= 3, program["launches"]


@pytest.mark.parametrize("target", ["h200"])
@pytest.mark.parametrize("name", MOSAIC_STEPS)
def test_step_of_a_model_has_all_kernels_of_the_backend(compilations, target, name) -> None:
    program = compiled(compilations[target], name)
    attention = "paged_prefill" if "chunk" in name else "paged_decode"
    write = "paged_write" if "latent" in name else "paged_rope_write"
    kernels = {kernel["name"]: kernel for kernel in program["kernels"]}
    assert {attention, write} <= kernels.keys()
    for kernel in kernels.values():
        assert kernel["bulk_copies"], f"{kernel['name']} is a kernel of another backend"
        assert kernel["spilled_bytes"] == 0, kernel
    step = MOSAIC_STEPS[name]
    pool_bytes = step.pool_gigabytes * 10**9
    assert program["aliased_bytes"] > 0.99 * pool_bytes
