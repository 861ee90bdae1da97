"""`LLM`: generation, samples, stop conditions and streams, as users of vLLM expect."""

import contextlib
import dataclasses
import gc
import itertools
import operator
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, Llama, SamplingParams, Tokenizer
from paged_jax.cache.blocks import check_invariants
from tests.support.bundled_reference import read_continuations
from tests.support.generation import GREEDY, PROMPTS, SEEDED, complete_prompt, generate, tokens_of
from tests.support.tiny_model import BOS, EOS, SIZES, save_tiny_model
from tests.support.workload import check_empty

# A pool that holds less than the context.
SMALL = {**SIZES, "num_blocks": 12, "max_num_seqs": 1}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="session")
def shared_llm(folder) -> LLM:
    return LLM(folder, **SIZES)


@pytest.fixture
def llm(shared_llm):
    """Return the shared engine, and check after the test that it is empty."""
    yield shared_llm
    check_empty(shared_llm)


# Against the reference implementation


def test_generate_gives_the_greedy_tokens_of_transformers() -> None:
    """Prompts of 1 to 70 tokens run together with the bundled model, in chunks of 16."""
    llm = LLM(dtype="float32", block_size=16, num_blocks=40, max_num_seqs=4, max_chunk=16)
    items = read_continuations()
    # An empty text is a prompt of the start token only.
    prompts = [item.prompt or {"prompt_token_ids": item.prompt_ids} for item in items]
    lengths = [len(item.generated_ids) for item in items]
    assert max(lengths) == 200
    # Two samples of the longest, so that no sample runs alone and needs another program.
    params = [
        SamplingParams(temperature=0, max_tokens=length, n=2 if length == max(lengths) else 1)
        for length in lengths
    ]
    for item, output in zip(items, generate(llm, prompts, params), strict=True):
        assert output.prompt_token_ids == item.prompt_ids
        for completion in output.outputs:
            assert completion.token_ids == item.generated_ids
            assert item.prompt + completion.text == item.text
            assert completion.finish_reason == "length"
    check_empty(llm)


# Reproducible tokens


@pytest.mark.parametrize(
    "params",
    [pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow), pytest.param(SEEDED, id="seeded")],
)
def test_tokens_do_not_depend_on_batch_mates_or_order(llm, params) -> None:
    alone = [tokens_of(generate(llm, prompt, params))[0] for prompt in PROMPTS]
    assert tokens_of(generate(llm, PROMPTS, params)) == alone
    assert tokens_of(generate(llm, PROMPTS[::-1], params)) == alone[::-1]
    assert len({tuple(samples[0]) for samples in alone}) == len(PROMPTS)


def test_engine_seed_makes_prompts_differ_and_reproducible(folder) -> None:
    params = dataclasses.replace(SEEDED, seed=None)

    def run(seed: int):
        return tokens_of(generate(LLM(folder, seed=seed, **SIZES), [PROMPTS[0]] * 3, params))

    first = run(0)
    assert len({tuple(samples[0]) for samples in first}) == 3
    assert run(0) == first
    assert run(1) != first


# Several samples of a prompt


def test_samples_share_the_prompt_blocks(folder) -> None:
    llm = LLM(folder, **SIZES, steps_per_dispatch=1)
    prompt = {"prompt_token_ids": [BOS, 5, 6, 7, 8, 9]}  # one full block and half of another
    params = SamplingParams(n=4, temperature=1, seed=3, max_tokens=5, ignore_eos=True)
    used, references = [], []
    for _, output in llm.stream(prompt, params):
        if not output.finished:
            pool = llm.cache.tables.pool
            used.append(llm.num_blocks - int(pool.num_free))
            references.append(sorted(pool.ref_counts.tolist(), reverse=True)[:6])
        assert len(output.outputs) == 4
    # Each sample writes the last prompt token into its own copy of the half-full block; one sample
    # keeps the original. When that block is full, each sample takes another block. The device is
    # one token ahead of the outputs.
    assert used == [1 + 4, 1 + 4, 1 + 8, 1 + 8]
    assert references[0] == [4, 1, 1, 1, 1, 0]
    assert llm.stats.peak_num_blocks == 9
    check_empty(llm)

    separate = LLM(folder, **SIZES, steps_per_dispatch=1, enable_prefix_caching=False)
    generate(separate, [prompt] * 4, dataclasses.replace(params, n=1))
    assert separate.stats.peak_num_blocks == 4 * 3


