"""`Sequence` and `Completion`: final text, held-back text, and the end of a sample."""

import dataclasses

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.completion import Completion
from paged_jax.scheduler.outputs import Logprob, RequestMetrics
from paged_jax.scheduler.request import Request, Sequence

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
    ids = [tokenizer.backend.token_to_id(token) for token in tokens]
    assert None not in ids
    return ids


def feed(sequence: Sequence, token_ids: list[int]) -> list[str]:
    """Append tokens until the sequence stops; return the final text after each token."""
    texts = []
    for token_id in token_ids:
        assert not sequence.is_finished
        sequence.append(token_id, -0.5, eos_token_ids=frozenset([EOS]))
        texts.append(sequence.output().text)
        if sequence.is_finished:
            break
    for earlier, later in zip(texts, texts[1:], strict=False):
        assert later.startswith(earlier), "final text must not change"
    return texts


def make_request(num_prompt_tokens: int = 3, max_tokens: int = 100, n: int = 1) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    request = Request(
        request_id="0",
        arrival=0,
        prompt=None,
        prompt_token_ids=[1] * num_prompt_tokens,
        params=params,
        seed=0,
        max_tokens=max_tokens,
        metrics=RequestMetrics(arrival_time=1.0),
    )
    length = num_prompt_tokens + max_tokens
    request.sequences = [
        Sequence(request, i, [1] * num_prompt_tokens, length, Completion(params, None))
        for i in range(n)
    ]
    return request


REQUEST = make_request()  # a strong reference: sequences hold the request only weakly


def start(tokenizer: Tokenizer | None, max_length: int = 103, **params) -> Sequence:
    """Return the third sequence of a prompt of three tokens."""
    completion = Completion(SamplingParams(**params), tokenizer)
    return Sequence(REQUEST, 2, [1] * 3, max_length, completion)


def ends(sequence: Sequence) -> tuple[str | None, str | int | None]:
    output = sequence.output()
    return output.finish_reason, output.stop_reason


@given(data=st.data(), stop=st.sampled_from([None, "END", ["the", "b\\nc", "aab"]]))
@settings(max_examples=300, derandomize=True)
def test_extend_gives_the_same_result_as_append(tokenizer, data, stop) -> None:
    params = data.draw(
        st.fixed_dictionaries(
            {
                "min_tokens": st.integers(0, 6),
                "ignore_eos": st.booleans(),
                "stop_token_ids": st.sampled_from([None, [3], [8, 9]]),
                "include_stop_str_in_output": st.booleans(),
            }
        )
    )
    max_length = data.draw(st.integers(5, 30))
    one_by_one, together = (start(tokenizer, max_length, stop=stop, **params) for _ in range(2))
    ids = st.lists(st.integers(0, tokenizer.vocab_size), min_size=1, max_size=5)
    while not one_by_one.is_finished:
        token_ids = data.draw(ids)
        logprobs = [-0.1 * token_id for token_id in token_ids]
        before = together.output()
        if not together.extend(token_ids, logprobs, eos_token_ids=frozenset([EOS])):
            assert together.output() == before
            append_all(together, token_ids, logprobs)
        append_all(one_by_one, token_ids, logprobs)
        assert together.output() == one_by_one.output()


def append_all(sequence: Sequence, token_ids: list[int], logprobs: list[float]) -> None:
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        if not sequence.is_finished:
            sequence.append(token_id, logprob, eos_token_ids=frozenset([EOS]))


def test_extend_accepts_plain_text(tokenizer) -> None:
    sequence = start(tokenizer, stop="END")
    a, b, E = ids_of(tokenizer, "a", "b", "E")
    sequence.append(a, -0.5, eos_token_ids=frozenset([EOS]))
    assert sequence.extend([b, E], [-0.5, -0.25], eos_token_ids=frozenset([EOS]))
    output = sequence.output()
    assert (output.text, output.token_ids, output.cumulative_logprob) == ("ab", [a, b, E], -1.25)


