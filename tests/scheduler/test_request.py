"""A sample's text: what is final, what is held back, and what stops it. No arrays here."""

import dataclasses

import pytest
import tokenizers
from tokenizers import decoders

from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import Logprob, RequestMetrics
from paged_jax.scheduler.request import Request, Sample

EOS = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocab = {"</s>": EOS, "<0xC3>": 1, "<0xA9>": 2, " the": 3, "END": 4, "E": 5, "N": 6, "D": 7}
    vocab |= {letter: len(vocab) + i for i, letter in enumerate("abcdex \n")}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
    )
    backend.add_special_tokens(["</s>"])
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"}, eos_token_ids=[EOS])


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer._backend.token_to_id(token) for token in tokens]
    assert None not in ids
    return ids


def feed(sample: Sample, token_ids: list[int], max_tokens: int = 100) -> list[str]:
    """Append tokens until the sample stops; the text that is final after each."""
    texts = []
    for token_id in token_ids:
        assert sample.finish_reason is None
        sample.append(token_id, -0.5, eos_token_ids=frozenset([EOS]), max_tokens=max_tokens)
        texts.append(sample.output().text)
        if sample.finish_reason is not None:
            break
    for earlier, later in zip(texts, texts[1:], strict=False):
        assert later.startswith(earlier), "text was taken back"
    return texts


def start(tokenizer: Tokenizer | None, **params) -> Sample:
    return Sample(2, SamplingParams(**params), tokenizer)


def test_append_collects_tokens_until_max_tokens(tokenizer) -> None:
    sample = start(tokenizer)
    assert feed(sample, ids_of(tokenizer, "a", "b", "c", "d"), max_tokens=3) == ["a", "ab", "abc"]
    output = sample.output()
    assert output.index == 2
    assert output.token_ids == ids_of(tokenizer, "a", "b", "c")
    assert output.cumulative_logprob == -1.5
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert output.logprobs is None


def test_output_is_a_snapshot(tokenizer) -> None:
    sample = start(tokenizer, logprobs=0)
    feed(sample, ids_of(tokenizer, "a"))
    before = sample.output()
    feed(sample, ids_of(tokenizer, "b"))
    assert before.token_ids == ids_of(tokenizer, "a")
    assert before.text == "a"


def test_end_of_sequence_stops_without_a_reason_or_a_text(tokenizer) -> None:
    for skip_special_tokens in (True, False):
        sample = start(tokenizer, skip_special_tokens=skip_special_tokens)
        assert feed(sample, [*ids_of(tokenizer, "a"), EOS])[-1] == "a"
        output = sample.output()
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert output.token_ids[-1] == EOS


def test_end_of_sequence_that_is_also_a_stop_token_has_no_reason(tokenizer) -> None:
    sample = start(tokenizer, stop_token_ids=[EOS])
    feed(sample, [EOS])
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_end_of_sequence_is_ignored_on_request(tokenizer) -> None:
    sample = start(tokenizer, ignore_eos=True, skip_special_tokens=False)
    [a] = ids_of(tokenizer, "a")
    assert feed(sample, [EOS, a], max_tokens=2)[-1] == "</s>a"
    assert sample.finish_reason == "length"


def test_stop_token_wins_over_max_tokens(tokenizer) -> None:
    [a] = ids_of(tokenizer, "a")
    sample = start(tokenizer, stop_token_ids=[a])
    feed(sample, [a], max_tokens=1)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", a)


@pytest.mark.parametrize(("include", "text"), [(False, "b"), (True, "ba")])
def test_stop_token_is_in_the_text_only_on_request(tokenizer, include, text) -> None:
    a, b = ids_of(tokenizer, "a", "b")
    sample = start(tokenizer, stop_token_ids=[a], include_stop_str_in_output=include)
    assert feed(sample, [b, a, b])[-1] == text
    assert sample.output().token_ids == [b, a]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abEND")])
@pytest.mark.parametrize("tokens", [["END"], ["E", "N", "D"]], ids=["one token", "three tokens"])
def test_stop_string_ends_the_text(tokenizer, tokens, include, text) -> None:
    sample = start(tokenizer, stop="END", include_stop_str_in_output=include)
    texts = feed(sample, ids_of(tokenizer, "a", "b", *tokens, "c"))
    assert texts[-1] == text
    assert set(texts[1:-1]) <= {"ab"}, "the beginning of a stop string is held back"
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "END")


def test_stop_string_wins_over_max_tokens(tokenizer) -> None:
    sample = start(tokenizer, stop="END")
    feed(sample, ids_of(tokenizer, "END"), max_tokens=1)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "END")


