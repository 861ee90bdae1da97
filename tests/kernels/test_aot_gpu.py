"""Tests of all Triton kernels and whole steps, compiled ahead of time for an H200.

`tests.support.aot_gpu` compiles in another process and reports figures, which are checked here.
"""

import itertools
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paged_jax.kernels import gpu_device
from paged_jax.kernels.call_table import CallShape
from paged_jax.kernels.triton import tuning
from paged_jax.models.parts.mlp import Dense
from tests.support.aot_cases import (
    EXPERTS,
    GPU_COMPLETE,
    GPU_DECODE,
    GPU_FAMILIES,
    GPU_LATENT,
    GPU_PARALLEL,
    GPU_PREFILL,
    GPU_RAGGED,
    GPU_RECURRENT,
    GPU_SINGLE,
    GPU_STEPS,
    GPU_UPDATES,
    STATES,
    asked_for,
    compiled,
    exactly,
    has_gpu_compiler,
    parameters,
    run_script,
)
from tests.support.decode_step import PrefillStep
from tests.support.kernel_cases import Case

# Maximum per thread block on compute capability 9.0 (CUDA C++ Programming Guide).
MAX_SHARED_MEMORY_BYTES = 227 * 1024

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason='no compiler for GPUs: install the extra "aot"'
)


@pytest.fixture(scope="module")
def results(request) -> dict[str, Any]:
    """Figures of the cases. One process compiles the ops, and another the whole steps."""
    steps = {
        **GPU_STEPS, **GPU_SINGLE, **GPU_PARALLEL, **GPU_FAMILIES, **GPU_LATENT, **GPU_RECURRENT,
        **GPU_COMPLETE,
    }.keys()  # fmt: skip
    names = asked_for(request, "name")
    parts = names - steps, names & steps
    with ThreadPoolExecutor() as threads:
        halves = threads.map(
            lambda names: run_script("aot_gpu", *exactly(names)), filter(None, parts)
        )
    return {name: program for half in halves for name, program in half.items()}


def assert_fits(program: dict[str, Any], spilled_bytes: int = 16) -> None:
    for kernel in program["kernels"]:
        # The assembler may spill a few values around a loop, at no cost, so that another program
        # instance fits an SM.
        assert kernel["spills_in_loops"] == 0, kernel
        assert kernel["spilled_bytes"] <= spilled_bytes, kernel
    for launch in program["launches"]:
        assert launch["shared_memory_bytes"] <= MAX_SHARED_MEMORY_BYTES, launch


def assert_reads_well(program: dict[str, Any], case: Case) -> None:
    """Check that K and V are loaded by asynchronous copies, and multiplied by tensor cores."""
    [attend] = program["kernels"]
    if case.pool_dtype is None:
        assert set(attend["async_copies"]) == {"16 bytes"}, attend
    else:
        # Scales are copied 4 bytes at a time, and Triton splits copies of V to change its layout.
        assert attend["async_copies"]["16 bytes"] > 0, attend
    # Tensor cores would round float32 to TF32.
    assert (attend["tensor_core_products"] > 0) == (case.dtype != "float32"), attend


@pytest.mark.parametrize("name", parameters(GPU_DECODE))
def test_decode_compiles_for_h200(results, name) -> None:
    program = compiled(results, name)
    # An earlier launch sets the counters of all layers of a step to zero.
    assert [launch["name"] for launch in program["launches"]][-1:] == ["paged_decode"]
    assert len(program["launches"]) <= 2, program["launches"]
    # Values that the merge after the loop needs may be spilled too.
    assert_fits(program, spilled_bytes=40)
    assert_reads_well(program, GPU_DECODE[name])
    # The partial results of the parts. Nothing has the size of the context. In latent attention, a
    # token has the elements of two heads, and a query those of up to 128 heads.
    share = 0.001 if GPU_DECODE[name].U is None else 0.012
    assert program["temporary_bytes"] <= share * GPU_DECODE[name].pool_bytes


@pytest.mark.parametrize("name", ["decode", "decode of one sequence of 128K", "decode, int8"])
def test_decode_stores_parts_before_it_counts_them_on_h200(results, name) -> None:
    """All threads of a program instance store the part, and all threads of another may load it."""
    [attend] = compiled(results, name)["kernels"]
    assert attend["counting"] == [
        "STG",
        "BAR.SYNC",  # all threads have stored
        "MEMBAR.ALL.GPU",  # and the whole GPU sees it,
        "ATOMG.E.ADD.STRONG.GPU",  # before a thread counts
        "CCTL.IVALL",  # and invalidates the L1 cache,
        "BAR.SYNC",  # before any thread
        "LDG",  # loads what the others have stored
    ], attend


