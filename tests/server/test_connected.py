"""Work for a client ends with the client, with the server, or by itself, and leaves nothing."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from paged_jax.server.service import CancelOnDisconnect, ClientGone

Work = Callable[[CancelOnDisconnect], Awaitable[object]]


class Stopped(Exception):
    """Why a server ends all work."""


def run(work: Work, *messages: str) -> object:
    """Do the work for a client that sends these messages; its last is waited for without end."""

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


async def last(connected: CancelOnDisconnect) -> object:
    return await asyncio.Event().wait()


async def be_stopped(connected: CancelOnDisconnect) -> object:
    asyncio.get_running_loop().call_soon(connected.end, Stopped())
    return await last(connected)


async def fail_late(connected: CancelOnDisconnect) -> object:
    try:
        return await last(connected)
    finally:
        raise KeyError("in the end")


async def be_cancelled(connected: CancelOnDisconnect) -> object:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    loop.call_soon(connected.end, Stopped())
    loop.call_soon(task.cancel)
    return await last(connected)


def test_work_that_is_done_has_its_result() -> None:
    assert run(lambda connected: asyncio.sleep(0.01, 7), "http.request") == 7


@pytest.mark.parametrize(
    ("work", "messages", "error"),
    [
        (last, ["http.request", "http.disconnect"], ClientGone),
        (be_stopped, [], Stopped),
        (fail_late, ["http.disconnect"], KeyError),
        (be_cancelled, [], asyncio.CancelledError),
    ],
)
def test_work_ends_for_its_reason(work, messages, error) -> None:
    with pytest.raises(error):
        run(work, *messages)


def test_the_task_goes_on_afterwards() -> None:
    async def main() -> int:
        with pytest.raises(ClientGone):
            async with CancelOnDisconnect(
                lambda: asyncio.sleep(0, {"type": "http.disconnect"}), set()
            ):
                await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0
        return await asyncio.sleep(0, 7)

    assert asyncio.run(main()) == 7
