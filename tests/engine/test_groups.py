"""Engines of models with sliding windows in some layers, compared with the plain model.

Blocks that have left a window are reused, and no block is lost. Four models: windows and a layer
with full attention; the same with other heads in that layer; two windows; one window, in a pool
that is far smaller than the prompts.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged_jax import Engine, Llama, LlamaConfig, SamplingParams, StructuredOutputsParams, Tokenizer
from paged_jax.cache.blocks.table_drawing import draw_tables
from paged_jax.cache_map import block_text, changes, snapshot
from paged_jax.engine.beam_search import BeamSearchParams, beam_search
from paged_jax.kernels import cascade, num_shared_blocks
from paged_jax.models import paged_attention
from paged_jax.models.config import ModelConfig
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.runner import runner
from paged_jax.runner.sizes import row_bucket
from paged_jax.server.metrics import Metrics
from paged_jax.server.snapshot import EngineSnapshot
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG, EOS, save_tokenizer_for_forms
from tests.support.workload import Job, check_empty, check_groups, finish, play

pytestmark = pytest.mark.usefixtures("padded_rows")

CONTEXT, WINDOW = 160, 24
SIZES: dict[str, Any] = {
    "block_size": 8, "max_num_seqs": 4, "max_chunk": 16, "steps_per_dispatch": 3,
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def with_window(spec: LayerSpec, window: int) -> LayerSpec:
    first, *others = spec.steps
    part = dataclasses.replace(first.part, window=window)
    return LayerSpec((dataclasses.replace(first, part=part), *others))


def make_config(kind: str) -> ModelConfig:
    fields = {f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(CONFIG) if f.init}
    fields |= {"max_position_embeddings": CONTEXT, "eos_token_ids": (), "sliding_window": WINDOW}
    if kind == "two windows":
        config = LlamaConfig(**fields | {"num_hidden_layers": 3})
        layers = (with_window(config.layers[0], (40, WINDOW)[layer % 2]) for layer in range(3))
        return config.replace(layers=tuple(layers))
    if kind == "window only":
        return LlamaConfig(**fields | {"model_type": "mistral"})
    # "mixed" has two layers with a window, "other heads" has a single layer with a window.
    num_sliding = 1 if kind == "other heads" else 2
    layers = ("sliding_attention",) * num_sliding + ("full_attention",)
    fields |= {"num_hidden_layers": len(layers), "layer_types": layers, "model_type": "qwen3"}
    if kind == "other heads":
        fields |= {"global_head_dim": 2 * CONFIG.head_dim, "num_global_key_value_heads": 1}
    return LlamaConfig(**fields)


# Blocks of the first group, too few for all sequences: each needs about 14 (one window: 10). Blocks
# of the model with two windows are half as long, see `LONG_CHUNKS`.
NUM_BLOCKS = {"mixed": 20, "other heads": 20, "two windows": 34, "window only": 9}
# Enough for the window and the chunk of three beams.
MORE_BLOCKS = {"mixed": 20, "window only": 18}


@pytest.fixture(scope="module")
def models() -> Callable[[str], Llama]:
    return functools.cache(lambda kind: random_llama(make_config(kind), scale=0.4))


@pytest.fixture(scope="module")
def forward() -> Callable[[Llama, list[int]], np.ndarray]:
    """Return the plain model: a function from tokens to log-probabilities ``[N, V]``."""
    run = jax.jit(lambda model, token_ids: jax.nn.log_softmax(model(token_ids)[0]))

    def logprobs(model: Llama, token_ids: list[int]) -> np.ndarray:
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(token_ids)] = token_ids
        return np.array(run(model, jnp.asarray(padded)))[: len(token_ids)]

    return logprobs


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    random = np.random.default_rng(0)

    def letters(count: int) -> list[int]:
        return random.integers(3, CONFIG.vocab_size, count).tolist()

    def job(name: str, token_ids: list[int], max_tokens: int, at: int = 0, **options: Any) -> Job:
        priority = options.pop("priority", 0)
        params = SamplingParams(**GREEDY, max_tokens=max_tokens, **options)
        return Job(name, {"prompt_token_ids": token_ids}, params, priority, at=at)

    long = letters(90)
    return [
        job("long", long, 20),
        job("one token", letters(1), 40),
        job("three samples", letters(51), 14, n=3),
        job("longest", letters(130), 12, at=20, priority=-1),
        # Its tokens repeat, so drafts are accepted.
        job("repeats", letters(7) * 6, 30, at=3, logit_bias={9: 60.0, 10: 60.0}),
        job("same beginning", [*long[:67], *letters(9)], 10, at=14, priority=-1),
        job("long again", long, 20, at=40),
    ]


def check_tokens(forward: Callable[..., np.ndarray], model: Llama, job: Job, output: Any) -> None:
    """Check that every token of all samples is the most probable one in the plain model."""
    assert len(output.outputs) == job.params.n
    for sample in output.outputs:
        assert len(sample.token_ids) == job.params.max_tokens
        token_ids = [*output.prompt_token_ids, *sample.token_ids]
        scores = forward(model, token_ids)[len(output.prompt_token_ids) - 1 : -1]
        for token_id, bias in (job.params.logit_bias or {}).items():
            scores[:, token_id] += bias
        assert sample.token_ids == np.argmax(scores, axis=-1).tolist(), job.name


SWAPPED, RECOMPUTED = {"preemption": "swap"}, {"preemption": "recompute"}
UNCACHED = {"enable_prefix_caching": False}
# Chunks that are longer than a window.
LONG_CHUNKS = {"max_chunk": 32, "block_size": 4}
PREEMPTED, MOVED = "num_preemptions", "num_swap_preemptions"
CACHED, GUESSED = "num_cached_tokens", "num_accepted_tokens"
# Model, options, and names of `EngineStats` that must not be 0, else nothing was tested.
CORE_VARIANTS = [
    ("mixed", SWAPPED, (MOVED, CACHED)),
    ("mixed", RECOMPUTED | UNCACHED, (PREEMPTED,)),
]
VARIANTS = [
    ("other heads", SWAPPED | {"num_speculative_tokens": 3}, (MOVED, CACHED, GUESSED)),
    ("two windows", SWAPPED | UNCACHED | LONG_CHUNKS, (MOVED,)),
    ("two windows", RECOMPUTED | LONG_CHUNKS, (PREEMPTED, CACHED)),
    ("window only", RECOMPUTED, (PREEMPTED, CACHED)),
    ("window only", SWAPPED | {"num_speculative_tokens": 3}, (MOVED, CACHED, GUESSED)),
]


@pytest.mark.parametrize(
    ("kind", "options", "happens"),
    [*CORE_VARIANTS, *(pytest.param(*row, marks=pytest.mark.slow) for row in VARIANTS)],
)
def test_engine_with_windows_matches_the_plain_model(
    models, forward, jobs, monkeypatch, kind, options, happens
) -> None:
    if (kind, options) == ("window only", RECOMPUTED):
        monkeypatch.setattr(runner, "row_bucket", row_bucket)
    model = models(kind)
    engine = Engine(model, **SIZES | {"num_blocks": NUM_BLOCKS[kind]} | options)
    for _ in range(2):
        outputs = play(engine, jobs, on_step=lambda _: check_groups(engine.cache))
        for job in jobs:
            check_tokens(forward, model, job, outputs[job.name])
        check_empty(engine)
    # With a window in all layers, these blocks are not enough for two samples together.
    assert (engine.stats.sharing > 0) == (kind != "window only")
    for name in happens:
        assert getattr(engine.stats, name) > 0, f"{name}: make it happen"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "window only"])
def test_stats_sharing_is_zero_for_different_prompts(models, jobs, kind) -> None:
    """Sharing is zero in every step, also in steps that are queued ahead of finished requests."""
    engine = Engine(models(kind), **SIZES | {"num_blocks": NUM_BLOCKS[kind]} | UNCACHED)
    unrelated = [
        dataclasses.replace(job, params=dataclasses.replace(job.params, n=1)) for job in jobs[:5]
    ]
    saved = []
    play(engine, unrelated, on_step=lambda _: saved.append(engine.stats.sharing))
    assert len(saved) > 20 and set(saved) == {0.0}


# Prompts begin with a combination of these. A window is longer than one of them.
BEGINNINGS = [tuple(range(3 + i, 40, 2)) for i in range(3)]


@st.composite
def drawn_jobs(draw: st.DrawFn) -> list[Job]:
    """Draw requests that begin alike and arrive while others run."""

    def job(number: int) -> Job:
        beginning = draw(st.lists(st.sampled_from(BEGINNINGS), max_size=4))
        ending = draw(st.lists(st.integers(3, 40), min_size=1, max_size=9))
        count, max_tokens = draw(st.sampled_from([1, 1, 3])), draw(st.integers(1, 30))
        params = SamplingParams(
            **GREEDY | {"temperature": float(count > 1)}, seed=7, n=count, max_tokens=max_tokens
        )
        return Job(
            str(number),
            {"prompt_token_ids": [*itertools.chain(*beginning), *ending]},
            params,
            draw(st.sampled_from([0, 0, -1])),
            at=draw(st.integers(0, 25)),
        )

    return [job(number) for number in range(draw(st.integers(2, 7)))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "window only"])
def test_prefix_cache_with_windows_changes_no_token(models, jobs, kind) -> None:
    """Requests share cached blocks, and the pools are too small to keep all of them."""
    sizes = SIZES | {"num_blocks": NUM_BLOCKS[kind]}
    cached, uncached = (Engine(models(kind), **sizes | switch) for switch in ({}, UNCACHED))

    @settings(max_examples=10, derandomize=True)
    @given(drawn_jobs())
    @example(jobs)  # More requests than the pools can hold.
    def compare(jobs: list[Job]) -> None:
        expected = play(uncached, jobs)
        outputs = play(cached, jobs, on_step=lambda _: check_groups(cached.cache))
        for name, output in outputs.items():
            pairs = zip(output.outputs, expected[name].outputs, strict=True)
            assert all(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
        check_empty(cached)

    compare()
    for engine in (cached, uncached):
        assert (engine.stats.num_cached_tokens > 0) == (engine is cached), "make it happen"
        assert engine.stats.num_preemptions > 0, "make it happen"


# Structured outputs in which each letter is a token: an animal after a colour, and JSON.
FORM = "(red|green|blue)( (dog|cat|fox)){2,5}"
TEXTS = {
    " ".join((colour, *animals))
    for colour in ("red", "green", "blue")
    for count in range(2, 6)
    for animals in itertools.product(("dog", "cat", "fox"), repeat=count)
}
PROPERTIES: dict[str, Any] = {
    "hue": {"enum": ["red", "green", "blue"]},
    "old": {"type": "boolean"},
    "pets": {"type": "array", "items": {"enum": ["dog", "cat"]}, "minItems": 1, "maxItems": 2},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
}
JSON_TEXTS = {
    json.dumps({"hue": hue, "old": is_old, "pets": pets})
    for hue in PROPERTIES["hue"]["enum"]
    for is_old in (False, True)
    for count in (1, 2)
    for pets in itertools.product(("dog", "cat"), repeat=count)
}
FORMS = [
    (StructuredOutputsParams(regex=FORM), TEXTS),
    (StructuredOutputsParams(json=SCHEMA), JSON_TEXTS),
]


def tokenizer_of_json(tiny_folder: Path, folder: Path) -> Tokenizer:
    """Return the tokenizer of the tiny model with JSON punctuation instead of other marks."""
    path = save_tokenizer_for_forms(tiny_folder, folder) / "tokenizer.json"
    fields = json.loads(path.read_text())
    for old, new in zip("!?.\n'", '{}[]"', strict=True):
        fields["model"]["vocab"][new] = fields["model"]["vocab"].pop(old)
    path.write_text(json.dumps(fields))
    return Tokenizer.from_folder(folder)


def check_text(
    forward: Callable[..., np.ndarray],
    model: Llama,
    tokenizer: Tokenizer,
    texts: set[str],
    output: Any,
) -> None:
    """Check that each token is the most probable of the tokens that the grammar allows."""
    [sample] = output.outputs
    assert sample.finish_reason == "stop" and sample.text in texts
    scores = forward(model, [*output.prompt_token_ids, *sample.token_ids])
    rows, text = scores[len(output.prompt_token_ids) - 1 : -1], ""
    for row, token_id in zip(rows, sample.token_ids, strict=True):
        longer = [known for known in texts if known.startswith(text) and known != text]
        letters = {known[len(text)] for known in longer}
        allowed = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in letters]
        allowed += [EOS] if text in texts else []
        assert token_id == allowed[int(np.argmax(row[allowed]))], text
        text += "" if token_id == EOS else tokenizer.decode([token_id])
    assert text == sample.text


@pytest.mark.slow
def test_cascade_and_grammars_with_windows_match_the_plain_model(
    models, forward, tiny_folder, tmp_path, monkeypatch
) -> None:
    """Cascade attention in the full-attention layer, grammars, and too few blocks for all."""
    pytest.importorskip("llguidance")
    traced = []
    cascade_attention = cascade.cascade_attention

    def trace(*args: Any, **options: Any) -> jax.Array:
        traced.append(options["layer"])
        return cascade_attention(*args, **options)

    # Cascade attention must be used for these short contexts too.
    monkeypatch.setattr(cascade, "_MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(paged_attention, "cascade_attention", trace)
    tokenizer = tokenizer_of_json(tiny_folder, tmp_path / "tokenizer")
    model = models("mixed")
    beginning = [int(token) for token in np.random.default_rng(3).integers(3, 40, 66)]
    unbound = SamplingParams(**GREEDY, max_tokens=25)
    bound = [SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=f) for f, _ in FORMS]
    all_params = [unbound, bound[0], unbound, bound[1], unbound, bound[0], bound[1]]
    jobs = [
        Job(str(number), {"prompt_token_ids": [*beginning, 3 + number]}, params)
        for number, params in enumerate(all_params)
    ]
    num_shared, find_shared = [], jax.jit(num_shared_blocks, static_argnums=2)

    def look(_: int) -> None:
        check_groups(engine.cache)
        tables = engine.cache.groups[0].tables
        count = find_shared(tables.block_tables, tables.lengths, engine.block_size)
        num_shared.append(int(count))

    for preemption in ("swap", "recompute"):
        engine = Engine(
            model,
            tokenizer=tokenizer,
            preemption=preemption,
            # No other engine shares the programs that this test traces.
            **SIZES | {"num_blocks": 17, "cascade_attention": True, "backend": "xla"},
        )
        outputs = play(engine, jobs, on_step=look)
        check_empty(engine)
        assert engine.stats.num_preemptions and engine.stats.num_cached_tokens, (
            "both must happen in this test"
        )
        assert bool(engine.stats.num_swap_preemptions) == (preemption == "swap")
        for job in jobs:
            if job.params is unbound:
                check_tokens(forward, model, job, outputs[job.name])
            else:
                texts = FORMS[bound.index(job.params)][1]
                check_text(forward, model, tokenizer, texts, outputs[job.name])
    assert max(num_shared) == len(beginning) // engine.block_size, "make it happen"
    assert set(traced) == {0}, "the first layer of the first group"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "window only"])
def test_cache_groups_and_cache_map_show_all_groups(models, forward, jobs, kind) -> None:
    """Check counts, map and pictures in every step, then beam search, sleep and a cache reset."""
    model = models(kind)
    engine = Engine(model, **SIZES | {"num_blocks": MORE_BLOCKS[kind]})
    maps, most_used, pictures = [snapshot(engine)], [0, 0], set()

    def look(num_steps: int) -> None:
        groups = engine.cache.groups
        free = [int(group.tables.pool.num_free) for group in groups]
        for number, use in enumerate(engine.cache_groups):
            assert (use.num_blocks, use.kept) == (
                groups[number].num_blocks, groups[number].tables.retention.label,
            )  # fmt: skip
            if not engine.core.is_ahead:  # otherwise they are the numbers of the last step
                assert use.num_used == use.num_blocks - free[number]
            most_used[number] = max(most_used[number], use.num_used)
        maps.append(snapshot(engine))
        assert [each.num_used for each in maps[-1].groups] == (
            [] if len(groups) == 1 else [use.num_used for use in engine.cache_groups]
        )
        changes(maps[-2], maps[-1])
        for block in maps[-1].sequences[0].block_ids if maps[-1].sequences else ():
            block_text(engine, block)
        pictures.update(draw_tables(groups[-1].tables, "").splitlines())

    outputs = play(engine, jobs, on_step=look)
    assert all(most_used[: len(engine.cache.groups)])
    assert "    logical   0 to 1 were freed: they left the sliding window" in pictures
    if kind == "mixed":
        lines = [line for line in metrics_of(engine) if "kv_cache_usage_of_group{" in line]
        assert [line.split('window="')[1].split('"')[0] for line in lines] == ["all", str(WINDOW)]

    # Beam search finds the prompt in the cache and reports right log-probabilities.
    [found] = beam_search(
        engine.core, [jobs[0].prompt], BeamSearchParams(beam_width=3, max_tokens=9)
    )
    for sequence in found.sequences:
        logprobs = forward(model, sequence.tokens)
        each = [logprobs[i - 1, sequence.tokens[i]] for i in range(90, 99)]
        np.testing.assert_allclose(sequence.cum_logprob, sum(each), atol=1e-4)
    check_empty(engine)

    num_cached = engine.stats.num_cached_tokens
    engine.reset_prefix_cache()
    for round in ("empty", "asleep"):
        if round == "asleep":
            engine.add_request(jobs[0].prompt, jobs[0].params)
            for _ in range(3):
                engine.step()
            engine.sleep()
            engine.wake_up()
            [output] = finish(engine).values()
            assert output == outputs["long"].outputs[0].token_ids
            num_cached = engine.stats.num_cached_tokens
        again = play(engine, jobs[:1])["long"]
        check_tokens(forward, model, jobs[0], again)
        assert (engine.stats.num_cached_tokens > num_cached) == (round == "asleep")


def metrics_of(engine: Engine) -> list[str]:
    metrics = Metrics("model", {"block_size": engine.block_size}, EngineSnapshot.of(engine))
    return metrics.text().decode().splitlines()


@pytest.mark.parametrize("kind", ["mixed", pytest.param("window only", marks=pytest.mark.slow)])
def test_prefix_cache_needs_only_the_last_window(models, forward, jobs, kind) -> None:
    model = models(kind)
    engine = Engine(model, **SIZES | {"num_blocks": MORE_BLOCKS[kind]})
    long, longest = jobs[0], jobs[3]
    beginning = {"prompt_token_ids": long.prompt["prompt_token_ids"][:41]}
    short = dataclasses.replace(long, name="short", prompt=beginning)
    num_found = []
    for job in (long, short, long, longest, short):
        before = engine.stats.num_cached_tokens
        output = play(engine, [job])[job.name]
        check_tokens(forward, model, job, output)
        check_empty(engine)
        num_found.append(engine.stats.num_cached_tokens - before)
    # Blocks before columns 2 and 8 have left the window. Some were reused; at the end, all.
    assert num_found == [0, 40, 88, 0, 0]
