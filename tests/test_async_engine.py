"""`AsyncEngine`: many tasks share an engine; tasks may be cancelled, and steps may fail."""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time

import pytest

from paged_jax import AsyncEngine, Engine, SamplingParams
from paged_jax.async_engine import EngineClosedError
from paged_jax.cache.blocks import check_invariants
from paged_jax.scheduler.request import Request
from tests.support.tiny_model import SIZES

PROMPTS = ["the cat sat on a mat", "in the house, he said", "ab", "one day", "who is it?"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_folder) -> Engine:
    return Engine(tiny_folder, **SIZES, steps_per_dispatch=2)


@pytest.fixture
def slow_engine(engine, monkeypatch) -> Engine:
    """Return an engine that is too slow to generate 40 tokens before a task wakes up."""
    advance = engine.advance
    monkeypatch.setattr(engine, "advance", lambda: (time.sleep(0.1), advance())[1])
    return engine


def run(engine: Engine, main):
    """Return the result of ``main(async_engine)``, and check that the engine is empty."""

    async def with_engine():
        async with AsyncEngine(engine) as asynchronous:
            return await asyncio.wait_for(main(asynchronous), timeout=300)

    result = asyncio.run(with_engine())
    assert not engine.has_unfinished and engine.cache_use == 0
    check_invariants(engine.cache.tables)
    return result


async def complete(engine: AsyncEngine, prompt, params=GREEDY, **options):
    outputs = [output async for output in engine.generate(prompt, params, **options)]
    texts = [output.outputs[0].text for output in outputs]
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1].outputs[0].token_ids


def test_generate_gives_a_slow_task_the_newest_output(engine) -> None:
    """Outputs do not pile up, and no token is lost: an output has all earlier tokens."""

    async def main(engine):
        outputs = []
        async for output in engine.generate(PROMPTS[0], GREEDY):
            outputs.append(output)
            while not await engine.call(lambda engine: not engine.has_unfinished):
                await asyncio.sleep(0.01)
        return outputs

    outputs = run(engine, main)
    # A single output if the engine finished before this task first woke up.
    assert len(outputs) <= 2 and outputs[-1].finished
    assert len(outputs[-1].outputs[0].token_ids) == GREEDY.max_tokens


def test_generate_final_only_yields_the_finished_output(engine) -> None:
    async def main(engine):
        return [x async for x in engine.generate(PROMPTS[0], GREEDY, final_only=True)]

    [output] = run(engine, main)
    assert output.finished and len(output.outputs[0].token_ids) == GREEDY.max_tokens


def test_generate_final_only_makes_one_output(engine, monkeypatch) -> None:
    made = []
    output = Request.output
    monkeypatch.setattr(Request, "output", lambda self: made.append(self) or output(self))

    async def main(engine):
        return [x async for x in engine.generate(PROMPTS[0], GREEDY, final_only=True)]

    run(engine, main)
    assert len(made) == 1


def test_aenter_raises_while_a_step_hangs(engine, monkeypatch) -> None:
    advance, is_in, may_go_on = engine.advance, threading.Event(), threading.Event()
    monkeypatch.setattr(engine, "advance", lambda: (is_in.set(), may_go_on.wait(30), advance())[2])

    async def main():
        asynchronous = AsyncEngine(engine)
        await asynchronous.__aenter__()
        task = asyncio.create_task(complete(asynchronous, PROMPTS[0]))
        assert await asyncio.to_thread(is_in.wait, 30)
        await asynchronous.close(timeout=0.01)
        with pytest.raises(RuntimeError, match="whose thread still runs"):
            await asynchronous.__aenter__()
        with pytest.raises(EngineClosedError):
            await complete(asynchronous, PROMPTS[1])
        may_go_on.set()
        await asynchronous.close()
        assert len(await task) < 12
        async with asynchronous:
            return await complete(asynchronous, PROMPTS[1])

    assert len(asyncio.run(asyncio.wait_for(main(), 60))) == 12
    assert not engine.has_unfinished


def test_generate_shares_the_engine_between_tasks(engine) -> None:
    async def main(engine):
        alone = [await complete(engine, prompt) for prompt in PROMPTS]
        together = await asyncio.gather(*[complete(engine, prompt) for prompt in PROMPTS])
        return alone, together

    alone, together = run(engine, main)
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)


def test_generate_cancelled_ends_only_its_request(engine) -> None:
    long = dataclasses.replace(GREEDY, max_tokens=40)

    async def main(engine):
        expected = await complete(engine, PROMPTS[1])
        leaver = asyncio.create_task(complete(engine, PROMPTS[0], long))
        other = asyncio.create_task(complete(engine, PROMPTS[1]))
        await asyncio.sleep(0.01)
        leaver.cancel()
        assert await other == expected
        with contextlib.suppress(asyncio.CancelledError):
            await leaver
        async with contextlib.aclosing(engine.generate(PROMPTS[2], long)) as stream:
            async for _ in stream:
                break
        # The next command runs after the request has ended.
        assert not await engine.call(lambda engine: engine.has_unfinished)

    run(engine, main)


def test_abort_finishes_the_iteration_of_a_task(slow_engine) -> None:
    async def main(engine):
        outputs = []
        params = dataclasses.replace(GREEDY, max_tokens=40)
        async for output in engine.generate(PROMPTS[0], params, request_id="mine"):
            outputs.append(output)
            await engine.abort("mine")
        return outputs[-1]

    output = run(slow_engine, main)
    assert output.finished and output.outputs[0].finish_reason == "abort"


def test_generate_raises_errors_in_the_calling_task(engine) -> None:
    async def main(engine):
        good = asyncio.create_task(complete(engine, PROMPTS[0]))
        with pytest.raises(ValueError, match="at least one character"):
            await complete(engine, "")
        return len(await good)

    assert run(engine, main) == 12