def test_append_stops_at_max_tokens(tokenizer) -> None:
    sequence = start(tokenizer, max_length=6)
    assert feed(sequence, ids_of(tokenizer, "a", "b", "c", "d")) == ["a", "ab", "abc"]
    output = sequence.output()
    assert output.index == 2
    assert output.token_ids == ids_of(tokenizer, "a", "b", "c")
    assert output.cumulative_logprob == -1.5
    assert ends(sequence) == ("length", None)
    assert output.logprobs is None


def test_output_is_a_snapshot(tokenizer) -> None:
    sequence = start(tokenizer, logprobs=0)
    feed(sequence, ids_of(tokenizer, "a"))
    before = sequence.output()
    feed(sequence, ids_of(tokenizer, "b"))
    assert before.token_ids == ids_of(tokenizer, "a")
    assert before.text == "a"


def test_append_stops_at_eos_without_stop_reason_and_text(tokenizer) -> None:
    for skip_special_tokens in (True, False):
        sequence = start(tokenizer, skip_special_tokens=skip_special_tokens)
        assert feed(sequence, [*ids_of(tokenizer, "a"), EOS])[-1] == "a"
        output = sequence.output()
        assert ends(sequence) == ("stop", None)
        assert output.token_ids[-1] == EOS


def test_append_has_no_stop_reason_if_eos_is_also_a_stop_token(tokenizer) -> None:
    sequence = start(tokenizer, stop_token_ids=[EOS])
    feed(sequence, [EOS])
    assert ends(sequence) == ("stop", None)


def test_append_ignores_eos_if_requested(tokenizer) -> None:
    sequence = start(tokenizer, max_length=5, ignore_eos=True, skip_special_tokens=False)
    [a] = ids_of(tokenizer, "a")
    assert feed(sequence, [EOS, a])[-1] == "</s>a"
    assert sequence.completion.finish_reason == "length"


def test_stop_token_takes_precedence_over_max_tokens(tokenizer) -> None:
    [a] = ids_of(tokenizer, "a")
    sequence = start(tokenizer, max_length=4, stop_token_ids=[a])
    feed(sequence, [a])
    assert ends(sequence) == ("stop", a)


@pytest.mark.parametrize(("include", "text"), [(False, "b"), (True, "ba")])
def test_stop_token_is_in_the_text_only_if_requested(tokenizer, include, text) -> None:
    a, b = ids_of(tokenizer, "a", "b")
    sequence = start(tokenizer, stop_token_ids=[a], include_stop_str_in_output=include)
    assert feed(sequence, [b, a, b])[-1] == text
    assert sequence.output().token_ids == [b, a]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abEND")])
@pytest.mark.parametrize("tokens", [["END"], ["E", "N", "D"]], ids=["one token", "three tokens"])
def test_stop_string_ends_the_text(tokenizer, tokens, include, text) -> None:
    sequence = start(tokenizer, stop="END", include_stop_str_in_output=include)
    texts = feed(sequence, ids_of(tokenizer, "a", "b", *tokens, "c"))
    assert texts[-1] == text
    assert set(texts[1:-1]) <= {"ab"}, "the beginning of a stop string is held back"
    assert ends(sequence) == ("stop", "END")


def test_stop_string_takes_precedence_over_max_tokens(tokenizer) -> None:
    sequence = start(tokenizer, max_length=4, stop="END")
    feed(sequence, ids_of(tokenizer, "END"))
    assert ends(sequence) == ("stop", "END")


def test_text_is_final_once_it_cannot_be_a_stop_string(tokenizer) -> None:
    sequence = start(tokenizer, stop="END")
    texts = feed(sequence, ids_of(tokenizer, "a", "E", "N", "E", "x"))
    assert texts == ["a", "a", "a", "aEN", "aENEx"]


