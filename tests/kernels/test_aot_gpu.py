"""Every Triton kernel, and the whole step, compiled for an H200 by the real compilers.

`tests.support.aot_gpu` compiles, in a process of its own; here is what its figures must be.
"""

import itertools
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paged_jax.kernels.triton import tuning
from tests.support.aot_cases import (
    EXPERTS,
    GPU_DECODE,
    GPU_FAMILIES,
    GPU_PARALLEL,
    GPU_PREFILL,
    GPU_RAGGED,
    GPU_SINGLE,
    GPU_STEPS,
    GPU_UPDATES,
    asked_for,
    compiled,
    exactly,
    has_gpu_compiler,
    parameters,
    run_script,
)
from tests.support.decode_step import PrefillStep
from tests.support.kernel_cases import Case

# What one block may have on compute capability 9.0 (CUDA C++ Programming Guide).
MAX_SHARED_MEMORY_BYTES = 227 * 1024

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason='no compiler for GPUs: install the extra "aot"'
)


@pytest.fixture(scope="module")
def results(request) -> dict[str, Any]:
    """What the script says of the cases: of the ops in one process, of whole steps in another."""
    steps = {**GPU_STEPS, **GPU_SINGLE, **GPU_PARALLEL, **GPU_FAMILIES}.keys()
    names = asked_for(request, "name")
    parts = names - steps, names & steps
    with ThreadPoolExecutor() as threads:
        halves = threads.map(
            lambda names: run_script("aot_gpu", *exactly(names)), filter(None, parts)
        )
    return {name: program for half in halves for name, program in half.items()}


def assert_fits(program: dict[str, Any], spilled_bytes: int = 16) -> None:
    for kernel in program["kernels"]:
        # The assembler may put a number or two aside around a loop, which costs nothing, to be left
        # with registers for one program more on a multiprocessor.
        assert kernel["spills_in_loops"] == 0, kernel
        assert kernel["spilled_bytes"] <= spilled_bytes, kernel
    for launch in program["launches"]:
        assert launch["shared_memory_bytes"] <= MAX_SHARED_MEMORY_BYTES, launch


def assert_reads_well(program: dict[str, Any], case: Case) -> None:
    """K and V come through the pipeline of asynchronous copies, and meet on the tensor cores."""
    [attend] = program["kernels"]
    if case.pool_dtype is None:
        assert set(attend["async_copies"]) == {"16 bytes"}, attend
    else:
        # Scales come 4 bytes at a time, and Triton splits V where it turns into another layout.
        assert attend["async_copies"]["16 bytes"] > 0, attend
    # Tensor cores would round float32 to TF32.
    assert (attend["tensor_core_products"] > 0) == (case.dtype != "float32"), attend


@pytest.mark.parametrize("name", parameters(GPU_DECODE))
def test_decode_compiles_for_h200(results, name) -> None:
    program = compiled(results, name)
    # Before it, what programs count in is made zero, for all layers of a step at once.
    assert [launch["name"] for launch in program["launches"]][-1:] == ["paged_decode"]
    assert len(program["launches"]) <= 2, program["launches"]
    # A few numbers of its part, too, which the merge behind the loop needs.
    assert_fits(program, spilled_bytes=40)
    assert_reads_well(program, GPU_DECODE[name])
    # Partial results of the parts; never anything of the size of the context.
    assert program["temporary_bytes"] <= 0.001 * GPU_DECODE[name].pool_bytes


@pytest.mark.parametrize("name", ["decode", "decode of one sequence of 128K", "decode, int8"])
def test_parts_are_written_before_they_are_counted_and_read_after_on_h200(results, name) -> None:
    """By all threads of a program for those of another one, through the memory of the device."""
    [attend] = compiled(results, name)["kernels"]
    assert attend["counting"] == [
        "STG",
        "BAR.SYNC",  # all threads have written
        "MEMBAR.ALL.GPU",  # and the whole device sees it,
        "ATOMG.E.ADD.STRONG.GPU",  # before one thread counts
        "CCTL.IVALL",  # and forgets what the first cache holds,
        "BAR.SYNC",  # before any thread
        "LDG",  # reads what the others have written
    ], attend


@pytest.mark.parametrize("name", parameters(GPU_PREFILL))
def test_prefill_compiles_for_h200(results, name) -> None:
    program = compiled(results, name)
    assert len(program["launches"]) == 1, program["launches"]
    assert_fits(program)
    assert_reads_well(program, GPU_PREFILL[name])
    assert program["temporary_bytes"] == 0


