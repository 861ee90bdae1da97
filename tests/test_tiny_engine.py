"""Tests of examples/tiny_engine.py: the tokens of `LLM`, and the life of blocks.

All tests together cost 12 CPU seconds, half of them for the programs of `LLM`, and the slow test
costs 3 more. The tests share one set of sizes, so each program is compiled once.
"""

import functools

import jax
import numpy as np
import pytest

from examples import tiny_engine
from examples.tiny_engine import Engine, Event, Request
from paged_jax import LLM, SamplingParams
from paged_jax.cache.blocks import check_invariants
from tests.support import ROOT
from tests.support.tiny_model import BOS, CONFIG, SIZES

SYSTEM = [BOS, *range(3, 19)]  # 17 tokens: 4 full blocks
PROMPTS = [
    [*SYSTEM, 20, 21],
    [*SYSTEM, 9, 9, 30],
    [BOS],
    [BOS, 7, 5, 5, 31, 8, 11],
    [*SYSTEM, 20, 21],
    [BOS, *range(30, 3, -1)],
]
VOCAB_SIZE = CONFIG.vocab_size
PROGRAMS = ("prefill", "decode", "attach", "fork", "publish", "release")


class Run:
    """An engine that checks itself after each step, with its events and its tokens in order."""

    def __init__(self, model):
        self.events: list[Event] = []
        self.engine = Engine(
            model,
            num_slots=SIZES["max_num_seqs"],
            num_blocks=SIZES["num_blocks"],
            block_size=SIZES["block_size"],
            chunk_size=8,
            trace=self.events.append,
        )
        self.stream: list[tuple[int, int]] = []

    def add(self, prompt: list[int], max_tokens: int = 12, **options) -> list[Request]:
        return self.engine.add(prompt, max_tokens, **options)

    def step(self) -> None:
        self.stream += [(request.id, token) for request, token in self.engine.step()]
        scheduler, cache = self.engine.scheduler, self.engine.cache
        check_invariants(cache.tables)
        order = [request.id for request in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order)
        lengths = np.zeros(cache.num_slots, np.int32)
        for request in scheduler.running:
            lengths[request.slot] = request.num_computed
        assert cache.lengths.tolist() == lengths.tolist()

    def finish(self) -> None:
        """Run until no request is left, and check that all blocks are free."""
        for _ in range(300):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished
        pool = self.engine.cache.tables.pool
        assert int(pool.num_free) == SIZES["num_blocks"]
        assert self.engine.scheduler.free_slots and pool.is_cached.any()

    def kinds(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]


