"""Structured outputs of an engine: they match their grammar in every mode of the engine."""

import itertools
import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax import LLM, Engine, SamplingParams, StructuredOutputError, StructuredOutputsParams
from paged_jax.cache.blocks import check_invariants
from paged_jax.models.text.grammar import GrammarCursor
from paged_jax.scheduler.outputs import RequestOutput
from tests.support.structured import PERSON, SIZES, schemas
from tests.support.tiny_model import EOS

CONSTRAINTS = [
    StructuredOutputsParams(json=PERSON),
    StructuredOutputsParams(regex="(red|green|blue) [0-9]{2,4}!?"),
    StructuredOutputsParams(choice=["a long way home", "a long way off", "elsewhere"]),
    None,
    StructuredOutputsParams(grammar='start: "[" word ("," " " word){8,30} "]"\nword: /[a-z]{1,5}/'),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(**SIZES)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    check_invariants(engine.cache.tables)
    return done


def params(constraint: StructuredOutputsParams | None, **others) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "max_tokens": 60, "structured_outputs": constraint, **others}
    )


@settings(max_examples=10)
@given(st.lists(schemas(), min_size=10, max_size=10))
def test_samples_match_their_json_schemas(engine, drawn) -> None:
    for index, schema in enumerate(drawn):
        constraint = StructuredOutputsParams(json=schema)
        engine.add_request("It is", params(constraint, max_tokens=None), request_id=str(index))
    samples = [output.outputs[0] for _, output in sorted(finish(engine).items())]
    # Some objects contain many escape sequences and fill the context before they end.
    complete = [sample.finish_reason == "stop" for sample in samples]
    assert sum(complete) >= 8
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for schema, sample in itertools.compress(zip(drawn, samples, strict=True), complete):
        jsonschema.validate(json.loads(sample.text), schema, format_checker=checker)


def run_all(engine: Engine, *, disturb=lambda engine: None) -> list[list[list[int]]]:
    """Return the tokens of requests with every grammar, two samples each."""
    for index in range(len(CONSTRAINTS)):
        add(engine, index)
    disturb(engine)
    done = finish(engine)
    return [[s.token_ids for s in done[str(i)].outputs] for i in range(len(CONSTRAINTS))]


def add(engine: Engine, index: int) -> None:
    # One request may continue after its structured output.
    options = {"ignore_eos": True, "min_tokens": 3, "max_tokens": 20} if index == 2 else {}
    asked = params(CONSTRAINTS[index], n=2, seed=index, **options)
    engine.add_request("It is", asked, request_id=str(index))


@pytest.fixture(scope="module")
def alone(engine) -> list[list[list[int]]]:
    """Return the tokens of each request alone."""
    tokens = []
    for index in range(len(CONSTRAINTS)):
        add(engine, index)
        tokens.append([sample.token_ids for sample in finish(engine)[str(index)].outputs])
    return tokens


def test_tokens_do_not_depend_on_other_requests(engine, alone) -> None:
    before = engine.stats.num_preemptions
    assert run_all(engine) == alone
    assert engine.stats.num_preemptions > before


@pytest.mark.slow
def test_tokens_do_not_depend_on_recovery(engine, alone) -> None:
    def disturb(engine: Engine) -> None:
        for _ in range(4):
            engine.step()
        engine.core.guard.recover()

    assert run_all(engine, disturb=disturb) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"steps_per_dispatch": 1}, {"num_speculative_tokens": 3}],
    ids=str,
)
def test_tokens_do_not_depend_on_engine_options(alone, changes) -> None:
    engine = Engine(**{**SIZES, **changes})
    assert run_all(engine) == alone
    assert (engine.stats.num_accepted_tokens > 0) is ("num_speculative_tokens" in changes)


def test_forced_tokens_need_fewer_steps(engine) -> None:
    """The grammar has two choices: the model draws one token, which forces all others."""
    constraint = StructuredOutputsParams(choice=["a" * 30, "b" * 30])
    engine.add_request("It is", params(constraint))
    before = engine.stats.num_steps
    [output] = finish(engine).values()
    num_steps, num_tokens = engine.stats.num_steps - before, len(output.outputs[0].token_ids)
    assert num_steps <= 2 + num_tokens / 8 < num_tokens / 2


def test_logprobs_ignore_the_grammar(engine) -> None:
    constraint = StructuredOutputsParams(choice=["a long way home"])
    engine.add_request("It is", params(constraint, logprobs=2))
    [output] = finish(engine).values()
    [sample] = output.outputs
    assert sample.text == "a long way home"
    forced = {"prompt_token_ids": output.prompt_token_ids + sample.token_ids}
    engine.add_request(forced, SamplingParams(max_tokens=1, prompt_logprobs=0))
    [scored] = finish(engine).values()
    rows = scored.prompt_logprobs[len(output.prompt_token_ids) :]
    for token_id, row, want in zip(sample.token_ids, sample.logprobs, rows, strict=True):
        # In bfloat16, prompts and decode steps round attention differently.
        assert row[token_id].logprob == pytest.approx(want[token_id].logprob, abs=0.01)
        assert row[token_id].rank == pytest.approx(want[token_id].rank, rel=0.05, abs=1)
        assert len(row) >= 2


