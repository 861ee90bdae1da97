"""`Engine` on several CPU devices: equal tokens, divided memory, and few collectives.

Two devices run each kind of layer. Eight, which is more than there are KV heads, run a dense model
and a model of experts. The most probable tokens are those of the whole forward pass on one device.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from paged_jax import LLM, CompletionOutput, Engine, SamplingParams, StructuredOutputsParams
from paged_jax.engine.beam_search import BeamSearchParams
from paged_jax.engine.drafts import Drafter
from paged_jax.engine.memory_plan import collectives, make_plan
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import Multipliers
from paged_jax.models.loading.orbax import save_checkpoint
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.parts.convolution import ShortConvolution
from paged_jax.models.parts.delta_net import GatedDeltaNet
from paged_jax.models.parts.experts import Router
from paged_jax.models.parts.kimi_delta import KimiDelta
from paged_jax.models.parts.latent import LatentAttention, LatentSizes
from paged_jax.models.parts.state_space import Mamba2
from paged_jax.models.parts.streams import ResidualStreams
from paged_jax.models.rope import QueryScale
from paged_jax.models.tensor_parallel import TensorParallel
from paged_jax.runner.programs import list_calls
from paged_jax.runner.weights import ReplicaError
from tests.engine.test_weight_swap import tensors_of
from tests.support import references
from tests.support.compiler import needs_compiler
from tests.support.covering import all_pairs
from tests.support.families import CASES
from tests.support.own_parts import with_new_parts
from tests.support.random_model import random_llama
from tests.support.tensor_parallel import (
    CONFIG,
    PAIR,
    PROMPTS,
    SIZES,
    compile_call,
    count_collectives,
    divided_logits,
    generate,
    greedy_tokens,
    logits,
    make_model,
    run,
)
from tests.support.tiny_model import save_tokenizer_for_forms
from tests.support.workload import Job, check_empty, play

pytest_plugins = ["tests.support.devices"]
pytestmark = pytest.mark.usefixtures("devices")

NUM_DRAFTS, MAX_TOKENS = 3, 40
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED = {"shared_expert_intermediate_size": 24}
GROUPS = Router("sigmoid", has_correction_bias=True, num_groups=4, num_chosen_groups=2)
RECURRENT = {"layer_types": ("linear_attention", "full_attention")}
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
SANDWICH = {"norm_placement": "sandwich", "norm_offset": 1.0, "qk_norm": True}
PER_LAYER = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 40}


DELTA = GatedDeltaNet(conv_width=4, num_key_heads=4, num_value_heads=8, key_dim=6, value_dim=10)
LOGITS = nnx.jit(logits)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model with the kinds of layers of a family, and an engine for it.

    Attributes:
      changes: fields of the model's config.
      preemption: kind of preemption of the engine.
      num_drafts: maximum number of drafts of the engine.
      num_devices: number of devices.
    """

    changes: dict[str, Any]
    preemption: str
    num_drafts: int
    num_devices: int = 2


