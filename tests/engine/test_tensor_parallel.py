"""`Engine` on several CPU devices: equal tokens, divided memory, and few collectives."""

import pytest

from tests.support.processes import run_on_devices
from tests.support.tiny_model import save_tokenizer_for_forms

# Each value of each option (dtype of pools and weights, preemption, scanned layers, drafts) occurs
# on two devices, with a KV head each, and on eight, which share the KV heads. Scores and beams are
# compared in int8 here, and in float32 by `_FEATURES`. The engine of the reference
# in int8 has a mesh with a single device.
_SAME_TOKENS = """
import sys

from paged_jax import LLM, Llama, SamplingParams, StructuredOutputsParams
from paged_jax.engine.beam_search import BeamSearchParams
from tests.support.tensor_parallel import PROMPTS, SIZES, generate, make_model

pad_one_row()
tokenizer, folder = sys.argv[1:]
make_model(vocab_size=43).save_pretrained(folder)
TYPES = {"float32": {"kv_dtype": "float32"}, "int8": {"kv_dtype": "int8"}}
REPEATS = {"prompt_token_ids": [0, *range(5, 12), *range(5, 12), 5]}
SCORED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=2)
REPEATED = SamplingParams(temperature=0, max_tokens=12, logit_bias={5: 100.0})
FORM = StructuredOutputsParams(regex="(red|green|blue) ?the{2,4}!?")
OF_FORM = SamplingParams(temperature=1, seed=1, max_tokens=12, structured_outputs=FORM)


def everything(llm):
    prompts = [REPEATS, {"prompt_token_ids": PROMPTS[0]}]
    others = [output.outputs[0] for output in llm.generate(prompts, [REPEATED, OF_FORM])]
    assert others[1].text.startswith(("red", "green", "blue"))
    found = generate(llm), [output.token_ids for output in others]
    if llm.cache.k.dtype != "int8":
        return found
    [scored] = llm.generate([REPEATS], SCORED)
    best = [list(row) for row in scored.prompt_logprobs[1:] + scored.outputs[0].logprobs]
    [beams] = llm.beam_search([REPEATS], BeamSearchParams(beam_width=2, max_tokens=4))
    return *found, best, [beam.tokens for beam in beams.sequences]


def make_llm(types, scan_layers=False, **options):
    model = Llama.from_pretrained(folder, dtype=types, scan_layers=scan_layers)
    return LLM(model, tokenizer=tokenizer, **SIZES, **TYPES[types], **options)


def make_mesh(num_devices):
    return jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])


meshes = {"float32": None, "int8": make_mesh(1)}
wanted = {types: everything(make_llm(types, mesh=meshes[types])) for types in TYPES}
NAMES = "types", "preemption", "scan_layers", "num_speculative_tokens"
for num_devices, *values in (
    (2, "float32", "swap", False, 3),
    (2, "int8", "recompute", True, 0),
    (8, "float32", "recompute", False, 0),
    (8, "int8", "swap", True, 3),
):
    row, mesh = dict(zip(NAMES, values, strict=True)), make_mesh(num_devices)
    llm = make_llm(**row, mesh=mesh)
    assert everything(llm) == wanted[row["types"]], row
    pool, stats = llm.cache.k, llm.stats
    assert pool.addressable_shards[0].data.shape[2] == max(1, 2 // num_devices)
    assert len(pool.sharding.device_set) == num_devices
    assert stats.num_cached_tokens and stats.num_preemptions, row
    assert bool(stats.num_swap_preemptions) == (row["preemption"] == "swap"), row
    assert bool(stats.num_accepted_tokens) == (row["num_speculative_tokens"] > 0), row
assert generate(llm) == generate(llm)  # with more in the prefix cache, so in other batches
compiled = num_compiled(llm)
generate(llm)
assert num_compiled(llm) == compiled, "a third round compiles nothing"
"""