def test_samples_differ_and_do_not_depend_on_batch_mates(llm) -> None:
    params = dataclasses.replace(SEEDED, n=3)
    [alone] = generate(llm, PROMPTS[0], params)
    assert [completion.index for completion in alone.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in alone.outputs}) == 3
    together = generate(llm, PROMPTS, [params, GREEDY, params, SEEDED, params])
    assert tokens_of(together)[0] == tokens_of([alone])[0]
    # The first sample equals the sample of n=1.
    assert tokens_of(generate(llm, PROMPTS[0], SEEDED))[0][0] == alone.outputs[0].token_ids


def test_samples_stop_independently(llm) -> None:
    params = SamplingParams(n=4, temperature=1, seed=2, max_tokens=16)
    [output] = generate(llm, PROMPTS[3], params)
    lengths = {len(completion.token_ids) for completion in output.outputs}
    assert len(lengths) > 1, "choose a seed for which the samples stop at different times"
    assert output.finished
    for completion in output.outputs:
        is_stop = completion.token_ids[-1] == EOS
        assert completion.finish_reason == ("stop" if is_stop else "length")
        assert EOS not in completion.token_ids[:-1]


# Stopping


def test_max_tokens_and_the_context_limit_a_sample(llm) -> None:
    completion = complete_prompt(llm, PROMPTS[0], max_tokens=1)
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")
    num_prompt_tokens = len(llm.tokenizer.encode(PROMPTS[0]))
    completion = complete_prompt(llm, PROMPTS[0], max_tokens=None)
    assert len(completion.token_ids) == llm.max_model_len - num_prompt_tokens
    assert completion.finish_reason == "length"
    longest = {"prompt_token_ids": [BOS] + [5] * (llm.max_model_len - 2)}
    assert len(complete_prompt(llm, longest, max_tokens=None).token_ids) == 1


def test_eos_token_stops_a_sample_unless_ignored(llm) -> None:
    always = {"logit_bias": {EOS: 1000.0}}
    completion = complete_prompt(llm, "ab", ignore_eos=False, **always)
    assert completion.token_ids == [EOS]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", None)
    completion = complete_prompt(llm, "ab", ignore_eos=True, max_tokens=5, **always)
    assert completion.token_ids == [EOS] * 5
    assert (completion.text, completion.finish_reason) == ("", "length")


def test_min_tokens_suppresses_stop_tokens(llm) -> None:
    stop = llm.tokenizer.encode("z", add_special_tokens=False)[0]
    params = {"min_tokens": 3, "ignore_eos": False, "stop_token_ids": [stop]}
    completion = complete_prompt(llm, "ab", logit_bias={EOS: 2000.0, stop: 1000.0}, **params)
    assert len(completion.token_ids) == 4
    assert completion.token_ids[-1] == EOS
    assert not {EOS, stop} & set(completion.token_ids[:-1])