@pytest.fixture
def run(tiny_model) -> Run:
    return Run(tiny_model)


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Return a function that computes the greedy tokens of the library's engine."""
    llm = LLM(tiny_model, **SIZES)

    @functools.cache
    def tokens(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        [output] = llm.generate([{"prompt_token_ids": [*prompt]}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    return lambda prompt, max_tokens=12: tokens(tuple(prompt), max_tokens)


def output_of(request: Request, prompt: list[int]) -> list[int]:
    assert request.token_ids[: len(prompt)] == prompt
    return request.token_ids[len(prompt) :]


def test_many_requests_give_the_tokens_of_the_library(run, expected) -> None:
    requests = [run.add(prompt)[0] for prompt in PROMPTS]
    run.finish()
    outputs = [output_of(*pair) for pair in zip(requests, PROMPTS, strict=True)]
    assert outputs == [expected(prompt) for prompt in PROMPTS]
    assert len({*map(tuple, outputs)}) == len(PROMPTS) - 1, "only two prompts are equal"
    # Requests of one step have different lengths, and a request starts while others run.
    assert run.stream != sorted(run.stream, key=lambda pair: pair[0])


def test_requests_that_arrive_later_join_the_batch(run, expected) -> None:
    [first] = run.add(PROMPTS[3])
    for _ in range(4):
        run.step()
    assert len(run.stream) == 4, "a token per step"
    [second] = run.add(PROMPTS[5])
    run.finish()
    assert [output_of(first, PROMPTS[3]), output_of(second, PROMPTS[5])] == [
        expected(PROMPTS[3]),
        expected(PROMPTS[5]),
    ]


def test_equal_prefixes_are_shared_and_computed_once(run, expected) -> None:
    """Both requests arrive together, so the second one must wait for the blocks of the first."""
    first, second = run.add(PROMPTS[0])[0], run.add(PROMPTS[1])[0]
    while not second.slot == 1 or not second.can_decode:
        run.step()
    tables = run.engine.cache.block_tables
    assert tables[0, :4].tolist() == tables[1, :4].tolist()
    assert run.engine.cache.tables.pool.ref_counts[tables[0, :4]].tolist() == [2] * 4
    assert len(run.kinds("shared")) == 4 and second.num_reused == 16
    run.finish()
    # Now the blocks are free, but have names.
    [third] = run.add(PROMPTS[4])
    run.finish()
    assert len(run.kinds("found")) == 4 and third.num_reused == 16
    assert not run.kinds("evicted")
    for request, prompt in ((first, PROMPTS[0]), (second, PROMPTS[1]), (third, PROMPTS[4])):
        assert output_of(request, prompt) == expected(prompt)


def test_samples_share_the_prompt_and_copy_its_last_block(run, expected) -> None:
    prompt = PROMPTS[0]  # 18 tokens are read: 4 full blocks, and 2 tokens in the last block
    samples = run.add(prompt, num_samples=3)
    while not run.stream:
        run.step()
    assert [sample.num_reused for sample in samples] == [0, 18, 18]
    assert len(run.kinds("shared")) == 2 * 5
    copies = run.kinds("copied")
    assert len(copies) == 2 and len({event.block for event in copies}) == 1
    tables, pool = run.engine.cache.block_tables[:3], run.engine.cache.tables.pool
    assert pool.ref_counts[tables[:, :5]].tolist() == [[3, 3, 3, 3, 1]] * 3
    run.finish()
    for sample in samples:
        assert output_of(sample, prompt) == expected(prompt)
    assert len(run.kinds("left")) == 2 * 4, "the last sample frees the shared blocks"


def test_samples_without_a_slot_find_the_prompt_in_the_cache(run, expected) -> None:
    samples = run.add(PROMPTS[0], num_samples=6)
    run.finish()
    assert [sample.num_reused for sample in samples] == [0, 18, 18, 18, 16, 16]
    for sample in samples:
        assert output_of(sample, PROMPTS[0]) == expected(PROMPTS[0])


def test_preempted_requests_give_the_same_tokens(run, expected) -> None:
    """Four requests need 52 blocks, and there are 20."""
    prompts = [[BOS, 4 + i, *PROMPTS[5][2:]] for i in range(4)]
    requests = [run.add(prompt, 24)[0] for prompt in prompts]
    run.finish()
    # The newest request makes room, and stays away until another one finishes.
    assert [event.request for event in run.kinds("preempted")] == [3, 2, 3]
    assert [request.num_preemptions for request in requests] == [0, 0, 1, 2]
    assert run.kinds("evicted")
    resumed = [each for each in requests if each.num_preemptions]
    assert any(each.num_reused > 0 for each in resumed), "some of its blocks were not evicted"
    for request, prompt in zip(requests, prompts, strict=True):
        assert output_of(request, prompt) == expected(prompt, 24)


def test_preempted_samples_give_the_tokens_of_a_request_that_runs_alone(run, tiny_model) -> None:
    """The random draws depend on the seed and the position only."""
    samples = run.add(PROMPTS[1], 30, num_samples=4, temperature=1.0, seed=5)
    other = run.add(PROMPTS[3], 30, temperature=1.0, seed=5)[0]
    run.finish()
    assert run.kinds("preempted") and run.kinds("copied")
    alone = Run(tiny_model)
    for seed, sample in enumerate(samples, 5):
        [request] = alone.add(PROMPTS[1], 30, temperature=1.0, seed=seed)
        alone.finish()
        assert request.token_ids == sample.token_ids
    [request] = alone.add(PROMPTS[3], 30, temperature=1.0, seed=5)
    alone.finish()
    assert request.token_ids == other.token_ids
    assert not alone.kinds("preempted")
    assert len({tuple(sample.token_ids) for sample in samples}) == 4


def test_draws_follow_the_probabilities() -> None:
    n = 4000
    logits = np.tile(np.log([[0.6, 0.3, 0.1]]).astype(np.float32), (n, 1))

    def rates(temperature: float, seed: int = 3) -> np.ndarray:
        temperatures, seeds = np.full(n, temperature, np.float32), np.full(n, seed, np.int32)
        tokens = jax.jit(tiny_engine.draw)(logits, temperatures, seeds, np.arange(n))
        return np.bincount(np.asarray(tokens), minlength=3) / n

    # Five standard deviations are at most 0.04.
    np.testing.assert_allclose(rates(1.0), [0.6, 0.3, 0.1], atol=0.04)
    np.testing.assert_allclose(rates(0.5), np.array([36, 9, 1]) / 46, atol=0.04)
    assert rates(0.0).tolist() == [1, 0, 0]
    assert rates(1.0).tolist() != rates(1.0, seed=4).tolist()


def test_long_prompts_are_read_in_chunks_while_others_decode(run, expected) -> None:
    [first] = run.add(PROMPTS[3])
    run.step()
    [second] = run.add(PROMPTS[5])  # 27 tokens are read, in chunks of 8
    progress = []
    while second.num_computed < 27:
        run.step()
        progress.append((second.num_computed, len(output_of(first, PROMPTS[3]))))
    # The step that reads the last chunk also decodes the first token.
    assert progress == [(8, 2), (16, 3), (24, 4), (28, 5)]
    run.finish()
    assert output_of(second, PROMPTS[5]) == expected(PROMPTS[5])


def test_tokens_are_streamed_in_their_order(run) -> None:
    requests = [run.add(prompt, 3 + i)[0] for i, prompt in enumerate(PROMPTS)]
    run.finish()
    for request, prompt in zip(requests, PROMPTS, strict=True):
        streamed = [token for id, token in run.stream if id == request.id]
        assert streamed == output_of(request, prompt)
    ends = {id: at for at, (id, _) in enumerate(run.stream)}
    starts = {id: at for at, (id, _) in reversed([*enumerate(run.stream)])}
    assert starts[1] < ends[0], "the second request starts before the first one ends"


def test_programs_are_compiled_once_and_copy_no_block(tiny_model) -> None:
    """An engine without a trace; its pools stay where they are in memory."""
    programs = [getattr(tiny_engine, name) for name in PROGRAMS]
    for program in programs:
        program.clear_cache()
    run = Run(tiny_model)
    run.engine.trace = None
    pools = run.engine.cache.pools
    before = pools.k.unsafe_buffer_pointer(), pools.v.unsafe_buffer_pointer()
    run.add(PROMPTS[0], num_samples=2)
    run.add(PROMPTS[3])
    run.finish()
    after = run.engine.cache.pools
    assert before == (after.k.unsafe_buffer_pointer(), after.v.unsafe_buffer_pointer())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pools))
    assert [program._cache_size() for program in programs] == [1] * len(programs)
    assert not run.events


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "a prompt must have tokens, .* got 0 prompt tokens"),
        ({"max_tokens": 0}, "max_tokens .* at least 1, .* max_tokens=0"),
        ({"num_samples": 0}, "num_samples must be at least 1, .* num_samples=0"),
        ({"temperature": -1.0}, "temperature at least 0, .* temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature at least 0, .* temperature=nan"),
        ({"prompt_ids": [BOS, -1]}, f"prompt_ids must be from 0 to {VOCAB_SIZE - 1}, got -1"),
        ({"prompt_ids": [VOCAB_SIZE]}, f"prompt_ids must be .*, got {VOCAB_SIZE}"),
        ({"seed": -1}, r"seed must be from 0 to 2\*\*31 - num_samples, got -1"),
        ({"seed": 2**31 - 1, "num_samples": 2}, f"seed must be .*, got {2**31 - 1}"),
        ({"max_tokens": 62}, "must have at most 64 tokens, .* got 65"),
    ],
)
def test_bad_requests_are_errors(run, changes, message) -> None:
    with pytest.raises(ValueError, match=f"^add: .*{message}"):
        run.engine.add(**{"prompt_ids": [BOS, 3, 4], "max_tokens": 5} | changes)
    assert not run.engine.has_unfinished


