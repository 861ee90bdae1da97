"""The output of a request depends neither on the engine's options nor on other requests.

The same jobs run on engines with many combinations of options. Every output must equal the output
of the job alone on an engine with enough memory and without optimisations.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from paged_jax import CompletionOutput, Engine, RequestOutput, SamplingParams, Tokenizer
from paged_jax.kernels import cascade, num_shared_blocks
from paged_jax.models import paged_attention
from paged_jax.runner import runner
from tests.support.tiny_model import BOS, CONFIG, EOS, SIZES
from tests.support.workload import Job, check_empty, full_batch, play

LETTERS = np.arange(3, CONFIG.vocab_size)
# Sizes of nearly all engines in the tests; prefix caching does not change their programs. The pool
# holds each job alone, but not all jobs that may run together: these need about 40 blocks.
PLAIN: dict[str, Any] = {**SIZES, "enable_prefix_caching": False, "cascade_attention": True}
USUAL: dict[str, Any] = {**PLAIN, "enable_prefix_caching": True}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to run the jobs.

    Attributes:
      options: options of the engine.
      arrival: ``"together"``, ``"reversed"``, or ``"one by one"`` (with some steps in between).
      num_rounds: number of times that the jobs run on the same engine.
      with_others: whether other requests run too; most of them are aborted.
      with_logprobs: whether all jobs return log-probabilities.
      with_scores: whether a job returns prompt log-probabilities (a program per `max_chunk`).
      happens: names of `EngineStats` that must not be 0 at the end, else nothing was tested.
    """

    options: dict[str, Any]
    arrival: str = "together"
    num_rounds: int = 1
    with_others: bool = False
    with_logprobs: bool = False
    with_scores: bool = True
    happens: tuple[str, ...] = ()


PREEMPTED, CACHED = "num_preemptions", "num_cached_tokens"
SWAPPED, GUESSED = "num_swap_preemptions", "num_accepted_tokens"
EVERYTHING = Variant(
    {"max_num_batched_tokens": 12, "steps_per_dispatch": 3},
    arrival="one by one",
    num_rounds=3,
    with_others=True,
    with_logprobs=True,
    happens=(PREEMPTED, CACHED),
)
# Other shapes of prefill, for one and four prompts; decoding has the usual programs.
IN_ONE_PIECE = {"max_chunk": 64}
# As different from the usual sizes as possible, so with other programs. Decoding uses cascade
# attention, see `traced_cascades`.
BLOCKS_OF_1 = {
    "block_size": 1, "num_blocks": 70, "max_num_seqs": 3, "max_chunk": 5, "backend": "xla",
}  # fmt: skip


def _everything(*happens: str, **options: Any) -> Variant:
    return dataclasses.replace(
        EVERYTHING,
        options={**EVERYTHING.options, **options},
        happens=(*EVERYTHING.happens, *happens),
    )


# Variants of the same sizes, which share programs, are next to each other.
CORE = "recomputed and cached", "4 guesses, swapped"
VARIANTS = {
    "recomputed": Variant(
        {"preemption": "recompute", "enable_prefix_caching": False},
        happens=(PREEMPTED, "num_recomputed_tokens"),
    ),
    "recomputed and cached": Variant({"preemption": "recompute"}, happens=(PREEMPTED, CACHED)),
    "swapped": Variant({"preemption": "swap"}, happens=(SWAPPED, CACHED)),
    "swapped uncached": Variant(
        {"preemption": "swap", "enable_prefix_caching": False}, happens=(SWAPPED,)
    ),
    "dispatches of 1 step": Variant({"steps_per_dispatch": 1}),
    "reversed": Variant({}, arrival="reversed"),
    "4 guesses, swapped": Variant(
        {"num_speculative_tokens": 4, "preemption": "swap"},
        num_rounds=4,
        with_logprobs=True,
        happens=(GUESSED, SWAPPED),
    ),
    "everything, 4 guesses, recomputed": dataclasses.replace(
        _everything(
            GUESSED,
            num_speculative_tokens=4,
            # Enough for the drafts of four samples and three chunks.
            max_num_batched_tokens=64,
            preemption="recompute",
        ),
        arrival="together",
    ),
    "everything, prompts in one piece": dataclasses.replace(
        EVERYTHING, options={**IN_ONE_PIECE, "steps_per_dispatch": 3}, with_scores=False
    ),
    "everything, blocks of 1, swapped": _everything(SWAPPED, **BLOCKS_OF_1, preemption="swap"),
    "everything, blocks of 1, recomputed": _everything(**BLOCKS_OF_1, preemption="recompute"),
}


@pytest.fixture(scope="module")
def tokenizer(tiny_folder) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


@pytest.fixture(scope="module")
def plain(tiny_model, tokenizer) -> Engine:
    return Engine(tiny_model, tokenizer=tokenizer, **PLAIN)


