"""`explain=True`: why a request waited or was preempted, and where its prefix match ended."""

import asyncio
import dataclasses
import json

import pytest

from paged_jax import LLM, AsyncEngine, Engine, RequestOutput, SamplingParams
from paged_jax.scheduler.explain import RequestHistory
from paged_jax.scheduler.outputs import Explanation
from paged_jax.scheduler.scheduler import Scheduler
from tests.support.fake_memory import FakeEngine, make_request
from tests.support.tiny_model import BOS, SIZES

C = SIZES["block_size"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)
LONG = {"prompt_token_ids": [BOS, *range(5, 22)]}  # 18 tokens: 4 full blocks and 2 tokens
OTHER = {"prompt_token_ids": [BOS, *range(25, 32)]}


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        outputs.update({output.request_id: output for output in engine.step()})
    return outputs


def explain(engine: Engine, prompt, params=GREEDY, **options) -> Explanation:
    """Run a request to its end and return its explanation."""
    request_id = engine.add_request(prompt, params, explain=True, **options)
    explanation = finish(engine)[request_id].explanation
    assert explanation is not None
    check(explanation)
    return explanation


def check(explanation: Explanation) -> None:
    """Check that the waits of each sample do not overlap, and that the explanation is JSON data."""
    for sample in {wait.sample for wait in explanation.waits}:
        end = 0.0
        for wait in explanation.waits:
            if wait.sample == sample:
                assert wait.start >= end and wait.seconds >= 0 and wait.reason and wait.detail
                end = wait.start + wait.seconds
    data = dataclasses.asdict(explanation)
    assert json.loads(json.dumps(data)) == data


# Match in the prefix cache


def match(engine: Engine, prompt, **changes) -> str:
    params = dataclasses.replace(GREEDY, max_tokens=1, **changes)
    sentence = explain(engine, prompt, params).prefix_match
    assert sentence is not None
    return sentence


def test_prefix_match_names_the_first_missing_block(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES)
    assert match(engine, LONG).startswith("block 0 (tokens 0..3) was not in the cache: no request")
    assert match(engine, LONG).startswith("every full block before the last token")
    assert match(engine, LONG).endswith("in the cache: 16 of 18 tokens")
    fork = {"prompt_token_ids": [*LONG["prompt_token_ids"][:10], *range(30, 36)]}
    assert match(engine, fork).startswith("block 2 (tokens 8..11) was not in the cache: no request")
    short = {"prompt_token_ids": LONG["prompt_token_ids"][:C]}
    assert match(engine, short).endswith("the last token is always computed, and the prompt has 4")
    salted = {**LONG, "cache_salt": "tenant"}
    assert match(engine, salted).startswith("block 0")
    assert "log-probabilities" in match(engine, LONG, prompt_logprobs=1)
    engine.reset_prefix_cache()
    assert match(engine, LONG).startswith("block 0")


def test_prefix_match_says_that_caching_is_disabled(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES, enable_prefix_caching=False)
    assert match(engine, LONG) == "nothing was looked up: the engine runs without prefix caching"


# Waits


def test_explanation_is_none_unless_requested(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES)
    request_id = engine.add_request(OTHER, GREEDY)
    assert finish(engine)[request_id].explanation is None


def test_waits_cover_the_time_from_arrival_to_the_first_step(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES)
    engine.add_request(OTHER, dataclasses.replace(SEEDED, n=4), request_id="first")
    engine.step()
    engine.add_request(LONG, GREEDY, request_id="second", explain=True)
    engine.add_request(LONG, GREEDY, request_id="third", explain=True)
    outputs = finish(engine)
    reasons = {}
    for name in ("second", "third"):
        output, explanation = outputs[name], outputs[name].explanation
        assert explanation is not None and output.metrics.first_scheduled_time is not None
        check(explanation)
        reasons[name] = [(wait.reason, wait.detail) for wait in explanation.waits]
        waited = output.metrics.first_scheduled_time - output.metrics.arrival_time
        assert sum(wait.seconds for wait in explanation.waits) == pytest.approx(waited, abs=0.01)
        assert explanation.num_cached_tokens == output.num_cached_tokens
    first_in_queue = "it was first in the queue and waited for the next step"
    assert reasons["second"] == [("turn", first_in_queue), ("slots", "no slot of 4 was free")]
    assert reasons["third"][0] == ("turn", "1 sample stood before it in the queue")
    assert reasons["third"][-1][0] == "same prefix"


def test_current_wait_is_reported_so_far(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES)
    engine.add_request(OTHER, dataclasses.replace(SEEDED, n=4))
    engine.add_request(LONG, GREEDY, request_id="late", explain=True)
    engine.step()
    engine.step()
    output = engine.abort("late")
    assert output is not None and output.explanation is not None
    assert [wait.reason for wait in output.explanation.waits] == ["turn", "slots"]
    assert output.explanation.waits[-1].seconds > 0
    assert output.explanation.prefix_match is None, "it was never looked up"
    again = output.explanation.waits[-1]
    finish(engine)
    assert output.explanation.waits[-1] == again, "an output does not change later"


def test_samples_share_an_explanation(tiny_model) -> None:
    explanation = explain(Engine(tiny_model, **SIZES), LONG, dataclasses.replace(SEEDED, n=3))
    waits = {wait.sample: wait for wait in explanation.waits}
    assert sorted(waits) == [0, 1, 2]
    assert [waits[i].reason for i in range(3)] == ["turn", "fork", "fork"]