_PROGRAMS = """
from paged_jax import Engine
from tests.support.compiler import needs_compiler
from tests.support.tensor_parallel import (
    CONFIG, SIZES, compile_call, count_collectives, make_model)

# Enough blocks that a copy of a pool, or of one layer of it, would be noticed.
for options in ({}, {"scan_layers": True}):
    engine = Engine(make_model(**options), **SIZES | {"num_blocks": 128000}, tensor_parallel_size=4)
    held = engine.cache.nbytes // 4
    # Two all-reduces per layer (a scan has the code of one layer) and one for the embedding. The
    # last layer of a prefill has none, because only its K and V are used.
    layers = 2 * (1 if options else CONFIG.num_hidden_layers)
    has_kernels = not needs_compiler.args[0]
    # With the CPU kernels, the rows of a prefill are parts of chunks.
    prefill = f"prefill of {'24' if has_kernels else '1 x 16'} tokens"
    for name, expected in {
        "decode of 4 samples": {"all-reduce": layers + 1, "all-gather": 1},
        prefill: {"all-reduce": layers + 1 - (0 if options else 2)},
    }.items():
        compiled = compile_call(engine, name)
        memory = compiled.memory_analysis()
        assert count_collectives(compiled) == expected, (name, count_collectives(compiled))
        assert memory.alias_size_in_bytes > held, (name, memory)
        assert memory.temp_size_in_bytes < held / 100, (name, memory)
        # The CPU kernels are used if a compiler is available.
        assert ("paged_jax_linear" in compiled.as_text()) == has_kernels, name
"""

# There are more devices than KV heads. Each device reads a part of the weights from files, and
# log-probabilities are requested.
_FEATURES = """
import sys

import numpy as np
from paged_jax import LLM, SamplingParams
from paged_jax.engine.beam_search import BeamSearchParams
from paged_jax.models.loading.orbax import save_checkpoint
from tests.support.tensor_parallel import SIZES

pad_one_row()
folder, checkpoint = sys.argv[1:]
PROMPT = {"prompt_token_ids": [0, *range(5, 12), *range(5, 12), 5]}
SCORED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=2)
REPEATED = SamplingParams(temperature=0, max_tokens=12, logit_bias={5: 100.0}, logprobs=2)


def of_logprobs(rows):
    pairs = [sorted((id, x.logprob) for id, x in row.items()) for row in rows if row]
    return [id for row in pairs for id, _ in row], [x for row in pairs for _, x in row]


def features(llm):
    scored, repeated = llm.generate([PROMPT, PROMPT], [SCORED, REPEATED])
    beams = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4))[0].sequences
    rows = scored.prompt_logprobs + scored.outputs[0].logprobs + repeated.outputs[0].logprobs
    ids, logprobs = of_logprobs(rows)
    tokens = [ids, [b.tokens for b in beams]]
    return tokens, np.array([*logprobs, *[b.cum_logprob for b in beams]])


options = SIZES | {"num_speculative_tokens": 3}
alone = LLM(folder, **options)
wanted, logprobs = features(alone)
llm = LLM(folder, **options, tensor_parallel_size=4, check_replicas=True)
assert llm.cache.k.shape[2] == 4, "two KV heads for each of four devices"
tokens, same_logprobs = features(llm)
assert tokens == wanted
np.testing.assert_allclose(same_logprobs, logprobs, atol=1e-5)
assert llm.stats.num_accepted_tokens, "guesses were right"


def check_same_weights(llm, other):
    ours, theirs = (each.core.executor.weights.arrays for each in (llm, other))
    for x, y in zip(ours, theirs, strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        for part, same in zip(x.addressable_shards, y.addressable_shards, strict=True):
            np.testing.assert_array_equal(part.data, same.data, strict=True)


# A checkpoint of one device is loaded onto several devices, and back.
save_checkpoint(alone.model, checkpoint)
check_same_weights(LLM(checkpoint, **options, tensor_parallel_size=4), llm)
llm.model.save_pretrained(checkpoint + "/saved")
check_same_weights(LLM(checkpoint + "/saved", tokenizer=folder, **options), alone)
"""