@pytest.mark.parametrize("name", parameters(GPU_RAGGED))
def test_ragged_batch_reads_pages_where_they_lie_on_h200(results, name) -> None:
    """As kernels over pools do: the layout changes no instruction that reads them."""
    program, case = compiled(results, name), GPU_RAGGED[name]
    kernels = {kernel["name"]: kernel for kernel in program["kernels"]}
    assert kernels.keys() == {"paged_decode", "paged_prefill"}
    for kernel in kernels.values():
        # What a program puts aside before its loop, once.
        assert kernel["spills_in_loops"] == 0 and kernel["spilled_bytes"] <= 64, kernel
    for name in ("paged_decode", "paged_prefill"):
        assert set(kernels[name]["async_copies"]) == {"16 bytes"}, kernels[name]
        assert (kernels[name]["tensor_core_products"] > 0) == (case.dtype != "float32"), name
    # Besides: where chunks begin and end, queries of decode, and the rows of both made one.
    assert len(program["launches"]) <= 8, program["launches"]
    assert program["temporary_bytes"] <= 0.001 * case.pool_bytes


@pytest.mark.parametrize("name", ["prefill of one chunk of 2048"])
def test_chunks_take_few_instructions_on_h200(results, name) -> None:
    """Beside the products of 128 rows and 64 tokens, which keep tensor cores busy 512 cycles."""
    [kernel] = compiled(results, name)["kernels"]
    whole, masked = sorted(kernel["loop_instructions"])
    assert whole <= 340 * 2, "128 tokens"
    assert masked <= 430 * 2


