"""Tests of the planner against allocated arrays, compiled programs and published figures."""

import json

import jax
import jax.numpy as jnp
import pytest

import paged_jax
from paged_jax import generate
from paged_jax.engine import core, pool_size
from paged_jax.engine.device_memory import DeviceMemory, host_memory
from paged_jax.engine.engine import Engine
from paged_jax.engine.footprint import block_bytes, record_bytes, weight_bytes
from paged_jax.engine.memory_plan import make_plan
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.plan import main
from paged_jax.runner.programs import list_calls
from tests.support.processes import run_on_devices
from tests.support.random_model import random_llama
from tests.support.real_checkpoints import REAL_CHECKPOINTS, save_real_config
from tests.support.tiny_model import CONFIG, SIZES

BUNDLED = LlamaConfig.from_file(bundled_folder())
# Large enough that the memory of a step is dominated by the terms of the plan.
MID = LlamaConfig(
    vocab_size=65536,
    hidden_size=256,
    intermediate_size=1408,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    eos_token_ids=(2,),
)
# As in small Qwen3 models, attention is wider than the MLP.
WIDE_HEADS = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    qk_norm=True,
)
# Experts need more memory than attention.
EXPERTS = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=512,
)


def set_memory(monkeypatch, total: int, in_use: int = 0) -> None:
    monkeypatch.setattr(core, "device_memory", lambda device: DeviceMemory(total, in_use))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


# Against allocated arrays


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "int8"])
@pytest.mark.parametrize("model", ["bundled", "tiny"])
def test_plan_equals_the_memory_of_an_engine(model, kv_dtype) -> None:
    config = BUNDLED if model == "bundled" else CONFIG
    engine = Engine(
        None if model == "bundled" else random_llama(CONFIG),
        kv_dtype=kv_dtype,
        max_num_seqs=3,
        num_blocks=7,
        block_size=4,
    )
    plan = make_plan(config, 1 << 30, "cpu", kv_dtype=kv_dtype, max_num_seqs=3, block_size=4)
    footprint, cache = plan.footprint, engine.cache
    assert footprint.weights == sum(x.nbytes for x in engine.weights)
    assert footprint.block * 7 == cache.nbytes
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(engine.core.runner.state))
    assert footprint.state + 7 * (footprint.block + record_bytes(4)) == state_bytes


_ON_EACH_DEVICE = """
import jax
from paged_jax import Engine
from paged_jax.engine import core
from paged_jax.engine.device_memory import DeviceMemory
from paged_jax.engine.footprint import record_bytes
from paged_jax.engine.memory_plan import make_plan
from tests.support.tensor_parallel import make_model

def bytes_on(device, tree):
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)

model = make_model()
for num_devices, kv_dtype in ((2, "auto"), (4, "int8"), (8, "auto")):
    sizes = {"block_size": 4, "kv_dtype": kv_dtype, "tensor_parallel_size": num_devices}
    footprint = make_plan(model.config, 1 << 30, "cpu", **sizes).footprint
    memory = footprint.fixed + 100 * (footprint.block + footprint.block_overhead)
    core.device_memory = lambda device: DeviceMemory(memory, 0)
    engine = Engine(model, memory_fraction=1, **sizes)
    assert engine.num_blocks == 100
    for device in jax.devices()[:num_devices]:
        assert bytes_on(device, engine.core.executor.weights.arrays) == footprint.weights
        assert bytes_on(device, engine.cache.group_pools) == 100 * footprint.block
        state = footprint.state + 100 * (footprint.block + record_bytes(4))
        assert bytes_on(device, engine.core.runner.state) == state
"""


@pytest.mark.slow
def test_plan_equals_the_memory_of_an_engine_on_each_device() -> None:
    run_on_devices(_ON_EACH_DEVICE, num_devices=8)


def test_blocks_of_tpus_are_padded_to_whole_registers() -> None:
    assert block_bytes(CONFIG, 4, "bfloat16", "gpu") == 2 * 2 * 2 * 4 * 8 * 2
    assert block_bytes(CONFIG, 4, "bfloat16", "tpu") == 2 * 2 * 2 * 4 * 128 * 2