def test_held_back_text_is_final_at_the_end(tokenizer) -> None:
    sequence = start(tokenizer, max_length=6, stop="END")
    assert feed(sequence, ids_of(tokenizer, "a", "E", "N"))[-1] == "aEN"
    assert sequence.completion.finish_reason == "length"
    sequence = start(tokenizer, stop="END")
    assert feed(sequence, [*ids_of(tokenizer, "a", "E", "N"), EOS])[-1] == "aEN"
    assert ends(sequence) == ("stop", None)


def test_stop_string_that_overlaps_itself_is_found(tokenizer) -> None:
    sequence = start(tokenizer, stop="aab")
    assert feed(sequence, ids_of(tokenizer, "a", "a", "a", "b"))[-1] == "a"
    assert sequence.completion.stop_reason == "aab"


def test_earliest_stop_string_ends_the_text(tokenizer) -> None:
    sequence = start(tokenizer, stop=["he", "t", "x"])
    assert feed(sequence, ids_of(tokenizer, "a", " the"))[-1] == "a "
    assert sequence.completion.stop_reason == "t"


def test_min_tokens_delays_stops(tokenizer) -> None:
    a, b = ids_of(tokenizer, "a", "b")
    for params in ({"stop_token_ids": [a]}, {"stop": "a"}):
        sequence = start(tokenizer, min_tokens=2, **params)
        feed(sequence, [b, a, b, a, b])
        assert sequence.output().token_ids == [b, a, b, a]
        assert sequence.output().text == "bab"


def test_incomplete_character_is_held_back(tokenizer) -> None:
    first, second, a = ids_of(tokenizer, "<0xC3>", "<0xA9>", "a")
    sequence = start(tokenizer)
    assert feed(sequence, [a, first, second]) == ["a", "a", "a\u00e9"]


def test_incomplete_character_at_the_end_becomes_a_replacement_character(tokenizer) -> None:
    first, a = ids_of(tokenizer, "<0xC3>", "a")
    sequence = start(tokenizer, max_length=5)
    assert feed(sequence, [a, first])[-1] == "a\ufffd"
    sequence = start(tokenizer)
    assert feed(sequence, [a, first, EOS])[-1] == "a\ufffd"


def test_text_is_empty_without_a_tokenizer() -> None:
    sequence = start(None, stop_token_ids=[7])
    assert feed(sequence, [5, 7]) == ["", ""]
    assert ends(sequence) == ("stop", 7)


def test_logprobs_are_kept_if_requested(tokenizer) -> None:
    candidates = {3: Logprob(-0.5, 1, " the")}
    for params, expected in (({"logprobs": 1}, [candidates]), ({}, None)):
        sequence = start(tokenizer, **params)
        sequence.append(3, -0.5, eos_token_ids=frozenset(), candidates=candidates)
        assert sequence.output().logprobs == expected


def test_request_is_finished_when_all_sequences_are() -> None:
    some = make_request(3, 2, n=2)
    for number, sequence in enumerate(some.sequences):
        assert not some.is_finished and not some.output().finished
        feed(sequence, [EOS])
        assert sequence.index == number
    assert some.is_finished and some.output().finished


def test_mark_keeps_the_first_time() -> None:
    some = make_request(3, 2)
    some.mark(first_token_time=2.0)
    some.mark(first_token_time=3.0, finished_time=4.0)
    expected = RequestMetrics(arrival_time=1.0, first_token_time=2.0, finished_time=4.0)
    assert some.metrics == expected
    assert dataclasses.asdict(some.output().metrics) == dataclasses.asdict(expected)


def test_end_keeps_an_earlier_finish_reason() -> None:
    one = make_request(1, max_tokens=2, n=2)
    one.sequences[0].append(3, -1.0, eos_token_ids=frozenset({3}))
    for sequence in one.sequences:
        sequence.completion.end("abort", "deadline")
    assert list(map(ends, one.sequences)) == [("stop", None), ("abort", "deadline")]
    assert one.is_finished
