"""Each model family compared with Hugging Face transformers, on small random weights.

Entries of `tests.support.families.CASES` are tested without a cache and in an engine. The engine's
pool is so small that it preempts sequences. `ENGINES` has the options of the engines. Together with
the engines on two devices, which use XLA, they run each kind of layer with three backends, with
both kinds of preemption, with and without drafts, and with scores. Other combinations run only with
``-m exhaustive``. Entries of `VARIANTS` are only loaded, run without a cache, and saved.
"""

import collections
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import Engine, SamplingParams
from paged_jax.engine.drafts import Drafter
from paged_jax.kernels import dispatch
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.triton import linear as triton_kernel
from paged_jax.models.config import LlamaConfig
from paged_jax.models.layer_groups import CHUNKED, HYBRID, NOTHING, SPARSE
from paged_jax.models.llama import Llama
from paged_jax.models.loading.huggingface import save_weights
from paged_jax.models.matrices import look_up_differentiably
from paged_jax.runner import runner
from paged_jax.scheduler.request import Sequence
from tests.engine import test_tensor_parallel as two_devices
from tests.support import families
from tests.support.families import CASES, VARIANTS, VOCAB_SIZE
from tests.support.workload import Job, check_empty, full_batch, play

# Importing torch and transformers takes seconds.
pytestmark = pytest.mark.slow

LENGTH, MAX_TOKENS = 512, 64
NUM_DRAFTS = 4
BACKENDS = ("xla", "triton", "cpu")
NUM_TOP = 20
TOKENS = np.random.default_rng(0).integers(2, VOCAB_SIZE, (1, LENGTH), np.int32)