@pytest.mark.parametrize(
    "model, token_bytes",
    [
        ("meta-llama/Llama-3.1-8B", 128 * 1024),
        ("a tuned Llama 2 7B", 512 * 1024),
        ("cognitivecomputations/Dolphin3.0-Mistral-24B", 160 * 1024),
        ("deepcogito/cogito-v1-preview-qwen-14B", 192 * 1024),
        ("a tuned Qwen3 14B", 160 * 1024),
        ("HuggingFaceTB/SmolLM3-3B", 72 * 1024),
    ],
)
def test_weights_of_real_checkpoints_have_the_bytes_of_their_index(model, token_bytes) -> None:
    config = LlamaConfig.from_dict(REAL_CHECKPOINTS[model]["config"])
    assert weight_bytes(config, "bfloat16") == REAL_CHECKPOINTS[model]["total_size"]
    assert block_bytes(config, 16, "bfloat16", "gpu") == 16 * token_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, num_parameters, token_bytes",
    [
        ("Meta-Llama-3-8B-Instruct", 8_030_261_248, 128 * 1024),
        ("Llama-2-7b-hf", 6_738_415_616, 512 * 1024),
        ("Llama-3.2-1B", 1_235_814_400, 32 * 1024),
        ("TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, 22 * 1024),
        ("SmolLM2-135M", 134_515_008, 22_5 * 1024 // 10),
        ("Mistral-7B-v0.1", 7_241_732_096, 128 * 1024),
        ("Qwen2.5-0.5B-Instruct", 494_032_768, 12 * 1024),
        ("Qwen3-0.6B", 596_049_920, 112 * 1024),
    ],
)
def test_weights_and_tokens_of_known_models(data_dir, name, num_parameters, token_bytes) -> None:
    config = LlamaConfig.from_file(data_dir / "configs" / name)
    assert weight_bytes(config, "bfloat16") == 2 * num_parameters
    assert block_bytes(config, 16, "bfloat16", "gpu") == 16 * token_bytes


# Against compiled programs


def compiled_bytes(engine: Engine, *kinds: str) -> dict[str, int]:
    """Return the memory of the largest program of each kind, including its results."""
    runner, sizes = engine.core.runner, engine.core.executor.sizes
    shape = f"1 x {sizes.max_chunk}" if sizes.tile is None else f"{sizes.max_prefill}"
    names = {
        f"prefill of {shape} tokens": "prefill",
        f"decode of {sizes.num_slots} samples": "decode",
        f"verification of {sizes.num_slots} samples": "verify",
        "score of 128 tokens": "score",
        "copy of blocks from the host": "swap",
    }
    held = {}
    for call in list_calls(runner.executor.programs, sizes, runner.state.cache):
        if names.get(call.name) not in kinds:
            continue
        lowered = call.program.lower(
            runner.executor.weights.arrays, runner.state, *call.args, **call.static
        )
        analysis = lowered.compile().memory_analysis()
        new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        arguments = sum(jnp.asarray(x).nbytes for x in jax.tree.leaves(call.args))
        held[names[call.name]] = analysis.temp_size_in_bytes + new + arguments
    return held


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize(
    "config, dtype, kv_dtype, backend, kinds",
    [
        (MID, "float32", "auto", None, ("prefill", "score", "decode", "verify", "swap")),
        (MID, "bfloat16", "int8", None, ("prefill", "swap")),
        (MID, "float16", "float16", None, ("decode",)),
        # The compiled CPU kernels need an eighth of the plan, which must hold without them.
        (WIDE_HEADS, "float32", "auto", "xla", ("prefill", "decode", "swap")),
        (EXPERTS, "float32", "auto", "xla", ("prefill",)),
    ],
)
def test_steps_need_at_most_the_planned_memory(config, dtype, kv_dtype, backend, kinds) -> None:
    sizes = {"max_num_seqs": 8, "max_model_len": 1024, "max_chunk": 1024}
    sizes |= {"num_speculative_tokens": 3, "kv_dtype": kv_dtype}
    model = random_llama(config, dtype=dtype)
    held = compiled_bytes(Engine(model, num_blocks=64, backend=backend, **sizes), *kinds)
    plan = make_plan(config, 1 << 30, "cpu", dtype=dtype, **sizes)
    assert held.keys() == set(kinds)
    for program, num_bytes in held.items():
        assert plan.footprint.steps[program] / 3 <= num_bytes <= plan.footprint.steps[program]


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize(("kv_dtype", "program"), [("bfloat16", "decode"), ("fp8", "prefill")])
def test_plan_includes_copies_of_pools_on_cpus(kv_dtype, program) -> None:
    model = random_llama(MID)
    sizes = {"max_num_seqs": 8, "max_model_len": 1024, "max_chunk": 64, "kv_dtype": kv_dtype}
    engine = Engine(model, num_blocks=1024, **sizes)
    footprint = make_plan(MID, 1 << 30, "cpu", **sizes).footprint
    taken = compiled_bytes(engine, program)[program] + engine.cache.nbytes
    planned = footprint.steps[program] + 1024 * (footprint.block + footprint.block_overhead)
    assert planned / 2 < taken <= planned


# memory_fraction


def test_memory_fraction_gives_the_planned_number_of_blocks(monkeypatch) -> None:
    total = 333 << 19
    set_memory(monkeypatch, total)
    engine = Engine(random_llama(CONFIG), block_size=4, max_num_seqs=4096, memory_fraction=0.5,
                    max_num_batched_tokens=4096)  # fmt: skip
    plan = make_plan(CONFIG, total // 2, "cpu", block_size=4, max_num_seqs=4096)
    assert engine.num_blocks == plan.num_blocks
    held = sum(x.nbytes for x in jax.tree.leaves((engine.weights, engine.core.runner.state)))
    assert held + plan.footprint.step <= total // 2
    assert held + plan.footprint.step + plan.footprint.block * 50 > total // 2


def test_memory_fraction_allocates_at_most_what_slots_can_use(monkeypatch) -> None:
    set_memory(monkeypatch, 1 << 30)
    engine = Engine(random_llama(CONFIG), block_size=4, max_num_seqs=2, memory_fraction=0.9)
    assert engine.num_blocks == 2 * CONFIG.max_position_embeddings // 4


def test_memory_fraction_leaves_the_memory_of_other_arrays(monkeypatch) -> None:
    sizes = {"block_size": 4, "max_num_seqs": 2048, "memory_fraction": 1}
    set_memory(monkeypatch, 64 << 20)
    alone = Engine(random_llama(CONFIG), **sizes)
    set_memory(monkeypatch, 72 << 20, in_use=8 << 20)
    beside = Engine(random_llama(CONFIG), **sizes)
    own = sum(x.nbytes for x in alone.weights)
    footprint = make_plan(CONFIG, 64 << 20, "cpu", block_size=4, max_num_seqs=2048).footprint
    assert beside.num_blocks == footprint.num_blocks((64 << 20) + own) > alone.num_blocks


def test_memory_fraction_without_room_for_a_block_is_an_error_with_numbers(monkeypatch) -> None:
    set_memory(monkeypatch, 8 << 20)
    match = r"memory_fraction 0.5 must leave room for .* of weights, .* step, and .*, got 4.00 MiB"
    with pytest.raises(ValueError, match=match):
        Engine(random_llama(CONFIG), memory_fraction=0.5)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"memory_fraction": 0.0}, "memory_fraction must be above 0 and at most 1, got 0.0"),
        ({"memory_fraction": 1.5}, "memory_fraction must be above 0 and at most 1, got 1.5"),
        (SIZES | {"memory_fraction": 0.5}, "must be None if num_blocks is given"),
    ],
)
def test_memory_fraction_out_of_bounds_is_an_error(options, match) -> None:
    with pytest.raises(ValueError, match=match):
        Engine(random_llama(CONFIG), **options)