# Four devices, and fewer KV heads. Layers with different windows have separate pools, which are
# divided too. Each device has all latent vectors. Recurrent layers and the pools of their states
# are divided by heads. The first model combines features of Gemma 3, gpt-oss and Qwen's MoE. In the
# last model, all devices share a group of heads of Mamba-2. `test_tensor_parallel_families.py` runs
# all kinds of recurrent layers on two devices.
_KINDS_OF_LAYERS = """
from paged_jax import Engine
from paged_jax.models.family import Multipliers
from paged_jax.models.layer_groups import LatentSizes
from paged_jax.models.mixer_sizes import Mamba2
from tests.support.tensor_parallel import SIZES, generate, make_model


def check_same_tokens(**changes):
    model = make_model(**changes)
    wanted = generate(Engine(model, **SIZES))
    engine = Engine(model, **SIZES, preemption="swap", tensor_parallel_size=4)
    assert generate(engine) == wanted, changes
    assert engine.stats.num_swap_preemptions, changes
    # The prompts are too short for a snapshot of states.
    assert bool(engine.stats.num_cached_tokens) == (engine.cache.states is None), changes
    return engine.cache


def part(pool):
    return pool.addressable_shards[0].data.shape[2:]


groups = check_same_tokens(
    layer_types=("sliding_attention", "full_attention"), sliding_window=6,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True,
    shared_expert_intermediate_size=24, norm_placement="sandwich", norm_offset=1.0, qk_norm=True,
    embedding_multiplier=32**0.5, rope_local_base_freq=100.0, tie_word_embeddings=True,
    attention_sinks=True, expert_bias=True, swiglu_limit=0.5).groups
assert len(groups) == 2
for group in groups:
    assert part(group.pools.k)[0] == 1, "a KV head each"

pad_one_row()
cache = check_same_tokens(
    num_key_value_heads=8, qkv_bias=False, o_bias=False, latent=LatentSizes(12, 16, 6, 4, 5))
assert cache.v is None and part(cache.k) == (1, 4, 20), "the vectors of all tokens"

mixer = Mamba2(num_heads=8, num_groups=1, head_dim=6, state_dim=10, conv_width=4, conv_bias=True)
factors = Multipliers(attention_in=0.7, key=1.4, attention_out=0.6, mlp_gate=1.3, mlp_out=0.8)
cache = check_same_tokens(
    layer_types=("hybrid", "full_attention"), mixer=mixer, multipliers=factors)
for pool in cache.states.pools[0]:
    assert part(pool)[0] == pool.shape[2] // 4
"""

_WEIGHTS = """
from flax import nnx
from paged_jax import Engine
from paged_jax.models.quantise import quantise
from tests.support.tensor_parallel import SIZES, generate, make_model

pad_one_row()
first, second = make_model(), make_model(seed=5)
of_first, of_second = (generate(Engine(model, **SIZES)) for model in (first, second))
assert of_first != of_second
engine = Engine(first, **SIZES, tensor_parallel_size=4)
assert generate(engine) == of_first
engine.update_params(second)  # from one device
assert generate(engine) == of_second
engine.sleep(1)
engine.wake_up()
assert generate(engine) == of_second
engine.update_params(engine.weights)  # from all of them
assert generate(engine) == of_second
for own, x in zip(engine.weights, jax.tree.leaves(nnx.state(second)), strict=True):
    assert own.shape == x.shape and (own == x).all()
"""