# Names of `tests.support.families.CASES` with the same kinds of layers.
ENGINES = {
    # Gated delta nets, gates of attention, shared experts.
    "qwen3_next": Kind(
        {
            **RECURRENT, **EXPERTS, **SHARED, "attention_gate": True,
            "mixer": DELTA,
        },
        "recompute",
        0,
    ),
    # Kimi Delta Attention, groups of experts, and latents: each device has all latent vectors.
    "kimi_linear": Kind(
        {
            **RECURRENT, **EXPERTS, **SHARED, "router": GROUPS, "norm_topk_prob": True,
            "mlp_layer_types": ("dense", "sparse"), "num_key_value_heads": 8,
            "qkv_bias": False, "o_bias": False, "latent": LatentSizes(12, 16, 6, 4, 5),
            "mixer": KimiDelta(conv_width=4, num_heads=4, head_dim=6),
        },
        "recompute",
        NUM_DRAFTS,
    ),
    # Mamba-2 beside attention. Both devices have heads of the only group.
    "falcon_h1": Kind(
        {
            "layer_types": ("hybrid", "full_attention"),
            "mixer": Mamba2(
                num_heads=8, num_groups=1, head_dim=6, state_dim=10, conv_width=4, conv_bias=True
            ),
            "multipliers": Multipliers(
                attention_in=0.7, key=1.4, attention_out=0.6, mlp_gate=1.3, mlp_out=0.8
            ),
        },
        "recompute",
        0,
    ),
    # Short convolutions.
    "lfm2_moe": Kind(
        {
            **RECURRENT, **EXPERTS, "qk_norm": True, "mlp_layer_types": ("dense", "sparse"),
            "mixer": ShortConvolution(conv_width=3, num_channels=24),
        },
        "swap",
        NUM_DRAFTS,
    ),
    # Windows, streams, sparse gates. The last layers read the keys and values of the first.
    "gemma3n": Kind(
        {
            **SANDWICH, **PER_LAYER, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "layer_types": 2 * WINDOWS["layer_types"], "sliding_window": 6, "vocab_size": 46,
            "residual_streams": ResidualStreams(3, 1), "laurel_rank": 6,
            "activation_sparsity": (0.7, 0.0, 0.5, 0.0), "intermediate_sizes": (48, 32, 48, 48),
        },
        "recompute",
        0,
    ),
    # Keys as values, and other heads in some layers: a single KV head, which both devices hold.
    "gemma4 with experts": Kind(
        {
            **WINDOWS, **EXPERTS, **SANDWICH, **SHARED, "separate_expert_norms": True,
            "router": Router(has_expert_scale=True), "shared_expert_gate": False,
            "attention_k_eq_v": True, "value_norm": True, "layer_scalar": True,
            "global_head_dim": 8, "num_global_key_value_heads": 1, "qkv_bias": False,
        },
        "swap",
        0,
    ),
    # Sinks, experts with biases.
    "gpt_oss": Kind(
        {
            **WINDOWS, **EXPERTS, "attention_sinks": True, "expert_bias": True,
            "swiglu_limit": 0.5, "norm_topk_prob": True, "rope_local_base_freq": 100.0,
            "tie_word_embeddings": True,
        },
        "swap",
        0,
        num_devices=8,
    ),
}  # fmt: skip
CORE = "qwen3_next"