def test_generate_passes_the_memory_fraction(capsys) -> None:
    assert generate.main(["--prompt", "It is", "--memory-fraction", "2"]) == 1
    assert "--memory-fraction must be above 0 and at most 1, got 2.0" in capsys.readouterr().err


def test_memory_fraction_needs_a_device_that_reports_its_memory(monkeypatch) -> None:
    monkeypatch.setattr(core, "device_memory", lambda device: None)
    with pytest.raises(ValueError, match="does not report its memory"):
        Engine(random_llama(CONFIG), memory_fraction=0.5)


# The pool of an engine without options


def test_planner_and_engine_choose_the_same_pool(tiny_folder, capsys, monkeypatch) -> None:
    """The default on CPUs decides: all slots could use more, and more would fit."""
    monkeypatch.setattr(pool_size, "DEFAULT_CACHE_BYTES", 1 << 20)
    engine = Engine(tiny_folder, block_size=4, max_num_seqs=2048)
    held = engine.cache.nbytes
    assert held <= 1 << 20 < held + held // engine.num_blocks
    assert engine.pool_limit.startswith("1.00 MiB, the default on CPUs; set num_blocks or")
    arguments = ("--model", str(tiny_folder), "--block-size", "4", "--max-num-seqs", "2048")
    _, out, _ = run(capsys, *arguments, "--json")
    plan = json.loads(out)
    assert plan["num_engine_blocks"] == engine.num_blocks < plan["num_blocks"]
    assert plan["engine_limit"] == engine.pool_limit
    _, out, _ = run(capsys, *arguments)
    assert f"An engine allocates {engine.num_blocks:,} blocks: {engine.pool_limit}." in out


