"""Each model family compared with Hugging Face transformers, on small random weights.

The expected values are stored, see `tests.support.references`, so the tests need no transformers.
Those that run transformers have the marker `peers`: it computes the stored values again, and reads
the folders that we write.

All entries of `tests.support.families.CASES` and `VARIANTS` are tested without a cache, and some in
an engine, whose pool is so small that it preempts sequences. `CORE_ENGINES` have each kind of
layer once. Together with `MORE_ENGINES` and the engines on two devices, which use XLA, they run
each kind of layer with three backends, with both kinds of preemption, with and without drafts, and
with scores. Other combinations run only with ``-m exhaustive``.
"""

import collections
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.engine.drafts import Drafter
from paged_jax.kernels import op as kernel_op
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.embedding import look_up_differentiably
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.saving import save_weights
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.latent import LatentAttention
from paged_jax.models.parts.mlp import Dense
from paged_jax.runner import runner
from paged_jax.scheduler.request import Sequence
from tests.engine import test_tensor_parallel as two_devices
from tests.support import families, family_references, references
from tests.support.families import CASES, IMAGE_MODELS, OTHER_IMAGE_MODELS, VARIANTS
from tests.support.own_parts import own_parts, with_new_parts
from tests.support.references import (
    ANSWER_POSITIONS,
    LENGTH,
    MAX_TOKENS,
    POSITIONS,
    PROMPTS,
    TOKENS,
    VOCAB_SIZE,
    Reference,
    columns,
    digest,
)
from tests.support.workload import Job, check_empty, full_batch, play

NUM_DRAFTS = 4
BACKENDS = ("xla", "triton", "cpu")
NUM_TOP = 20


# Options of the engines of each case: the backend, the kind of preemption, whether the engine
# verifies drafts, and whether it scores a prompt. Most engines use the CPU kernels, which compile
# in the least time. The tests of coverage check the tables.
CORE_ENGINES = {
    "mistral": ("triton recompute", "xla swap"),
    "gpt_oss": ("cpu swap",),
    "gemma3n": ("cpu swap scores",),
    "llama4": ("cpu swap",),
    "lfm2_moe": ("cpu recompute",),
    "qwen3_5": ("cpu swap drafts scores",),
    "falcon_h1": ("cpu swap",),
    "kimi_linear": ("cpu recompute drafts",),
}
MORE_ENGINES = {
    "mistral": ("cpu swap drafts scores",),
    "gemma2": ("cpu recompute drafts", "xla recompute scores", "triton swap"),
    "olmo2": ("triton swap", "cpu recompute drafts"),
    "gpt_oss": ("xla recompute drafts scores", "triton recompute"),
    "gemma3n": ("triton recompute drafts",),
    "gemma4": ("cpu swap scores", "triton recompute drafts"),
    "minimax_m2": ("xla swap scores",),
    "llama4": ("xla recompute drafts scores", "triton recompute"),
    "mistral4": ("cpu recompute drafts",),  # scaled queries of latent attention
    "lfm2_moe": ("triton swap drafts scores",),
    "qwen3_5": ("triton recompute",),
    "falcon_h1": ("triton recompute", "cpu recompute drafts scores"),
    "kimi_linear": ("triton swap scores",),
    "nemotron_h": ("cpu swap", "xla recompute drafts scores", "triton swap"),
}
# A family with a part that no other has gets engines by itself.
for _name in with_new_parts(CASES, CORE_ENGINES):
    CORE_ENGINES.setdefault(_name, ("cpu swap drafts scores",))
    MORE_ENGINES.setdefault(_name, ("xla recompute", "triton swap"))
