"""Every Mosaic kernel, and the whole step, compiled for TPUs by the real compiler.

`tests.support.aot_tpu` compiles, in a process of its own; here is what its figures must be.
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.aot_cases import (
    EXPERTS,
    TPU_ATTENTION,
    TPU_FAMILIES,
    TPU_PARALLEL,
    TPU_RAGGED,
    TPU_STEPS,
    TPU_UPDATES,
    asked_for,
    compiled,
    exactly,
    parameters,
    run_script,
)
from tests.support.decode_step import PrefillStep

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='no compiler for TPUs: install the extra "aot"',
)


# What compiles for one is refused by the other seldom, for the lack of memory.
@pytest.fixture(scope="module", params=["v5e", pytest.param("v6e", marks=pytest.mark.slow)])
def generation(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def compilations(request) -> dict[str, Any]:
    """What the script says of the cases and of all steps, of generations in a process each."""
    names, generations = (asked_for(request, what) for what in ("name", "generation"))

    def compile_for(generation: str) -> dict[str, Any]:
        steps = TPU_STEPS[generation] | TPU_PARALLEL[generation] | TPU_FAMILIES[generation]
        return run_script("aot_tpu", generation, *exactly([*names, *steps]))

    with ThreadPoolExecutor() as threads:
        return dict(zip(generations, threads.map(compile_for, generations), strict=True))


@pytest.fixture(scope="module")
def results(compilations, generation) -> dict[str, Any]:
    return compilations[generation]


@pytest.mark.parametrize("name", parameters(TPU_ATTENTION))
def test_attention_compiles_for_tpu(results, name) -> None:
    program = compiled(results, name)
    assert program["kernels"] == 1
    assert program["multiplied_types"] == ["f32" if "float32" in name else "bf16"]
    # The pool is read where it lies: XLA lays no part of it out anew for the kernel.
    assert program["temporary_bytes"] < 0.01 * TPU_ATTENTION[name].pool_bytes


@pytest.mark.parametrize("name", parameters(TPU_RAGGED))
def test_ragged_batch_reads_pages_where_they_lie_on_tpu(results, name) -> None:
    program = compiled(results, name)
    assert program["kernels"] == 1
    # None of the pages is laid out anew. Queries or outputs may be, in another type too.
    case = TPU_RAGGED[name]
    query_bytes = 4 * case.B * case.T * case.K * case.G * case.D
    assert program["temporary_bytes"] < 0.01 * case.pool_bytes + query_bytes


@pytest.mark.parametrize("name", parameters(TPU_UPDATES))
def test_update_is_in_place_on_tpu(results, name) -> None:
    program = compiled(results, name)
    pool_bytes = TPU_UPDATES[name].pool_bytes
    assert program["aliased_bytes"] == pool_bytes
    assert program["temporary_bytes"] < 0.01 * pool_bytes


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_two_products_of_what_was_chosen_on_tpu(results, name) -> None:
    """No weight is copied, and XLA multiplies nothing, which would be by all experts."""
    program, case = compiled(results, name), EXPERTS[name]
    # Each in a kernel, which knows its tiles from no more than the sizes of groups.
    assert program["kernels"] == 2
    assert program["multiplied_types"] == ["f32" if case.dtype == "float32" else "bf16"]
    assert program["temporary_bytes"] < 1.5 * case.activation_bytes + 0.01 * case.weight_bytes
    # As the kernels count, by rows of whole tiles; products of XLA would come on top.
    rows = -(-case.num_tokens * case.num_chosen // 16) * 16
    padded = case.num_products * rows / (case.num_tokens * case.num_chosen)
    assert program["flops"] < 1.2 * 2 * padded


def test_step_copies_no_pool_on_tpu(results, generation) -> None:
    for name, step in TPU_STEPS[generation].items():
        program = compiled(results, name)
        assert program["kernels"] == 1  # in the body of the scan over layers
        # The matrix unit multiplies float32 in several passes.
        assert program["multiplied_types"] == ["bf16"]
        pool_bytes = step.pool_gigabytes * 10**9
        assert program["aliased_bytes"] > 0.99 * pool_bytes
        # A chunk needs activations besides, those of the gate and up projections the most.
        rows = step.chunk if isinstance(step, PrefillStep) else 0
        activation_bytes = 8 * rows * 2 * step.config.intermediate_size
        assert program["temporary_bytes"] < 0.01 * pool_bytes + activation_bytes, name


def test_parallel_step_sends_two_sums_a_layer_and_copies_no_pool_on_tpu(
    results, generation
) -> None:
    """Of an engine, on each of several chips; it fits their memory, which the compiler enforces."""
    [(name, step)] = TPU_PARALLEL[generation].items()
    program, pool_bytes = compiled(results, name), step.pool_gigabytes * 10**9
    assert program["kernels"] == 1  # in the body of the scan over layers, as are the two sums
    assert program["collectives"] == {"all-reduce": 2 + 1, "all-gather": 1}
    # A pool has a whole number of blocks.
    assert program["aliased_bytes"] > 0.99 * pool_bytes
    assert program["temporary_bytes"] < 0.01 * pool_bytes


def test_step_of_layers_that_differ_fills_a_tpu(results, generation) -> None:
    """Of an engine, on each of several chips, with pools for each kind of layers."""
    for name, step in TPU_FAMILIES[generation].items():
        program, pool_bytes = compiled(results, name), step.pool_gigabytes * 10**9
        num_layers, has_experts = len(step.config.sliding_windows), step.config.num_experts > 0
        # In each layer attention, and both products of the experts; layers are not scanned.
        assert program["kernels"] == num_layers * (1 + 2 * has_experts), name
        assert program["multiplied_types"] == ["bf16"]
        assert program["collectives"] == {"all-reduce": 2 * num_layers + 1, "all-gather": 1}
        assert program["aliased_bytes"] > 0.99 * pool_bytes
        # A copy of gpt-oss' embedding, whose rows fill no whole registers of lanes, would be more.
        assert program["temporary_bytes"] < 0.005 * pool_bytes, name


def test_plan_of_several_devices_is_what_is_compiled() -> None:
    program = compiled(run_script("aot_parallel", "v5e:2x2", "8B", "--layers", "2"), "decode")
    planned = program["planned"]
    # Beside weights and pool: the state, and the blocks' records.
    rest = program["argument_bytes"] - planned["weights"] - planned["pool"]
    assert 0 < rest < 0.05 * planned["pool"]
    assert program["aliased_bytes"] > planned["pool"]
    assert planned["step"] / 3 < program["temporary_bytes"] < planned["step"]
    # Of the layers, which are scanned, the body of the loop stands in the program.
    all_reduces = planned["collectives"]["num_all_reduces"] - 2 * (2 - 1)
    assert program["collectives"] == {"all-reduce": all_reduces, "all-gather": 1}
