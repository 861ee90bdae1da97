"""Cancellation of work for clients that disconnect."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from paged_jax.server.disconnection import CancelOnDisconnect, ClientGone

Work = Callable[[CancelOnDisconnect], Awaitable[object]]


class Stopped(Exception):
    """Reason of the server to cancel all work."""


def run(work: Work, *messages: str) -> object:
    """Run `work` for a client that sends these ASGI messages and then nothing."""

    async def receive():
        if messages[len(received) :]:
            received.append(messages[len(received)])
            return {"type": received[-1]}
        return await asyncio.Event().wait()

    async def main() -> object:
        connected = CancelOnDisconnect(receive, others)
        try:
            async with connected:
                return await work(connected)
        finally:
            await asyncio.sleep(0)
            assert not others and asyncio.all_tasks() == {asyncio.current_task()}

    received: list[str] = []
    others: set[CancelOnDisconnect] = set()
    return asyncio.run(main())


async def wait_forever(connected: CancelOnDisconnect) -> object:
    return await asyncio.Event().wait()


async def be_stopped(connected: CancelOnDisconnect) -> object:
    asyncio.get_running_loop().call_soon(connected.end, Stopped())
    return await wait_forever(connected)


async def fail_late(connected: CancelOnDisconnect) -> object:
    try:
        return await wait_forever(connected)
    finally:
        raise KeyError("in the end")


async def be_cancelled(connected: CancelOnDisconnect) -> object:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    loop.call_soon(connected.end, Stopped())
    loop.call_soon(task.cancel)
    return await wait_forever(connected)


def test_cancel_on_disconnect_returns_the_result_of_finished_work() -> None:
    assert run(lambda connected: asyncio.sleep(0.01, 7), "http.request") == 7


@pytest.mark.parametrize(
    ("work", "messages", "error"),
    [
        (wait_forever, ["http.request", "http.disconnect"], ClientGone),
        (be_stopped, [], Stopped),
        (fail_late, ["http.disconnect"], KeyError),
        (be_cancelled, [], asyncio.CancelledError),
    ],
)
def test_cancel_on_disconnect_raises_the_reason(work, messages, error) -> None:
    with pytest.raises(error):
        run(work, *messages)


def test_cancel_on_disconnect_leaves_the_task_usable() -> None:
    async def main() -> int:
        with pytest.raises(ClientGone):
            async with CancelOnDisconnect(
                lambda: asyncio.sleep(0, {"type": "http.disconnect"}), set()
            ):
                await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0
        return await asyncio.sleep(0, 7)

    assert asyncio.run(main()) == 7
