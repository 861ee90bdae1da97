"""Engine with recurrent layers: the same tokens as the plain model, whatever happens to a request.

The model is `tests.support.recurrent_model`. Its states are wrong if a token is applied twice or
skipped, or if a state comes from another sequence.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from paged_jax import LLM, BeamSearchParams, Engine, RequestOutput, SamplingParams, rollout
from paged_jax.cache.blocks import check_invariants, state_tables
from paged_jax.cache_map import snapshot
from paged_jax.engine.drafts import Drafter
from paged_jax.runner import runner
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import decode_steps, verify_steps
from paged_jax.runner.sizes import row_bucket
from paged_jax.scheduler.request import Sequence
from paged_jax.server.metrics import Metrics
from paged_jax.server.snapshot import EngineSnapshot
from tests.support.block_tables import check_states
from tests.support.recurrent_model import (
    RecurrentModel,
    V,
    greedy_tokens,
    make_config,
    make_model,
    token_logprobs,
)
from tests.support.workload import Job, play

pytestmark = pytest.mark.usefixtures("padded_rows")

SIZES: dict[str, Any] = {
    "block_size": 4, "max_num_seqs": 4, "max_model_len": 128, "max_chunk": 16, "num_blocks": 44,
    "steps_per_dispatch": 3, "num_snapshots": 6, "kv_dtype": "float32",
}  # fmt: skip
# Tokens between the points where chunks end, fewer than usual.
INTERVAL = 8


@pytest.fixture(autouse=True)
def short_interval(monkeypatch) -> None:
    monkeypatch.setattr(state_tables, "STATE_INTERVAL", INTERVAL)


def make_engine(**options: Any) -> Engine:
    return Engine(make_model(), **SIZES | options)


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, count).tolist()


def check_entries(engine: Engine) -> None:
    cache = jax.device_get(engine.core.runner.state.cache)
    *groups, states = cache.groups
    for group in groups:
        check_invariants(group.tables)
    check_states(states.tables, cache.lengths)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Return prompts of which some share their first 40 tokens, and one has several samples."""
    shared = random_tokens(0, 40)
    prompts = [random_tokens(seed, length) for seed, length in ((1, 1), (2, 7), (3, 30), (4, 61))]
    prompts += [shared + random_tokens(seed, length) for seed, length in ((5, 3), (6, 25), (7, 9))]
    jobs = [
        Job(f"{number}", {"prompt_token_ids": tokens}, greedy(20), at=number % 3)
        for number, tokens in enumerate(prompts)
    ]
    several = {"prompt_token_ids": shared + random_tokens(8, 12)}
    return [*jobs, Job("several", several, greedy(9, n=3), at=2)]


@pytest.fixture(scope="module")
def expected(jobs) -> dict[str, list[int]]:
    tokens = {
        job.name: greedy_tokens(
            make_model(), list(job.prompt["prompt_token_ids"]), job.params.max_tokens or 0
        )
        for job in jobs
    }
    assert min(len(set(each)) for each in tokens.values()) > 5, "tokens depend on the states"
    return tokens


@pytest.mark.slow
def test_rejected_drafts_leave_no_trace_in_states(jobs, expected, monkeypatch) -> None:
    # Draft some of the next tokens, and then a wrong one.
    draft_known_tokens(monkeypatch, expected, lambda count: count % 4, has_wrong=True)
    engine = make_engine(num_speculative_tokens=4, preemption="swap")
    run(engine, jobs, expected)
    assert 10 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens - 10
    assert engine.stats.num_swap_preemptions


def draft_known_tokens(
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, list[int]],
    num_right: Callable[[int], int],
    has_wrong: bool,
) -> None:
    """Draft tokens of `expected`: `num_right` of the number of generated tokens."""

    def draft(drafter: Drafter, sequence: Sequence) -> list[int]:
        count = sequence.num_generated
        tokens = expected[sequence.request.request_id][count : count + num_right(count)]
        return [*tokens, (tokens[-1] if tokens else count) + 1] if has_wrong else tokens

    monkeypatch.setattr(Drafter, "_draft", draft)