def test_max_tokens_cuts_a_structured_output_short(engine) -> None:
    engine.add_request("It is", params(CONSTRAINTS[0], max_tokens=3))
    [output] = finish(engine).values()
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text == '{"name": "'[: len(output.outputs[0].text)]


def test_grammar_failure_ends_only_its_request(engine, alone) -> None:
    engine.add_request("It is", params(CONSTRAINTS[4]), request_id="bad")
    while not engine.get_request("bad").sequences[0].num_generated:
        engine.step()
    # This happens if a grammar becomes too complex.
    engine.get_request("bad").sequences[0].grammar._matcher.consume_token(1535)
    engine.add_request("It is", params(CONSTRAINTS[0], n=2, seed=0), request_id="good")
    done = finish(engine)
    [failed] = done["bad"].outputs
    assert failed.finish_reason == "error" and "could not be followed" in failed.stop_reason
    assert [sample.token_ids for sample in done["good"].outputs] == alone[0]


@pytest.fixture
def break_grammars(monkeypatch):
    """Return a function that lets grammars fail after 3 tokens, as too complex grammars do."""
    follow, cursors = GrammarCursor.follow, []

    def break_first(most: int) -> None:
        def broken(self, token_ids, start) -> None:
            if len(token_ids) - start >= 3 and self not in cursors and len(cursors) < most:
                cursors.append(self)
                self._matcher.consume_token(1535)
            follow(self, token_ids, start)

        monkeypatch.setattr(GrammarCursor, "follow", broken)

    return break_first


def test_generate_returns_the_text_before_a_grammar_failure(break_grammars) -> None:
    llm = LLM(**SIZES)
    constraint = StructuredOutputsParams(regex="[0-9]{200}")
    wanted = params(constraint, temperature=0, max_tokens=20)
    [whole] = llm.generate("It is", wanted, use_tqdm=False)
    break_grammars(1)
    [output] = llm.generate("It is", wanted, use_tqdm=False)
    [sample] = output.outputs
    assert sample.finish_reason == "error" and "the grammar could not be" in sample.stop_reason
    assert sample.text and whole.outputs[0].text.startswith(sample.text)
    check_invariants(llm.cache.tables)


def test_grammar_failure_ends_only_its_sample(break_grammars) -> None:
    llm = LLM(**SIZES)
    break_grammars(1)
    constraint = StructuredOutputsParams(regex="[0-9]{200}")
    [output] = llm.generate("It is", params(constraint, n=3, seed=0, max_tokens=20), use_tqdm=False)
    reasons = [sample.finish_reason for sample in output.outputs]
    assert sorted(reasons) == ["error", "length", "length"]
    assert {len(each.token_ids) for each in output.outputs if each.finish_reason == "length"} == {
        20
    }


def test_rollout_raises_for_a_grammar_failure(break_grammars) -> None:
    llm = LLM(**SIZES)
    break_grammars(1)
    constraint = StructuredOutputsParams(regex="[0-9]{200}")
    with pytest.raises(StructuredOutputError, match="LLM.rollout: the grammar could not be"):
        llm.rollout(np.array([[5, 9, 2]]), np.array([3]), params(constraint, max_tokens=20))


def test_min_tokens_delays_the_end_if_the_grammar_allows(engine) -> None:
    """The end is delayed even if it is probable, but not if the grammar allows nothing else."""
    for regex, options, count in (
        ("[a-z]+", {"min_tokens": 9}, 10),
        ("[a-z]+", {}, 1),
        ("g", {"min_tokens": 9}, 2),
    ):
        constraint = StructuredOutputsParams(regex=regex)
        [stop] = engine.tokenizer.encode("q", add_special_tokens=False)
        bias = {EOS: 100.0, stop: 90.0}
        asked = params(constraint, logit_bias=bias, stop_token_ids=[stop], **options)
        engine.add_request("It is", asked)
        [output] = finish(engine).values()
        [sample] = output.outputs
        assert sample.finish_reason == "stop" and len(sample.token_ids) == count
        assert re.fullmatch(regex, sample.text) or not options


def test_ignore_eos_continues_after_the_structured_output(engine) -> None:
    for regex in ("go", "go(ne)?"):  # the end is forced, and sampled
        constraint = StructuredOutputsParams(regex=regex)
        engine.add_request("It is", params(constraint, ignore_eos=True, max_tokens=20))
        [output] = finish(engine).values()
        [sample] = output.outputs
        assert sample.finish_reason == "length" and len(sample.token_ids) == 20
        end = sample.token_ids.index(EOS)
        assert re.fullmatch(regex, engine.tokenizer.decode(sample.token_ids[:end]))
        assert len(set(sample.token_ids[end:])) > 3


def test_add_request_rejects_impossible_structured_outputs(engine) -> None:
    with pytest.raises(
        ValueError, match="structured_outputs cannot be compiled: Invalid type: stri"
    ):
        engine.add_request("It is", params(StructuredOutputsParams(json={"type": "strin"})))
    assert not engine.has_unfinished