def test_largest_seed_and_token_are_accepted(run) -> None:
    prompt = [BOS, VOCAB_SIZE - 1]
    samples = run.add(prompt, num_samples=2, temperature=1.0, seed=2**31 - 2)
    run.finish()
    assert samples[-1].seed == 2**31 - 1
    assert all(len(output_of(sample, prompt)) > 0 for sample in samples)


def test_command_line_prints_tokens_events_and_texts(
    tiny_model, tiny_folder, monkeypatch, capsys
) -> None:
    """The tiny model replaces the bundled one, with the sizes of the other tests."""
    tokenizer = tiny_engine.Tokenizer.from_folder(tiny_folder)
    monkeypatch.setattr(tiny_engine.Decoder, "from_pretrained", lambda: tiny_model)
    monkeypatch.setattr(tiny_engine.Tokenizer, "from_folder", lambda folder: tokenizer)
    sizes = {"num_slots": SIZES["max_num_seqs"], "block_size": SIZES["block_size"]}
    monkeypatch.setattr(tiny_engine, "Engine", functools.partial(Engine, **sizes, chunk_size=8))
    prompts = [word for prompt in ("the cat sat.", "the cat is") for word in ("--prompt", prompt)]
    flags = ["--num-tokens", "3", "--temperature", "0", "--num-blocks", str(SIZES["num_blocks"])]
    tiny_engine.main([*prompts, *flags, "--trace"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["step 0", "    request 0   allocated  block 0"]
    assert "    request 0   copied     block 2 to block 3" in lines
    [first, *_] = [line for line in lines if line.startswith("  0: '")]
    assert "  1: '" in first, "both samples get a token in one step"
    texts = [line for line in lines if line.startswith("the cat")]
    assert texts[0] == texts[1] and texts[0].startswith("the cat sat.")
    assert texts[2] == texts[3] and texts[2].startswith("the cat is")

    with pytest.raises(SystemExit):
        tiny_engine.main([*prompts, *flags, "--num-tokens", "99"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "a prompt and its new tokens must have at most 64 tokens" in error


@pytest.mark.slow
def test_page_shows_lines_that_the_command_line_prints(capsys) -> None:
    tiny_engine.main(["--trace"])
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "paged-attention.md").read_text()
    shown = page.split("$ python examples/tiny_engine.py --trace\n")[1].split("\n```")[0]
    assert [part for part in shown.split("\n...") if part not in printed] == []
    for kind in ("allocated", "shared", "found", "copied", "published", "left", "freed", "evicted"):
        assert f" {kind} " in printed


def test_bad_sizes_are_errors(tiny_model) -> None:
    for size in ("num_slots", "num_blocks", "block_size", "chunk_size"):
        sizes = {"num_slots": 4, "num_blocks": 20, "block_size": 8, "chunk_size": 16} | {size: 0}
        slots, blocks, tokens, chunk = sizes.values()
        message = f"Engine: .* must be at least 1, got {slots}, {blocks}, {tokens} and {chunk}"
        with pytest.raises(ValueError, match=message):
            Engine(tiny_model, **sizes)