def run(engine: Engine, jobs: list[Job], expected: dict[str, list[int]]) -> None:
    outputs = play(engine, jobs, on_step=lambda _: check_entries(engine))
    for job in jobs:
        assert len(outputs[job.name].outputs) == job.params.n
        for sample in outputs[job.name].outputs:
            assert list(sample.token_ids) == expected[job.name], job.name


VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "cached": ({}, ("num_cached_tokens",)),
    "uncached": ({"enable_prefix_caching": False}, ()),
    "no snapshots": ({"num_snapshots": 0}, ()),
    "short chunks": ({"max_num_batched_tokens": 6, "steps_per_dispatch": 1}, ()),
    "recomputed": ({"preemption": "recompute"}, ("num_preemptions", "num_cached_tokens")),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("cached", "recomputed") else pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_engine_matches_the_plain_model(jobs, expected, monkeypatch, name) -> None:
    options, happens = VARIANTS[name]
    if name == "cached":
        monkeypatch.setattr(runner, "row_bucket", row_bucket)
    engine = make_engine(**options)
    run(engine, jobs, expected)
    run(engine, jobs, expected)  # with a warm prefix cache
    for counter in happens:
        assert getattr(engine.stats, counter), f"{counter} must not be 0"
    tables = engine.core.runner.state.cache.groups[-1].tables
    assert int(tables.pool.num_free) == tables.num_entries, "no state is in use"


Prompts = list[list[int]]


def ask(engine: Engine, prompts: Prompts, count: int, **options: Any) -> list[RequestOutput]:
    """Run prompts that arrive together, and check their tokens."""
    for number, prompt in enumerate(prompts):
        tokens = {"prompt_token_ids": prompt}
        engine.add_request(tokens, greedy(count), request_id=f"{number}", **options)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    found = [outputs[f"{number}"] for number in range(len(prompts))]
    for prompt, output in zip(prompts, found, strict=True):
        assert list(output.outputs[0].token_ids) == greedy_tokens(make_model(), prompt, count)
    return found


def with_tails(shared: list[int], count: int) -> Prompts:
    return [shared + random_tokens(seed, 30) for seed in range(1, count + 1)]


def test_prompts_with_a_common_prefix_compute_little_of_it_again() -> None:
    shared, engine = random_tokens(0, 50), make_engine()
    assert ask(engine, [shared], 1)[0].num_cached_tokens == 0
    for prompt in with_tails(shared, 2):
        [output] = ask(engine, [prompt], 8)
        # The snapshot is at most an interval and a block before the end of the prefix.
        assert 50 - INTERVAL - SIZES["block_size"] <= output.num_cached_tokens <= 50


def test_a_prefix_of_500_tokens_is_found_but_for_64_tokens_and_a_block(monkeypatch) -> None:
    """The usual sizes: blocks of 16 tokens, and states at multiples of 64 tokens."""
    monkeypatch.setattr(state_tables, "STATE_INTERVAL", 64)
    model = RecurrentModel(make_config(max_position_embeddings=1024))
    shared, options = random_tokens(0, 500), {"block_size": 16, "max_model_len": 640}
    engine = Engine(model, **SIZES | options)
    jobs = [
        Job(f"{n}", {"prompt_token_ids": p}, greedy(16), at=40 * n)
        for n, p in enumerate([shared, *with_tails(shared, 2)])
    ]
    found = play(engine, jobs, on_step=lambda _: check_entries(engine))
    cached, uncached = [found[job.name] for job in jobs], []
    for job in jobs:
        engine.reset_prefix_cache()
        uncached.append(play(engine, [job])[job.name])
    for with_cache, without in zip(cached, uncached, strict=True):
        assert with_cache.outputs[0].token_ids == without.outputs[0].token_ids
    assert not any(output.num_cached_tokens for output in (*uncached, cached[0]))
    assert all(500 - 64 - 16 <= output.num_cached_tokens <= 500 for output in cached[1:])


def test_prompts_that_arrive_together_share_the_states_of_their_prefix() -> None:
    outputs = ask(make_engine(), with_tails(random_tokens(0, 50), 3), 4)
    assert [output.num_cached_tokens for output in outputs] == [0, 48, 48]


