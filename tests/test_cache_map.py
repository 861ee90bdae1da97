"""Tests of `cache_map`: states of the cache, and events between two states."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from paged_jax import Engine, Llama, SamplingParams
from paged_jax.cache_map import BlockText, CacheEvent, CacheMap, block_text, changes, snapshot
from tests.support.tiny_model import BOS, SIZES

C = SIZES["block_size"]
OPTIONS = {**SIZES, "steps_per_dispatch": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)
LONG = {"prompt_token_ids": [BOS, *range(5, 22)]}  # 18 tokens: 4 full blocks and 2 tokens
OTHER = {"prompt_token_ids": [BOS, *range(25, 32)]}


@pytest.fixture(scope="module")
def model(tiny_model) -> Llama:
    return tiny_model


def step(engine: Engine) -> tuple[CacheMap, list[CacheEvent]]:
    before = snapshot(engine)
    check(engine, before)
    engine.step()
    after = snapshot(engine)
    check(engine, after)
    return after, changes(before, after)


def finish(engine: Engine) -> list[CacheEvent]:
    events = []
    while engine.has_unfinished:
        events += step(engine)[1]
    return events


def of_kind(events: list[CacheEvent], kind: str) -> list[CacheEvent]:
    return [event for event in events if event.kind == kind]


def check(engine: Engine, cache_map: CacheMap) -> None:
    """Check the invariants of a state."""
    entries = Counter(block for s in cache_map.sequences for block in s.block_ids)
    assert cache_map.ref_counts == [entries[block] for block in range(cache_map.num_blocks)]
    assert cache_map.is_cached == [bool(digest) for digest in cache_map.digests]
    digests = [digest for digest in cache_map.digests if digest]
    assert len(set(digests)) == len(digests)
    assert cache_map.num_free + cache_map.num_used == cache_map.num_blocks == engine.num_blocks
    assert cache_map.num_shared == sum(count > 1 for count in entries.values())
    assert cache_map.num_cached_only == sum(
        found and not count
        for found, count in zip(cache_map.is_cached, cache_map.ref_counts, strict=True)
    )
    free = [block for block, count in enumerate(cache_map.ref_counts) if not count]
    assert sorted(cache_map.free_order) == free
    # Cached blocks are the last in the order of allocation.
    found = [cache_map.is_cached[block] for block in cache_map.free_order]
    assert found == sorted(found)
    for sample in cache_map.sequences:
        assert len(sample.block_ids) == -(-sample.num_computed // C)
        assert (sample.state == "decode") == (sample.num_computed == sample.num_tokens - 1)
    assert all(sample.reason for sample in cache_map.waiting)
    slots = [sample.slot for sample in cache_map.sequences]
    assert len(set(slots)) == len(slots) <= engine.max_num_seqs
    data = dataclasses.asdict(cache_map)
    assert json.loads(json.dumps(data)) == data


# snapshot


@pytest.mark.slow
def test_snapshot_separates_running_and_waiting_samples(model) -> None:
    engine = Engine(model, **OPTIONS)
    engine.add_request(LONG, dataclasses.replace(SEEDED, n=2), request_id="a", priority=3)
    engine.add_request(OTHER, GREEDY, request_id="b", priority=4)
    assert [(s.request_id, s.sample, s.reason) for s in snapshot(engine).waiting] == [
        ("a", 0, "turn"),
        ("a", 1, "fork"),
        ("b", 0, "turn"),
    ]
    cache_map, _ = step(engine)  # a chunk has 16 tokens
    assert [(s.request_id, s.state, s.num_computed) for s in cache_map.sequences] == [
        ("a", "prefill", 16),
        ("b", "decode", 8),
    ]
    assert [s.priority for s in cache_map.sequences] == [3, 4]
    cache_map, _ = step(engine)
    assert [(s.request_id, s.sample, s.state) for s in cache_map.sequences] == [
        ("a", 0, "decode"),
        ("a", 1, "decode"),
        ("b", 0, "decode"),
    ]
    assert [s.is_fork for s in cache_map.sequences] == [False, True, False]
    assert cache_map.num_shared == 4
    finish(engine)
    assert snapshot(engine).num_used == 0


def test_snapshot_agrees_with_the_cache_after_every_step(model) -> None:
    engine = Engine(model, **OPTIONS)
    random, kinds = np.random.default_rng(0), set()
    for number in range(60):
        if random.random() < 0.4:
            length = int(random.integers(1, 32))
            token_ids = [BOS, *(5 + random.integers(0, 2, length)).tolist()]
            params = dataclasses.replace(
                SEEDED, n=int(random.integers(1, 4)), max_tokens=int(random.integers(1, 32))
            )
            priority = int(random.integers(0, 2))
            engine.add_request({"prompt_token_ids": token_ids}, params, priority=priority)
        if random.random() < 0.05:
            engine.abort(str(number // 3))
        kinds |= {event.kind for event in step(engine)[1]}
    assert kinds >= {"admit", "preempt", "evict", "copy_on_write", "finish"}
    finish(engine)


def test_snapshot_counts_tokens_found_in_the_prefix_cache(model) -> None:
    engine = Engine(model, **OPTIONS)
    for _ in range(2):
        engine.add_request(LONG, GREEDY)
        finish(engine)
    cache_map = snapshot(engine)
    assert (cache_map.num_queried_tokens, cache_map.num_cached_tokens) == (34, 16)
    assert cache_map.hit_rate == 16 / 34
    assert cache_map.num_cached_only == 7  # of 29 tokens in the cache


# block_text


def test_block_text_has_an_entry_for_each_sample(model, tiny_folder) -> None:
    engine = Engine(model, tokenizer=tiny_folder, **OPTIONS)
    engine.add_request("the cat sat", dataclasses.replace(SEEDED, n=2), request_id="a")
    cache_map, _ = step(engine)
    first, second = cache_map.sequences
    # The device may have generated more tokens, in blocks that are still empty for the host.
    token_ids = {s.index: s.token_ids[: s.num_computed] for s in engine.sequences}
    assert engine.tokenizer is not None
    head = engine.tokenizer.encode("the cat sat")[:C]
    shared = block_text(engine, first.block_ids[0])
    assert shared == [
        BlockText("a", 0, 0, head, "<s>the c", True),
        BlockText("a", 1, 0, head, "<s>the c", True),
    ]
    for sample in (first, second):
        known = token_ids[sample.sample]
        start = (len(known) - 1) // C * C
        [own] = block_text(engine, sample.block_ids[start // C])
        assert (own.sample, own.start) == (sample.sample, start)
        assert own.token_ids == known[start:]
        assert len(known) <= sample.num_computed == sample.num_tokens - 1
    finish(engine)
    [cached] = block_text(engine, first.block_ids[0])
    assert cached == BlockText(None, None, None, head, "<s>the c", True)


def test_block_text_of_a_free_block_is_empty(model) -> None:
    engine = Engine(model, **OPTIONS)
    assert block_text(engine, 3) == []
    for block_id in (-1, OPTIONS["num_blocks"]):
        with pytest.raises(ValueError, match=rf"block_id must be in 0..19, got {block_id}"):
            block_text(engine, block_id)


# changes


def test_changes_has_admissions_and_ends(model) -> None:
    engine = Engine(model, **OPTIONS)
    before = snapshot(engine)
    assert changes(before, before) == []
    engine.add_request(OTHER, dataclasses.replace(GREEDY, max_tokens=9), request_id="a")
    cache_map, [admitted] = step(engine)
    assert admitted == CacheEvent(
        "admit", "a", cache_map.sequences[0].block_ids, "sample 0 of request a got slot 0"
    )
    [finished] = finish(engine)
    assert (finished.kind, finished.request_id) == ("finish", "a")
    assert finished.block_ids[:3] == cache_map.sequences[0].block_ids
    engine.add_request(OTHER, GREEDY, request_id="b")
    _, [admitted] = step(engine)
    assert admitted.text == "sample 0 of request b got slot 0 and found 1 block in the cache"


@pytest.mark.parametrize("num_tokens", [18, 10], ids=["prompt in two steps", "in one step"])
def test_changes_has_copies_on_write(model, num_tokens) -> None:
    engine = Engine(model, **OPTIONS)
    prompt = {"prompt_token_ids": LONG["prompt_token_ids"][:num_tokens]}
    engine.add_request(prompt, dataclasses.replace(SEEDED, n=3, max_tokens=6), request_id="a")
    copies, before = [], snapshot(engine)
    while not copies:
        assert engine.has_unfinished
        before = snapshot(engine)
        cache_map, events = step(engine)
        copies = of_kind(events, "copy_on_write")
    tables = {s.sample: s.block_ids for s in cache_map.sequences}
    sources = {event.block_ids[0] for event in copies}
    targets = [event.block_ids[1] for event in copies]
    last = [tables[sample][(num_tokens - 1) // C] for sample in range(3)]
    # One of the three samples keeps the last block of the prompt, and the others have copies.
    assert len(copies) == 2
    assert sources == {last[max(cache_map.sequences, key=lambda s: s.slot).sample]}
    assert sorted([*sources, *targets]) == sorted(last)
    assert all(before.ref_counts[target] == 0 for target in targets)
    assert all("got a copy of block" in event.text for event in copies)
    assert not of_kind(finish(engine), "copy_on_write")


def test_changes_has_no_copies_for_forks_at_the_end_of_a_block(model) -> None:
    engine = Engine(model, **OPTIONS)
    prompt = {"prompt_token_ids": LONG["prompt_token_ids"][: 2 * C + 1]}
    engine.add_request(prompt, dataclasses.replace(SEEDED, n=3))
    events = finish(engine)
    assert len(of_kind(events, "admit")) == 3 and not of_kind(events, "copy_on_write")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_changes_has_preemptions_and_evictions(model, preemption) -> None:
    engine = Engine(model, **OPTIONS, preemption=preemption)
    engine.add_request(LONG, dataclasses.replace(GREEDY, max_tokens=1))
    finish(engine)
    assert snapshot(engine).num_cached_only == 4
    # Each sample needs 11 of the 20 blocks in the end.
    params = dataclasses.replace(GREEDY, max_tokens=36)
    engine.add_request(OTHER, params, request_id="a")
    engine.add_request({"prompt_token_ids": [BOS, *range(3, 10)]}, params, request_id="b")
    events = []
    while not of_kind(events, "preempt"):
        assert engine.has_unfinished
        cache_map, events_of_step = step(engine)
        events += events_of_step
    [preempted] = of_kind(events, "preempt")
    assert preempted.request_id == "b" and len(preempted.block_ids) == 10
    assert ("which went to host memory" in preempted.text) == (preemption == "swap")
    assert [(s.request_id, s.is_swapped) for s in cache_map.waiting] == [
        ("b", preemption == "swap")
    ]
    evicted = [block for event in of_kind(events, "evict") for block in event.block_ids]
    assert len(set(evicted)) >= 4, "the four that were cached, for nobody was there to want them"
    events = finish(engine)
    [back] = of_kind(events, "admit")
    assert ("from host memory" in back.text) == (preemption == "swap")


def test_changes_has_no_evictions_if_the_cache_is_reset(model) -> None:
    engine = Engine(model, **OPTIONS)
    engine.add_request(LONG, GREEDY)
    finish(engine)
    before = snapshot(engine)
    engine.reset_prefix_cache()
    after = snapshot(engine)
    assert before.num_cached_only and not after.num_cached_only
    assert changes(before, after) == []


def test_html_of_a_snapshot_shows_samples_and_escapes_their_names(tiny_folder) -> None:
    engine = Engine(tiny_folder, **SIZES)
    engine.add_request("ab", request_id="<i>")
    engine.step()
    page = snapshot(engine)._repr_html_()
    assert page.count('title="block ') == SIZES["num_blocks"] and 'class="u" title=' in page
    assert "sample 0 of request &lt;i&gt;" in page and "<i>" not in page