def test_stop_token_ids_stop_and_are_the_stop_reason(llm) -> None:
    [stop] = llm.tokenizer.encode("z", add_special_tokens=False)
    params = {"logit_bias": {stop: 1000.0}, "stop_token_ids": [stop, 9]}
    completion = complete_prompt(llm, "ab", **params)
    assert (completion.token_ids, completion.text) == ([stop], "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert complete_prompt(llm, "ab", include_stop_str_in_output=True, **params).text == "z"


def test_stop_strings_end_the_text_across_tokens(llm) -> None:
    whole = complete_prompt(llm, PROMPTS[0], max_tokens=20)
    # Two letters inside the text that belong to different tokens.
    pieces = [llm.tokenizer.decode([token_id]) for token_id in whole.token_ids]
    joints = [a[-1] + b[0] for a, b in itertools.pairwise(pieces[4:]) if a and b]
    stop = next(joint for joint in joints if whole.text.find(joint) > 3)
    at = whole.text.find(stop)

    completion = complete_prompt(llm, PROMPTS[0], max_tokens=20, stop=["never", stop])
    assert completion.text == whole.text[:at]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < len(whole.token_ids)
    kept = complete_prompt(
        llm, PROMPTS[0], max_tokens=20, stop=stop, include_stop_str_in_output=True
    )
    assert kept.text == whole.text[: at + 2]
    # A stop string that does not occur changes nothing.
    assert complete_prompt(llm, PROMPTS[0], max_tokens=20, stop="never") == whole


def test_text_equals_the_decoded_tokens(llm) -> None:
    for output in generate(llm, PROMPTS, SEEDED):
        completion = output.outputs[0]
        expected = llm.tokenizer.decode(completion.token_ids, continues_text=True)
        assert completion.text == expected


# Streaming


@pytest.mark.slow
def test_stream_yields_only_final_text(folder) -> None:
    llm = LLM(folder, **SIZES, steps_per_dispatch=1)
    whole = complete_prompt(llm, PROMPTS[0], max_tokens=20)
    stops = [None, whole.text[5:8], whole.text[9:11] + "never", whole.text[-2:] + "."]
    params = [dataclasses.replace(GREEDY, max_tokens=20, stop=stop) for stop in stops]
    texts: list[list[str]] = [[] for _ in stops]
    last = {}
    for index, output in llm.stream([PROMPTS[0]] * len(stops), params):
        texts[index].append(output.outputs[0].text)
        last[index] = output
    for index, output in enumerate(generate(llm, [PROMPTS[0]] * len(stops), params)):
        text = output.outputs[0].text
        deltas = [b[len(a) :] for a, b in itertools.pairwise(["", *texts[index]])]
        assert "".join(deltas) == text
        assert all(text.startswith(part) for part in texts[index])
        assert last[index].outputs == output.outputs and last[index].finished
    assert len(texts[0]) == 20, "one output for each token"


def test_stream_close_releases_everything(llm) -> None:
    expected = tokens_of(generate(llm, PROMPTS, GREEDY))
    for num_outputs in (1, 2, 7):
        with contextlib.closing(llm.stream(PROMPTS, GREEDY)) as stream:
            for _ in itertools.islice(stream, num_outputs):
                assert int(llm.cache.tables.pool.num_free) < llm.num_blocks
        check_empty(llm)
    assert tokens_of(generate(llm, PROMPTS, GREEDY)) == expected


def test_stream_releases_everything_if_the_consumer_raises(llm) -> None:
    expected = tokens_of(generate(llm, PROMPTS, GREEDY))
    with pytest.raises(KeyError):
        for _ in llm.stream(PROMPTS, GREEDY):
            raise KeyError
    check_empty(llm)
    assert tokens_of(generate(llm, PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("core.runner", "attach"),
        ("core.runner", "prefill"),
        ("core.runner", "decode"),
        ("core.runner", "release"),
        ("core.scheduler", "schedule"),
        ("core.scheduler", "finish"),
    ],
)
def test_generate_interrupted_anywhere_releases_everything(llm, monkeypatch, owner, name) -> None:
    """Ctrl-C may arrive between any two changes of state, and after donation."""
    expected = tokens_of(generate(llm, PROMPTS, GREEDY))
    for when in ("before", "after"):
        part = operator.attrgetter(owner)(llm)
        original = getattr(part, name)

        def interrupt(*args, when=when, original=original, **kwargs):
            if when == "after":
                original(*args, **kwargs)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(part, name, interrupt)
            generate(llm, PROMPTS, GREEDY)
        check_empty(llm)
        assert tokens_of(generate(llm, PROMPTS, GREEDY)) == expected, name


def test_stream_and_generate_may_overlap(llm) -> None:
    expected = [tokens_of(generate(llm, prompt, GREEDY)) for prompt in PROMPTS[:3]]
    params = dataclasses.replace(GREEDY, max_tokens=30)
    unread = llm.stream(PROMPTS[1], GREEDY)
    with contextlib.closing(llm.stream(PROMPTS[3], params)) as stream:
        next(stream)
        request_id = llm.add_request(PROMPTS[2], GREEDY)
        assert tokens_of(generate(llm, PROMPTS[0], GREEDY)) == expected[0]
        rest = [output for _, output in stream]
    assert tokens_of(rest[-1:]) == tokens_of(generate(llm, PROMPTS[3], params))
    # Outputs from the steps of other calls are kept.
    assert tokens_of([[*unread][-1][1]]) == expected[1]
    told = []
    while llm.has_unfinished:
        told += llm.step()
    assert [output.request_id for output in told if output.finished] == [request_id]
    assert tokens_of(told[-1:]) == expected[2]


def test_abort_ends_a_request_of_a_stream(llm) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=40)
    last = {}
    for index, output in llm.stream(PROMPTS[:2], params):
        last[index] = output.outputs[0]
        if index == 0:
            llm.abort(output.request_id)
    assert [last[index].finish_reason for index in (0, 1)] == ["abort", "length"]


def test_stream_that_is_never_read_ends_its_requests(llm) -> None:
    llm.stream(PROMPTS, GREEDY).close()
    assert not llm.has_unfinished
    llm.stream(PROMPTS, GREEDY)
    gc.collect()
    assert not llm.has_unfinished