def test_a_branch_point_is_kept_for_the_third_prompt() -> None:
    """The explanation of the second prompt says that a snapshot was lacking."""
    engine = make_engine()
    outputs = [ask(engine, [p], 1, explain=True)[0] for p in with_tails(random_tokens(0, 50), 3)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 48]
    matches = [str(output.explanation and output.explanation.prefix_match) for output in outputs]
    assert "block 0" in matches[0]
    assert "tokens 0..47 were in the cache" in matches[1] and "in none of them" in matches[1]
    assert "block 12" in matches[2], "the snapshot is where the blocks end"


def test_ngram_drafts_change_no_token() -> None:
    """The tokens repeat earlier tokens, so the drafter finds drafts, and some are right."""
    prompt = random_tokens(0, 7) * 4
    params = greedy(60, logit_bias=dict.fromkeys(range(4), 8.0))
    outputs = []
    for options in ({}, {"num_speculative_tokens": 4}):
        engine = make_engine(**options)
        jobs = [Job(f"{n}", {"prompt_token_ids": prompt[n:]}, params, at=n) for n in range(3)]
        found = play(engine, jobs, on_step=lambda _, engine=engine: check_entries(engine))
        outputs.append([found[job.name].outputs[0].token_ids for job in jobs])
    assert outputs[0] == outputs[1]
    assert 10 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def test_update_params_forgets_all_snapshots() -> None:
    """An unfinished request continues from its tokens with the new weights."""
    engine, prompt = make_engine(), random_tokens(0, 40)
    assert [ask(engine, [prompt], 1)[0].num_cached_tokens for _ in range(2)] == [0, 32]
    engine.add_request({"prompt_token_ids": prompt}, greedy(20), request_id="one")
    outputs = {output.request_id: output for _ in range(3) for output in engine.step()}
    before = list(outputs["one"].outputs[0].token_ids)
    assert 0 < len(before) < 20
    other = RecurrentModel(make_config(), seed=1)
    engine.update_params(other)
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    rest = greedy_tokens(other, prompt + before, 20 - len(before))
    assert list(outputs["one"].outputs[0].token_ids) == before + rest
    engine.update_params(make_model())
    assert ask(engine, [prompt], 8)[0].num_cached_tokens == 0


def test_cache_groups_map_and_metrics_show_the_states() -> None:
    engine = make_engine()
    most = 0

    def look(_: int) -> None:
        nonlocal most
        attention, states = engine.cache_groups
        assert attention.kept == "all" and attention.num_layers == 1
        assert states.kept == "states" and states.num_layers == 2
        assert states.num_blocks == SIZES["max_num_seqs"] + SIZES["num_snapshots"]
        tables = jax.device_get(engine.cache.groups[-1].tables)
        if not engine.core.is_ahead:  # otherwise they are the numbers of the last step
            assert states.num_used == states.num_blocks - int(tables.pool.num_free)
        assert [group.kept for group in snapshot(engine).groups] == ["all", "states"]
        most = max(most, states.num_used)

    prompts = [random_tokens(seed, 30) for seed in range(3)]
    play(
        engine,
        [Job(f"{n}", {"prompt_token_ids": p}, greedy(9)) for n, p in enumerate(prompts)],
        on_step=look,
    )
    assert most >= 3, "each sequence has a state"
    metrics = Metrics("model", {"block_size": engine.block_size}, EngineSnapshot.of(engine))
    lines = [line for line in metrics.text().decode().splitlines() if "usage_of_group{" in line]
    assert [line.split('window="')[1].split('"')[0] for line in lines] == ["all", "states"]


def test_sleep_and_wake_up_keep_the_tokens() -> None:
    engine, prompt = make_engine(), random_tokens(0, 40)
    engine.add_request({"prompt_token_ids": prompt}, greedy(20), request_id="one")
    for _ in range(3):
        engine.step()
    engine.sleep()
    engine.wake_up()
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    assert list(outputs["one"].outputs[0].token_ids) == greedy_tokens(make_model(), prompt, 20)