def test_help_has_the_rule_for_the_pool(capsys) -> None:
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    rule = "at most 85% of the memory that is free after loading the weights, and on CPUs in at"
    assert f"{rule} most 1.00 GiB" in text


def test_gpus_keep_a_part_of_the_memory_of_the_planned_device(capsys) -> None:
    """A server takes 90% of a GPU, and its engine 85% of what the weights leave."""
    arguments = ("--platform", "gpu", "--memory", "32MiB", "--json")
    _, out, _ = run(capsys, *arguments)
    plan = json.loads(out)
    free = int(0.9 * (32 << 20)) - plan["weight_bytes"]
    assert plan["num_engine_blocks"] == int(0.85 * free) // plan["block_bytes"]
    assert plan["engine_limit"].startswith("85% of the memory that is free")
    _, out, _ = run(capsys, *arguments, "--memory-fraction", "0.75")
    part = json.loads(out)
    assert part["memory_bytes"] == 24 << 20
    assert part["num_engine_blocks"] == part["num_blocks"]
    assert part["engine_limit"] == "all that memory_fraction 0.75 allows"


# Host memory


# The command line


@pytest.fixture
def llama_8b(tmp_path) -> str:
    """Return a folder with the config of Llama 3.1 8B."""
    return str(save_real_config("meta-llama/Llama-3.1-8B", tmp_path))


def test_main_compares_with_a_contiguous_cache(capsys, llama_8b) -> None:
    status, out, err = run(
        capsys, "--model", llama_8b, "--max-model-len", "8192",
        "--memory", "24GiB", "--platform", "gpu", "--lengths", "500", "8192", "--json",
    )  # fmt: skip
    plan = json.loads(out)
    assert (status, err) == (0, "")
    assert plan["num_parameters"] == 8_030_261_248
    assert plan["weight_bytes"] == 16_060_522_496
    assert (plan["dtype"], plan["kv_dtype"]) == ("bfloat16", "bfloat16")
    assert (plan["token_bytes"], plan["block_bytes"]) == (131072, 16 * 131072)
    taken = plan["weight_bytes"] + plan["state_bytes"] + plan["step_bytes"]
    a_block = plan["block_bytes"] + plan["block_overhead_bytes"]
    assert 0 <= (24 << 30) - taken - plan["num_blocks"] * a_block < a_block
    num_contiguous = ((24 << 30) - taken) // (8192 * 131072)
    assert plan["lengths"] == [
        {
            "length": length,
            "num_paged": plan["num_blocks"] // num_blocks,
            "num_contiguous": num_contiguous,
            "ratio": plan["num_blocks"] // num_blocks / num_contiguous,
        }
        for length, num_blocks in ((500, 32), (8192, 512))
    ]


