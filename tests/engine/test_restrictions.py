"""Allowed tokens and bad words, in every mode of the engine."""

import pytest

from paged_jax import Engine, SamplingParams, StructuredOutputsParams
from paged_jax.scheduler.outputs import RequestOutput
from tests.support.tiny_model import BOS, EOS, SIZES

PROMPT = {"prompt_token_ids": [BOS, 5, 9, 30, 9]}
N = 20


@pytest.fixture(scope="module")
def engine(tiny_folder) -> Engine:
    return Engine(tiny_folder, **SIZES)


@pytest.fixture(scope="module")
def vowels(engine) -> list[int]:
    return [engine.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "aeiou"]


def run(engine: Engine, *requests: SamplingParams) -> list[RequestOutput]:
    for index, params in enumerate(requests):
        engine.add_request(PROMPT, params, request_id=str(index))
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [done[str(index)] for index in range(len(requests))]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def words_of(engine: Engine, params: SamplingParams) -> list[str]:
    """Return words of two and three tokens that an engine generates without restrictions."""
    [output] = run(engine, params)
    token_ids, decode = output.outputs[0].token_ids, engine.tokenizer.decode
    pairs = [decode(token_ids[i : i + n]).strip() for i, n in ((2, 2), (6, 3), (11, 2))]
    encode = engine.tokenizer.encode
    return [word for word in pairs if len(encode(word, add_special_tokens=False)) > 1]


@pytest.fixture(scope="module")
def requests(engine, vowels) -> list[SamplingParams]:
    greedy = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True)
    drawn = SamplingParams(temperature=1.2, max_tokens=N, seed=3, n=2, ignore_eos=True)
    base = [vars(greedy), vars(drawn)]
    restricted = [{"allowed_token_ids": vowels}, {"bad_words": words_of(engine, greedy)}]
    restricted += [{"bad_words": ["a", "e", "in"], "allowed_token_ids": [*vowels, 40]}]
    return [SamplingParams(**{**each, **own}) for each in base for own in ({}, *restricted)]


@pytest.fixture(scope="module")
def alone(engine, requests) -> list[list[list[int]]]:
    return [tokens_of(run(engine, params))[0] for params in requests]


def test_samples_contain_only_allowed_tokens(requests, alone) -> None:
    for params, samples in zip(requests, alone, strict=True):
        if params.allowed_token_ids is not None:
            assert set(sum(samples, [])) <= set(params.allowed_token_ids)
            assert all(len(sample) == N for sample in samples)


def test_samples_contain_no_bad_word(engine, requests, alone) -> None:
    free = alone[0][0]
    assert requests[2].bad_words and alone[2][0] != free
    for params, samples in zip(requests, alone, strict=True):
        for word in params.bad_words:
            for text in (word, f" {word}"):
                bad = engine.tokenizer.encode(text, add_special_tokens=False)
                assert not any(contains(sample, bad) for sample in samples), word


def contains(row: list[int], part: list[int]) -> bool:
    return any(row[i : i + len(part)] == part for i in range(len(row)))


def test_a_word_is_excluded_only_where_it_would_be_completed(engine, requests, alone) -> None:
    """The tokens before the first bad word are the tokens without restrictions."""
    free, bound = alone[0][0], alone[2][0]
    words = [engine.tokenizer.encode(w, add_special_tokens=False) for w in requests[2].bad_words]
    first = next(i for i in range(N) if any(free[: i + 1][-len(w) :] == w for w in words))
    assert first > 0 and bound[:first] == free[:first] and bound[first] != free[first]


def test_tokens_do_not_depend_on_other_requests(engine, requests, alone) -> None:
    before = engine.stats.num_preemptions
    assert tokens_of(run(engine, *requests)) == alone
    assert engine.stats.num_preemptions > before


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"steps_per_dispatch": 1}, {"num_speculative_tokens": 3}])
def test_tokens_do_not_depend_on_engine_options(tiny_folder, requests, alone, changes) -> None:
    engine = Engine(tiny_folder, **SIZES, **changes)
    assert tokens_of(run(engine, *requests)) == alone


@pytest.mark.peers
def test_bad_words_match_transformers(engine, requests, alone) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = engine.core.options.model
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    encode = engine.tokenizer.encode
    bad = [encode(w, add_special_tokens=False) for w in requests[2].bad_words]
    prompt = torch.tensor([PROMPT["prompt_token_ids"]])
    options = {"do_sample": False, "pad_token_id": EOS, "eos_token_id": -1, "max_new_tokens": N}
    ids = model.generate(prompt, bad_words_ids=bad, **options)
    assert ids[0, prompt.shape[1] :].tolist() == alone[2][0]


def test_an_end_token_must_be_allowed(engine, vowels) -> None:
    params = {"temperature": 5.0, "seed": 1, "max_tokens": 12}
    never, always = run(
        engine,
        SamplingParams(allowed_token_ids=vowels, **params),
        SamplingParams(allowed_token_ids=[EOS], min_tokens=3, **params),
    )
    assert never.outputs[0].finish_reason == "length"
    assert always.outputs[0].token_ids == [EOS] * 4


def test_a_bias_applies_to_allowed_tokens(engine, vowels) -> None:
    params = SamplingParams(
        temperature=0, allowed_token_ids=vowels, logit_bias={vowels[3]: 50.0, 9: 90.0}, max_tokens=4
    )
    assert tokens_of(run(engine, params)) == [[[vowels[3]] * 4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids must hold integers in 0.."),
        ({"bad_words": ["ab" * 9]}, "bad_words must be words of 1 to 16 tokens, got 'abab"),
        ({"bad_words": ["x" * 10**6]}, "bad_words must be words of 1 to 16 tokens"),
        (
            {"bad_words": [a + b for a in "abcdefgh" for b in "abcdefghijklm"]},
            r"bad_words must have at most 128 token sequences, got \d+\. Most words have two",
        ),
    ],
    ids=str,
)
def test_add_request_rejects_restrictions(engine, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add_request(PROMPT, SamplingParams(**options))


def test_bad_words_need_a_tokenizer(engine) -> None:
    plain = Engine(engine.model, **SIZES)
    with pytest.raises(ValueError, match="bad_words must be empty because .* no tokenizer"):
        plain.add_request(PROMPT, SamplingParams(bad_words=["a"]))


def test_a_format_takes_precedence() -> None:
    """The only text of the format contains a bad word and tokens that are not allowed."""
    engine = Engine(**{**SIZES, "block_size": 8})
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["yes"]),
        bad_words=["yes"],
        allowed_token_ids=[5],
    )
    engine.add_request("It is", params)
    texts = [output.outputs[0].text for _ in range(20) for output in engine.step()]
    assert texts[-1] == "yes" and not engine.has_unfinished
