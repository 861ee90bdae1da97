"""Tests of all Mosaic kernels and whole steps, compiled ahead of time for TPUs.

`tests.support.aot_tpu` compiles in another process and reports figures, which are checked here.
"""

import importlib.util
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paged_jax.kernels.padding import padded_state_shape, round_up_to_lanes
from paged_jax.models.parts.mlp import Dense
from tests.support.aot_cases import (
    EXPERTS,
    STATES,
    TPU_ATTENTION,
    TPU_FAMILIES,
    TPU_PARALLEL,
    TPU_RAGGED,
    TPU_RECURRENT,
    TPU_STATES,
    TPU_STEPS,
    TPU_UPDATES,
    WIDE_STATES,
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


# A program that compiles for one generation rarely fails for the other (lack of memory).
@pytest.fixture(scope="module", params=["v5e", pytest.param("v6e", marks=pytest.mark.slow)])
def generation(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def compilations(request) -> dict[str, Any]:
    """Figures of the cases and of all steps. There is a process for each generation."""
    names, generations = (asked_for(request, what) for what in ("name", "generation"))

    def compile_for(generation: str) -> dict[str, Any]:
        steps = TPU_STEPS[generation] | TPU_PARALLEL[generation] | TPU_FAMILIES[generation]
        steps |= TPU_STATES[generation]
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
    # XLA copies no part of the pool to change its layout.
    assert program["temporary_bytes"] < 0.01 * TPU_ATTENTION[name].pool_bytes


@pytest.mark.parametrize("name", parameters(TPU_RAGGED))
def test_ragged_batch_copies_no_pages_on_tpu(results, name) -> None:
    program = compiled(results, name)
    assert program["kernels"] == 1
    # XLA copies no pages. It may change the layout or the dtype of queries and outputs.
    case = TPU_RAGGED[name]
    query_bytes = 4 * case.B * case.T * case.K * case.G * case.D
    assert program["temporary_bytes"] < 0.01 * case.pool_bytes + query_bytes


@pytest.mark.parametrize("name", parameters(TPU_UPDATES))
def test_update_is_in_place_on_tpu(results, name) -> None:
    program = compiled(results, name)
    pool_bytes = TPU_UPDATES[name].pool_bytes
    assert program["kernels"] == ("write" in name and "int8" not in name)
    assert program["aliased_bytes"] == pool_bytes
    assert program["temporary_bytes"] < 0.01 * pool_bytes


def test_copies_are_issued_in_few_bundles() -> None:
    """A bundle takes about a cycle. The programs are for v6e. Cost: 15 CPU-seconds."""
    programs = run_script("aot_bundles", "v6e", "decode", "write of 64 tokens")
    loops = programs["decode"]["loops"]
    # The loop over the blocks of a tile. With checks of bounds, it has 53 bundles.
    [issue] = [loop for loop in loops if loop["depth"] == 3 and loop["copies"]]
    assert (issue["copies"], issue["waits"]) == (2, 0) and issue["bundles"] <= 30
    # The whole kernel, whose loops run once for each token. XLA's scatter takes 1,080 bundles for
    # 16 of the 1,024 rows of these tokens.
    assert programs["write of 64 tokens"]["bundles"] <= 170


@pytest.mark.parametrize("name", STATES)
def test_states_are_advanced_in_place_on_tpu(results, name) -> None:
    """XLA computes convolutions, and may copy the states of the batch, but not the pool.

    Rows of states are padded to a multiple of 128 lanes.
    """
    program, case = compiled(results, name), STATES[name]
    row = case.state_shape[-1]
    assert program["aliased_bytes"] == case.pool_bytes // row * round_up_to_lanes(row)
    entry_bytes = case.pool_bytes // (case.L * case.P)
    batch_bytes = case.B * entry_bytes if case.op == "convolution" else 0
    assert program["temporary_bytes"] < 0.01 * case.pool_bytes + batch_bytes
    assert program["kernels"] == (case.op != "convolution")


@pytest.mark.parametrize("name", WIDE_STATES)
def test_xla_reads_states_of_more_than_128_lanes_without_copies_of_their_pool(
    results, name
) -> None:
    """Prompts read states in this way with any backend. Temporaries are states of the batch."""
    program, case = compiled(results, name), WIDE_STATES[name]
    assert program["kernels"] == 0
    assert program["aliased_bytes"] == case.pool_bytes
    batch_bytes = case.B * case.pool_bytes // (case.L * case.P)
    assert program["temporary_bytes"] < 0.01 * case.pool_bytes + 3 * batch_bytes


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_two_grouped_matmuls_on_tpu(results, name) -> None:
    """No weight is copied, and XLA computes no matmul, which would be with all experts."""
    program, case = compiled(results, name), EXPERTS[name]
    # Two kernels, each of which computes its tiles from the group sizes.
    assert program["kernels"] == 2
    assert program["multiplied_types"] == ["f32" if case.dtype == "float32" else "bf16"]
    assert program["temporary_bytes"] < 1.5 * case.activation_bytes + 0.01 * case.weight_bytes
    # The kernels count the rows of whole tiles. Matmuls of XLA would be counted in addition.
    rows = -(-case.num_tokens * case.num_chosen // 16) * 16
    padded = case.num_products * rows / (case.num_tokens * case.num_chosen)
    assert program["flops"] < 1.2 * 2 * padded


def test_step_copies_no_pool_on_tpu(results, generation) -> None:
    for name, step in TPU_STEPS[generation].items():
        program = compiled(results, name)
        # A write and the attention, in the body of the scan over layers. XLA writes int8 and fp8.
        assert program["kernels"] == 2 - (step.pool_dtype != "bfloat16"), name
        # The matrix unit multiplies float32 in several passes.
        assert program["multiplied_types"] == ["bf16"]
        pool_bytes = step.pool_gigabytes * 10**9
        assert program["aliased_bytes"] > 0.99 * pool_bytes
        # A chunk also needs activations, mostly of the gate and up projections.
        activation_bytes = 0
        if isinstance(step, PrefillStep):
            features = step.config.layers[0].get(Dense).features
            activation_bytes = 8 * step.chunk * 2 * features
        assert program["temporary_bytes"] < 0.01 * pool_bytes + activation_bytes, name


def test_parallel_step_has_two_all_reduces_per_layer_on_tpu(results, generation) -> None:
    """The step is from an engine on several TPUs. The compiler checks that it fits their memory."""
    [(name, step)] = TPU_PARALLEL[generation].items()
    program, pool_bytes = compiled(results, name), step.pool_gigabytes * 10**9
    assert program["kernels"] == 2  # in the scan over layers, like two of the all-reduces
    assert program["collectives"] == {"all-reduce": 2 + 1, "all-gather": 1}
    # The pool is rounded down to whole blocks.
    assert program["aliased_bytes"] > 0.99 * pool_bytes
    assert program["temporary_bytes"] < 0.01 * pool_bytes


def test_step_of_different_layers_fills_a_tpu(results, generation) -> None:
    """The steps are from an engine on several TPUs, with pools for each kind of layer."""
    for name, step in TPU_FAMILIES[generation].items():
        program, pool_bytes = compiled(results, name), step.pool_gigabytes * 10**9
        num_layers, has_experts = len(step.config.sliding_windows), step.config.num_experts > 0
        # A write, attention and two matmuls of experts per layer. Layers are not scanned.
        assert program["kernels"] == num_layers * (2 + 2 * has_experts), name
        assert program["multiplied_types"] == ["bf16"]
        assert program["collectives"] == {"all-reduce": 2 * num_layers + 1, "all-gather": 1}
        assert program["aliased_bytes"] > 0.99 * pool_bytes
        # A copy of the embedding of gpt-oss, which is no multiple of 128 lanes, would exceed this.
        assert program["temporary_bytes"] < 0.005 * pool_bytes, name


def test_step_with_states_or_latents_copies_no_pool_on_tpus(results, generation) -> None:
    """The steps are from an engine on 16 TPUs, which divide the heads of states."""
    for name, step in TPU_STATES[generation].items():
        program, pool_bytes = compiled(results, name), step.pool_gigabytes * 10**9
        assert program["collectives"] == {
            "all-reduce": 2 * step.config.num_hidden_layers + 1,
            "all-gather": 1,
        }
        assert program["aliased_bytes"] > 0.99 * pool_bytes
        assert program["temporary_bytes"] < 0.005 * pool_bytes, name


def test_recurrent_step_moves_no_states_on_tpus(results, generation) -> None:
    """A kernel per layer advances the states. XLA neither gathers nor scatters them."""
    for name, step in TPU_STATES[generation].items():
        if step.num_states is None:
            continue
        program, config = compiled(results, name), step.config
        num_recurrent = sum(len(group.layers) for group in config.state_groups)
        num_attention = config.num_hidden_layers - num_recurrent
        # Two matmuls of experts per layer.
        num_experts = 2 * config.num_hidden_layers
        assert program["kernels"] == num_recurrent + 2 * num_attention + num_experts
        [shape] = {group.states[1].shape for group in config.state_groups}
        heads, *last = shape
        moved = f"{heads // step.num_devices},{last[0]},{last[1]}"
        assert not [each for each in program["moved_shapes"] if each.endswith(moved)]
        state_bytes = 4 * num_recurrent * step.num_states * math.prod(shape) // step.num_devices
        assert program["temporary_bytes"] < 0.01 * state_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", TPU_RECURRENT)
def test_step_of_recurrent_layers_copies_no_pool_on_a_tpu(results, name) -> None:
    """States stay in their pools, also with sizes that fill no whole tiles."""
    program, step = compiled(results, name), TPU_RECURRENT[name]
    pool_bytes = step.pool_gigabytes * 10**9
    assert program["aliased_bytes"] > 0.99 * pool_bytes
    assert program["temporary_bytes"] < 0.01 * pool_bytes
    [group] = step.config.state_groups
    if len(group.states) > 1:
        heads, rows, lanes = padded_state_shape(group.states[1].shape, "tpu")
        moved = [each for each in program["moved_shapes"] if each.endswith(f"{rows},{lanes}")]
        assert not moved, f"{heads} heads"


def test_plan_of_several_devices_matches_the_compiled_step() -> None:
    program = compiled(run_script("aot_parallel", "v5e:2x2", "8B", "--layers", "2"), "decode")
    planned = program["planned"]
    # The other arguments are the decode state and the block pool.
    rest = program["argument_bytes"] - planned["weights"] - planned["pool"]
    assert 0 < rest < 0.05 * planned["pool"]
    assert program["aliased_bytes"] > planned["pool"]
    assert planned["step"] / 3 < program["temporary_bytes"] < planned["step"]
    # The layers are scanned, so the program contains the all-reduces of a single layer.
    all_reduces = planned["collectives"]["num_all_reduces"] - 2 * (2 - 1)
    assert program["collectives"] == {"all-reduce": all_reduces, "all-gather": 1}