# Instructions of a warp for 64 tokens of one KV head. A multiprocessor gets 64 tokens of 1 byte in
# about 960 cycles (4.3 TB/s for 132 of them at 1.85 GHz), and its four schedulers issue at most one
# instruction a cycle, each for one of the four warps of a program.
@pytest.mark.parametrize(
    ("name", "step_tokens", "most"),
    [
        ("decode", 64, 420),
        # Here the registers leave room for more programs, at the price of instructions.
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
    # Three programs of 4 warps at least share a multiprocessor, of 65,536 registers and 228 KB.
    assert 3 * 4 * 32 * attend["registers"] <= 65_536
    [launch] = [x for x in program["launches"] if x["name"] == attend["name"]]
    assert 3 * (launch["shared_memory_bytes"] + 1024) <= 228 * 1024


@pytest.mark.parametrize("name", parameters(GPU_DECODE))
def test_programs_per_core_fit_an_h200(results, name) -> None:
    """What the division of a batch counts on: registers by warp in units of 256, shared memory."""
    case, program = GPU_DECODE[name], compiled(results, name)
    pool_dtype = case.pool_dtype or case.dtype
    shape = tuning.Shape(case.D, case.G, case.C, case.dtype, pool_dtype)
    shape = shape._replace(group=tuning.slice_size(shape))
    params = tuning.decode_params("", shape)
    counted = tuning.programs_per_core(shape, params, tuning.DEFAULT)
    [attend] = program["kernels"]
    [launch] = [x for x in program["launches"] if x["name"] == attend["name"]]
    registers = params.num_warps * -(-32 * attend["registers"] // 256) * 256
    fitting = min(65_536 // registers, 228 * 1024 // (launch["shared_memory_bytes"] + 1024))
    assert counted <= fitting
    assert counted == fitting or fitting > 3, "rooms that the division leaves empty"


@pytest.mark.parametrize("name", parameters(GPU_UPDATES))
def test_update_is_one_launch_in_place_for_h200(results, name) -> None:
    program = compiled(results, name)
    assert len(program["launches"]) == 1, program["launches"]
    assert_fits(program)
    # Triton's division by a constant is approximate; XLA multiplies by the reciprocal.
    assert [kernel["divisions_by_constants"] for kernel in program["kernels"]] == [[]]
    # XLA's own table of the buffers of a result.
    assert program["temporary_bytes"] <= 64
    assert program["aliased_bytes"] == GPU_UPDATES[name].pool_bytes


@pytest.mark.parametrize(
    "name", parameters({**GPU_DECODE, **GPU_PREFILL, **GPU_RAGGED, **GPU_UPDATES})
)
def test_kernels_wait_for_the_one_before_ahead_of_memory_on_h200(results, name) -> None:
    """A kernel may be launched while the kernel that writes its operands still runs."""
    kernels = compiled(results, name)["kernels"]
    assert kernels and all(kernel["waits_first"] is True for kernel in kernels), kernels


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_two_products_of_what_was_chosen_on_h200(results, name) -> None:
    """No weight is copied, and no product is XLA's, which would be one with all experts."""
    program, case = compiled(results, name), EXPERTS[name]
    launches = Counter(launch["name"] for launch in program["launches"])
    assert sum(n for launch, n in launches.items() if launch.startswith("grouped_linear")) == 2
    assert not [launch for launch in launches if "gemm" in launch or "dot" in launch]
    # Choosing, sorting and adding up beside them; of many rows XLA's sort.
    is_sorted = case.num_tokens * case.num_chosen > 1024
    assert launches.total() <= (14 if is_sorted else 11), launches
    assert_fits(program)
    for kernel in program["kernels"]:
        assert (kernel["tensor_core_products"] > 0) == (case.dtype != "float32"), kernel
        # With many rows for each expert, in products of a whole warpgroup.
        many = case.num_tokens * case.num_chosen >= 32 * case.num_experts
        assert (kernel["warpgroup_products"] > 0) == many, kernel
        assert set(kernel["async_copies"]) == {"16 bytes"}, kernel
    assert program["temporary_bytes"] < 1.5 * case.activation_bytes + 0.01 * case.weight_bytes


@pytest.mark.parametrize("name", GPU_STEPS)
def test_step_attends_on_tensor_cores_of_h200(results, name) -> None:
    """The kernels as the model calls them, not as a test of the op does."""
    program, is_chunk = compiled(results, name), isinstance(GPU_STEPS[name], PrefillStep)
    attention = "paged_prefill" if is_chunk else "paged_decode"
    launches = [launch["name"] for launch in program["launches"]]
    assert attention in launches
    kernels = {kernel["name"]: kernel for kernel in program["kernels"]}
    assert_fits(program)
    assert kernels[attention]["tensor_core_products"] > 0, kernels[attention]
    # A chunk has rows enough for the products of a whole warpgroup, which alone are fast.
    assert (kernels[attention]["warpgroup_products"] > 0) == is_chunk, kernels[attention]
    # The projection, when the parts of its product are added up, is split, rotated, quantised and
    # written in one launch. (Between those of one layer, XLA may put what the step does besides.)
    assert min(preparations(launches, attention), key=len) == ["paged_rope_write"]


@pytest.mark.parametrize("name", GPU_PARALLEL)
def test_parallel_step_sends_two_sums_a_layer_and_copies_no_pool_on_h200(results, name) -> None:
    """Of an engine, on each of several GPUs, by the kernels of one."""
    program, step = compiled(results, name), GPU_PARALLEL[name]
    pool_bytes = step.pool_gigabytes * 10**9
    num_layers = step.config.num_hidden_layers
    assert program["collectives"] == {"all-reduce": 2 * num_layers + 1, "all-gather": 1}
    kernels = {kernel["name"] for kernel in program["kernels"]}
    assert kernels == {"paged_rope_write", "paged_decode", "copy_blocks"}
    # A pool has a whole number of blocks.
    assert program["aliased_bytes"] > 0.99 * pool_bytes
    assert program["temporary_bytes"] < 0.01 * pool_bytes


@pytest.mark.parametrize("name", GPU_FAMILIES)
def test_step_of_layers_that_differ_fills_an_h200(results, name) -> None:
    """Of an engine, with pools for each kind of layers, all of them updated in place."""
    program, step = compiled(results, name), GPU_FAMILIES[name]
    pool_bytes = step.pool_gigabytes * 10**9
    assert program["aliased_bytes"] > 0.99 * pool_bytes
    # A copy of the weights of a layer's experts would take as much.
    assert program["temporary_bytes"] < 0.01 * pool_bytes
    layers = step.config.sliding_windows
    for number, window in enumerate(layers):
        [attend] = [x for x in program["kernels"] if x["name"] == variant("paged_decode", number)]
        assert attend["spills_in_loops"] == 0 and attend["spilled_bytes"] <= 64, (window, attend)
        assert attend["tensor_core_products"] > 0 and attend["async_copies"], (window, attend)
    launches = [launch["name"] for launch in program["launches"]]
    assert not [name for name in launches if "remat" in name]
    # Of a layer: queries, keys and values, the output, gate and up, down or the router; the logits.
    products = [name for name in launches if "gemm" in name]
    has_experts = step.config.num_experts > 0
    assert len(products) == (3 if has_experts else 4) * len(layers) + 1, products
    if has_experts:
        # From one layer's write to the next one's. The router is a product that XLA, without a GPU
        # to time it on, divides: two paddings, and a sum of its parts.
        begin, end = (launches.index(variant("paged_rope_write", number)) for number in (0, 1))
        assert end - begin <= 24, launches[begin:end]
    # The experts' weights are multiplied by the rows that chose them, and nowhere else.
    grouped = [x for x in program["kernels"] if x["name"].startswith("grouped_linear")]
    assert len([x for x in launches if x.startswith("grouped_linear")]) == (
        2 * len(layers) * has_experts
    )
    for kernel in grouped:
        assert kernel["spilled_bytes"] == 0 and kernel["tensor_core_products"] > 0, kernel
        assert set(kernel["async_copies"]) == {"16 bytes"}, kernel


def variant(kernel: str, number: int) -> str:
    """The name that Triton gives to the second form of a kernel in a program, and so on."""
    return f"{kernel}__{number}" if number else kernel


def preparations(launches: list[str], attention: str) -> list[list[str]]:
    """What each layer launches between a product, the sums of its parts left out, and attention."""
    layers = []
    for end in (i for i, launch in enumerate(launches) if launch == attention):
        product = max(i for i, launch in enumerate(launches[:end]) if "gemm" in launch)
        layers.append([x for x in launches[product + 1 : end] if "reduce" not in x])
    return layers


@pytest.mark.parametrize("name", ["engine with full pools"])
def test_engine_computes_nothing_twice_where_pools_fill_an_h200(results, name) -> None:
    launches = [x["name"] for x in compiled(results, name)["launches"]]
    assert not [name for name in launches if "remat" in name]


# Two norms, four products, silu, `paged_rope_write` and attention. Where products are divided, the
# sums of three of them, which add the residual stream too; else it is added up in the norms, and by
# a kernel of its own after several layers.
@pytest.mark.parametrize(
    ("name", "fewest", "usual"),
    [("engine with full pools", 12, 12), ("step, products undivided", 9, 10)],
)
def test_layer_of_a_decode_step_has_few_launches_on_h200(results, name, fewest, usual) -> None:
    launches = [launch["name"] for launch in compiled(results, name)["launches"]]
    layers = [i for i, launch in enumerate(launches) if launch == "paged_rope_write"]
    assert len(layers) == GPU_STEPS[name].config.num_hidden_layers
    # From one layer's write to the next one's.
    numbers = [end - begin for begin, end in itertools.pairwise(layers)]
    assert min(numbers) <= fewest and statistics.median_low(numbers) <= usual


@pytest.mark.parametrize("name", GPU_SINGLE)
def test_step_of_one_sequence_has_few_launches_on_h200(results, name) -> None:
    launches = [launch["name"] for launch in compiled(results, name)["launches"]]
    layers = [i for i, launch in enumerate(launches) if launch == "paged_rope_write"]
    assert len(layers) == GPU_SINGLE[name].config.num_hidden_layers
    assert max(end - begin for begin, end in itertools.pairwise(layers)) <= 11
    # What parts are counted in, made zero for all layers at once.
    assert len([launch for launch in launches if "broadcast" in launch]) == 1, launches


@pytest.mark.parametrize("name", ["engine with full pools"])
def test_step_of_an_engine_launches_little_beside_its_layers_on_h200(results, name) -> None:
    """Nothing is allocated in the loop over tokens, and few conditions keep the host waiting."""
    program = compiled(results, name)
    loop = [x for x in program["launches"] if x["within"][:1] == ["body"]]
    step = [launch["name"] for launch in loop if len(launch["within"]) == 1]
    products = [i for i, name in enumerate(step) if "gemm" in name]
    # Embeddings, rotations, places of tokens; the first norm, product and its sum.
    assert step.index("paged_rope_write") <= 6
    # Two passes over the logits; what was drawn is counted, noted and looked at.
    assert len(step) - 1 - products[-1] <= 14
    # Of the two branches, greedy rows take the short one.
    in_branches = Counter(launch["within"][1] for launch in loop if len(launch["within"]) > 1)
    assert len(in_branches) == 2 and min(in_branches.values()) == 1
    # Besides greedy or not: which filters, and whether the most probable tokens are reported.
    assert program["num_conditionals"] <= 3
    # Before and behind the loop: blocks are planned and taken, rows gathered and put back.
    assert sum(not launch["within"] for launch in program["launches"]) <= 48
    # Whether the loop goes on is known from the step before.
    assert not [x for x in program["launches"] if x["within"][:1] == ["condition"]]


@pytest.mark.parametrize("name", GPU_STEPS)
def test_step_copies_no_pool_on_h200(results, name) -> None:
    program, step = compiled(results, name), GPU_STEPS[name]
    pool_bytes = step.pool_gigabytes * 10**9
    assert program["aliased_bytes"] >= 0.99 * pool_bytes
    # A chunk needs activations besides, those of the gate and up projections the most.
    rows = step.chunk if isinstance(step, PrefillStep) else 0
    activation_bytes = 8 * rows * 2 * step.config.intermediate_size
    assert program["temporary_bytes"] < 0.01 * pool_bytes + activation_bytes