def test_held_back_text_is_released_when_it_is_no_stop_string(tokenizer) -> None:
    sample = start(tokenizer, stop="END")
    texts = feed(sample, ids_of(tokenizer, "a", "E", "N", "E", "x"))
    assert texts == ["a", "a", "a", "aEN", "aENEx"]


def test_held_back_text_is_released_at_the_end(tokenizer) -> None:
    sample = start(tokenizer, stop="END")
    assert feed(sample, ids_of(tokenizer, "a", "E", "N"), max_tokens=3)[-1] == "aEN"
    assert sample.finish_reason == "length"
    sample = start(tokenizer, stop="END")
    assert feed(sample, [*ids_of(tokenizer, "a", "E", "N"), EOS])[-1] == "aEN"
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_stop_string_that_overlaps_itself_is_found(tokenizer) -> None:
    sample = start(tokenizer, stop="aab")
    assert feed(sample, ids_of(tokenizer, "a", "a", "a", "b"))[-1] == "a"
    assert sample.stop_reason == "aab"


def test_earliest_of_several_stop_strings_wins(tokenizer) -> None:
    sample = start(tokenizer, stop=["he", "t", "x"])
    assert feed(sample, ids_of(tokenizer, "a", " the"))[-1] == "a "
    assert sample.stop_reason == "t"


def test_min_tokens_holds_stops_off(tokenizer) -> None:
    a, b = ids_of(tokenizer, "a", "b")
    for params in ({"stop_token_ids": [a]}, {"stop": "a"}):
        sample = start(tokenizer, min_tokens=2, **params)
        feed(sample, [b, a, b, a, b])
        assert sample.token_ids == [b, a, b, a]
        assert sample.output().text == "bab"


def test_half_a_character_is_held_back(tokenizer) -> None:
    first, second, a = ids_of(tokenizer, "<0xC3>", "<0xA9>", "a")
    sample = start(tokenizer)
    assert feed(sample, [a, first, second]) == ["a", "a", "a\u00e9"]


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer) -> None:
    first, a = ids_of(tokenizer, "<0xC3>", "a")
    sample = start(tokenizer)
    assert feed(sample, [a, first], max_tokens=2)[-1] == "a\ufffd"
    sample = start(tokenizer)
    assert feed(sample, [a, first, EOS])[-1] == "a\ufffd"


def test_without_a_tokenizer_there_is_no_text() -> None:
    sample = start(None, stop_token_ids=[7])
    assert feed(sample, [5, 7]) == ["", ""]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", 7)


def test_logprobs_are_kept_where_asked_for(tokenizer) -> None:
    candidates = {3: Logprob(-0.5, 1, " the")}
    for params, expected in (({"logprobs": 1}, [candidates]), ({}, None)):
        sample = start(tokenizer, **params)
        sample.append(3, -0.5, eos_token_ids=frozenset(), max_tokens=9, candidates=candidates)
        assert sample.output().logprobs == expected


def request(num_prompt_tokens: int, max_tokens: int, n: int = 1) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return Request(
        request_id="0",
        arrival=0,
        prompt=None,
        prompt_token_ids=[1] * num_prompt_tokens,
        params=params,
        seed=0,
        max_tokens=max_tokens,
        samples=[Sample(i, params, None) for i in range(n)],
        metrics=RequestMetrics(arrival_time=1.0),
        priority=0,
        deadline=None,
        cache_salt="",
    )


def test_is_finished_when_all_samples_are() -> None:
    some = request(3, 2, n=2)
    for number, sample in enumerate(some.samples):
        assert not some.is_finished and not some.output().finished
        feed(sample, [EOS])
        assert sample.index == number
    assert some.is_finished and some.output().finished


def test_mark_keeps_the_first_time() -> None:
    some = request(3, 2)
    some.mark(first_token_time=2.0)
    some.mark(first_token_time=3.0, finished_time=4.0)
    expected = RequestMetrics(arrival_time=1.0, first_token_time=2.0, finished_time=4.0)
    assert some.metrics == expected
    assert dataclasses.asdict(some.output().metrics) == dataclasses.asdict(expected)


def test_end_keeps_what_the_tokens_have_said_before() -> None:
    one = request(1, max_tokens=2, n=2)
    one.samples[0].append(3, -1.0, eos_token_ids=frozenset({3}), max_tokens=2)
    for sample in one.samples:
        sample.end("abort", "deadline")
    ends = [(sample.finish_reason, sample.stop_reason) for sample in one.samples]
    assert ends == [("stop", None), ("abort", "deadline")]
    assert one.is_finished