def draft_from(expected: dict[str, list[int]]):
    """Return a drafter that guesses some of the expected tokens, and a wrong one."""

    def draft(_, sequence):
        tokens, count = expected[sequence.request.request_id], sequence.num_generated
        drafted = tokens[count : count + count % NUM_DRAFTS]
        return [*drafted, ((drafted or [count])[-1] + 1) % CONFIG.vocab_size]

    return draft


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == CORE else pytest.mark.slow) for name in ENGINES],
)
@pytest.mark.usefixtures("padded_rows")
def test_kinds_of_layers_give_the_tokens_of_one_device(name, monkeypatch) -> None:
    """Prompts share a beginning, which later prompts find in the prefix cache; blocks run out."""
    kind = ENGINES[name]
    model = make_model(max_position_embeddings=160, **kind.changes)
    tokens = np.random.default_rng(0).integers(2, 40, 110).tolist()
    prompts = {str(end): tokens[:70] + tokens[end : end + 9] for end in (80, 90, 100)}
    expected = {key: greedy_tokens(model, x, MAX_TOKENS)[0] for key, x in prompts.items()}
    assert min(len(set(x)) for x in expected.values()) > 5
    if kind.num_drafts:
        monkeypatch.setattr(Drafter, "_draft", draft_from(expected))
    sizes = {"block_size": 8, "num_blocks": 24, "max_num_seqs": 3, "max_model_len": 160}
    engine = Engine(
        model,
        **sizes,
        max_chunk=16,
        backend="xla",  # `tests/models/test_families.py` runs the others
        preemption=kind.preemption,
        num_speculative_tokens=kind.num_drafts,
        tensor_parallel_size=kind.num_devices,
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    jobs = [
        Job(key, {"prompt_token_ids": prompt}, params, at=at)
        for at, (key, prompt) in zip((0, 5, 6), prompts.items(), strict=True)
    ]
    outputs = play(engine, jobs)
    assert {key: list(x.outputs[0].token_ids) for key, x in outputs.items()} == expected
    check_empty(engine)
    stats = engine.stats
    assert stats.num_cached_tokens and stats.num_preemptions
    assert bool(stats.num_swap_preemptions) == (kind.preemption == "swap")
    assert bool(stats.num_accepted_tokens) == bool(kind.num_drafts)
    check_division(engine, kind.num_devices)


@pytest.mark.parametrize(
    "name",
    [pytest.param("granite", marks=pytest.mark.slow), *with_new_parts(CASES, ENGINES)],
)
def test_stored_models_give_their_answers_on_two_devices(name, tmp_path) -> None:
    """Families with a part that no kind of `ENGINES` has, and one without."""
    reference = references.write_reference(name, tmp_path)
    engine = Engine(
        Decoder.from_pretrained(tmp_path, scan_layers=False),
        block_size=8,
        num_blocks=72,
        max_num_seqs=4,
        max_model_len=references.LENGTH,
        max_chunk=16,
        backend="xla",
        tensor_parallel_size=2,
    )
    params = SamplingParams(temperature=0, max_tokens=references.MAX_TOKENS, ignore_eos=True)
    jobs = [
        Job(key, {"prompt_token_ids": prompt.tolist()}, params, at=0)
        for key, prompt in references.PROMPTS.items()
    ]
    outputs = play(engine, jobs)
    answers = {key: list(x.outputs[0].token_ids) for key, x in outputs.items()}
    assert answers == reference.answers
    check_division(engine, 2)


def check_division(engine: Engine, num_devices: int) -> None:
    """Check that the plan counts the sums over devices, and that each device has its share."""
    executor = engine.core.runner.executor
    calls = list_calls(executor.programs, executor.sizes, engine.cache)
    [call] = [call for call in calls if call.name == f"decode of {engine.max_num_seqs} samples"]
    lowered = call.program.lower(executor.weights.arrays, executor.state, *call.args, **call.static)
    plan = make_plan(engine.config, 1 << 30, "cpu", tensor_parallel_size=num_devices)
    num_sums = lowered.as_text().count('"stablehlo.all_reduce"')
    assert num_sums == collectives(plan, 1).num_all_reduces
    block_groups = engine.cache.block_groups
    states = engine.cache.groups[len(block_groups) :]
    for pool in (pool for group in states for pool in group.pools[0]):
        assert num_devices * part(pool)[0] == pool.shape[2]
    latent = next(filter(None, (spec.find(LatentAttention) for spec in engine.config.layers)), None)
    if latent is not None:  # each device has all latent vectors
        assert engine.cache.v is None
        assert part(engine.cache.k) == (1, engine.block_size, latent.kv.head_dim)
    else:
        for group in block_groups:
            assert part(group.pools.k)[0] * num_devices == group.pools.k.shape[2]


def part(pool: jax.Array) -> tuple[int, ...]:
    """Return the shape of a device's part of a pool, without layers and blocks."""
    return pool.addressable_shards[0].data.shape[2:]


# A dense model on two devices


@pytest.fixture(scope="module")
def engine(devices) -> Engine:
    """Return an engine with a KV head on both devices, and a vocabulary that is padded."""
    model = make_model(num_key_value_heads=1, vocab_size=47)
    return Engine(model, **SIZES, tensor_parallel_size=2)


def complete(engine: Engine) -> list[CompletionOutput]:
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=2)
    ids = [engine.add_request({"prompt_token_ids": prompt}, params) for prompt in PROMPTS]
    outputs = run(engine)
    return [outputs[id].outputs[0] for id in ids]


