"""Admission of waiting sequences: blocks, order, and prefixes of running sequences."""

from tests.support.scheduling import add, check_outputs, make_engine, prompt_of


def test_admit_does_not_let_others_overtake_a_large_request():
    engine = make_engine(num_blocks=10)
    add(engine, 0, length=17, max_tokens=4)
    [large], [small] = add(engine, 1, length=25), add(engine, 2, length=1)
    plan = engine.step()
    assert len(plan.decodes) == 1 and plan.leave_on_stop
    assert (large.waits_for, small.waits_for) == ("blocks", "turn")
    engine.run()
    assert engine.finished[0].request.request_id == "0"
    check_outputs(engine)


def test_admit_does_not_starve_a_large_request():
    engine = make_engine(num_slots=3, num_blocks=12)
    for number in range(3):
        add(engine, number, length=9, max_tokens=10)
    engine.step()
    [large] = add(engine, 3, length=40, max_tokens=8)
    for number in range(4, 100):
        add(engine, number, length=9, max_tokens=10)
        engine.step()
        if large in engine.finished:
            break
    # Ten steps of earlier requests, eight steps of the large one, and a few until it is admitted.
    assert number < 4 + 10 + 8 + 4


def test_admit_reserves_a_block_for_each_growing_sequence():
    # Three blocks for each. Admitting the third needs a reserved block for each of the other two.
    for num_blocks, num_running in ((11, 3), (10, 2)):
        engine = make_engine(num_blocks=num_blocks, enable_prefix_caching=False)
        for number in range(4):
            add(engine, number, length=10, max_tokens=12)
        assert len(engine.step().decodes) == num_running


def test_admit_reserves_no_block_for_sequences_that_cannot_grow():
    # Three blocks for each, enough for all tokens.
    engine = make_engine(num_blocks=9, enable_prefix_caching=False)
    for number in range(4):
        add(engine, number, length=10, max_tokens=3)
    assert len(engine.step().decodes) == 3


def test_admit_counts_the_promised_blocks_of_partial_prefills():
    engine = make_engine(num_blocks=12, max_chunk=4)
    add(engine, 0, length=32)
    [second] = add(engine, 1, length=16)
    engine.step()
    # Eleven blocks are free, seven of them are promised.
    assert engine.memory.num_free == 11 and second.waits_for == "blocks"


def test_try_to_start_does_not_look_up_a_waiting_request_in_every_step():
    engine = make_engine(num_blocks=10)
    add(engine, 0, length=17, max_tokens=12)
    [large] = add(engine, 1, length=25)
    for _ in range(8):
        engine.step()
    assert large.waits_for == "blocks"
    # Once for the first request. Once for the large one during the first prefill and once after it.
    assert engine.memory.num_attempts == 3
    engine.run()
    check_outputs(engine)


def test_retry_deferred_looks_up_again_after_a_prefill():
    engine = make_engine(num_blocks=12)
    add(engine, 5, length=21, max_tokens=9)
    engine.step()
    prompt = prompt_of(0, 21)
    [sequence] = add(engine, 1, length=21, prompt=prompt)
    engine.step()
    assert sequence.waits_for == "blocks"
    add(engine, 0, length=21, max_tokens=9, prompt=prompt, priority=-1)
    engine.step()
    assert sequence.waits_for == "blocks"
    engine.step()
    assert sequence.slot is not None
    engine.run()
    check_outputs(engine)


# The prefix cache


def test_equal_prompts_are_prefilled_once():
    engine = make_engine(max_chunk=6)
    prompt = prompt_of(0, 14)
    add(engine, 0, length=14)
    equal = [add(engine, n, length=14, prompt=prompt)[0] for n in (1, 2)]
    [longer] = add(engine, 3, length=16, prompt=prompt + [2, 2])
    [other] = add(engine, 4, length=6, salt="other")
    plan = engine.step()
    assert all(s.waits_for == "same prefix" for s in (*equal, longer))
    assert [s.request.request_id for s, _ in plan.chunks] == ["0", "4"], "other requests pass them"
    assert plan.num_steps == 1 and other in plan.decodes
    engine.run()
    check_outputs(engine)
    # Three shared blocks, and the tokens after them: 1 token of each prompt, 3 of the longest.
    assert engine.num_prefilled == 5 + 12 + 1 + 1 + 1 + 3
    assert engine.scheduler.stats.num_cached_tokens == 3 * 12


def test_no_sequence_waits_for_a_block_that_decode_fills():
    engine = make_engine(max_chunk=4)
    add(engine, 0, length=8)
    engine.step()
    [longer] = add(engine, 1, length=12, prompt=prompt_of(0, 12))
    plan = engine.step()
    assert len(plan.chunks) == 2 and longer.num_computed == 8


def test_prompts_with_different_salts_share_no_blocks():
    engine = make_engine()
    for number, salt in enumerate(("", "a", "b")):
        add(engine, number, length=14, prompt=prompt_of(0, 14), salt=salt)
    assert len(engine.step().chunks) == 3
    assert engine.scheduler.stats.num_cached_tokens == 0


def test_no_look_ups_without_prefix_caching():
    engine = make_engine(enable_prefix_caching=False)
    for number in range(2):
        add(engine, number, length=14, prompt=prompt_of(0, 14))
    assert [n for _, n in engine.step().chunks] == [13, 13]
    engine.run()
    assert engine.memory.num_attempts == engine.scheduler.stats.num_queried_tokens == 0


def test_cached_prompt_still_computes_its_last_token():
    engine = make_engine()
    for number, num_computed in ((0, 12), (1, 0)):
        [sequence] = add(engine, number, length=13, prompt=prompt_of(0, 13))
        plan = engine.step()
        assert sum(n for _, n in plan.chunks) == num_computed
        assert plan.decodes == [sequence]
        engine.run()
    check_outputs(engine)