def test_main_prints_the_plan(capsys) -> None:
    status, out, _ = run(capsys, "--memory", "64MiB", "--platform", "cpu", "--lengths", "64")
    plan = make_plan(BUNDLED, 64 << 20, "cpu")
    assert status == 0
    assert "memory     64.00 MiB  on cpu" in out
    assert f"{plan.num_parameters:,} parameters in {plan.dtype}" in out
    assert f"{plan.num_blocks:,} of 16 tokens in {plan.kv_dtype}" in out
    row = [64, plan.num_blocks // 4, plan.num_contiguous]
    assert [int(number) for number in out.split("ratio\n")[1].split()[:3]] == row
    assert f"allocates {plan.num_engine_blocks:,} blocks: all that 16 slots of 512 tokens" in out
    assert plan.num_engine_blocks == 16 * 512 // 16 < plan.num_blocks


def test_main_plans_each_of_several_devices(capsys, llama_8b) -> None:
    options = ("--model", llama_8b, "--max-model-len", "8192", "--device", "V5e")
    options += ("--tensor-parallel-size", "16", "--lengths", "4096", "--max-num-seqs", "64")
    status, out, _ = run(capsys, *options, "--json")
    plan = json.loads(out)
    assert (status, plan["platform"], plan["num_devices"]) == (0, "tpu", 16)
    assert (plan["num_parameters"], plan["memory_bytes"]) == (8_030_261_248, 16 * 10**9)
    # 8 KV heads on 16 devices: each head is on two devices.
    assert plan["token_bytes"] == 32 * 2 * 128 * 2
    assert plan["collectives"]["num_all_reduces"] == 2 * 32 + 1
    [length] = plan["lengths"]
    assert length["num_running"] == 64 < length["num_paged"]
    seconds = max(length["reading"], length["computing"]) + length["sending"]
    assert length["step_seconds"] == seconds
    _, out, _ = run(capsys, *options)
    assert "on each of 16 devices, tpu" in out
    assert "16.00 KiB a token; 8 KV heads, each on 2 devices" in out
    assert "by each device in a decode step of 64: 65 all-reduces, 1 all-gather" in out
    row = out.split("tokens/s\n")[1].splitlines()[0].split()
    assert row[-3:] == ["64", f"{1000 * seconds:.2f}", f"{64 / seconds:,.0f}"]


def test_main_says_when_sequences_wait(capsys) -> None:
    arguments = ("--memory", "64M", "--platform", "cpu", "--lengths", "64", "--max-num-seqs", "40")
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and "40 sequences run at once, see --max-num-seqs" in out


def test_main_suggests_flags(capsys) -> None:
    for flag, meant in {
        "--max_num_seqs": "--max-num-seqs",
        "--kv-cache-dtype": "--kv-dtype",
    }.items():
        with pytest.raises(SystemExit) as exit_info:
            main([flag, "3"])
        assert exit_info.value.code == 2
        assert capsys.readouterr().err.endswith(f"Did you mean {meant}?\n")
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"paged_jax {paged_jax.__version__}\n"


def test_main_plans_for_this_machine(capsys) -> None:
    status, out, _ = run(capsys, "--memory-fraction", "0.5", "--json")
    assert status == 0
    assert json.loads(out)["memory_bytes"] == (host_memory() or 0) // 2


def test_main_reports_in_a_line_that_the_model_does_not_fit(capsys, llama_8b) -> None:
    status, out, err = run(capsys, "--model", llama_8b, "--memory", "12GiB", "--platform", "gpu")
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "14.96 GiB of weights" in err and "got 12.00 GiB" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lengths", "513"], "--lengths must be positive and at most max_model_len = 512"),
        (["--max-model-len", "513"], "max_model_len must be at most the model's context of 512"),
        (["--memory-fraction", "2"], "--memory-fraction must be above 0"),
        (["--block-size", "0"], "block_size must be a positive integer"),
        (
            ["--num-speculative-tokens", "-1"],
            "num_speculative_tokens must be an integer, at least 0",
        ),
        (["--tensor-parallel-size", "3"], "must divide the model's num_attention_heads, 4"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_main_reports_errors_in_a_line(capsys, arguments, message) -> None:
    status, out, err = run(capsys, "--memory", "1GiB", *arguments)
    assert (status, out) == (1, "")
    assert err.count("\n") == 1 and message in err


def test_main_rejects_a_platform_other_than_that_of_the_device(capsys) -> None:
    status, out, err = run(capsys, "--device", "h100", "--platform", "cpu")
    assert status == 1 and out == ""
    assert "--platform must be gpu with --device h100, got cpu" in err
    assert run(capsys, "--device", "h100", "--platform", "gpu")[0] == 0


@pytest.mark.parametrize("size", ["lots", "12XB", "-1", "GiB"])
def test_main_rejects_invalid_sizes(capsys, size) -> None:
    with pytest.raises(SystemExit) as exit:
        main([f"--memory={size}"])
    assert exit.value.code == 2
    assert "KiB" in capsys.readouterr().err
