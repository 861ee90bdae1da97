"""Lookahead: a step is queued before the tokens of the last step are read; outputs stay the same.

On CPUs, a call of a program returns immediately. On GPUs, it waits for the program's loop, so
another thread makes it. Both ways are tested.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paged_jax import Engine, SamplingParams, Tokenizer
from tests.support.tiny_model import BOS, CONFIG, EOS, SIZES
from tests.support.workload import Job, check_empty, finish, play

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=20, ignore_eos=True)
LONG = {"prompt_token_ids": [BOS, *range(5, 22)]}
OTHER = {"prompt_token_ids": [BOS, *range(25, 32)]}
WAYS = ["after one another", "queued", "called by a thread"]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


@pytest.fixture
def make_engine(tiny_model, tokenizer) -> Callable[..., Engine]:
    def make(way: str = WAYS[1], **options: Any) -> Engine:
        engine = Engine(tiny_model, tokenizer=tokenizer, **{**SIZES, **options})
        engine.core.scheduler.lookahead.is_used = way != WAYS[0]
        engine.core.executor.calls_wait = way == WAYS[2]
        return engine

    return make


def jobs(count: int = 12) -> list[Job]:
    """Return requests that end in all ways: stop tokens, stop strings, lengths and aborts."""
    random, letters = np.random.default_rng(3), np.arange(3, CONFIG.vocab_size)
    result = []
    for number in range(count):
        kind = number % 4
        params = SamplingParams(
            temperature=float(random.choice([0.0, 1.0])),
            seed=number,
            n=1 + (number % 5 == 0),
            max_tokens=int(random.integers(1, 24)),
            ignore_eos=kind != 0,
            logit_bias={EOS: 3.0} if kind == 0 else None,
            stop=["th", "a", "ou"] if kind == 1 else None,
            stop_token_ids=[5, 9] if kind == 2 else None,
            min_tokens=int(random.integers(0, 3)),
        )
        token_ids = [BOS, *random.choice(letters, int(random.integers(1, 20))).tolist()]
        at = int(random.integers(0, 12))
        job = Job(str(number), {"prompt_token_ids": token_ids}, params, at=at)
        result.append(job)
    return result


def texts(outputs: dict) -> dict[str, Any]:
    return {
        name: [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
        for name, output in outputs.items()
    }


@pytest.fixture(scope="module")
def expected(tiny_model, tokenizer) -> dict[str, Any]:
    engine = Engine(tiny_model, tokenizer=tokenizer, **SIZES)
    engine.core.scheduler.lookahead.is_used = False
    return texts(play(engine, jobs()))


# Queued steps


def test_step_queues_the_next_step_before_it_reads_tokens(make_engine, monkeypatch) -> None:
    engine, events = make_engine(), []
    runner, executor = engine.core.runner, engine.core.executor
    decode, read = runner.decode, executor.read

    def queueing(plan):
        events.append(("queue", plan.num_steps))
        return decode(plan)

    def reading(pending):
        tokens = read(pending)
        events.append(("read", int(tokens.num_steps)))
        return tokens

    monkeypatch.setattr(runner, "decode", queueing)
    monkeypatch.setattr(executor, "read", reading)
    engine.add_request(OTHER, GREEDY)
    finish(engine)
    # Each step has half of the 8 decode steps, and 20 tokens need five of them.
    queue, read = ("queue", 4), ("read", 4)
    assert events == [queue, queue, read, queue, read, queue, read, queue, read, read]


def test_add_request_waits_at_most_steps_per_dispatch(make_engine) -> None:
    engine = make_engine()
    engine.add_request(OTHER, dataclasses.replace(GREEDY, max_tokens=40), request_id="first")
    engine.step()
    engine.step()
    [first] = engine.sequences
    num_before = first.num_generated
    engine.add_request(LONG, GREEDY, request_id="second")
    while not any(s.num_generated for s in engine.sequences if s is not first):
        engine.step()
    # Four decode steps were queued, one ran with the prefill, four with its own first tokens.
    assert first.num_generated - num_before == 4 + 1 + 4
    finish(engine)


@pytest.mark.parametrize("way", WAYS[1:])
def test_num_free_counts_the_queued_step(make_engine, way) -> None:
    engine = make_engine(way)
    request_id = engine.add_request(OTHER, GREEDY)
    engine.step()
    assert engine.core.is_ahead
    # 7 computed prompt tokens and two steps of 4 tokens fill 4 blocks.
    assert engine.core.runner.num_free == SIZES["num_blocks"] - 4
    engine.abort(request_id)
    check_empty(engine)


def test_drafts_turn_off_lookahead(make_engine) -> None:
    engine = make_engine("after one another", num_speculative_tokens=2)
    assert engine.core.scheduler.lookahead.is_used is False
    engine = Engine(engine.model, **SIZES, num_speculative_tokens=2)
    engine.add_request(OTHER, GREEDY)
    engine.step()
    assert not engine.core.is_ahead


# Equal outputs


@pytest.mark.parametrize("way", WAYS[1:])
def test_outputs_do_not_depend_on_lookahead(make_engine, expected, way) -> None:
    engine = make_engine(way)
    assert texts(play(engine, jobs())) == expected
    check_empty(engine)


@pytest.mark.parametrize("way", WAYS[1:])
def test_abort_at_any_step_changes_no_other_request(make_engine, way) -> None:
    engine = make_engine(way)
    engine.add_request(OTHER, SEEDED, request_id="kept")
    wanted = finish(engine)
    for num_steps in range(7):
        engine.add_request(LONG, dataclasses.replace(GREEDY, max_tokens=30), request_id="gone")
        engine.add_request(OTHER, SEEDED, request_id="kept")
        tokens = {}
        for _ in range(num_steps):
            tokens |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
        tokens.pop("gone", None)
        if aborted := engine.abort("gone"):
            assert aborted.outputs[0].finish_reason == "abort"
        assert tokens | finish(engine) == wanted


def test_abort_drops_the_queued_step(make_engine) -> None:
    engine = make_engine()
    request_id = engine.add_request(OTHER, GREEDY)
    engine.step()
    assert engine.core.is_ahead
    engine.abort(request_id)
    assert not engine.core.is_ahead and engine.cache_use == 0
    assert engine.step() == []
    check_empty(engine)


@pytest.mark.parametrize("way", WAYS[1:])
def test_stop_strings_end_the_text_despite_lookahead(make_engine, way) -> None:
    engine = make_engine(way)
    [whole] = play(engine, [Job("whole", OTHER, SEEDED)]).values()
    text = whole.outputs[0].text
    stop = text[3:5]
    params = dataclasses.replace(SEEDED, stop=[stop])
    outputs = play(engine, [Job("a", OTHER, params), Job("b", OTHER, SEEDED)])
    assert outputs["a"].outputs[0].text == text[: text.index(stop)]
    assert outputs["a"].outputs[0].stop_reason == stop
    assert texts(outputs)["b"] == texts({"b": whole})["b"]
    check_empty(engine)


@pytest.mark.parametrize("way", WAYS)
def test_lookahead_stops_when_blocks_run_out(make_engine, way) -> None:
    """The preempted request continues with the tokens that it has alone."""
    engine = make_engine(way)
    params = dataclasses.replace(SEEDED, max_tokens=40)
    both = [Job(name, each, params) for name, each in (("long", LONG), ("other", OTHER))]
    alone = texts({job.name: play(engine, [job])[job.name] for job in both})
    assert not engine.stats.num_preemptions

    def on_step(num_steps: int) -> None:
        assert num_steps < 100, "more is queued again and again that cannot run"

    assert texts(play(engine, both, on_step=on_step)) == alone
    assert engine.stats.num_preemptions
    check_empty(engine)


# Events between two steps


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("part", ["decode", "read"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_step_that_fails_anywhere_loses_nothing(make_engine, monkeypatch, way, part, error) -> None:
    engine = make_engine(way)
    prompts = {"a": LONG, "b": OTHER}

    def add() -> None:
        for name, prompt in prompts.items():
            engine.add_request(prompt, SEEDED, request_id=name)

    add()
    wanted = finish(engine)
    owner = engine.core.executor if part == "read" else engine.core.runner
    original, num_left = getattr(owner, part), 0

    def fail(*args, **options):
        nonlocal num_left
        result = original(*args, **options)
        num_left -= 1
        if num_left == 0:
            raise error
        return result

    monkeypatch.setattr(owner, part, fail)
    for at in range(1, 6):
        num_left = at
        add()
        tokens = {}
        with pytest.raises(error):
            while engine.has_unfinished:
                tokens |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
        assert tokens | finish(engine) == wanted


def test_failure_in_the_call_thread_reaches_the_reading_step(make_engine, monkeypatch) -> None:
    engine = make_engine(WAYS[2])
    wanted = texts(play(engine, [Job("a", OTHER, SEEDED)]))
    executor, call = engine.core.executor, engine.core.executor._call
    engine.add_request(OTHER, SEEDED, request_id="a")
    engine.step()

    def fail(program):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(executor, "_call", fail)
        with pytest.raises(MemoryError):
            engine.step()
            engine.step()
    monkeypatch.setattr(executor, "_call", call)
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    assert texts(outputs) == wanted
    check_empty(engine)


def test_recover_waits_for_the_call_thread(make_engine, monkeypatch) -> None:
    engine = make_engine(WAYS[2])
    wanted = texts(play(engine, [Job("a", OTHER, SEEDED)]))
    executor, call = engine.core.executor, engine.core.executor._call

    def call_late(program):
        time.sleep(0.1)
        return call(program)

    engine.add_request(OTHER, SEEDED, request_id="a")
    monkeypatch.setattr(executor, "_call", call_late)
    engine.step()
    ahead = executor._ahead
    assert ahead is not None
    engine.core.guard.recover()
    assert ahead.done()
    monkeypatch.undo()
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    assert texts(outputs) == wanted
    check_empty(engine)


@pytest.mark.parametrize("way", WAYS[1:])
def test_update_params_and_cache_reset_work_with_a_queued_step(make_engine, way) -> None:
    engine = make_engine(way)
    engine.add_request(OTHER, SEEDED, request_id="a")
    wanted = finish(engine)
    for action in (lambda: engine.update_params(engine.model), engine.reset_prefix_cache):
        engine.add_request(OTHER, SEEDED, request_id="a")
        engine.step()
        assert engine.core.is_ahead
        action()
        assert finish(engine) == wanted


def test_timeout_ends_a_request_despite_lookahead(make_engine) -> None:
    engine = make_engine()
    late = engine.add_request(OTHER, dataclasses.replace(GREEDY, max_tokens=50), timeout=1e4)
    engine.step()
    assert engine.core.is_ahead
    request = engine.get_request(late)
    queue = engine.core.scheduler._queue
    queue.by_deadline = [(0.0, *entry[1:]) for entry in queue.by_deadline]
    while engine.has_unfinished:
        engine.step()
    assert request.sequences[0].completion.stop_reason == "deadline"
    check_empty(engine)


@pytest.mark.parametrize("way", WAYS[1:])
def test_beam_search_works_after_lookahead(tiny_folder, way) -> None:
    from paged_jax import LLM, BeamSearchParams

    llm = LLM(tiny_folder, **SIZES)
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    [wanted] = llm.beam_search("the cat", params)
    llm.core.executor.calls_wait = way == WAYS[2]
    request_id = llm.add_request(OTHER, GREEDY)
    llm.step()
    llm.abort(request_id)
    [found] = llm.beam_search("the cat", params)
    assert found.sequences == wanted.sequences
    check_empty(llm)
