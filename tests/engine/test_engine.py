"""`Engine`: requests that come and go, what they share, and what survives when something fails."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import Engine, Llama, SamplingParams
from tests.support.tiny_model import BOS, SIZES
from tests.support.workload import check_empty, finish

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)
LONG = {"prompt_token_ids": [BOS, *range(5, 22)]}  # 18 tokens: 4 full blocks and 2 tokens
OTHER = {"prompt_token_ids": [BOS, *range(25, 32)]}


@pytest.fixture
def engine(tiny_model) -> Engine:
    return Engine(tiny_model, **SIZES)


def complete(engine: Engine, prompt, params=GREEDY, **options):
    """The output of one request, run to its end beside whatever else there is."""
    request_id = engine.add_request(prompt, params, **options)
    while True:
        for output in engine.step():
            if output.request_id == request_id and output.finished:
                return output


def replace_program(engine: Engine, monkeypatch, name: str, function) -> None:
    executor = engine.core.executor
    program = dataclasses.replace(getattr(executor.programs, name), jitted=function)
    monkeypatch.setattr(executor, "programs", executor.programs._replace(**{name: program}))


# Coming and going


def test_requests_are_freed_as_soon_as_they_have_ended(engine, no_collector) -> None:
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


def test_a_request_that_fails_is_returned_though_only_the_engine_held_it(
    engine, no_collector, monkeypatch
) -> None:
    def fail(*_):
        raise FloatingPointError("not a number")

    monkeypatch.setattr(engine.core.postprocessor, "append_tokens", fail)
    completions = complete(engine, LONG, dataclasses.replace(SEEDED, n=4)).outputs
    assert [c.finish_reason for c in completions] == ["error"] * 4
    check_empty(engine)


def test_requests_join_a_running_batch(engine) -> None:
    alone = [complete(engine, prompt).outputs[0].token_ids for prompt in (LONG, OTHER)]
    first = engine.add_request(LONG, dataclasses.replace(GREEDY, max_tokens=30))
    engine.step()
    second = engine.add_request(OTHER, GREEDY, request_id="second")
    assert second == "second"
    tokens = finish(engine)
    assert tokens[first][:12] == alone[0]
    assert tokens[second] == alone[1]
    assert engine.step() == []


def test_abort_ends_one_request_alone(engine) -> None:
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


def test_a_deadline_ends_a_request_where_it_stands(engine) -> None:
    engine.add_request(LONG, dataclasses.replace(GREEDY, max_tokens=2))
    late = engine.add_request(OTHER, GREEDY, timeout=1e-9)
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs[late].finished
    assert outputs[late].outputs[0].finish_reason == "abort"
    assert outputs[late].outputs[0].stop_reason == "deadline"
    finish(engine)
    in_time = complete(engine, OTHER, GREEDY, timeout=1e9)
    assert in_time.outputs[0].finish_reason == "length"


def test_better_priorities_go_first_and_lose_nobody(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES, steps_per_dispatch=2)
    # It takes all slots.
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
def test_a_refused_request_changes_nothing(engine, prompt, options, message) -> None:
    engine.add_request(OTHER, GREEDY, request_id="taken")
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, GREEDY, **options)
    assert list(finish(engine)) == ["taken"]
    assert engine.add_request(OTHER, GREEDY) == "1"


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers(tiny_model) -> None:
    engine = Engine(tiny_model, **{**SIZES, "num_blocks": 12, "max_num_seqs": 2})
    match = "pool of 12 blocks of 4 tokens, got 8 .* 42 new .* need 13"
    with pytest.raises(ValueError, match=match):
        engine.add_request(OTHER, dataclasses.replace(GREEDY, max_tokens=42))
    assert not engine.has_unfinished
    engine.add_request(OTHER, dataclasses.replace(GREEDY, max_tokens=41))


# What requests share


def test_a_prompt_is_found_again(engine) -> None:
    first, second = complete(engine, LONG), complete(engine, LONG)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert second.outputs == first.outputs
    assert engine.stats.num_cached_tokens == 16
    assert engine.stats.num_queried_tokens == 2 * 17
    engine.reset_prefix_cache()
    assert complete(engine, LONG).num_cached_tokens == 0


def test_the_last_token_is_always_computed(engine) -> None:
    prompt = {"prompt_token_ids": LONG["prompt_token_ids"][:16]}
    first, second = complete(engine, prompt), complete(engine, prompt)
    assert second.num_cached_tokens == 12
    assert second.outputs == first.outputs


def test_the_device_looks_up_only_what_was_published(engine, monkeypatch) -> None:
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


def test_the_host_forgets_digests_that_the_device_has_forgotten(engine, monkeypatch) -> None:
    monkeypatch.setattr("paged_jax.runner.slots._MAX_PUBLISHED", 1)
    slots = engine.core.runner.slots
    for token_id in range(5, 11):
        complete(engine, {"prompt_token_ids": [BOS, *[token_id] * 17]})
        assert len(slots._published) <= engine.num_blocks + 7  # those of one request more
        pool = engine.cache.tables.pool
        cached = np.asarray(pool.digests)[np.asarray(pool.is_cached)]
        assert {words.tobytes() for words in cached} <= slots._published
    # The latest prompt is still there, the first one is not.
    assert complete(engine, {"prompt_token_ids": [BOS, *[10] * 17]}).num_cached_tokens == 16
    assert complete(engine, {"prompt_token_ids": [BOS, *[5] * 17]}).num_cached_tokens == 0


def test_salts_keep_tenants_apart(engine) -> None:
    def num_cached(**salt):
        params = dataclasses.replace(GREEDY, max_tokens=1)  # all of them fit the pool
        return complete(engine, {**LONG, **salt}, params).num_cached_tokens

    assert num_cached() == 0
    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="b") == 0
    assert num_cached(cache_salt="a") == 16
    assert num_cached() == 16


def test_a_conversation_finds_what_was_generated(engine) -> None:
    first = complete(engine, LONG)
    spoken = [*first.prompt_token_ids, *first.outputs[0].token_ids]  # 30 tokens, 29 in the cache
    second = complete(engine, {"prompt_token_ids": [*spoken, 5, 6, 7]})
    assert second.num_cached_tokens == 28
    fresh = complete(Engine(engine.model, **SIZES), {"prompt_token_ids": [*spoken, 5, 6, 7]})
    assert second.outputs[0].token_ids == fresh.outputs[0].token_ids


def test_equal_prompts_of_one_batch_are_computed_once(engine) -> None:
    expected = complete(engine, LONG, SEEDED).outputs[0].token_ids
    engine.reset_prefix_cache()
    before = engine.stats.num_prompt_tokens
    ids = [engine.add_request(LONG, SEEDED) for _ in range(3)]
    assert finish(engine) == dict.fromkeys(ids, expected)
    # The first computes all 18; the others the two tokens after the last full block.
    assert engine.stats.num_prompt_tokens - before == 18 + 2 + 2


def test_prefix_caching_can_be_turned_off(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES, enable_prefix_caching=False)
    assert complete(engine, LONG).outputs == complete(engine, LONG).outputs
    assert engine.stats.num_queried_tokens == engine.stats.num_cached_tokens == 0


def test_blocks_of_those_that_run_are_found_after_a_reset(engine) -> None:
    request_id = engine.add_request(LONG, GREEDY)
    engine.step()
    engine.step()
    [sequence] = engine.sequences
    assert sequence.num_computed > 16, "its prompt could be found"
    engine.reset_prefix_cache()
    assert finish(engine).keys() == {request_id}
    assert complete(engine, LONG).num_cached_tokens == 16


def test_samples_share_blocks_and_the_savings_are_counted(engine) -> None:
    complete(engine, LONG, dataclasses.replace(SEEDED, n=4))
    assert 0.3 < engine.stats.sharing < 0.8
    assert Engine(engine.model, **SIZES).stats.sharing == 0


def test_requests_with_nothing_in_common_save_no_blocks(tiny_model) -> None:
    """In no step, those that run ahead of what is known to have ended included."""
    engine = Engine(tiny_model, **SIZES)
    for number in range(6):
        prompt = {"prompt_token_ids": [BOS, *range(5 + number, 9 + 2 * number)]}
        params = SamplingParams(max_tokens=4 + 5 * number, ignore_eos=True)
        engine.add_request(prompt, params)
    while engine.has_unfinished:
        engine.step()
        assert engine.stats.sharing == 0


# Other weights


def noisy(model: Llama) -> Llama:
    other = nnx.clone(model)
    state = jax.tree.map(
        # On the host: on the device each shape would take programs of its own.
        lambda x: jnp.asarray(
            np.asarray(x)
            + np.float32(0.1) * np.sin(np.arange(x.size, dtype=x.dtype)).reshape(x.shape)
        ),
        nnx.state(other),
    )
    nnx.update(other, state)
    return other


def test_update_params_takes_effect_and_forgets_what_was_cached(engine) -> None:
    old = complete(engine, LONG)
    other = noisy(engine.model)
    for params in (other, nnx.state(other)):
        engine.update_params(params)
        new = complete(engine, LONG)
        assert new.num_cached_tokens == 0
        assert new.outputs == complete(Engine(other, **SIZES), LONG).outputs
        assert new.outputs[0].token_ids != old.outputs[0].token_ids


def test_update_params_copies(engine) -> None:
    other = noisy(engine.model)
    engine.update_params(other)
    expected = complete(engine, LONG).outputs
    for x in jax.tree.leaves(nnx.state(other)):
        x.delete()
    assert complete(engine, LONG).outputs == expected


def test_update_params_amid_requests_keeps_their_tokens(engine) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=24)
    request_id = engine.add_request(LONG, params)
    engine.step()
    [before] = engine.step()
    tokens = before.outputs[0].token_ids
    assert 0 < len(tokens) < 24
    other = noisy(engine.model)
    engine.update_params(other)
    after = finish(engine)[request_id]
    prompt = {"prompt_token_ids": [*LONG["prompt_token_ids"], *tokens]}
    rest = dataclasses.replace(params, max_tokens=24 - len(tokens))
    assert after == tokens + complete(Engine(other, **SIZES), prompt, rest).outputs[0].token_ids


def test_the_model_is_that_of_the_current_weights(engine) -> None:
    other = noisy(engine.model)
    engine.update_params(other)
    ours, theirs = (jax.tree.leaves(nnx.state(m)) for m in (engine.model, other))
    assert all((x == y).all() for x, y in zip(ours, theirs, strict=True))
    with pytest.raises(ValueError, match="a model, its nnx.state, or a list .* got dict"):
        engine.update_params({"embed_tokens": theirs[0]})


def test_update_params_refuses_other_shapes(engine) -> None:
    expected = complete(engine, LONG).outputs
    leaves = jax.tree.leaves(nnx.state(engine.model))
    with pytest.raises(ValueError, match=r"must be \d+ arrays .* got \d+\."):
        engine.update_params(leaves[:-1])
    with pytest.raises(ValueError, match=r"and \(3,\) for"):
        engine.update_params([*leaves[:-1], jnp.zeros(3)])
    assert complete(engine, LONG).outputs == expected


# When something fails


@pytest.mark.parametrize("part", ["prefill", "decode", "fork", "publish"])
def test_a_failed_step_loses_no_request(engine, monkeypatch, part) -> None:
    """Neither at once nor later, where penalties count the tokens that there are already."""
    params = dataclasses.replace(
        SEEDED, n=2, max_tokens=20, logit_bias={9: 8.0, 10: 7.0}, frequency_penalty=1.0
    )
    requests = [engine.add_request(prompt, params) for prompt in (LONG, OTHER, LONG)]
    expected = finish(engine)
    runner = engine.core.runner
    owner = runner if hasattr(runner, part) else runner.slots
    original, failures = getattr(owner, part), []

    def fail(*args, **kwargs):
        result = original(*args, **kwargs)
        if not failures or any(s.num_prompt_tokens < len(s.token_ids) for s in engine.sequences):
            failures.append(part)
            raise MemoryError
        return result

    again = [engine.add_request(prompt, params) for prompt in (LONG, OTHER, LONG)]
    with monkeypatch.context() as patch:
        patch.setattr(owner, part, fail)
        for _ in range(2):
            with pytest.raises(MemoryError):
                while engine.has_unfinished:
                    engine.step()
    assert list(finish(engine).values()) == list(expected.values()) and len(again) == len(requests)


def test_a_failure_after_a_request_has_finished_loses_it_not(engine, monkeypatch) -> None:
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


def test_an_id_may_be_taken_again_after_a_step_that_was_cut_short(engine, monkeypatch) -> None:
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


def test_recovery_may_be_interrupted_too(engine, monkeypatch) -> None:
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
def test_types_of_arguments_are_checked(engine, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add_request(OTHER, **options)
    assert not engine.has_unfinished


def test_automatic_ids_step_aside(engine) -> None:
    assert engine.add_request(OTHER, GREEDY, request_id="1") == "1"
    assert engine.add_request(OTHER, GREEDY) == "2"
    finish(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 2}, "at least max_num_seqs = 4.* got 2"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens must be a positive .* got None"),
        (
            {"num_speculative_tokens": None},
            "num_speculative_tokens must be .* at least 0, got None",
        ),
        ({"preemption": "drop"}, "preemption must be one of auto, recompute, swap, got 'drop'"),
        ({"seed": -1}, "seed must be an integer in 0..2\\*\\*63 - 1, got -1"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"swap_space": "4"}, "swap_space must be a finite number of GiB, at least 0, got '4'"),
        ({"swap_space": float("nan")}, "swap_space must be a finite"),
        ({"swap_space": -1}, "swap_space must be .* got -1"),
        ({"on_compile": 3}, "on_compile must be a function or None, got 3"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"cascade_attention": 1}, "cascade_attention must be True or False, got 1"),
        ({"memory_fraction": True}, "memory_fraction must be above 0 and at most 1, got True"),
        ({"memory_fraction": "a"}, "memory_fraction must be above 0 and at most 1, got 'a'"),
    ],
)
def test_bad_options_are_refused(tiny_model, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model, **SIZES, **options)


def test_unknown_arguments_are_refused_with_a_guess(tiny_model) -> None:
    guesses = {"gpu_memory_utilization": "memory_fraction", "num_block": "num_blocks"}
    for name, meant in guesses.items():
        with pytest.raises(TypeError, match=f"Engine: {name} is no argument. Did you mean {meant}"):
            Engine(tiny_model, **{name: 1})
    with pytest.raises(TypeError, match="enforce_eager is no argument.$"):
        Engine(tiny_model, **{"enforce_eager": True})


def test_warmup_waits_for_nobody(engine) -> None:
    engine.add_request(LONG, GREEDY)
    with pytest.raises(RuntimeError, match="no request may be unfinished, got 1"):
        engine.warmup()
    finish(engine)


# The type of the cache


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [
        ("auto", jnp.float32),
        ("float32", jnp.float32),
        ("bfloat16", jnp.bfloat16),
        ("float16", jnp.float16),
        ("int8", jnp.int8),
        ("fp8", jnp.float8_e4m3fn),
    ],
)
def test_kv_dtype_is_the_type_of_the_pools(tiny_model, kv_dtype, dtype) -> None:
    cache = Engine(tiny_model, **SIZES, kv_dtype=kv_dtype).cache
    assert cache.k.dtype == cache.v.dtype == dtype


@pytest.mark.slow
def test_a_narrow_cache_changes_log_probabilities_a_little(tiny_model, engine) -> None:
    narrow = Engine(tiny_model, **SIZES, kv_dtype="int8")
    params = dataclasses.replace(GREEDY, max_tokens=1)
    exact, rough = (complete(e, LONG, params).outputs[0] for e in (engine, narrow))
    assert rough.cumulative_logprob == pytest.approx(exact.cumulative_logprob, abs=0.3)
    check_empty(narrow)


def test_unknown_kv_dtypes_are_refused(tiny_model) -> None:
    with pytest.raises(ValueError, match="kv_dtype must be one of auto, float32.*got 'int4'"):
        Engine(tiny_model, **SIZES, kv_dtype="int4")


@pytest.mark.slow
def test_settings_of_jax_change_no_token(tiny_model) -> None:
    # In one chunk each, so that all samples begin at once, with one program of decoding.
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
def test_blocks_that_do_not_suffice_are_noticed(engine, monkeypatch, program, num_before) -> None:
    """Before the step returns, and without losing a request."""
    wanted = complete(engine, LONG, dataclasses.replace(SEEDED, n=2)).outputs
    engine.reset_prefix_cache()
    run = getattr(engine.core.executor.programs, program).jitted

    def fail(*args, **static):
        return run(*args, **static)[0], jnp.array(False)

    engine.add_request(LONG, dataclasses.replace(SEEDED, n=2))
    replace_program(engine, monkeypatch, program, fail)
    for _ in range(num_before):
        engine.step()
    with pytest.raises(RuntimeError, match="blocks must suffice"):
        engine.step()
    monkeypatch.undo()
    outputs = []
    while engine.has_unfinished:
        outputs = engine.step()
    assert [o.token_ids for o in outputs[0].outputs] == [o.token_ids for o in wanted]
    check_empty(engine)


def test_blocks_that_nobody_else_holds_are_counted(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES, steps_per_dispatch=1)
    params = SamplingParams(n=2, temperature=1, seed=0, max_tokens=8, ignore_eos=True)
    engine.add_request({"prompt_token_ids": [1, 5, 6, 7, 8, 9, 10, 11, 12, 13]}, params)
    while sum(sequence.slot is not None for sequence in engine.sequences) < 2:
        engine.step()
    slots, both = engine.core.runner.slots, engine.sequences
    num_used = engine.num_blocks - slots.num_free
    alone = [slots.num_held([sequence]) for sequence in both]
    assert slots.num_held(both) == num_used > sum(alone) > 0