ENGINES = {
    name: (*CORE_ENGINES.get(name, ()), *MORE_ENGINES.get(name, ()))
    for name in [*CORE_ENGINES, *MORE_ENGINES]
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> tuple[str, Reference, Path]:
    """Return the name of a stored model, the model, and its folder."""
    folder = tmp_path_factory.mktemp("theirs")
    return request.param, references.write_reference(request.param, folder), folder


@pytest.fixture(scope="module")
def model(case) -> Decoder:
    return Decoder.from_pretrained(case[2])


@pytest.fixture(scope="module")
def products(case) -> list[Interpret]:
    """Return a list for the `interpret` of each traced call of Triton's grouped matmul.

    All tests of a case share the list, because a second engine of equal sizes traces nothing.
    """
    return []


forward = nnx.jit(lambda model, token_ids: model(token_ids))


def plain_logits(model: Decoder, token_ids: Rows[int]) -> np.ndarray:
    """Return the logits of at most `LENGTH` tokens, without a cache, ``[T, V]``."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(token_ids)] = token_ids
    return np.asarray(forward(model, jnp.asarray(padded))[0])[: len(token_ids)]


def check_forward(model: Decoder, reference: Reference) -> None:
    assert np.std(reference.logits[:, :-1]) > 0.2  # otherwise any model would match
    logits = digest(plain_logits(model, TOKENS), POSITIONS)
    np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=1e-4)


def check_saved(model: Decoder, reference: Reference, folder: Path) -> None:
    """Check that the saved tensors are those of the file, and that they give the same model."""
    save_weights(model, folder)
    assert LlamaConfig.from_file(folder) == model.config
    expected = references.draw(reference.tensors)
    with safe_open(folder / "model.safetensors", "np") as file:
        # OLMo Hybrid's convolutions may be divided in two ways.
        names = {name for name in expected.keys() & set(file.keys()) if "_conv1d" not in name}
        for name in names:
            np.testing.assert_array_equal(file.get_tensor(name), expected[name], err_msg=name)
    assert names
    if names != set(expected):
        # transformers writes other names than the published files of some families have.
        same = Decoder.from_pretrained(folder, scan_layers=model.scan_layers)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(same), nnx.state(model))


def test_forward_matches_transformers(case, model, tmp_path) -> None:
    check_forward(model, case[1])
    check_saved(model, case[1], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_of_a_variant_matches_transformers(tmp_path, variant) -> None:
    # Also tests several files, and separate layers.
    reference = references.write_reference(variant, tmp_path / "theirs", num_files=3)
    model = Decoder.from_pretrained(tmp_path / "theirs", scan_layers=False)
    check_forward(model, reference)
    check_saved(model, reference, tmp_path / "ours")


@pytest.mark.parametrize("model_type", IMAGE_MODELS)
def test_from_pretrained_reads_the_text_part_of_a_model_with_images(model_type, tmp_path) -> None:
    reference = references.write_reference(families.with_images(model_type), tmp_path)
    model = Decoder.from_pretrained(tmp_path)
    assert model.config.model_type == IMAGE_MODELS[model_type].family
    assert model.config.eos_token_ids == (1, 5)
    check_forward(model, reference)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("model_type", OTHER_IMAGE_MODELS)
def test_text_parts_of_other_models_with_images_match_transformers(model_type, tmp_path) -> None:
    initial = families.initial_with_images(model_type)
    config, tensors = families.describe(initial)
    theirs = families.load_drawn(type(initial), config, tensors)
    references.write_model(tmp_path, config, references.draw(tensors))
    model = Decoder.from_pretrained(tmp_path)
    assert model.config.model_type == OTHER_IMAGE_MODELS[model_type].family
    expected = families.logits(theirs, TOKENS[None])[0]
    assert np.std(expected) > 0.2
    np.testing.assert_allclose(plain_logits(model, TOKENS), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.peers
def test_an_engine_of_qwen3_vl_with_experts_generates_the_tokens_of_transformers(tmp_path) -> None:
    name = families.with_images("qwen3_vl_moe")
    reference, prompt = references.write_reference(name, tmp_path), PROMPTS["short"].tolist()
    kind = type(families.initial_with_images("qwen3_vl_moe"))
    theirs = families.load_drawn(kind, dict(reference.config), dict(reference.tensors))
    model = Decoder.from_pretrained(tmp_path)
    engine = Engine(model, block_size=8, num_blocks=16, max_num_seqs=1, max_model_len=128)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    output = play(engine, [Job("short", {"prompt_token_ids": prompt}, params)])["short"]
    expected = families.greedy_tokens(theirs, prompt, MAX_TOKENS)
    assert [each.token_ids for each in output.outputs] == [expected]


ALL_MODELS = [*CASES, *VARIANTS, *map(families.with_images, IMAGE_MODELS)]


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("name", ALL_MODELS)
def test_stored_values_are_those_of_transformers(name) -> None:
    families.transformers()
    assert ALL_MODELS == references.names()
    answers = references.stored(name).answers
    assert family_references.differences(name, family_references.record(name, answers)) == []


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("name", ALL_MODELS)
def test_transformers_reads_what_we_save(name, tmp_path) -> None:
    families.transformers()
    reference = references.write_reference(name, tmp_path / "theirs")
    save_weights(Decoder.from_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    theirs = family_references.exact(families.load(tmp_path / "ours"))
    logits = digest(families.logits(theirs, TOKENS[None])[0], POSITIONS)
    tolerance = family_references.tolerance(reference.config)
    np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=tolerance)


def stored_kinds(name: str) -> set[str]:
    """Return the properties of a stored model on which kernels, cache groups or states depend."""
    config = LlamaConfig.from_dict(references.stored(name).config)
    windows = {window is None for window in config.sliding_windows}
    has_chunks = any(config.attention_chunks)
    parts = [part for layer in dict.fromkeys(config.layers) for part in layer.walk()]
    attention = [part for part in parts if isinstance(part, Attention)]
    latent = [part for part in parts if isinstance(part, LatentAttention)]
    experts = [part for part in parts if isinstance(part, Experts)]
    dense = [part for part in parts if isinstance(part, Dense)]
    is_whole = [
        bool(layer.kv or layer.states) and bool(layer.find(Dense) or layer.experts)
        for layer in config.layers
    ]
    rotated = [part.rope for part in (*attention, *latent)]
    kinds = {
        "a window in all layers": windows == {False},
        "a window in some layers": len(windows) == 2 and not has_chunks,
        "attention to chunks": has_chunks,
        "only attention or only an MLP": not all(is_whole),
        "attention beside a recurrence": any(layer.kv and layer.states for layer in config.layers),
        "latent attention": bool(latent),
        "soft caps": any(part.soft_cap for part in attention),
        "sinks": any(part.has_sinks for part in attention),
        "other heads in some layers": len({part.kv for part in attention}) > 1,
        "keys as values": any(part.values_are_keys for part in attention),
        "shared keys and values": any(part.source is not None for part in attention),
        "several residual streams": config.streams is not None,
        "embeddings of layers": config.per_layer is not None,
        "experts": bool(experts),
        "dense layers beside experts": bool(experts and dense),
        "experts with biases": any(part.has_bias for part in experts),
        "scaled queries": any(part.query_scale for part in (*attention, *latent)),
        "layers without rotation": None in rotated,
        "rotation of a part": any(rope and rope.rotary_dim < rope.head_dim for rope in rotated),
        "norms over all heads": any(
            part.norm is not None and part.norm.scope == "projection" for part in attention
        ),
        "gates of attention": any(part.has_gate for part in attention),
        "biases": any(part.qkv_bias for part in attention),
        "biases of MLPs": any(part.has_bias for part in dense),
        "tied embeddings": config.tie_word_embeddings,
    }
    return own_parts(name) | {kind for kind, is_there in kinds.items() if is_there}


def options_of(row: str) -> tuple[str, ...]:
    """Return the options of an engine, and whether it has no drafts."""
    return *row.split(), "drafts" if "drafts" in row else "no drafts"


OPTIONS = {*BACKENDS, "swap", "recompute", "drafts", "no drafts", "scores"}


def test_engines_of_the_core_cover_each_kind_of_layer_and_each_option() -> None:
    assert all(row in ENGINES[name] for name, rows in CORE_ENGINES.items() for row in rows)
    rows = itertools.chain(*CORE_ENGINES.values())
    assert set(itertools.chain(*map(options_of, rows))) == OPTIONS
    kinds = set().union(*map(stored_kinds, CASES))
    assert len(kinds) > 20
    # The forward passes of the core, kernels and cache groups are tested with these.
    without_engine = {
        "soft caps", "norms over all heads", "only attention or only an MLP", "keys as values",
        "other heads in some layers",
    }  # fmt: skip
    assert set().union(*map(stored_kinds, CORE_ENGINES)) == kinds - without_engine


def test_engines_cover_each_kind_of_layer_with_each_option() -> None:
    """Also checks that each backend runs with each other option."""
    covered, combined = collections.defaultdict(set), set()
    for name in CASES:
        options = [options_of(row) for row in ENGINES.get(name, ())]
        combined.update((backend, option) for backend, *others in options for option in others)
        if name in two_devices.ENGINES:
            options.append(("xla",))
        for kind in stored_kinds(name):
            covered[kind].update(*options)
    kinds = set().union(*map(stored_kinds, CASES))
    assert {kind: OPTIONS - covered[kind] for kind in kinds if covered[kind] != OPTIONS} == {}
    assert combined == set(itertools.product(BACKENDS, OPTIONS - set(BACKENDS)))


def engine_params() -> list[Any]:
    """Return the parameters of all engines. An engine that is in neither table is exhaustive."""
    params = []
    for name in ENGINES:
        for row in ENGINES[name]:
            marks = () if row in CORE_ENGINES.get(name, ()) else pytest.mark.slow
            params.append(pytest.param(name, row, id=f"{name}-{row}", marks=marks))
    for number, name in enumerate(CASES):
        for backend, preemption in itertools.product(BACKENDS, ("swap", "recompute")):
            row = f"{backend} {preemption}"
            if not any(known.startswith(row) for known in ENGINES.get(name, ())):
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
    reference, (backend, preemption, *others) = case[1], options.split()
    swaps, speculates = preemption == "swap", "drafts" in others
    traced_before = len(products)
    backends = {**kernel_op.BACKENDS, "triton": families.interpreted_triton(products)}
    monkeypatch.setattr(kernel_op, "BACKENDS", backends)
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
    common = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": NUM_TOP}
    greedy = SamplingParams(temperature=0, **common)
    scored = SamplingParams(temperature=0, prompt_logprobs=NUM_TOP, **common)
    params = {"long": scored if "scores" in others else greedy}
    arrivals = {"long": 0, "short": 24, "same beginning": 24}
    if model.config.state_groups:
        # The second prompt with a beginning leaves a snapshot of the states, which the third finds.
        arrivals["same beginning again"] = 60
    jobs = [
        Job(name, {"prompt_token_ids": PROMPTS[name].tolist()}, params.get(name, greedy), at=at)
        for name, at in arrivals.items()
    ]
    # If all layers have a window, a sequence stops taking blocks once it exceeds the window.
    sampled = SamplingParams(seed=1, n=2, **common)
    jobs.append(Job("two samples", {"prompt_token_ids": TOKENS[40:43].tolist()}, sampled, at=27))
    if speculates:
        draft_some(monkeypatch, reference.answers)
    outputs = play(engine, jobs)
    check_empty(engine)
    for job in jobs:
        check_output(model, reference, outputs[job.name])
    tokens = [sample.token_ids for output in outputs.values() for sample in output.outputs]
    assert len({*itertools.chain(*tokens)}) > 10
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
        assert bool(products) == bool(config.num_experts or config.streams)
        assert all(products) or jax.default_backend() == "gpu"
    else:
        assert len(products) == traced_before


def draft_some(monkeypatch, answers: Mapping[str, list[int]]) -> None:
    """Draft 0 to 3 of the expected tokens of some requests, and then a wrong token."""

    def draft(_: Drafter, sequence: Sequence) -> list[int]:
        count = sequence.num_generated
        tokens = answers.get(sequence.request.request_id, [])[count : count + count % NUM_DRAFTS]
        return [*tokens, ((tokens or [count])[-1] + 1) % VOCAB_SIZE]

    monkeypatch.setattr(Drafter, "_draft", draft)


def check_output(model: Decoder, reference: Reference, output: RequestOutput) -> None:
    """Check the tokens and log-probabilities of all samples of a request.

    The greedy tokens, and log-probabilities at some positions, are compared with transformers, and
    the log-probabilities of all tokens with the model without a cache. Its logits are compared
    with transformers in other tests.
    """
    name, prompt = output.request_id, output.prompt_token_ids
    scored = (output.prompt_logprobs or [None])[1:]
    for sample in output.outputs:
        assert len(sample.token_ids) == MAX_TOKENS
        reported = [*scored, *sample.logprobs]
        assert all(len(row) >= NUM_TOP for row in reported)
        logits = plain_logits(model, [*prompt, *sample.token_ids])[:-1][-len(reported) :]
        for ours, row in zip(reported, logits.astype(np.float64), strict=True):
            expected = row - np.logaddexp.reduce(row)
            values = np.array([entry.logprob for entry in ours.values()])
            np.testing.assert_allclose(values, expected[list(ours)], rtol=0, atol=1e-4)
            assert np.sort(values)[-NUM_TOP] >= np.sort(expected)[-NUM_TOP] - 1e-4
        if name in reference.answers:
            assert sample.token_ids == reference.answers[name]
            check_logprobs(sample.logprobs, reference.answer_logits[name], ANSWER_POSITIONS)
    if scored:
        assert name == "long" and len(scored) == len(prompt) - 1
        check_logprobs(scored, reference.logits, POSITIONS)


def check_logprobs(
    reported: Rows[Mapping[int, Any]], rows: np.ndarray, positions: Rows[int]
) -> None:
    """Check the log-probabilities of those tokens whose logits are in `rows`, see `digest`."""
    num_checked = 0
    for position, row in zip(positions, rows, strict=True):
        expected = dict(zip(columns(position).tolist(), row[:-1] - row[-1], strict=True))
        for token in expected.keys() & (reported[position] if position < len(reported) else {}):
            value = reported[position][token].logprob
            assert value == pytest.approx(expected[token], rel=0, abs=1e-4), (position, token)
            num_checked += 1
    assert num_checked > 2 * len(positions)


@pytest.mark.slow
@pytest.mark.peers
def test_from_pretrained_reads_bfloat16_weights(tmp_path) -> None:
    # Gemma's embedding factor is not exact in bfloat16, and must be rounded like the weights.
    case = families.changed(CASES["gemma2"], hidden_size=72)
    families.reference(case).bfloat16().save_pretrained(tmp_path)
    model = Decoder.from_pretrained(tmp_path)
    assert model.config.dtype == "bfloat16"
    rows = model._scale_embeddings(
        look_up_differentiably(model._table("embed_tokens"), jnp.asarray(TOKENS[None]))
    )
    theirs = families.load(tmp_path, dtype="bfloat16")
    expected = families.embeddings(theirs, TOKENS[None])
    np.testing.assert_array_equal(rows.astype(jnp.bfloat16).astype(jnp.float32), expected)

    widened = Decoder.from_pretrained(tmp_path, dtype="float32")
    expected = families.logits(families.load(tmp_path, dtype="float32"), TOKENS[None])
    np.testing.assert_allclose(
        forward(widened, jnp.asarray(TOKENS[None])), expected, rtol=0, atol=1e-4
    )