def check_model(engine: Engine, model: Decoder) -> None:
    """Check the engine's weights and its tokens, with their log-probabilities."""
    for ours, theirs in zip(engine.weights, jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    for sample, prompt in zip(complete(engine), PROMPTS, strict=True):
        tokens, rows = greedy_tokens(model, prompt, 14)
        assert sample.token_ids == tokens
        for found, row in zip(sample.logprobs, rows, strict=True):
            assert list(found) == np.argsort(-row)[:2].tolist()
            expected = [row[token_id] for token_id in found]
            np.testing.assert_allclose([x.logprob for x in found.values()], expected, atol=1e-5)


@pytest.mark.usefixtures("padded_rows")
def test_dense_model_gives_the_tokens_of_one_device(engine) -> None:
    check_model(engine, make_model(num_key_value_heads=1, vocab_size=47))
    check_division(engine, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("padded_rows")
def test_update_params_replaces_divided_weights(engine, devices) -> None:
    """The arrays come from one device, the host, a mesh with other axes, and the engine itself."""
    first, second = (make_model(num_key_value_heads=1, vocab_size=47, seed=s) for s in (1, 5))
    check_model(engine, first)
    tensors = tensors_of(second)
    mesh = jax.make_mesh(
        (2, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=devices[:2]
    )
    spec = {1: PartitionSpec("fsdp"), 2: PartitionSpec("tp", "fsdp")}
    there = {x: jax.device_put(y, NamedSharding(mesh, spec[y.ndim])) for x, y in tensors.items()}
    alone = {name: jax.device_put(x, devices[1]) for name, x in tensors.items()}
    for params, mapping in ((second, None), (there, {}), (tensors, {}), (alone, {})):
        engine.update_params(first)
        engine.update_params(params, mapping=mapping)
        check_model(engine, second)
    engine.update_params(engine.weights)
    engine.sleep(1)
    engine.wake_up()
    check_model(engine, second)
    engine.update_params(first)


# A dense model on eight devices

REPEATS = {"prompt_token_ids": [0, *range(5, 12), *range(5, 12), 5]}


def outputs_of(llm: LLM) -> list:
    """Return the outputs of all kinds of requests."""
    form = StructuredOutputsParams(regex="(red|green|blue) ?the{2,4}!?")
    of_form = SamplingParams(temperature=1, seed=1, max_tokens=12, structured_outputs=form)
    repeated = SamplingParams(temperature=0, max_tokens=12, logit_bias={5: 100.0})
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=2)
    prompts = [REPEATS, {"prompt_token_ids": PROMPTS[0]}, REPEATS]
    others = llm.generate(prompts, [repeated, of_form, scored])
    assert others[1].outputs[0].text.startswith(("red", "green", "blue"))
    rows = others[2].prompt_logprobs[1:] + others[2].outputs[0].logprobs
    [beams] = llm.beam_search([REPEATS], BeamSearchParams(beam_width=2, max_tokens=4))
    return [
        generate(llm),
        [output.outputs[0].token_ids for output in others],
        [list(row) for row in rows],
        [beam.tokens for beam in beams.sequences],
    ]


def check_same_weights(llm: LLM, other: LLM) -> None:
    ours, theirs = (each.core.executor.weights.arrays for each in (llm, other))
    for x, y in zip(ours, theirs, strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        for part, same in zip(x.addressable_shards, y.addressable_shards, strict=True):
            np.testing.assert_array_equal(part.data, same.data, strict=True)


def num_compiled(llm: LLM) -> int:
    return sum(program.jitted._cache_size() for program in llm.core.executor.programs)


@pytest.mark.slow
@pytest.mark.usefixtures("padded_rows")
def test_eight_devices_give_the_outputs_of_one_device(tiny_folder, tmp_path, devices) -> None:
    """Each device reads its part of the files; four devices share a KV head."""
    pytest.importorskip("llguidance")
    folder = tmp_path / "model"
    make_model(vocab_size=43).save_pretrained(folder)
    tokenizer = save_tokenizer_for_forms(tiny_folder, tmp_path / "tokenizer")
    options = {**SIZES, "tokenizer": tokenizer, "kv_dtype": "int8", "preemption": "swap"}
    options |= {"num_speculative_tokens": NUM_DRAFTS}
    mesh = jax.make_mesh((1,), ("x",), devices=devices[:1])
    alone = LLM(folder, **options, mesh=mesh)
    llm = LLM(folder, **options, tensor_parallel_size=8, check_replicas=True)
    wanted = outputs_of(alone)
    assert outputs_of(llm) == wanted
    pool, stats = llm.cache.k, llm.stats
    assert part(pool)[0] == 1 and len(pool.sharding.device_set) == pool.shape[2] == 8
    assert stats.num_cached_tokens and stats.num_swap_preemptions and stats.num_accepted_tokens
    assert generate(llm) == wanted[0]  # with more in the prefix cache, so in other batches
    compiled = num_compiled(llm)
    generate(llm)
    assert num_compiled(llm) == compiled, "a third round compiles nothing"

    # A checkpoint of one device is loaded onto several devices, and back.
    save_checkpoint(alone.model, tmp_path / "checkpoint")
    check_same_weights(LLM(tmp_path / "checkpoint", **options, tensor_parallel_size=8), llm)
    llm.model.save_pretrained(tmp_path / "saved")
    check_same_weights(LLM(tmp_path / "saved", **options, mesh=mesh), alone)

    check_replicas_are_compared(llm, wanted[0])


def check_replicas_are_compared(llm: LLM, wanted: list) -> None:
    """Check that the engine notices a device with other keys or weights, and begins anew."""
    llm.add_request({"prompt_token_ids": PROMPTS[0]}, PAIR)
    llm.step()
    executor = llm.core.executor
    sampling = executor.state.sampling
    other = dataclasses.replace(sampling, keys=with_other_copy(sampling.keys))
    executor._state = dataclasses.replace(executor.state, sampling=other)
    with pytest.raises(ReplicaError, match="but they differ"):
        run(llm)
    run(llm)
    assert generate(llm) == wanted

    shared = [x for x in executor.weights.arrays if x.is_fully_replicated]
    executor.update_weights(
        lambda arrays: [with_other_copy(x) if x is shared[-1] else x for x in arrays]
    )
    with pytest.raises(ReplicaError):
        generate(llm)


def with_other_copy(x: jax.Array) -> jax.Array:
    """Return an array of which the second device has another copy."""
    shards = x.addressable_shards
    copies = [np.array(shard.data) for shard in shards]
    copies[1].view(np.uint8)[...] ^= 1
    parts = [jax.device_put(y, shard.device) for y, shard in zip(copies, shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


# Programs and refusals


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("scan_layers", [False, True])
def test_decode_step_has_two_all_reduces_per_layer_and_copies_no_pool(scan_layers) -> None:
    # Enough blocks that a copy of a pool, or of one layer of it, would be noticed.
    sizes = SIZES | {"num_blocks": 128000}
    engine = Engine(make_model(scan_layers=scan_layers), **sizes, tensor_parallel_size=4)
    held = engine.cache.nbytes // 4
    # Two all-reduces per layer (a scan has the code of one layer) and one for the embedding. The
    # last layer of a prefill has none, because only its K and V are used.
    layers = 2 * (1 if scan_layers else CONFIG.num_hidden_layers)
    has_kernels = not needs_compiler.args[0]
    # With the CPU kernels, the rows of a prefill are parts of chunks.
    prefill = f"prefill of {'24' if has_kernels else '1 x 16'} tokens"
    for name, expected in {
        "decode of 4 samples": {"all-reduce": layers + 1, "all-gather": 1},
        prefill: {"all-reduce": layers + 1 - (0 if scan_layers else 2)},
    }.items():
        compiled = compile_call(engine, name)
        memory = compiled.memory_analysis()
        assert count_collectives(compiled) == expected, name
        assert memory.alias_size_in_bytes > held, (name, memory)
        assert memory.temp_size_in_bytes < held / 100, (name, memory)
        # The CPU kernels are used if a compiler is available.
        assert ("paged_jax_linear" in compiled.as_text()) == has_kernels, name


def test_engine_rejects_models_that_it_cannot_divide(devices) -> None:
    model = make_model()
    mesh = jax.make_mesh((2,), ("x",), devices=devices[:2])
    spread = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
    for each, options, message in (
        (model, {"tensor_parallel_size": 3}, "num_attention_heads, 8, got 3"),
        (make_model(num_attention_heads=16), {"tensor_parallel_size": 16}, "at most 8, the number"),
        (model, {"mesh": mesh, "tensor_parallel_size": 2}, "must be 1 if mesh is given"),
        (make_model(intermediate_size=50), {"tensor_parallel_size": 4}, "_size, 50, got 4"),
        (spread, {}, "must be on one device, got weights on 2 devices. Pass mesh="),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(each, **options)


# Logits

FACTORS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5,
    "logit_scale": 0.7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
}  # fmt: skip
MLPS = {
    "experts": {**EXPERTS, "expert_bias": True, "norm_topk_prob": True, "swiglu_limit": 0.5},
    "shared": {**EXPERTS, "shared_expert_intermediate_size": 20},
    "some dense": {**EXPERTS, "mlp_layer_types": ("dense", "sparse")},
}
NORMS = {
    "head": {"qk_norm": True},
    "own": {"qk_norm": True, "qk_norm_scope": "own"},
    "projection": {"qk_norm": True, "qk_norm_scope": "projection"},
}
# The other tests have layers without norms of heads, and models with only dense layers.
SWITCHES = all_pairs({
    "num_devices": (2, 4),
    "norms": tuple(NORMS),
    "mlp": tuple(MLPS),
    "norm_placement": ("pre", "sandwich", "post", "parallel"),
    "norm_type": ("rms", "layer"),
    "biases": (False, True),
    "factors": (False, True),
    "layer_types": ((), ("sliding_attention", "full_attention")),
    "other_heads": (False, True),
    "tie_word_embeddings": (False, True),
})  # fmt: skip
TOKENS = np.random.default_rng(2).integers(0, CONFIG.vocab_size, 12, np.int32)


def small_model(**changes) -> Decoder:
    return random_llama(dataclasses.replace(CONFIG, **changes), scale=0.35)


def check_logits(model: Decoder, num_devices: int) -> int:
    """Check the logits of a divided model, and return its number of all-reduces."""
    found, num_sums = divided_logits(model, num_devices, TOKENS)
    np.testing.assert_allclose(found, LOGITS(model, TOKENS), atol=2e-5)
    return num_sums


@pytest.mark.slow
@pytest.mark.parametrize("row", SWITCHES)
def test_logits_match_a_single_device(row) -> None:
    has_windows, has_others = bool(row["layer_types"]), row["other_heads"]
    model = small_model(
        norm_placement=row["norm_placement"],
        norm_type=row["norm_type"],
        layer_types=row["layer_types"],
        sliding_window=4 if has_windows else None,
        tie_word_embeddings=row["tie_word_embeddings"],
        num_global_key_value_heads=1 if has_others else 0,
        global_head_dim=8 if has_others else 0,
        qkv_bias=row["biases"],
        o_bias=row["biases"],
        mlp_bias=row["biases"],
        attention_sinks=row["biases"],
        **MLPS[row["mlp"]],
        **NORMS[row["norms"]],
        **(FACTORS if row["factors"] else {}),
    )
    num_sums = check_logits(model, row["num_devices"])
    expected = (1 if row["norm_placement"] == "parallel" else 2) + (row["norms"] == "projection")
    assert num_sums == CONFIG.num_hidden_layers * expected + 1


# If there are fewer groups of Mamba-2 than devices, a group has heads on several devices. If there
# is a norm, it needs the mean over these devices.
BIASES = {"in_bias": True, "conv_bias": True, "out_bias": True}
MAMBA = {"num_heads": 8, "head_dim": 6, "state_dim": 10, "out_multiplier": 0.7, **BIASES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "mixer", "num_means"),
    [
        (4, ShortConvolution(conv_width=3, num_channels=24, **BIASES), 0),
        (4, DELTA, 0),
        (2, KimiDelta(conv_width=4, num_heads=4, head_dim=6), 0),
        (4, Mamba2(conv_width=4, num_groups=4, **MAMBA), 0),
        (2, Mamba2(conv_width=4, num_groups=1, **MAMBA), 1),
        (4, Mamba2(conv_width=4, num_groups=2, norm="before gate", **MAMBA), 1),
        (4, Mamba2(conv_width=4, num_groups=1, norm="none", **MAMBA), 0),
    ],
)
def test_logits_of_recurrent_layers_match_a_single_device(num_devices, mixer, num_means) -> None:
    num_sums = check_logits(small_model(**RECURRENT, mixer=mixer), num_devices)
    assert num_sums == CONFIG.num_hidden_layers * 2 + 1 + num_means


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "changes"),
    [
        (4, {"attention_gate": True}),
        # As in Llama 4.
        (
            4,
            {
                **EXPERTS, "layer_types": ("chunked_attention", "full_attention"),
                "attention_chunk_size": 5, "qk_norm": True, "qk_norm_weight": False,
                "qk_norm_layers": (True, False), "rope_layers": (True, False),
                "query_scale": QueryScale(0.3, 4, 1, True), "shared_expert_gate": False,
                "shared_expert_intermediate_size": 20,
                "router": Router("sigmoid", scales_inputs=True),
            },
        ),
        # As in Gemma 4, with embeddings of each layer.
        (2, {**WINDOWS, **PER_LAYER, "qk_norm": True, "layer_scalar": True, "vocab_size": 46}),
        # As in Nemotron-H: layers with only a mixer, or only an MLP.
        (
            2,
            {
                **EXPERTS, "num_hidden_layers": 4, "gated_mlp": False, "hidden_act": "relu2",
                "layer_types": ("linear_attention", "none", "full_attention", "none"),
                "mlp_layer_types": ("none", "dense", "none", "sparse"),
                "mixer": Mamba2(conv_width=4, num_groups=2, **MAMBA),
            },
        ),
    ],
    ids=["gate", "llama4", "per-layer embeddings", "nemotron"],
)  # fmt: skip
def test_logits_of_other_layers_match_a_single_device(num_devices, changes) -> None:
    check_logits(small_model(**changes), num_devices)


@pytest.mark.slow
def test_devices_with_the_same_kv_head_compute_different_queries(devices) -> None:
    """Two devices share a KV head with four queries. Each computes two queries."""
    model = small_model(
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=47,  # so it is padded
        qk_norm=True,
        qk_norm_scope="projection",
    )
    check_logits(model, 2)
    mesh = jax.make_mesh((2,), ("x",), devices=devices[:2])
    parallel = TensorParallel.create("test", mesh, model.config)
    checked = set()
    for name, x in named_arrays(nnx.state(model)).items():
        kind = name.rpartition(".")[2]
        if kind not in ("qkv_proj", "qkv_bias", "q_norm", "k_norm"):
            continue
        checked.add(kind)
        # A parameter is [1 KV head, 4 queries + key + value, ...]. q_norm has no key, k_norm no
        # query.
        laid_out = parallel.to_program_layout(name, x)
        heads = np.asarray(x).reshape(1, -1, model.config.head_dim, *x.shape[3:])
        [mine] = [y.data for y in laid_out.addressable_shards if y.device == devices[1]]
        expected = heads[:, 2:] if kind != "k_norm" else heads
        np.testing.assert_array_equal(np.asarray(mine).reshape(expected.shape), expected, name)
    assert len(checked) == 4