# Options of the engines of each case: the backend, the kind of preemption, whether the engine
# verifies drafts, and whether it scores a prompt. Most cases run one engine with the CPU kernels,
# which compile in the least time. A case with a kind of layer that no other case has runs two or
# three engines. `test_engines_cover_each_kind_of_layer_with_each_option` checks the table.
ENGINES = {
    "llama": ("cpu swap",),
    "mistral": ("triton recompute",),
    "qwen2 with windows in some layers": ("cpu recompute",),
    "qwen3 tied": ("cpu recompute",),
    "gemma3": ("cpu recompute",),
    "gemma2": ("xla swap scores", "triton swap", "cpu recompute drafts"),
    "phi3 with longrope of half a head, and a window": ("xla recompute drafts",),
    "olmo2": ("triton recompute",),
    "olmo3 with yarn": ("cpu swap drafts scores",),
    "smollm3": ("cpu recompute",),
    "granite": ("cpu recompute",),
    "glm4": ("cpu recompute",),
    "cohere2": ("cpu recompute",),
    "mixtral": ("cpu recompute",),
    "qwen2_moe": ("cpu recompute",),
    "qwen3_moe": ("cpu swap",),
    "olmoe": ("cpu recompute",),
    "gpt_oss": ("xla swap drafts scores", "triton recompute", "cpu swap"),
    "glm4_moe": ("cpu recompute",),
    "gemma3n": ("triton recompute drafts", "cpu swap scores"),
    "gemma4": ("cpu swap scores",),
    "gemma4 with embeddings per layer and shared keys": ("cpu recompute",),
    "gemma4 with experts": ("triton recompute drafts",),
    "ministral3": ("cpu swap scores",),
    "deepseek_v2": ("cpu recompute",),
    "deepseek_v3": ("cpu swap",),
    "minimax_m2": ("xla swap scores",),
    "llama4": ("xla swap drafts scores", "triton recompute", "cpu swap"),
    "lfm2_moe": ("triton swap drafts scores", "cpu recompute"),
    "qwen3_5": ("cpu swap drafts scores",),
    "qwen3_5_moe": ("cpu recompute",),
    "qwen3_next": ("triton swap",),
    "granitemoehybrid": ("cpu recompute",),
    "falcon_h1": ("triton recompute", "cpu swap drafts scores"),
    "olmo_hybrid": ("cpu recompute",),
    "kimi_linear": ("triton swap scores", "cpu recompute drafts"),
    "nemotron_h": ("xla swap scores", "triton recompute drafts", "cpu swap"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Return the model of transformers and its folder."""
    folder = tmp_path_factory.mktemp("theirs")
    model = families.reference(CASES[request.param])
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def expected(case) -> np.ndarray:
    """Return the logits ``[T, V]`` of transformers."""
    return varied_logits(case[0])


@pytest.fixture(scope="module")
def model(case) -> Llama:
    return Llama.from_pretrained(case[1])


@pytest.fixture(scope="module")
def products(case) -> Iterator[list[Interpret]]:
    """Yield the argument `interpret` of each traced call of Triton's grouped matrix multiplication.

    All tests of a case share the list, because a second engine of equal sizes traces nothing.
    """
    products = []
    grouped_linear = triton_kernel.grouped_linear

    def traced(*args, interpret=False):
        products.append(interpret)
        return grouped_linear(*args, interpret=interpret)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernel, "grouped_linear", traced)
        yield products


def varied_logits(theirs) -> np.ndarray:
    logits = families.logits(theirs, TOKENS)[0]
    assert np.std(logits) > 0.2  # otherwise any model would match
    return logits


forward = nnx.jit(lambda model, token_ids: model(token_ids))


def check_forward(model: Llama, expected: np.ndarray, folder) -> None:
    """Check the logits, save the model, and check that transformers reproduces them."""
    logits = forward(model, jnp.asarray(TOKENS))[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    save_weights(model, folder)
    assert LlamaConfig.from_file(folder) == model.config
    np.testing.assert_array_equal(families.logits(families.load(folder), TOKENS)[0], expected)


def test_forward_matches_transformers(model, expected, tmp_path) -> None:
    check_forward(model, expected, tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_of_a_variant_matches_transformers(tmp_path, variant) -> None:
    theirs = families.reference(VARIANTS[variant])
    # Also tests several files, and separate layers.
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    model = Llama.from_pretrained(tmp_path / "theirs", scan_layers=False)
    check_forward(model, varied_logits(theirs), tmp_path / "ours")


def kinds_of_layers(config: LlamaConfig) -> set[str]:
    """Return the properties of a model on which kernels, cache groups or states depend."""
    windows = {window is None for window in config.sliding_windows}
    types = {*config.layer_types, *config.mlp_layer_types}
    kinds = {
        "a window in all layers": windows == {False},
        "a window in some layers": len(windows) == 2 and CHUNKED not in types,
        "attention to chunks": CHUNKED in types,
        "only attention or only an MLP": NOTHING in types,
        "attention beside a recurrence": HYBRID in types,
        type(config.mixer).__name__: config.mixer is not None,
        "latent attention": config.latent is not None,
        "soft caps": config.attn_logit_softcapping is not None,
        "sinks": config.attention_sinks,
        "other heads in some layers": bool(config.global_head_dim),
        "keys as values": config.attention_k_eq_v,
        "shared keys and values": bool(config.num_kv_shared_layers),
        "several residual streams": config.residual_streams is not None,
        "embeddings of layers": bool(config.hidden_size_per_layer_input),
        "experts": bool(config.num_experts),
        "dense layers beside experts": SPARSE in types,
        "experts with biases": config.expert_bias,
        "scaled queries": config.query_scale is not None,
        "layers without rotation": bool(config.rope_layers) or not config.partial_rotary_factor,
        "rotation of a part": 0 < config.partial_rotary_factor < 1,
        "norms over all heads": config.qk_norm and config.qk_norm_scope == "projection",
        "gates of attention": config.attention_gate,
        "biases": config.qkv_bias,
        "biases of MLPs": config.mlp_bias,
        "tied embeddings": config.tie_word_embeddings,
    }
    return {kind for kind, is_there in kinds.items() if is_there}


def test_engines_cover_each_kind_of_layer_with_each_option(tmp_path) -> None:
    """Also checks that each backend runs with each other option."""
    covered, combined = collections.defaultdict(set), set()
    for name, case in CASES.items():
        families.reference_config(case).save_pretrained(tmp_path / name)
        kinds = kinds_of_layers(LlamaConfig.from_file(tmp_path / name))
        rows = [
            (*row.split(), "drafts" if "drafts" in row else "no drafts") for row in ENGINES[name]
        ]
        combined.update((backend, option) for backend, *others in rows for option in others)
        if name in two_devices.ENGINES:
            rows.append(("xla",))
        for kind in kinds:
            covered[kind].update(*rows)
    others = {"swap", "recompute", "drafts", "no drafts", "scores"}
    options = {*BACKENDS, *others}
    assert len(covered) > 20
    assert {kind: options - found for kind, found in covered.items() if found != options} == {}
    assert combined == set(itertools.product(BACKENDS, others))


def engine_params() -> list[Any]:
    """Return the parameters of all engines. An engine that is not in `ENGINES` is exhaustive."""
    params = []
    for number, (name, rows) in enumerate(ENGINES.items()):
        params += [pytest.param(name, row, id=f"{name}-{row}") for row in rows]
        for backend, preemption in itertools.product(BACKENDS, ("swap", "recompute")):
            row = f"{backend} {preemption}"
            if not any(each.startswith(row) for each in rows):
                row += " drafts" if number % 2 == (backend == "xla") else ""
                row += " scores" if preemption == "swap" else ""
                params.append(
                    pytest.param(name, row, id=f"{name}-{row}", marks=pytest.mark.exhaustive)
                )
    return params


@pytest.mark.parametrize(("case", "options"), engine_params(), indirect=["case"])
def test_engine_matches_transformers(case, model, products, monkeypatch, options) -> None:
    """Prompts run in chunks and hit the prefix cache, samples share blocks, and blocks run out.

    If the engine scores a prompt, it scores all positions of the longest prompt.
    """
    theirs, (backend, preemption, *others) = case[0], options.split()
    swaps, speculates = preemption == "swap", "drafts" in others
    traced_before = len(products)
    backends = {**dispatch.BACKENDS, "triton": families.InterpretedTriton()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    # One row is padded to four, which saves a program a case.
    monkeypatch.setattr(runner, "row_bucket", full_batch)
    engine = Engine(
        model,
        block_size=8,
        num_blocks=72 if None in model.config.sliding_windows else 15,
        max_num_seqs=5,
        max_model_len=LENGTH,
        max_chunk=16,
        max_num_batched_tokens=32,
        preemption=preemption,
        num_speculative_tokens=NUM_DRAFTS if speculates else 0,
        backend=backend,
    )
    prompt = TOKENS[0, : LENGTH - MAX_TOKENS].tolist()
    common = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": NUM_TOP}
    greedy = SamplingParams(temperature=0, **common)
    scored = SamplingParams(temperature=0, prompt_logprobs=NUM_TOP, **common)
    drawn = SamplingParams(seed=1, n=2, **common)
    # Recurrent layers keep snapshots of their states at multiples of 64 tokens.
    shared = 25 if model.config.mixer is None else 70
    jobs = [
        Job("long", {"prompt_token_ids": prompt}, scored if "scores" in others else greedy),
        Job("short", {"prompt_token_ids": prompt[:40]}, greedy, at=24),
        Job("same beginning", {"prompt_token_ids": prompt[:shared] + prompt[80:89]}, greedy, at=24),
        # If all layers have a window, a sequence stops taking blocks once it exceeds the window.
        Job("two samples", {"prompt_token_ids": prompt[40:43]}, drawn, at=27),
    ]
    if model.config.mixer is not None:
        # The second prompt with a beginning leaves a snapshot of the states, which the third finds.
        again = {"prompt_token_ids": prompt[:shared] + prompt[90:99]}
        jobs.append(Job("same beginning again", again, greedy, at=60))
    if speculates:
        draft_some(
            monkeypatch,
            {
                j.name: families.greedy_tokens(theirs, j.prompt["prompt_token_ids"], MAX_TOKENS)
                for j in jobs[:3]
            },
        )
    outputs = play(engine, jobs)
    check_empty(engine)
    samples = [(output, sample) for output in outputs.values() for sample in output.outputs]
    for output, sample in samples:
        check_sample(theirs, output, sample)
    assert len({token for _, sample in samples for token in sample.token_ids}) > 10
    stats = engine.stats
    if speculates:
        assert 5 < stats.num_accepted_tokens < stats.num_draft_tokens - 5
    assert stats.num_cached_tokens > 0
    assert stats.num_preemptions > 0
    assert (stats.num_swap_preemptions > 0) == swaps
    assert (stats.num_recomputed_tokens > 0) != swaps
    # Experts and residual streams use the backend of the attention.
    if backend == "triton":
        config = model.config
        assert bool(products) == bool(config.num_experts or config.residual_streams)
        assert all(products) or jax.default_backend() == "gpu"
    else:
        assert len(products) == traced_before


def draft_some(monkeypatch, expected: dict[str, list[int]]) -> None:
    """Draft 0 to 3 of the expected tokens of some requests, and then a wrong token."""

    def draft(_: Drafter, sequence: Sequence) -> list[int]:
        count = sequence.num_generated
        tokens = expected.get(sequence.request.request_id, [])[count : count + count % NUM_DRAFTS]
        return [*tokens, ((tokens or [count])[-1] + 1) % VOCAB_SIZE]

    monkeypatch.setattr(Drafter, "_draft", draft)


def check_sample(theirs, output, sample) -> None:
    """Check greedy tokens, and the log-probabilities at all positions."""
    prompt, tokens = output.prompt_token_ids, sample.token_ids
    assert len(tokens) == MAX_TOKENS
    logits = families.logits(theirs, np.array([[*prompt, *tokens]]))[0, :-1]
    if len(output.outputs) == 1:
        np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1)[-MAX_TOKENS:])
    reported = [*(output.prompt_logprobs or [None])[1:], *sample.logprobs]
    assert all(len(each) >= NUM_TOP for each in reported)
    try:
        check_logprobs(reported, logits)
    except AssertionError:
        # The error of transformers in float32 is up to 8e-5 (Gemma 4 with embeddings per layer).
        exact = copy.deepcopy(theirs).double()
        check_logprobs(reported, families.logits(exact, np.array([[*prompt, *tokens]]))[0, :-1])


def check_logprobs(reported: list[dict[int, Any]], logits: np.ndarray) -> None:
    """Check the log-probabilities of tokens at the last positions of `logits`."""
    logits = logits[-len(reported) :].astype(np.float64)
    expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    for ours, row in zip(reported, expected, strict=True):
        values = np.array([each.logprob for each in ours.values()])
        np.testing.assert_allclose(values, row[list(ours)], rtol=0, atol=1e-4)
        assert np.sort(values)[-NUM_TOP] >= np.sort(row)[-NUM_TOP] - 1e-4


# Families whose switches other families have, too. Their engines are tested once.
OTHERS = {VARIANTS[name].model_type: name for name in VARIANTS}
OTHERS = {
    kind: OTHERS[kind] for kind in OTHERS if kind not in {c.model_type for c in CASES.values()}
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_engine_of_a_variant_matches_transformers(model_type, tmp_path) -> None:
    theirs = families.reference(VARIANTS[OTHERS[model_type]])
    theirs.save_pretrained(tmp_path)
    engine = Engine(
        Llama.from_pretrained(tmp_path), block_size=8, num_blocks=24, max_num_seqs=1,
        max_model_len=128, max_chunk=16, backend="cpu",
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=NUM_TOP)
    output = play(engine, [Job("a", {"prompt_token_ids": TOKENS[0, :41].tolist()}, params)])["a"]
    check_empty(engine)
    check_sample(theirs, output, output.outputs[0])


@pytest.mark.parametrize("model_type", families.IMAGE_MODELS)
def test_from_pretrained_reads_the_text_part_of_a_model_with_images(model_type, tmp_path) -> None:
    theirs = families.reference_with_images(model_type)
    theirs.save_pretrained(tmp_path / "theirs")
    model = Llama.from_pretrained(tmp_path / "theirs")
    assert model.config.model_type == families.IMAGE_MODELS[model_type][-1]
    assert model.config.eos_token_ids == (1, 5)
    check_forward(model, varied_logits(theirs), tmp_path / "ours")


def test_from_pretrained_reads_bfloat16_weights(tmp_path) -> None:
    # Gemma's embedding factor is not exact in bfloat16, and must be rounded like the weights.
    case = families.changed(CASES["gemma2"], hidden_size=72)
    families.reference(case).bfloat16().save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path)
    assert model.config.dtype == "bfloat16"
    rows = model._scale_embeddings(
        look_up_differentiably(model._table("embed_tokens"), jnp.asarray(TOKENS))
    )
    theirs = families.load(tmp_path, dtype="bfloat16")
    expected = families.embeddings(theirs, TOKENS)
    np.testing.assert_array_equal(rows.astype(jnp.bfloat16).astype(jnp.float32), expected)

    widened = Llama.from_pretrained(tmp_path, dtype="float32")
    expected = families.logits(families.load(tmp_path, dtype="float32"), TOKENS)
    np.testing.assert_allclose(forward(widened, jnp.asarray(TOKENS)), expected, rtol=0, atol=1e-4)