def test_beam_search_and_prompt_logprobs_match_the_plain_model() -> None:
    llm, prompt = LLM(make_model(), **SIZES), random_tokens(0, 40)
    [found] = llm.beam_search(
        {"prompt_token_ids": prompt}, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    )
    assert len({tuple(each.tokens) for each in found.sequences}) == 3
    for each in found.sequences:
        logprobs = token_logprobs(make_model(), each.tokens)
        assert each.cum_logprob == pytest.approx(sum(logprobs[-6:]), abs=1e-4)
    tokens = {"prompt_token_ids": prompt}
    [output] = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    scores = [
        each[token].logprob
        for token, each in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        if each is not None
    ]
    np.testing.assert_allclose(scores, token_logprobs(make_model(), prompt), atol=1e-4)


@pytest.mark.parametrize("name", ["decode", pytest.param("verify", marks=pytest.mark.slow)])
def test_step_updates_the_states_in_place(name) -> None:
    model, slots = make_model(), np.arange(4, dtype=np.int32)

    def make_state() -> DecodeState:
        cache = model.create_cache(num_slots=4, max_length=64, num_blocks=4096, num_states=65536)
        return DecodeState.create(cache, V)

    state = jax.eval_shape(make_state)
    if name == "decode":
        step, args = functools.partial(decode_steps, max_steps=8), (slots, 8)
    else:
        step, args = verify_steps, (np.zeros((4, 3), np.int32), np.zeros(4, np.int32), slots)
    compiled = jax.jit(step, donate_argnums=1).lower(model, state, *args).compile()
    pools = jax.tree.leaves(state.cache.group_pools)
    num_bytes = sum(x.size * x.dtype.itemsize for x in pools)
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < num_bytes / 100


def test_rollout_matches_the_plain_model() -> None:
    prompts = [random_tokens(1, 9), random_tokens(2, 3)]
    padded = np.array([prompts[0], prompts[1] + [0] * 6], np.int32)
    run = jax.jit(rollout, static_argnames=("max_tokens", "num_samples", "block_size"))
    found = run(
        make_model(), padded, np.array([9, 3], np.int32), max_tokens=7, num_samples=2,
        temperature=0.0, block_size=4,
    )  # fmt: skip
    for row, tokens in enumerate(found.token_ids.tolist()):
        assert tokens == greedy_tokens(make_model(), prompts[row // 2], 7)


# The number of right drafts of a step, as a function of the number of generated tokens.
NUM_RIGHT: dict[str, Callable[[int], int]] = {
    "drafts": lambda count: 4,
    "rejected drafts": lambda count: count % 4,
}


@pytest.mark.parametrize("decoding", ["1", "3", *NUM_RIGHT])
def test_the_next_turn_continues_from_a_state_in_the_answer(decoding, monkeypatch) -> None:
    """The states of an answer are kept at multiples of the interval, although no chunk ends there.

    The second prompt has the first prompt, its answer, and new tokens. The number of steps of a
    dispatch, and verification of drafts, change nothing.
    """
    options: dict[str, Any] = {"num_speculative_tokens": 4}
    if decoding not in NUM_RIGHT:
        options = {"steps_per_dispatch": int(decoding)}
    engine, prompt = make_engine(**options), random_tokens(30, 13)
    for count, cached in ((30, 0), (9, 40)):
        if decoding in NUM_RIGHT:
            expected = {"0": greedy_tokens(make_model(), prompt, count)}
            has_wrong = decoding == "rejected drafts"
            draft_known_tokens(monkeypatch, expected, NUM_RIGHT[decoding], has_wrong)
        [output] = ask(engine, [prompt], count)
        # 13 + 30 tokens, of which the last was never an input: the last multiple of 8 is 40.
        assert output.num_cached_tokens == cached
        prompt = prompt + list(output.outputs[0].token_ids) + random_tokens(31, 5)
    assert (engine.stats.num_accepted_tokens > 10) == (decoding in NUM_RIGHT)
    if decoding == "drafts":
        # Drafts after the next multiple of the interval, or after the last token, do not count.
        assert engine.stats.num_draft_tokens == engine.stats.num_accepted_tokens
    check_entries(engine)