_DIFFERENCE = """
import dataclasses

import numpy as np
from paged_jax import Engine
from paged_jax.runner.weights import ReplicaError
from tests.support.tensor_parallel import PAIR, PROMPTS, SIZES, generate, make_model, run


def with_other_copy(x):
    copies = [np.array(shard.data) for shard in x.addressable_shards]
    copies[1].view(np.uint8)[...] ^= 1
    parts = [jax.device_put(copy, shard.device)
             for copy, shard in zip(copies, x.addressable_shards)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


pad_one_row()
engine = Engine(make_model(), **SIZES, tensor_parallel_size=2, check_replicas=True)
wanted = generate(engine)
engine.add_request({"prompt_token_ids": PROMPTS[0]}, PAIR)
engine.step()
executor = engine.core.executor
sampling = executor.state.sampling
other = dataclasses.replace(sampling, keys=with_other_copy(sampling.keys))
executor._state = dataclasses.replace(executor.state, sampling=other)
try:
    run(engine)
except ReplicaError as error:
    assert "after decode of 4 samples, but they differ" in str(error)
else:
    raise AssertionError("one device drew by other keys")
run(engine)
assert generate(engine) == wanted, "the engine begins anew"

shared = [x for x in executor.weights.arrays if x.is_fully_replicated]
assert shared
executor.update_weights(lambda arrays: [
    with_other_copy(x) if x is shared[-1] else x for x in arrays])
try:
    generate(engine)
except ReplicaError:
    pass
else:
    raise AssertionError("one device multiplied by another norm")
"""

_REFUSALS = """
from paged_jax import Engine
from tests.support.tensor_parallel import make_model


def refusal(model, **options):
    try:
        Engine(model, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("refused")


model, mesh = make_model(), jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
assert "num_attention_heads, 8, got 3" in refusal(model, tensor_parallel_size=3)
assert "at most 4, the number of cpu devices" in refusal(model, tensor_parallel_size=8)
assert "must be 1 if mesh is given" in refusal(model, mesh=mesh, tensor_parallel_size=2)
assert "intermediate_size, 50, got 4" in refusal(
    make_model(intermediate_size=50), tensor_parallel_size=4)
spread = jax.device_put(model, jax.NamedSharding(mesh, jax.P()))
assert "must be on one device, got weights on 2 devices. Pass mesh=" in refusal(spread)
"""

# Most engines pad a single row to four, which saves two programs per engine.
_HEAD = """
import jax
from paged_jax.runner import runner
from tests.support.workload import full_batch

def pad_one_row():
    runner.row_bucket = full_batch

def num_compiled(engine):
    return sum(program.jitted._cache_size() for program in engine.core.executor.programs)
"""


@pytest.mark.slow
def test_tensor_parallel_gives_the_tokens_of_one_device(tiny_folder, tmp_path) -> None:
    """Includes forks, prefix hits, preemption, and more devices than KV heads."""
    pytest.importorskip("llguidance")
    tokenizer = save_tokenizer_for_forms(tiny_folder, tmp_path / "tokenizer")
    run_on_devices(_HEAD + _SAME_TOKENS, tokenizer, tmp_path / "model", num_devices=8)


@pytest.mark.slow
def test_tensor_parallel_loads_parts_of_files(tiny_folder, tmp_path) -> None:
    run_on_devices(_HEAD + _FEATURES, tiny_folder, tmp_path / "checkpoint")


@pytest.mark.slow
def test_windows_latents_and_recurrent_layers_give_the_tokens_of_one_device() -> None:
    run_on_devices(_HEAD + _KINDS_OF_LAYERS)


@pytest.mark.slow
def test_update_params_replaces_divided_weights() -> None:
    run_on_devices(_HEAD + _WEIGHTS)


@pytest.mark.slow
def test_check_replicas_finds_a_device_with_other_keys_or_weights() -> None:
    run_on_devices(_HEAD + _DIFFERENCE)


@pytest.mark.slow
def test_engine_rejects_models_that_it_cannot_divide() -> None:
    run_on_devices(_HEAD + _REFUSALS)


@pytest.mark.slow
@pytest.mark.optimised
def test_decode_step_has_two_all_reduces_per_layer_and_copies_no_pool() -> None:
    run_on_devices(_PROGRAMS, num_devices=4)
