"""Each family of models against Hugging Face transformers, on small random weights.

Entries of `tests.support.families.CASES` go through all of these tests: the plain forward, prefill
in chunks and decode through a paged cache, and an engine whose pool is so small that it preempts,
in both ways. Of two backends a case has one in the cache and the other in the engine. Entries of
`VARIANTS` are read, computed, and saved.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import Engine, SamplingParams
from paged_jax.kernels import dispatch, grouped
from paged_jax.kernels.backend import Interpret
from paged_jax.models.config import LlamaConfig
from paged_jax.models.embedding import take_rows
from paged_jax.models.llama import Llama, _table
from paged_jax.models.loading.huggingface import save_weights
from paged_jax.runner import runner
from tests.support import families
from tests.support.families import CASES, VARIANTS, VOCAB_SIZE
from tests.support.workload import Job, check_empty, play

# Importing torch and transformers takes seconds.
pytestmark = pytest.mark.slow

LENGTH, CHUNK, NUM_CHUNKS = 512, 128, 3
MAX_TOKENS = 64
TOKENS = np.random.default_rng(0).integers(2, VOCAB_SIZE, (1, LENGTH), np.int32)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """The number of a case, transformers' model, and the folder that it has been saved to."""
    folder = tmp_path_factory.mktemp("theirs")
    model = families.reference(CASES[request.param])
    model.save_pretrained(folder)
    return list(CASES).index(request.param), model, folder


@pytest.fixture(scope="module")
def expected(case) -> np.ndarray:
    """Logits ``[T, V]`` of a sequence."""
    return varied_logits(case[1])


@pytest.fixture(scope="module")
def model(case) -> Llama:
    return Llama.from_pretrained(case[2])


@pytest.fixture(scope="module")
def products(case) -> list[Interpret]:
    """How each product of rows with experts was traced that Triton's kernel computes."""
    return []


@pytest.fixture
def backends(case, products, monkeypatch) -> tuple[str, str]:
    """That of the cache and that of the engine. The kernels of ``"triton"`` are interpreted."""
    grouped_linear = grouped.triton.grouped_linear

    def traced(*args, interpret=False):
        products.append(interpret)
        return grouped_linear(*args, interpret=interpret)

    monkeypatch.setattr(grouped.triton, "grouped_linear", traced)
    monkeypatch.setitem(dispatch.BACKENDS, "triton", families.InterpretedTriton())
    return ("xla", "triton") if case[0] % 2 else ("triton", "xla")


def check_products(model: Llama, backend: str, products: list[Interpret]) -> None:
    """Experts were computed by the backend that attention has."""
    if backend == "triton":
        assert bool(products) == bool(model.config.num_experts)
        assert all(products) or jax.default_backend() == "gpu"


def varied_logits(theirs) -> np.ndarray:
    logits = families.logits(theirs, TOKENS)[0]
    assert np.std(logits) > 0.2  # a model whose logits vanish would agree with anything
    return logits


forward = nnx.jit(lambda model, token_ids: model(token_ids))
score = nnx.jit(Llama.score, static_argnames="backend", donate_argnames="cache")
decode = nnx.jit(Llama.decode, static_argnames="backend", donate_argnames="cache")


