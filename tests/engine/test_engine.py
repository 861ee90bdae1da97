"""`Engine`: adding and ending requests, prefix caching, new weights, and recovery from failures."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Engine, SamplingParams
from tests.support.tiny_model import BOS, SIZES
from tests.support.workload import check_empty, finish
from tests.support.workload import complete as complete_request

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)
LONG = {"prompt_token_ids": [BOS, *range(5, 22)]}  # 18 tokens: 4 full blocks and 2 tokens
OTHER = {"prompt_token_ids": [BOS, *range(25, 32)]}


@pytest.fixture
def engine(tiny_model) -> Engine:
    return Engine(tiny_model, **SIZES)


def complete(engine: Engine, prompt, params=GREEDY, **options):
    return complete_request(engine, prompt, params, **options)


def replace_program(engine: Engine, monkeypatch, name: str, function) -> None:
    executor = engine.core.executor
    program = dataclasses.replace(getattr(executor.programs, name), jitted=function)
    monkeypatch.setattr(executor, "programs", executor.programs._replace(**{name: program}))


# Adding and ending requests


def test_step_frees_requests_that_have_ended(engine, no_collector) -> None:
    ids = [engine.add_request(prompt, GREEDY) for prompt in (LONG, OTHER)]
    ids.append(engine.add_request(OTHER, GREEDY, timeout=1e-9))
    requests = [engine.get_request(request_id) for request_id in ids]
    engine.step()
    engine.abort(ids[1])
    finish(engine)
    assert all(request.is_finished for request in requests)
    freed = [weakref.ref(x) for request in requests for x in (request, *request.sequences)]
    assert all(reference() is not None for reference in freed)
    del requests
    assert [reference() for reference in freed] == [None] * 6


def test_step_returns_a_request_that_failed(engine, no_collector, monkeypatch) -> None:
    def fail(*_):
        raise FloatingPointError("not a number")

    monkeypatch.setattr(engine.core.postprocessor, "append_tokens", fail)
    completions = complete(engine, LONG, dataclasses.replace(SEEDED, n=4)).outputs
    assert [c.finish_reason for c in completions] == ["error"] * 4
    check_empty(engine)


def test_add_request_joins_a_running_batch(engine) -> None:
    alone = [complete(engine, prompt).outputs[0].token_ids for prompt in (LONG, OTHER)]
    first = engine.add_request(LONG, dataclasses.replace(GREEDY, max_tokens=30))
    engine.step()
    second = engine.add_request(OTHER, GREEDY, request_id="second")
    assert second == "second"
    tokens = finish(engine)
    assert tokens[first][:12] == alone[0]
    assert tokens[second] == alone[1]
    assert engine.step() == []


def test_abort_ends_only_its_request(engine) -> None:
    expected = complete(engine, OTHER, dataclasses.replace(SEEDED, max_tokens=20))
    first = engine.add_request(LONG, dataclasses.replace(GREEDY, max_tokens=30, n=2))
    second = engine.add_request(OTHER, dataclasses.replace(SEEDED, max_tokens=20))
    waiting = engine.add_request(LONG, GREEDY)
    engine.step()
    engine.step()
    aborted = engine.abort(first)
    assert aborted.finished and len(aborted.outputs[0].token_ids) > 0
    assert [c.finish_reason for c in aborted.outputs] == ["abort", "abort"]
    assert engine.abort(waiting).finished
    assert engine.abort(first) is None and engine.abort("nobody") is None
    assert finish(engine) == {second: expected.outputs[0].token_ids}


def test_add_request_timeout_ends_the_request(engine) -> None:
    engine.add_request(LONG, dataclasses.replace(GREEDY, max_tokens=2))
    late = engine.add_request(OTHER, GREEDY, timeout=1e-9)
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs[late].finished
    assert outputs[late].outputs[0].finish_reason == "abort"
    assert outputs[late].outputs[0].stop_reason == "deadline"
    finish(engine)
    in_time = complete(engine, OTHER, GREEDY, timeout=1e9)
    assert in_time.outputs[0].finish_reason == "length"


def test_add_request_priority_decides_the_order(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES, steps_per_dispatch=2)
    # This request takes all slots.
    four = dataclasses.replace(GREEDY, n=SIZES["max_num_seqs"])
    expected = {
        name: complete(engine, prompt, params).outputs[0].token_ids
        for name, prompt, params in (("low", LONG, four), ("high", OTHER, GREEDY))
    }
    engine.add_request(LONG, four, request_id="low", priority=1)
    while sum(sequence.slot is not None for sequence in engine.sequences) < 4:
        engine.step()
    num_preemptions = engine.stats.num_preemptions
    engine.add_request(OTHER, GREEDY, request_id="high", priority=0)
    order = []
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                order.append(output.request_id)
                assert output.outputs[0].token_ids == expected[output.request_id]
    assert order == ["high", "low"]
    assert engine.stats.num_preemptions > num_preemptions


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (LONG, {"request_id": "taken"}, "request_id must be unique, got 'taken'"),
        (LONG, {"timeout": 0}, "timeout must be seconds > 0"),
        (LONG, {"priority": 0.5}, "priority must be an integer, got 0.5"),
        ("text", {}, "tokenizer for text prompts"),
        ({"prompt_token_ids": [1] * 64}, {}, "at most 63 tokens"),
    ],
)
def test_add_request_changes_nothing_if_it_raises(engine, prompt, options, message) -> None:
    engine.add_request(OTHER, GREEDY, request_id="taken")
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, GREEDY, **options)
    assert list(finish(engine)) == ["taken"]
    assert engine.add_request(OTHER, GREEDY) == "1"


def test_add_request_rejects_requests_larger_than_the_pool(tiny_model) -> None:
    engine = Engine(tiny_model, **{**SIZES, "num_blocks": 12, "max_num_seqs": 2})
    match = "pool of 12 blocks of 4 tokens, got 8 .* 42 tokens to generate, which need 13"
    with pytest.raises(ValueError, match=match):
        engine.add_request(OTHER, dataclasses.replace(GREEDY, max_tokens=42))
    assert not engine.has_unfinished
    engine.add_request(OTHER, dataclasses.replace(GREEDY, max_tokens=41))


# Prefix caching and shared blocks


def test_prefix_cache_finds_a_repeated_prompt(engine) -> None:
    first, second = complete(engine, LONG), complete(engine, LONG)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert second.outputs == first.outputs
    assert engine.stats.num_cached_tokens == 16
    assert engine.stats.num_queried_tokens == 2 * 17
    engine.reset_prefix_cache()
    assert complete(engine, LONG).num_cached_tokens == 0


def test_prefix_cache_never_covers_the_last_prompt_token(engine) -> None:
    prompt = {"prompt_token_ids": LONG["prompt_token_ids"][:16]}
    first, second = complete(engine, prompt), complete(engine, prompt)
    assert second.num_cached_tokens == 12
    assert second.outputs == first.outputs


def test_attach_looks_up_only_published_blocks(engine, monkeypatch) -> None:
    counts, look_up = [], engine.core.executor.programs.attach.jitted

    def counting(weights, state, slot, digests, token_ids, num_blocks):
        counts.append(int(num_blocks))
        return look_up(weights, state, slot, digests, token_ids, num_blocks)

    replace_program(engine, monkeypatch, "attach", counting)
    complete(engine, LONG)
    complete(engine, OTHER)
    assert counts == []
    begins_alike = {"prompt_token_ids": [*LONG["prompt_token_ids"][:9], *range(30, 20, -1)]}
    assert complete(engine, begins_alike).num_cached_tokens == 8
    assert counts == [2]
    engine.reset_prefix_cache()
    complete(engine, LONG)
    assert counts == [2]


def test_slots_forget_digests_of_evicted_blocks(engine, monkeypatch) -> None:
    monkeypatch.setattr("paged_jax.runner.runner._MAX_PUBLISHED", 1)
    slots = engine.core.runner
    for token_id in range(5, 11):
        complete(engine, {"prompt_token_ids": [BOS, *[token_id] * 17]})
        assert len(slots._published) <= engine.num_blocks + 7  # and the blocks of one request
        pool = engine.cache.tables.pool
        cached = np.asarray(pool.digests)[np.asarray(pool.is_cached)]
        assert {words.tobytes() for words in cached} <= slots._published
    # The latest prompt is still cached, the first prompt is not.
    assert complete(engine, {"prompt_token_ids": [BOS, *[10] * 17]}).num_cached_tokens == 16
    assert complete(engine, {"prompt_token_ids": [BOS, *[5] * 17]}).num_cached_tokens == 0


def test_cache_salt_separates_tenants(engine) -> None:
    def num_cached(**salt):
        params = dataclasses.replace(GREEDY, max_tokens=1)  # all requests fit the pool
        return complete(engine, {**LONG, **salt}, params).num_cached_tokens

    assert num_cached() == 0
    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="b") == 0
    assert num_cached(cache_salt="a") == 16
    assert num_cached() == 16


def test_prefix_cache_finds_generated_tokens(engine) -> None:
    first = complete(engine, LONG)
    spoken = [*first.prompt_token_ids, *first.outputs[0].token_ids]  # 30 tokens, 29 in the cache
    second = complete(engine, {"prompt_token_ids": [*spoken, 5, 6, 7]})
    assert second.num_cached_tokens == 28
    fresh = complete(Engine(engine.model, **SIZES), {"prompt_token_ids": [*spoken, 5, 6, 7]})
    assert second.outputs[0].token_ids == fresh.outputs[0].token_ids


def test_equal_prompts_in_a_batch_are_computed_once(engine) -> None:
    expected = complete(engine, LONG, SEEDED).outputs[0].token_ids
    engine.reset_prefix_cache()
    before = engine.stats.num_prompt_tokens
    ids = [engine.add_request(LONG, SEEDED) for _ in range(3)]
    assert finish(engine) == dict.fromkeys(ids, expected)
    # The first request computes 18 tokens, the others only the 2 after the last full block.
    assert engine.stats.num_prompt_tokens - before == 18 + 2 + 2


def test_enable_prefix_caching_false_caches_nothing(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES, enable_prefix_caching=False)
    assert complete(engine, LONG).outputs == complete(engine, LONG).outputs
    assert engine.stats.num_queried_tokens == engine.stats.num_cached_tokens == 0


def test_reset_prefix_cache_keeps_new_blocks_of_running_requests(engine) -> None:
    request_id = engine.add_request(LONG, GREEDY)
    engine.step()
    engine.step()
    [sequence] = engine.sequences
    assert sequence.num_computed > 16, "the blocks of its prompt are published"
    engine.reset_prefix_cache()
    assert finish(engine).keys() == {request_id}
    assert complete(engine, LONG).num_cached_tokens == 16


def test_stats_sharing_counts_blocks_that_samples_share(engine) -> None:
    complete(engine, LONG, dataclasses.replace(SEEDED, n=4))
    assert 0.3 < engine.stats.sharing < 0.8
    assert Engine(engine.model, **SIZES).stats.sharing == 0


def test_stats_sharing_is_zero_for_different_prompts(tiny_model) -> None:
    """Sharing is zero in every step, also in steps that are queued ahead of finished requests."""
    engine = Engine(tiny_model, **SIZES)
    for number in range(6):
        prompt = {"prompt_token_ids": [BOS, *range(5 + number, 9 + 2 * number)]}
        params = SamplingParams(max_tokens=4 + 5 * number, ignore_eos=True)
        engine.add_request(prompt, params)
    while engine.has_unfinished:
        engine.step()
        assert engine.stats.sharing == 0


# Failures


@pytest.mark.parametrize("part", ["prefill", "decode", "fork", "publish"])
def test_step_that_fails_loses_no_request(engine, monkeypatch, part) -> None:
    """The step fails in prefill and again during decoding, when penalties count earlier tokens."""
    params = dataclasses.replace(
        SEEDED, n=2, max_tokens=20, logit_bias={9: 8.0, 10: 7.0}, frequency_penalty=1.0
    )
    requests = [engine.add_request(prompt, params) for prompt in (LONG, OTHER, LONG)]
    expected = finish(engine)
    runner = engine.core.runner
    original, failures = getattr(runner, part), []

    def fail(*args, **kwargs):
        result = original(*args, **kwargs)
        if not failures or any(s.num_prompt_tokens < len(s.token_ids) for s in engine.sequences):
            failures.append(part)
            raise MemoryError
        return result

    again = [engine.add_request(prompt, params) for prompt in (LONG, OTHER, LONG)]
    with monkeypatch.context() as patch:
        patch.setattr(runner, part, fail)
        for _ in range(2):
            with pytest.raises(MemoryError):
                while engine.has_unfinished:
                    engine.step()
    assert list(finish(engine).values()) == list(expected.values()) and len(again) == len(requests)


def test_step_that_fails_after_a_finished_request_keeps_it(engine, monkeypatch) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=3)
    expected = [complete(engine, prompt, params).outputs[0].token_ids for prompt in (OTHER, LONG)]
    first = engine.add_request(OTHER, params)
    second = engine.add_request(LONG, params)
    original, finished = engine.core.postprocessor.take_row, []

    def fail(sequence, *args):
        if sequence.request.request_id == second:
            raise KeyboardInterrupt
        original(sequence, *args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.postprocessor, "take_row", fail)
        with pytest.raises(KeyboardInterrupt):
            while engine.has_unfinished:
                finished += [o for o in engine.step() if o.finished]
    while engine.has_unfinished:
        finished += [o for o in engine.step() if o.finished]
    outputs = {output.request_id: output.outputs[0].token_ids for output in finished}
    assert len(finished) == 2 and [outputs[first], outputs[second]] == expected
    check_empty(engine)


def test_request_id_is_free_after_a_step_that_was_cut_short(engine, monkeypatch) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=3)
    expected = [complete(engine, prompt, params).outputs[0].token_ids for prompt in (OTHER, LONG)]
    original, finished = engine.core.postprocessor.take_row, []

    def fail(sequence, *args):
        original(sequence, *args)
        if sequence.is_finished:
            raise KeyboardInterrupt

    engine.add_request(OTHER, params, request_id="again")
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.postprocessor, "take_row", fail)
        with pytest.raises(KeyboardInterrupt):
            while engine.has_unfinished:
                engine.step()
    engine.add_request(LONG, params, request_id="again")
    while engine.has_unfinished:
        finished += [o for o in engine.step() if o.finished]
    assert [output.outputs[0].token_ids for output in finished] == expected
    check_empty(engine)


def test_recover_may_be_interrupted(engine, monkeypatch) -> None:
    params = dataclasses.replace(SEEDED, max_tokens=20)
    expected = complete(engine, LONG, params).outputs[0].token_ids
    request_id = engine.add_request(LONG, params)
    engine.step()
    engine.step()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.runner, "decode", interrupt)
        patch.setattr(engine.core.scheduler, "restart", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert finish(engine) == {request_id: expected}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"max_tokens": 4}}, "params must be SamplingParams"),
        ({"request_id": ["a"]}, "request_id must be a text"),
        ({"arrival_time": "x"}, "arrival_time must be seconds or None, got 'x'"),
    ],
)
def test_add_request_checks_types(engine, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add_request(OTHER, **options)
    assert not engine.has_unfinished


def test_next_id_skips_taken_ids(engine) -> None:
    assert engine.add_request(OTHER, GREEDY, request_id="1") == "1"
    assert engine.add_request(OTHER, GREEDY) == "2"
    finish(engine)


def test_warmup_requires_an_idle_engine(engine) -> None:
    engine.add_request(LONG, GREEDY)
    with pytest.raises(RuntimeError, match="no request may be unfinished, got 1"):
        engine.warmup()
    finish(engine)


@pytest.mark.slow
def test_tokens_do_not_depend_on_jax_settings(tiny_model) -> None:
    # Each prompt is one chunk, so all samples start together and need one decode program.
    prompt = {"prompt_token_ids": LONG["prompt_token_ids"][:16]}
    params = dataclasses.replace(SEEDED, top_k=8, top_p=0.9, n=2)

    def generate() -> dict[str, list[int]]:
        engine = Engine(tiny_model, **SIZES)
        engine.add_request(OTHER, GREEDY)
        engine.add_request(prompt, params)
        tokens = finish(engine)
        engine.add_request(prompt, params)
        again = finish(engine)
        assert engine.stats.num_cached_tokens == 12
        return tokens | again

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        tokens = generate()
    assert tokens == generate()


@pytest.mark.parametrize(("program", "num_before"), [("prefill", 0), ("fork", 1)])
def test_step_raises_if_blocks_do_not_suffice(engine, monkeypatch, program, num_before) -> None:
    """The error is raised before the step returns, and no request is lost."""
    wanted = complete(engine, LONG, dataclasses.replace(SEEDED, n=2)).outputs
    engine.reset_prefix_cache()
    run = getattr(engine.core.executor.programs, program).jitted

    def fail(*args, **static):
        return run(*args, **static)[0], jnp.array(False)

    engine.add_request(LONG, dataclasses.replace(SEEDED, n=2))
    replace_program(engine, monkeypatch, program, fail)
    for _ in range(num_before):
        engine.step()
    with pytest.raises(RuntimeError, match="must have enough free blocks"):
        engine.step()
    monkeypatch.undo()
    outputs = []
    while engine.has_unfinished:
        outputs = engine.step()
    assert [o.token_ids for o in outputs[0].outputs] == [o.token_ids for o in wanted]
    check_empty(engine)


def test_num_held_counts_blocks_that_no_other_sample_holds(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES, steps_per_dispatch=1)
    params = SamplingParams(n=2, temperature=1, seed=0, max_tokens=8, ignore_eos=True)
    engine.add_request({"prompt_token_ids": [1, 5, 6, 7, 8, 9, 10, 11, 12, 13]}, params)
    while sum(sequence.slot is not None for sequence in engine.sequences) < 2:
        engine.step()
    slots, both = engine.core.runner, engine.sequences
    num_used = engine.num_blocks - slots.num_free
    alone = [slots.num_held([sequence]) for sequence in both]
    assert slots.num_held(both) == num_used > sum(alone) > 0