def test_wait_names_the_request_that_computes_the_prefix(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES)
    engine.add_request(LONG, GREEDY, request_id="a")
    explanation = explain(engine, LONG, request_id="b")
    assert ("same prefix", "request a was computing the same prefix") in [
        (wait.reason, wait.detail) for wait in explanation.waits
    ]
    assert explanation.num_cached_tokens == 16


def scheduled(requests: list[tuple[int, int]], num_slots: int = 4, **options) -> list[Explanation]:
    """Return explanations of requests with these prompt lengths and priorities, one per step."""
    sizes = {"num_blocks": 10, "max_num_batched_tokens": 100, "max_chunk": 100, **options}
    scheduler = Scheduler(num_slots, sizes.pop("num_blocks"), C, **sizes)
    engine, histories = FakeEngine(scheduler, num_slots, eos=None), []
    for number, (length, priority) in enumerate(requests):
        prompt = [1 + (number + 3 * i) % 20 for i in range(length)]
        histories.append(RequestHistory(0.0))
        request = make_request(
            number, prompt, max_tokens=9, priority=priority, history=histories[-1]
        )
        scheduler.add(request.sequences)
        engine.step()
    engine.run()
    explanations = [history.explanation(0) for history in histories]
    assert all(e.waits[0].start == 0 for e in explanations)
    return explanations


def test_wait_for_blocks_counts_needed_and_free_blocks() -> None:
    # The first request holds 5 of 10 blocks and may grow. The second needs 6.
    _, second = scheduled([(18, 0), (22, 0)])
    assert [wait.reason for wait in second.waits] == ["turn", "blocks"]
    assert second.waits[1].detail == (
        "it needed 6 blocks, 5 were free, 1 of these reserved for running samples"
    )


def test_wait_for_blocks_gives_a_bound_if_the_prefix_was_not_looked_up() -> None:
    # One block is free, and it is reserved for the two running requests.
    third = scheduled([(17, 0), (13, 0), (8, 0)])[2]
    assert third.waits[1].detail == (
        "it needed up to 2 blocks, 1 were free, 1 of these reserved for running samples"
    )


def test_wait_for_the_budget_names_the_budget() -> None:
    _, second = scheduled([(30, 0), (6, 0)], max_num_batched_tokens=8, max_chunk=8)
    assert ("budget", "a step had no tokens left of 8") in [
        (wait.reason, wait.detail) for wait in second.waits
    ]


# Preemptions


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_preemption_note_says_what_was_lost_and_why(kind) -> None:
    explanations = scheduled([(17, 0), (13, 0)], preemption=kind)
    notes = [note for explanation in explanations for note in explanation.preemptions]
    assert notes == explanations[1].preemptions, "the most senior request is not preempted"
    assert [(note.kind, note.num_tokens) for note in notes] == [(kind, 16)]
    assert notes[0].detail == (
        "the next tokens of 2 samples needed 1 more block, 0 were free; "
        "no other sample could be preempted"
    )
    reasons = [wait.reason for wait in explanations[1].waits]
    assert "preempted" in reasons[1:]


def test_preemption_note_says_why_this_sample_was_chosen() -> None:
    low, lower, _ = scheduled([(9, 1), (5, 2), (29, 0)])
    cause = "request 2 arrived with the better priority 0; "
    assert [note.detail for note in lower.preemptions] == [
        f"{cause}it was preempted before request 0 because it had the worse priority"
    ]
    alone = f"{cause}no other sample could be preempted"
    assert [note.detail for note in low.preemptions] == [alone]


def test_preemption_note_compares_with_the_second_choice() -> None:
    requests = [(5, 1), (7, 1), (13, 1), (60, 0)]
    least, next_one, *_ = scheduled(requests, num_blocks=20, preemption="recompute")
    assert least.preemptions[0].detail == (
        "request 3 arrived with the better priority 0; "
        "it was preempted before request 1 because it had less to lose"
    )
    assert "it was preempted before request 2" in next_one.preemptions[0].detail


# Entry points


def test_llm_and_async_engine_return_explanations(tiny_folder) -> None:
    llm = LLM(tiny_folder, **SIZES)
    [output] = llm.generate("the cat", GREEDY, explain=True, use_tqdm=False)
    assert output.explanation is not None and output.explanation.waits[0].reason == "turn"
    *_, (_, last) = llm.stream("the cat", GREEDY, explain=True)
    assert last.explanation is not None and last.explanation.num_cached_tokens == 4

    async def main():
        async with AsyncEngine(llm) as engine:
            return [output async for output in engine.generate("the cat", GREEDY, explain=True)]

    assert all(output.explanation is not None for output in asyncio.run(main()))


def test_new_weights_make_a_request_wait_again(tiny_model) -> None:
    engine = Engine(tiny_model, **SIZES)
    request_id = engine.add_request(LONG, GREEDY, explain=True)
    engine.step()
    engine.update_params(tiny_model)
    explanation = finish(engine)[request_id].explanation
    assert explanation is not None
    check(explanation)
    assert [wait.reason for wait in explanation.waits] == ["turn", "turn"]
    assert explanation.waits[1].start > explanation.waits[0].seconds
    assert not explanation.preemptions