@pytest.mark.parametrize("name", parameters(GPU_PREFILL))
def test_prefill_compiles_for_h200(results, name) -> None:
    program = compiled(results, name)
    assert len(program["launches"]) == 1, program["launches"]
    assert_fits(program)
    assert_reads_well(program, GPU_PREFILL[name])
    assert program["temporary_bytes"] == 0


@pytest.mark.parametrize("name", parameters(GPU_RAGGED))
def test_ragged_batch_copies_no_pages_on_h200(results, name) -> None:
    """Kernels read pages with the same instructions as pools."""
    program, case = compiled(results, name), GPU_RAGGED[name]
    kernels = {kernel["name"]: kernel for kernel in program["kernels"]}
    assert kernels.keys() == {"paged_decode", "paged_prefill"}
    for kernel in kernels.values():
        # Values that are spilled once, before the loop.
        assert kernel["spills_in_loops"] == 0 and kernel["spilled_bytes"] <= 64, kernel
    for name in ("paged_decode", "paged_prefill"):
        assert set(kernels[name]["async_copies"]) == {"16 bytes"}, kernels[name]
        assert (kernels[name]["tensor_core_products"] > 0) == (case.dtype != "float32"), name
    # The other launches compute the chunks, gather the queries of decode, and combine the rows.
    assert len(program["launches"]) <= 8, program["launches"]
    assert program["temporary_bytes"] <= 0.001 * case.pool_bytes


@pytest.mark.parametrize("name", ["prefill of one chunk of 2048"])
def test_prefill_takes_few_instructions_on_h200(results, name) -> None:
    """The matmuls of 128 rows and 64 tokens keep the tensor cores busy for 512 cycles."""
    [kernel] = compiled(results, name)["kernels"]
    whole, masked = sorted(kernel["loop_instructions"])
    assert whole <= 340 * 2, "128 tokens"
    assert masked <= 430 * 2


# Instructions per warp for 64 tokens of a KV head. An SM reads 64 tokens of 1-byte elements in
# about 960 cycles (4.3 TB/s for 132 SMs at 1.85 GHz). Each of its four schedulers issues at most an
# instruction per cycle, for one of the four warps of a program instance.
@pytest.mark.parametrize(
    ("name", "step_tokens", "most"),
    [
        ("decode", 64, 420),
        # This kernel uses fewer registers and more instructions, so more program instances fit.
        ("decode of one sequence of 128K", 64, 440),
        ("decode, int8", 128, 440),
        ("decode, fp8", 128, 380),
    ],
)
def test_decode_takes_few_instructions_on_h200(results, name, step_tokens, most) -> None:
    program = compiled(results, name)
    [attend] = program["kernels"]
    # The other loop merges parts.
    whole, _ = attend["loop_instructions"]
    assert whole <= most * step_tokens / 64
    # At least three program instances of 4 warps fit an SM with 65,536 registers and 228 KB.
    assert 3 * 4 * 32 * attend["registers"] <= 65_536
    [launch] = [x for x in program["launches"] if x["name"] == attend["name"]]
    assert 3 * (launch["shared_memory_bytes"] + 1024) <= 228 * 1024