@pytest.fixture(scope="module")
def jobs(plain) -> list[Job]:
    """Return jobs of 1 to 40 prompt tokens with all kinds of parameters."""
    random = np.random.default_rng(0)

    def prompt(num_tokens: int, start: tuple[int, ...] = (BOS,)) -> dict[str, list[int]]:
        letters = random.choice(LETTERS, num_tokens - len(start))
        return {"prompt_token_ids": [*start, *letters.tolist()]}

    def seeded(seed: int, **changes: Any) -> SamplingParams:
        fields: dict[str, Any] = {
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 20,
            "ignore_eos": True,
        }
        return SamplingParams(**{**fields, **changes})

    long = prompt(40)
    beginning = tuple(long["prompt_token_ids"][:21])
    whole = prompt(33)
    # Its blocks equal blocks of other prompts at the same places, but in another combination.
    crossed = [*long["prompt_token_ids"][:16], *whole["prompt_token_ids"][16:]]
    # Stop strings and tokens are taken from the output without them.
    two = prompt(2)
    [free] = play(plain, [Job("free", two, seeded(5, max_tokens=24))])["free"].outputs
    return [
        Job("long", long, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)),
        Job("whole context", whole, seeded(10, max_tokens=None, temperature=0.3)),
        Job("crossed", {"prompt_token_ids": crossed}, seeded(11, max_tokens=8)),
        Job("long again", long, seeded(1, top_k=5)),
        Job("three samples", prompt(9), seeded(2, n=3, max_tokens=12, temperature=0.7)),
        Job("same beginning", prompt(30, beginning), seeded(3, top_p=0.8, logprobs=0)),
        Job("one token", {"prompt_token_ids": [BOS]}, seeded(6, min_p=0.05, max_tokens=50)),
        Job("stop string", two, seeded(5, max_tokens=24, stop=free.text[9:12])),
        Job("stop token", two, seeded(5, max_tokens=24, stop_token_ids=[free.token_ids[10]])),
        Job(
            "end token",
            prompt(16),
            seeded(7, ignore_eos=False, logit_bias={EOS: 3.0}, min_tokens=5, max_tokens=40),
        ),
        Job(
            "penalties",
            prompt(17),
            seeded(8, n=2, presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.2),
        ),
        Job(
            "repetitions",
            prompt(5),
            seeded(9, logit_bias={9: 8.0, 10: 7.0}, frequency_penalty=0.1, max_tokens=40),
        ),
        Job(
            "one letter",
            prompt(12),
            SamplingParams(temperature=0, logit_bias={11: 1000.0}, max_tokens=30, logprobs=3),
        ),
        # Last, so that it is preempted after it has generated tokens.
        Job("prompt scored", prompt(27, beginning), seeded(4, prompt_logprobs=2, max_tokens=30)),
    ]


@pytest.fixture(scope="module")
def expected(plain, jobs) -> dict[str, RequestOutput]:
    """Return the output of each job alone."""
    outputs = {job.name: play(plain, [job])[job.name] for job in jobs}
    assert plain.stats.num_preemptions == plain.stats.num_cached_tokens == 0
    for name in ("stop string", "stop token", "end token"):
        assert outputs[name].outputs[0].finish_reason == "stop"
        assert len(outputs[name].outputs[0].token_ids) < 24
    assert outputs["whole context"].outputs[0].finish_reason == "length"
    return outputs


@pytest.fixture(scope="module")
def expected_with_logprobs(plain, jobs, expected) -> dict[str, RequestOutput]:
    """Return the output of each job alone, with log-probabilities."""
    outputs = {job.name: play(plain, [job])[job.name] for job in map(with_logprobs, jobs)}
    for job in jobs:
        for ours, theirs in zip(outputs[job.name].outputs, expected[job.name].outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
    return outputs


@pytest.fixture(scope="module")
def layers() -> list[int]:
    """Return the layers of all cascade attention calls that this file has traced."""
    return []


@pytest.fixture
def traced_cascades(layers, monkeypatch) -> list[int]:
    """Use cascade attention for short contexts too, and return the layers that call it.

    It must trace programs that no other test shares, so use it with an engine that sets `backend`.
    """
    cascade_attention = cascade.cascade_attention

    def traced(*args, **options):
        layers.append(options["layer"])
        return cascade_attention(*args, **options)

    monkeypatch.setattr(cascade, "_MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(paged_attention, "cascade_attention", traced)
    return layers


def with_logprobs(job: Job) -> Job:
    """Return the same job with log-probabilities of all generated tokens."""
    count = 1 if job.params.logprobs is None else job.params.logprobs
    return dataclasses.replace(job, params=dataclasses.replace(job.params, logprobs=count))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=name, marks=() if name in CORE else pytest.mark.slow)
        for name, variant in VARIANTS.items()
    ],
)
def test_outputs_do_not_depend_on(
    request, monkeypatch, tiny_model, tokenizer, jobs, expected, expected_with_logprobs, variant
) -> None:
    if variant.options.keys() & {"num_speculative_tokens", "block_size"}:
        # Pad one row to four, because other engines do not share these programs.
        monkeypatch.setattr(runner, "row_bucket", full_batch)
    if variant.options.get("backend"):
        request.getfixturevalue("traced_cascades")
    if variant.with_logprobs:
        jobs, expected = list(map(with_logprobs, jobs)), expected_with_logprobs
    if not variant.with_scores:
        jobs = [job for job in jobs if job.params.prompt_logprobs is None]
    engine = Engine(tiny_model, tokenizer=tokenizer, **{**USUAL, **variant.options})
    for seed in range(variant.num_rounds):
        random = np.random.default_rng(seed)
        round = arranged(jobs, variant.arrival, random)
        if variant.with_others:
            round = [*round, *others(jobs, random)]
        outputs = play(engine, round)
        for job in jobs:
            assert_same(outputs[job.name], expected[job.name])
        check_empty(engine)
    for name in variant.happens:
        assert getattr(engine.stats, name) > 0, f"{name} must happen in this test"
    if GUESSED in variant.happens:
        stats = engine.stats
        assert 15 < stats.num_accepted_tokens <= stats.num_draft_tokens
        assert sum(stats.num_accepted_at) == stats.num_accepted_tokens
        # A token is accepted only after the tokens before it in its draft.
        counts = [stats.num_drafts, *stats.num_accepted_at]
        assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