@pytest.mark.slow
def test_stream_open_at_process_exit_prints_nothing(folder) -> None:
    lines = [
        "import paged_jax",
        f"stream = paged_jax.LLM({str(folder)!r}, **{SIZES}).stream(['ab'])",
        "next(stream)",
    ]
    process = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True)
    assert process.returncode == 0
    assert process.stderr == b""


def test_stream_collected_during_a_step_closes_after_it(llm, monkeypatch) -> None:
    alone = generate(llm, PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    cycle: list = [llm.stream(PROMPTS[1:3], GREEDY)]
    next(cycle[0])
    cycle.append(cycle)
    decode, num_resets = llm.core.runner.decode, llm.num_cache_resets

    def collect_and_decode(*args, **kwargs):
        gc.collect()
        return decode(*args, **kwargs)

    monkeypatch.setattr(llm.core.runner, "decode", collect_and_decode)
    del cycle
    [output] = generate(llm, PROMPTS[0], GREEDY)
    assert output.outputs[0].token_ids == alone
    assert not llm.has_unfinished and llm.num_cache_resets == num_resets


def test_step_rejects_overlapping_calls(llm, monkeypatch) -> None:
    decode, refused = llm.core.runner.decode, []

    def step_and_decode(*args, **kwargs):
        with pytest.raises(RuntimeError, match="Engine: calls must not overlap") as error:
            llm.step()
        refused.append(error)
        return decode(*args, **kwargs)

    monkeypatch.setattr(llm.core.runner, "decode", step_and_decode)
    assert len(generate(llm, PROMPTS[0], GREEDY)[0].outputs[0].token_ids) == 12 and refused


@pytest.fixture(scope="module")
def small(shared_llm) -> LLM:
    return LLM(shared_llm.model, tokenizer=shared_llm.tokenizer, **SMALL)


@pytest.mark.slow
def test_max_tokens_none_is_limited_by_the_pool(llm, small) -> None:
    completion = complete_prompt(small, "ab", max_tokens=None)
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 12 * 4 + 1 - len(llm.tokenizer.encode("ab"))


# Parameters


def test_logit_bias_forces_a_token(llm) -> None:
    bias = {**dict.fromkeys(range(43), 900.0), 9: 1000.0}
    token_ids = complete_prompt(llm, "ab", logit_bias=bias, max_tokens=4).token_ids
    assert token_ids == [9] * 4


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_penalties_reduce_repetition(llm, penalty) -> None:
    # The bias makes the model repeat this token most of the time.
    bias = {"logit_bias": {9: 4.0}, "max_tokens": 16}
    plain = complete_prompt(llm, "ab", **bias).token_ids
    penalised = complete_prompt(llm, "ab", **bias, **penalty).token_ids
    assert penalised[0] == plain[0], "the first token has no penalty"
    assert len(set(penalised)) > len(set(plain))


def test_sampling_params_may_differ_by_prompt(llm) -> None:
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (3, 1, 5, 2, 4)]
    params[2] = dataclasses.replace(SEEDED, max_tokens=5)
    outputs = generate(llm, PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 5, 2, 4]
    for prompt, some, output in zip(PROMPTS, params, outputs, strict=True):
        assert tokens_of(generate(llm, prompt, some)) == tokens_of([output])
    first = int(outputs[0].request_id)
    assert [int(output.request_id) for output in outputs] == list(range(first, first + 5))


def test_get_default_sampling_params_returns_the_recommended_ones(llm, folder) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
    [by_default] = generate(llm, PROMPTS[0])
    assert by_default.outputs == generate(llm, PROMPTS[0], SamplingParams(temperature=0))[0].outputs
    backend = Tokenizer.from_folder(folder).backend
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    tokenizer = Tokenizer(backend, sampling_defaults=recommended)
    other = LLM(llm.model, tokenizer=tokenizer, **SIZES)
    assert other.get_default_sampling_params() == SamplingParams(**recommended)


# More requests than fit


def test_generate_finishes_more_requests_than_slots(llm) -> None:
    prompts = [
        {"prompt_token_ids": [BOS, *range(5, 5 + n)]} for n in (1, 9, 17, 3, 30, 2, 12, 7, 5)
    ]
    params = [dataclasses.replace(SEEDED, max_tokens=n) for n in (25, 20, 30, 1, 20, 8, 25, 30, 2)]
    params[3] = dataclasses.replace(params[3], n=4)
    alone = [tokens_of(generate(llm, *pair))[0] for pair in zip(prompts, params, strict=True)]

    most_running, finished = 0, {}
    for index, output in llm.stream(prompts, params):
        tables = llm.cache.tables
        check_invariants(tables)
        most_running = max(most_running, int((tables.lengths > 0).sum()))
        if output.finished:
            assert index not in finished
            finished[index] = output
    assert sorted(finished) == list(range(len(prompts)))
    assert most_running > 1
    assert tokens_of(finished[index] for index in range(len(prompts))) == alone