@pytest.mark.parametrize("name", parameters(GPU_DECODE))
def test_programs_per_core_fit_an_h200(results, name) -> None:
    """The split of a batch relies on it. Registers are allocated per warp in units of 256."""
    case, program = GPU_DECODE[name], compiled(results, name)
    pool_dtype = case.pool_dtype or case.dtype
    shape = CallShape(case.D, case.G, case.C, case.dtype, pool_dtype, case.U or 0)
    shape = shape._replace(group=tuning.slice_size(shape))
    params = tuning.decode_params("", shape)
    counted = tuning.programs_per_core(shape, params, gpu_device.DEFAULT)
    [attend] = program["kernels"]
    [launch] = [x for x in program["launches"] if x["name"] == attend["name"]]
    registers = params.num_warps * -(-32 * attend["registers"] // 256) * 256
    fitting = min(65_536 // registers, 228 * 1024 // (launch["shared_memory_bytes"] + 1024))
    assert counted <= fitting
    assert counted == fitting or fitting > 3, "an SM has room for more program instances"


@pytest.mark.parametrize("name", parameters(GPU_UPDATES))
def test_update_is_one_launch_in_place_for_h200(results, name) -> None:
    program = compiled(results, name)
    assert len(program["launches"]) == 1, program["launches"]
    assert_fits(program)
    # Triton's division by a constant is approximate. XLA multiplies by the reciprocal.
    assert [kernel["divisions_by_constants"] for kernel in program["kernels"]] == [[]]
    # XLA's table of the output buffers.
    assert program["temporary_bytes"] <= 64
    assert program["aliased_bytes"] == GPU_UPDATES[name].pool_bytes


@pytest.mark.parametrize(
    "name", parameters({**GPU_DECODE, **GPU_PREFILL, **GPU_RAGGED, **GPU_UPDATES})
)
def test_kernels_wait_for_the_previous_kernel_on_h200(results, name) -> None:
    """A kernel may be launched while the kernel that writes its operands still runs."""
    kernels = compiled(results, name)["kernels"]
    assert kernels and all(kernel["waits_first"] is True for kernel in kernels), kernels


@pytest.mark.parametrize("name", STATES)
def test_states_are_read_and_written_once_on_h200(results, name) -> None:
    program, case = compiled(results, name), STATES[name]
    [kernel] = program["kernels"]
    launches = [launch["name"] for launch in program["launches"]]
    assert launches.count(kernel["name"]) == 1
    # The other launches compute gates and leave out padding.
    assert len(launches) <= 3, launches
    assert_fits(program)
    assert kernel["waits_first"] is True and kernel["divisions_by_constants"] == []
    # Only the pool is as large; the outputs and the masked inputs of all rows are smaller.
    assert program["aliased_bytes"] == case.pool_bytes
    assert program["temporary_bytes"] <= 0.002 * case.pool_bytes
    if case.op != "convolution":
        # 128 threads hold 4,096 elements of a state, and load and store 4 at a time.
        accesses = kernel["global_accesses"]
        assert accesses["st"] == 8 and accesses["ld"] in (8, 9), accesses


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_two_grouped_matmuls_on_h200(results, name) -> None:
    """No weight is copied, and XLA computes no matmul, which would be with all experts."""
    program, case = compiled(results, name), EXPERTS[name]
    launches = Counter(launch["name"] for launch in program["launches"])
    assert sum(n for launch, n in launches.items() if launch.startswith("grouped_linear")) == 2
    assert not [launch for launch in launches if "gemm" in launch or "dot" in launch]
    # The other launches choose, sort and add. Many rows are sorted by XLA.
    is_sorted = case.num_tokens * case.num_chosen > 1024
    assert launches.total() <= (14 if is_sorted else 11), launches
    assert_fits(program)
    for kernel in program["kernels"]:
        assert (kernel["tensor_core_products"] > 0) == (case.dtype != "float32"), kernel
        # With many rows per expert, the kernel uses warpgroup matmuls.
        many = case.num_tokens * case.num_chosen >= 32 * case.num_experts
        assert (kernel["warpgroup_products"] > 0) == many, kernel
        assert set(kernel["async_copies"]) == {"16 bytes"}, kernel
    assert program["temporary_bytes"] < 1.5 * case.activation_bytes + 0.01 * case.weight_bytes


@pytest.mark.parametrize("name", GPU_STEPS)
def test_step_attends_on_tensor_cores_of_h200(results, name) -> None:
    """A step of a model that calls the kernels uses matrix instructions."""
    program, is_chunk = compiled(results, name), isinstance(GPU_STEPS[name], PrefillStep)
    attention = "paged_prefill" if is_chunk else "paged_decode"
    launches = [launch["name"] for launch in program["launches"]]
    assert attention in launches
    kernels = {kernel["name"]: kernel for kernel in program["kernels"]}
    assert_fits(program)
    assert kernels[attention]["tensor_core_products"] > 0, kernels[attention]
    # A chunk has enough rows for warpgroup matmuls, which are faster.
    assert (kernels[attention]["warpgroup_products"] > 0) == is_chunk, kernels[attention]
    # After the split-K sum of its matmul, the projection is split, rotated, quantised and written
    # in one launch. XLA may put other operations of the step between the launches of a layer.
    assert min(preparations(launches, attention), key=len) == ["paged_rope_write"]


@pytest.mark.parametrize("name", GPU_PARALLEL)
def test_parallel_step_has_two_all_reduces_per_layer_on_h200(results, name) -> None:
    """The step is from an engine on several GPUs. Each GPU runs the same kernels."""
    program, step = compiled(results, name), GPU_PARALLEL[name]
    pool_bytes = step.pool_gigabytes * 10**9
    num_layers = step.config.num_hidden_layers
    assert program["collectives"] == {"all-reduce": 2 * num_layers + 1, "all-gather": 1}
    kernels = {kernel["name"] for kernel in program["kernels"]}
    assert kernels == {"paged_rope_write", "paged_decode", "copy_blocks"}
    # The pool is rounded down to whole blocks.
    assert program["aliased_bytes"] > 0.99 * pool_bytes
    assert program["temporary_bytes"] < 0.01 * pool_bytes


@pytest.mark.parametrize("name", GPU_LATENT)
def test_latent_step_copies_no_pool_on_h200(results, name) -> None:
    """A layer has one write of 576 elements per token, and one launch that reads them once."""
    program, step = compiled(results, name), GPU_LATENT[name]
    pool_bytes = step.pool_gigabytes * 10**9
    assert program["aliased_bytes"] > 0.99 * pool_bytes
    assert program["temporary_bytes"] < 0.01 * pool_bytes
    launches = [launch["name"] for launch in program["launches"]]
    for kernel in ("paged_write", "paged_decode"):  # layers share their code
        assert launches.count(kernel) == step.config.num_hidden_layers
    [attend] = [x for x in program["kernels"] if x["name"] == "paged_decode"]
    assert attend["spills_in_loops"] == 0 and attend["tensor_core_products"] > 0, attend
    assert set(attend["async_copies"]) == {"16 bytes"}, attend


@pytest.mark.parametrize(
    "name", [*GPU_RECURRENT, *(pytest.param(name, marks=pytest.mark.slow) for name in GPU_COMPLETE)]
)
def test_recurrent_step_copies_no_state_on_h200(results, name) -> None:
    """A recurrent layer has one launch for its convolution, and one for the states of its heads."""
    step = {**GPU_RECURRENT, **GPU_COMPLETE}[name]
    program, config = compiled(results, name), step.config
    pool_bytes = step.pool_gigabytes * 10**9
    # Pools of keys, values and states. XLA copies none of them, and keeps no gathered states.
    assert program["aliased_bytes"] > 0.99 * pool_bytes
    assert program["temporary_bytes"] < 0.01 * pool_bytes
    launches = Counter(launch["name"].partition("__")[0] for launch in program["launches"])
    num_recurrent = sum(shapes != () for shapes in config.state_shapes)
    assert launches["recurrent_delta"] == launches["recurrent_convolution"] == num_recurrent
    assert launches["paged_decode"] == config.num_hidden_layers - num_recurrent
    for kernel in program["kernels"]:
        assert kernel["spills_in_loops"] == 0, kernel
        if kernel["name"].startswith("recurrent_delta"):
            accesses = kernel["global_accesses"]
            assert accesses["st"] == 8 and accesses["ld"] in (8, 9), accesses
        if kernel["name"].startswith("paged_decode"):
            assert kernel["tensor_core_products"] > 0, kernel


@pytest.mark.parametrize("name", GPU_FAMILIES)
def test_step_of_different_layers_fills_an_h200(results, name) -> None:
    """The step is from an engine with pools for each kind of layer, all updated in place."""
    program, step = compiled(results, name), GPU_FAMILIES[name]
    pool_bytes = step.pool_gigabytes * 10**9
    assert program["aliased_bytes"] > 0.99 * pool_bytes
    # A copy of the expert weights of a layer would exceed this.
    assert program["temporary_bytes"] < 0.01 * pool_bytes
    layers = step.config.sliding_windows
    for number, window in enumerate(layers):
        [attend] = [x for x in program["kernels"] if x["name"] == variant("paged_decode", number)]
        assert attend["spills_in_loops"] == 0 and attend["spilled_bytes"] <= 64, (window, attend)
        assert attend["tensor_core_products"] > 0 and attend["async_copies"], (window, attend)
    launches = [launch["name"] for launch in program["launches"]]
    assert not [name for name in launches if "remat" in name]
    # Matmuls of a layer: QKV, output, gate and up, and down or router; and one for the logits.
    products = [name for name in launches if "gemm" in name]
    has_experts = step.config.num_experts > 0
    assert len(products) == (3 if has_experts else 4) * len(layers) + 1, products
    if has_experts:
        # Launches from the write of a layer to the write of the next layer. Without a GPU to
        # measure on, XLA splits the matmul of the router, which adds two paddings and a sum.
        begin, end = (launches.index(variant("paged_rope_write", number)) for number in (0, 1))
        assert end - begin <= 24, launches[begin:end]
    # Expert weights are multiplied only by the rows that chose them.
    grouped = [x for x in program["kernels"] if x["name"].startswith("grouped_linear")]
    assert len([x for x in launches if x.startswith("grouped_linear")]) == (
        2 * len(layers) * has_experts
    )
    for kernel in grouped:
        assert kernel["spilled_bytes"] == 0 and kernel["tensor_core_products"] > 0, kernel
        assert set(kernel["async_copies"]) == {"16 bytes"}, kernel


def variant(kernel: str, number: int) -> str:
    """Return Triton's name of variant `number` of a kernel in a program."""
    return f"{kernel}__{number}" if number else kernel


def preparations(launches: list[str], attention: str) -> list[list[str]]:
    """Return the launches of each layer from a matmul (without its split-K sum) to attention."""
    layers = []
    for end in (i for i, launch in enumerate(launches) if launch == attention):
        product = max(i for i, launch in enumerate(launches[:end]) if "gemm" in launch)
        layers.append([x for x in launches[product + 1 : end] if "reduce" not in x])
    return layers


@pytest.mark.parametrize("name", ["engine with full pools"])
def test_engine_rematerialises_nothing_if_pools_fill_an_h200(results, name) -> None:
    launches = [x["name"] for x in compiled(results, name)["launches"]]
    assert not [name for name in launches if "remat" in name]


# Two norms, four matmuls, silu, `paged_rope_write` and attention. If matmuls are split, there are
# three sums, which also add the residual stream. Otherwise the norms add it, and another kernel
# adds it after several layers.
@pytest.mark.parametrize(
    ("name", "fewest", "usual"),
    [("engine with full pools", 12, 12), ("step, products undivided", 9, 10)],
)
def test_layer_of_a_decode_step_has_few_launches_on_h200(results, name, fewest, usual) -> None:
    launches = [launch["name"] for launch in compiled(results, name)["launches"]]
    layers = [i for i, launch in enumerate(launches) if launch == "paged_rope_write"]
    assert len(layers) == GPU_STEPS[name].config.num_hidden_layers
    # From the write of a layer to the write of the next layer.
    numbers = [end - begin for begin, end in itertools.pairwise(layers)]
    assert min(numbers) <= fewest and statistics.median_low(numbers) <= usual


@pytest.mark.parametrize("name", GPU_SINGLE)
def test_step_of_one_sequence_has_few_launches_on_h200(results, name) -> None:
    launches = [launch["name"] for launch in compiled(results, name)["launches"]]
    layers = [i for i, launch in enumerate(launches) if launch == "paged_rope_write"]
    assert len(layers) == GPU_SINGLE[name].config.num_hidden_layers
    assert max(end - begin for begin, end in itertools.pairwise(layers)) <= 11
    # One launch sets the counters of all layers to zero.
    assert len([launch for launch in launches if "broadcast" in launch]) == 1, launches


@pytest.mark.parametrize("name", ["engine with full pools"])
def test_step_of_an_engine_has_few_launches_besides_its_layers_on_h200(results, name) -> None:
    """Nothing is allocated in the loop over tokens, and the host waits for few conditions."""
    program = compiled(results, name)
    loop = [x for x in program["launches"] if x["within"][:1] == ["body"]]
    step = [launch["name"] for launch in loop if len(launch["within"]) == 1]
    products = [i for i, name in enumerate(step) if "gemm" in name]
    # Embeddings, rotations, places of tokens; the first norm, matmul and sum.
    assert step.index("paged_rope_write") <= 6
    # Two passes over the logits. Sampled tokens are counted, stored and checked.
    assert len(step) - 1 - products[-1] <= 14
    # Greedy rows take the shorter of the two branches.
    in_branches = Counter(launch["within"][1] for launch in loop if len(launch["within"]) > 1)
    assert len(in_branches) == 2 and min(in_branches.values()) == 1
    # The conditionals are for greedy sampling, filters, and reported log-probabilities.
    assert program["num_conditionals"] <= 3
    # Launches before and after the loop reserve blocks, and gather and scatter rows.
    assert sum(not launch["within"] for launch in program["launches"]) <= 48
    # The previous step decides whether the loop continues.
    assert not [x for x in program["launches"] if x["within"][:1] == ["condition"]]


@pytest.mark.parametrize("name", GPU_STEPS)
def test_step_copies_no_pool_on_h200(results, name) -> None:
    program, step = compiled(results, name), GPU_STEPS[name]
    pool_bytes = step.pool_gigabytes * 10**9
    assert program["aliased_bytes"] >= 0.99 * pool_bytes
    # A chunk also needs activations, mostly of the gate and up projections.
    activation_bytes = 0
    if isinstance(step, PrefillStep):
        features = step.config.layers[0].get(Dense).features
        activation_bytes = 8 * step.chunk * 2 * features
    assert program["temporary_bytes"] < 0.01 * pool_bytes + activation_bytes