@pytest.mark.slow
def test_cascade_attention_gives_the_same_tokens(
    tiny_model, tokenizer, plain, traced_cascades, monkeypatch
) -> None:
    """Three sequences begin with the same 21 blocks."""
    monkeypatch.setattr(runner, "row_bucket", full_batch)
    beginning = [BOS, *range(5, 25)]
    jobs = [
        Job(
            str(number),
            {"prompt_token_ids": [*beginning, 25 + number]},
            SamplingParams(
                temperature=number % 2, seed=number, max_tokens=15, ignore_eos=True, logprobs=2
            ),
        )
        for number in range(3)
    ]
    expected = {job.name: play(plain, [job])[job.name] for job in jobs}
    engine = Engine(tiny_model, tokenizer=tokenizer, **{**USUAL, **BLOCKS_OF_1})
    num_shared, find_shared = [], jax.jit(num_shared_blocks, static_argnums=2)

    def look(num_steps: int) -> None:
        tables = engine.cache.tables
        count = find_shared(tables.block_tables, tables.lengths, engine.block_size)
        num_shared.append(int(count))

    outputs = play(engine, jobs, on_step=look)
    assert max(num_shared) == 21 and traced_cascades, "cascade attention must be used"
    for job in jobs:
        assert_same(outputs[job.name], expected[job.name])
    check_empty(engine)


def arranged(jobs: list[Job], arrival: str, random: np.random.Generator) -> list[Job]:
    """Return the same jobs with other arrivals."""
    if arrival == "one by one":
        times = np.cumsum(random.integers(1, 4, len(jobs))).tolist()
        order = random.permutation(len(jobs)).tolist()
        return [dataclasses.replace(jobs[i], at=at) for i, at in zip(order, times, strict=True)]
    return jobs[::-1] if arrival == "reversed" else jobs


def others(jobs: list[Job], random: np.random.Generator) -> list[Job]:
    """Return other requests for the same prompts, of random priority; most are aborted."""
    strangers = []
    for number, job in enumerate(random.choice(np.arange(len(jobs)), 12).tolist()):
        at = int(random.integers(0, 30))
        strangers.append(
            Job(
                f"other {number}",
                jobs[job].prompt,
                SamplingParams(temperature=2, n=int(random.integers(1, 3)), ignore_eos=True),
                priority=int(random.choice([0, 0, 0, -1, 1])),
                at=at,
                abort_at=at + int(random.integers(0, 15)),
            )
        )
    return strangers


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    name = expected.request_id
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert_same_logprobs(output.prompt_logprobs, expected.prompt_logprobs, name)
    for ours, theirs in zip(output.outputs, expected.outputs, strict=True):
        assert_same_sample(ours, theirs, f"{name}, sample {theirs.index}")


def assert_same_sample(output: CompletionOutput, expected: CompletionOutput, name: str) -> None:
    exact = ("index", "token_ids", "text", "finish_reason", "stop_reason")
    ours, theirs = ({key: getattr(x, key) for key in exact} for x in (output, expected))
    assert ours == theirs, name
    np.testing.assert_allclose(
        output.cumulative_logprob, expected.cumulative_logprob, atol=1e-4, rtol=0, err_msg=name
    )
    assert_same_logprobs(output.logprobs, expected.logprobs, name)


def assert_same_logprobs(ours: list | None, theirs: list | None, name: str) -> None:
    """Check for the same candidates and ranks, and nearly the same log-probabilities."""
    if ours is None or theirs is None:
        assert ours is theirs, name
        return
    for row, expected in zip(ours, theirs, strict=True):
        if row is None or expected is None:
            assert row is expected, name
            continue
        assert {t: c.rank for t, c in row.items()} == {t: c.rank for t, c in expected.items()}, name
        for token_id, candidate in row.items():
            np.testing.assert_allclose(
                candidate.logprob, expected[token_id].logprob, atol=1e-4, rtol=0, err_msg=name
            )