@pytest.mark.slow
def test_generate_may_use_the_whole_pool(small) -> None:
    # 12 blocks of 4 tokens; the last token is never written.
    prompt = {"prompt_token_ids": [BOS, 5, 6, 7]}
    params = SamplingParams(n=3, temperature=1, seed=0, max_tokens=45, ignore_eos=True)
    [output] = generate(small, prompt, params)
    assert [len(completion.token_ids) for completion in output.outputs] == [45] * 3
    assert small.stats.peak_num_blocks == 12
    check_empty(small)
    with pytest.raises(
        ValueError, match="pool of 12 blocks of 4 tokens.*46 tokens to generate.* need 13"
    ):
        generate(small, prompt, dataclasses.replace(params, max_tokens=46))
    check_empty(small)


def test_generate_accepts_token_ids(llm) -> None:
    """A list or an array of integers is one prompt; a list of such lists is several."""
    ids = [5, 9, 30]
    [want] = llm.generate({"prompt_token_ids": ids}, GREEDY)
    for prompts in (ids, [ids], tuple(ids), np.array(ids), [np.array(ids)], jnp.array([ids])):
        [got] = llm.generate(prompts, GREEDY)
        assert got.prompt_token_ids == ids
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert len(llm.generate([ids, "It is", {"prompt_token_ids": ids}], GREEDY)) == 3


# Invalid arguments


def test_llm_rejects_a_missing_folder(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        LLM(tmp_path / "missing")


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, GREEDY, "LLM.generate: prompts must be one prompt or a list of prompts, got None"),
        ([5.0], GREEDY, "a prompt must be a text, a list of token ids, or a dict"),
        ([["a"]], GREEDY, "prompt_token_ids must"),
        (np.ones((1, 1, 2), np.int32), GREEDY, "must be a one-dimensional array of integers"),
        ([{"role": "user", "content": "x"}], GREEDY, "Pass messages to LLM.chat"),
        (PROMPTS[:1], 5, "LLM.generate: sampling_params must be SamplingParams, got 5"),
        (PROMPTS[:1], {"n": 2}, r"got a dict. Pass SamplingParams\(\*\*params\)"),
    ],
)
def test_generate_says_how_to_pass_prompts_and_parameters(llm, prompts, params, message) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    check_empty(llm)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("get_tokenizer", "no attribute 'get_tokenizer'. Use its attribute tokenizer."),
        ("llm_engine", "no attribute 'llm_engine'. An LLM is itself an engine"),
        ("embed", "no attribute 'embed'. Only text generation is supported."),
        ("no_such_thing", "no attribute 'no_such_thing'$"),
    ],
)
def test_attributes_of_other_libraries_have_advice(llm, name, message) -> None:
    with pytest.raises(AttributeError, match=message):
        getattr(llm, name)
    assert not hasattr(llm, name) and hasattr(llm, "tokenizer")


@pytest.mark.parametrize("messages", ["Hi", {"role": "user", "content": "Hi"}])
def test_chat_says_how_to_pass_messages(llm, messages) -> None:
    with pytest.raises(ValueError, match="LLM.chat: messages must be a list of dicts .* got .*Hi"):
        llm.chat(messages, GREEDY)


def test_generate_raises_for_nan_weights_and_empties_the_cache(folder) -> None:
    model = Llama.from_pretrained(folder)
    nnx.update(model, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), nnx.state(model)))
    llm = LLM(model, **SIZES)
    prompt = {"prompt_token_ids": [BOS, 5, 6]}
    for params in (GREEDY, dataclasses.replace(SEEDED, n=4)):
        with pytest.raises(FloatingPointError, match="gave NaN for request .* after 3 tokens"):
            generate(llm, [prompt, prompt], params)
        check_empty(llm)


def test_detokenize_false_makes_no_text(llm) -> None:
    plain = complete_prompt(llm, PROMPTS[0], detokenize=False)
    assert plain.text == "" and plain.token_ids == complete_prompt(llm, PROMPTS[0]).token_ids
    with pytest.raises(ValueError, match="detokenize must be True with stop strings"):
        SamplingParams(stop="x", detokenize=False)


def test_llm_rejects_num_blocks_beyond_memory(folder) -> None:
    with pytest.raises(ValueError, match="num_blocks must fit the host memory"):
        LLM(folder, num_blocks=10**12)