def check_forward(model: Llama, expected: np.ndarray, folder) -> None:
    """It computes the logits, and so does transformers with what it saves."""
    logits = forward(model, jnp.asarray(TOKENS))[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    save_weights(model, folder)
    assert LlamaConfig.from_file(folder) == model.config
    np.testing.assert_array_equal(families.logits(families.load(folder), TOKENS)[0], expected)


def test_forward_computes_what_transformers_computes(model, expected, tmp_path) -> None:
    check_forward(model, expected, tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_of_a_variant_computes_what_transformers_computes(tmp_path, variant) -> None:
    theirs = families.reference(VARIANTS[variant])
    # In several files, and layers that are not stacked.
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    model = Llama.from_pretrained(tmp_path / "theirs", scan_layers=False)
    check_forward(model, varied_logits(theirs), tmp_path / "ours")


def test_chunks_and_steps_compute_what_transformers_computes(
    model, expected, backends, products
) -> None:
    cache = model.create_cache(num_slots=1, max_length=LENGTH)
    slots, num_tokens = jnp.array([0]), jnp.array([CHUNK])
    logits = []
    for start in range(0, NUM_CHUNKS * CHUNK, CHUNK):
        chunk = jnp.asarray(TOKENS[:, start : start + CHUNK])
        rows, cache, ok = score(model, cache, chunk, slots, num_tokens, backend=backends[0])
        assert ok
        logits.extend(rows[0])
    for token_id in TOKENS[0, NUM_CHUNKS * CHUNK :]:
        rows, cache, ok = decode(model, cache, jnp.array([token_id]), slots, backend=backends[0])
        assert ok
        logits.append(rows[0])
    np.testing.assert_allclose(np.stack(logits), expected, rtol=0, atol=1e-4)
    check_products(model, backends[0], products)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_engine_gives_the_tokens_of_transformers(
    case, model, backends, products, monkeypatch, preemption
) -> None:
    """Prompts in chunks, one of which is cached, samples that share blocks, and too few blocks."""
    # One row is padded to four, which saves a program a case.
    monkeypatch.setattr(runner, "row_bucket", lambda count, num_slots: num_slots)
    theirs = case[1]
    engine = Engine(
        model,
        block_size=8,
        num_blocks=24 if None in model.config.windows else 11,
        max_num_seqs=4,
        max_model_len=128,
        max_chunk=16,
        max_num_batched_tokens=32,
        preemption=preemption,
        backend=backends[1],
    )
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    drawn = SamplingParams(seed=1, n=2, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    first, second, third = (TOKENS[0, start : start + 40].tolist() for start in (0, 40, 80))
    jobs = [
        Job("alone", {"prompt_token_ids": first}, greedy),
        Job("same beginning", {"prompt_token_ids": first[:25] + third[:9]}, greedy),
        # Where all layers have a window, a sequence needs more blocks only until it is as long.
        Job("two samples", {"prompt_token_ids": second[:3]}, drawn, at=3),
        Job("again", {"prompt_token_ids": first}, greedy, at=40),
    ]
    outputs = play(engine, jobs)
    check_empty(engine)
    for output in outputs.values():
        for sample in output.outputs:
            check_sample(theirs, output.prompt_token_ids, sample)
    stats = engine.stats
    assert stats.num_cached_tokens > 0, "make it happen"
    assert stats.num_preemptions > 0
    assert (stats.num_swap_preemptions > 0) == (preemption == "swap")
    assert (stats.num_recomputed_tokens > 0) == (preemption == "recompute")
    check_products(model, backends[1], products)


def check_sample(theirs, prompt: list[int], sample) -> None:
    """The most probable tokens, or log-probabilities of those that were drawn."""
    tokens = np.array(sample.token_ids)
    assert len(tokens) == MAX_TOKENS and len(set(sample.token_ids)) > 3
    logits = families.logits(theirs, np.array([[*prompt, *tokens]]))[0, -MAX_TOKENS - 1 : -1]
    if sample.logprobs is None:
        np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))
        return
    ours = [at[token].logprob for at, token in zip(sample.logprobs, tokens, strict=True)]
    expected = jax.nn.log_softmax(logits)[np.arange(MAX_TOKENS), tokens]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def test_the_text_model_of_one_that_sees_images_is_read(tmp_path) -> None:
    theirs = families.reference_with_images(CASES["gemma3"])
    theirs.save_pretrained(tmp_path / "theirs")
    model = Llama.from_pretrained(tmp_path / "theirs")
    assert model.config.model_type == "gemma3_text" and model.config.eos_token_ids == (1, 5)
    check_forward(model, varied_logits(theirs), tmp_path / "ours")


def test_bfloat16_weights_of_transformers_are_read(tmp_path) -> None:
    # Gemma's factor, of which the square root is no number of bfloat16, is rounded with the rest.
    case = families.changed(CASES["gemma2"], hidden_size=72)
    families.reference(case).bfloat16().save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path)
    assert model.config.dtype == "bfloat16"
    rows = model._scaled(take_rows(_table(model, "embed_tokens"), jnp.asarray(TOKENS)))
    theirs = families.load(tmp_path, dtype="bfloat16")
    expected = families.embeddings(theirs, TOKENS)
    np.testing.assert_array_equal(rows.astype(jnp.bfloat16).astype(jnp.float32), expected)

    widened = Llama.from_pretrained(tmp_path, dtype="float32")
    expected = families.logits(families.load(tmp_path, dtype="float32"), TOKENS)
    np.testing.assert_allclose(forward(widened, jnp.asarray(TOKENS)), expected, rtol=0, atol=1e-4)