def test_close_ends_running_requests(slow_engine) -> None:
    async def main():
        asynchronous = await AsyncEngine(slow_engine).__aenter__()
        params = dataclasses.replace(GREEDY, max_tokens=40)
        stream = asynchronous.generate(PROMPTS[0], params)
        await anext(stream)
        await asynchronous.close()
        last = [output async for output in stream][-1]
        with pytest.raises(RuntimeError, match="must be running"):
            await complete(asynchronous, PROMPTS[0])
        return last

    assert asyncio.run(main()).outputs[0].finish_reason == "abort"
    assert not slow_engine.has_unfinished


def test_generate_cancelled_before_it_is_added_leaves_nothing(engine) -> None:
    long = dataclasses.replace(GREEDY, max_tokens=40)

    async def main(engine):
        for _ in range(5):
            task = asyncio.create_task(complete(engine, PROMPTS[0], long))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not await engine.call(lambda engine: engine.has_unfinished)

    run(engine, main)


def test_generate_may_reuse_an_id(engine) -> None:
    async def main(engine):
        async for output in engine.generate(PROMPTS[0], GREEDY, request_id="x"):
            if output.finished:
                break
        first = engine.generate(PROMPTS[0], GREEDY, request_id="x")
        await anext(first)
        await first.aclose()
        return await complete(engine, PROMPTS[1], request_id="x")

    assert len(run(engine, main)) == 12


def exceptions(caplog) -> list[type[BaseException]]:
    """Return the types of the logged exceptions."""
    return [record.exc_info[0] for record in caplog.records if record.exc_info]


def test_step_that_fails_once_is_logged_and_tried_again(engine, monkeypatch, caplog) -> None:
    original, calls = engine.core.runner.decode, []

    def fail_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return original(*args, **kwargs)

    async def main(engine):
        return await asyncio.gather(*[complete(engine, prompt) for prompt in PROMPTS])

    expected = run(engine, main)
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.runner, "decode", fail_once)
        num_failed = engine.stats.num_failed_steps
        assert run(engine, main) == expected
    assert len(calls) > 2
    assert exceptions(caplog) == [MemoryError] and "attempt 1 of 3" in caplog.text
    assert engine.stats.num_failed_steps == num_failed + 1


def test_failure_reaches_every_task_and_the_engine_can_restart(engine, monkeypatch, caplog) -> None:
    async def main(engine):
        errors = await asyncio.gather(
            *[complete(engine, prompt) for prompt in PROMPTS[:2]], return_exceptions=True
        )
        with pytest.raises(RuntimeError, match="got an engine that has failed"):
            await complete(engine, PROMPTS[0])
        return errors

    def fail(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.runner, "decode", fail)
        for error in run(engine, main):
            assert isinstance(error, RuntimeError)
            assert isinstance(error.__cause__, MemoryError)
    assert exceptions(caplog) == [MemoryError] * 3

    async def twice():
        asynchronous = AsyncEngine(engine)
        for _ in range(2):
            async with asynchronous:
                with pytest.raises(RuntimeError, match="must be closed"):
                    await asynchronous.__aenter__()
                assert len(await complete(asynchronous, PROMPTS[0])) == 12

    asyncio.run(twice())


def test_failure_of_the_device_ends_all_tasks(tiny_folder, monkeypatch) -> None:
    """The device state cannot be restored either."""
    engine = Engine(tiny_folder, **SIZES)

    ends = []

    async def main():
        async with AsyncEngine(engine, on_failure=lambda: ends.append(1)) as asynchronous:
            tasks = [complete(asynchronous, prompt) for prompt in PROMPTS]
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    def fail(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(engine.core.runner, "decode", fail)
    monkeypatch.setattr(engine.core.runner, "reset", fail)
    errors = asyncio.run(main())
    assert [type(error) for error in errors] == [EngineClosedError] * len(PROMPTS)
    assert ends == [1]


def test_on_step_sees_each_step_and_each_abort(engine) -> None:
    seen, told = [], []

    def on_step(stepped: Engine, requests) -> None:
        assert stepped is engine
        seen.extend((request.request_id, request.is_finished) for request in requests)

    async def main():
        async with AsyncEngine(engine, on_step=on_step) as asynchronous:
            async for output in asynchronous.generate(PROMPTS[0], GREEDY, request_id="whole"):
                told.append(("whole", output.finished))
                assert told[-1] in seen, "tasks hear of it afterwards"
            long = dataclasses.replace(GREEDY, max_tokens=40)
            async for _ in asynchronous.generate(PROMPTS[1], long, request_id="aborted"):
                await asynchronous.abort("aborted")
            stream = asynchronous.generate(PROMPTS[2], long, request_id="left")
            await anext(stream)
            await stream.aclose()
            await asynchronous.generate(PROMPTS[3], long, request_id="closed").__anext__()

    asyncio.run(main())
    assert set(told) <= set(seen)
    assert [name for name, finished in seen if finished] == ["whole", "aborted", "left", "closed"]


def test_on_step_exceptions_are_logged_once(engine, caplog) -> None:
    calls = []

    def on_step(engine: Engine, requests) -> None:
        calls.append(requests)
        raise ZeroDivisionError

    async def main():
        async with AsyncEngine(engine, on_step=on_step) as asynchronous:
            return await complete(asynchronous, PROMPTS[0])

    with caplog.at_level(logging.ERROR):
        assert len(asyncio.run(main())) == 12
    assert len(calls) > 1
    [record] = caplog.records
    assert record.name == "paged_jax.async_engine" and "on_step failed" in record.message
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError
