"""A client leaves a stream of each API after any event: its blocks are free within a step."""

import pytest

from tests.server.test_anthropic_codec import FUNCTIONS as MESSAGES_FUNCTIONS
from tests.server.test_response_codec import FUNCTIONS
from tests.support.live_server import LiveServer, wait_until
from tests.support.reasoning_server import reasoning_server
from tests.support.structured import TOOLS

CHAT = {"messages": [{"role": "user", "content": "Well?"}]}
# An answer of reasoning and text, and an answer of calls, in each API.
COMMON = {"stream": True, "temperature": 1, "seed": 3}
BODIES = {
    "chat text": ("/v1/chat/completions", {**CHAT, "max_tokens": 80}),
    "chat calls": (
        "/v1/chat/completions",
        {**CHAT, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "response text": ("/v1/responses", {"input": "Well?", "max_output_tokens": 80}),
    "response calls": (
        "/v1/responses",
        {
            "input": "Well?",
            "tools": FUNCTIONS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    "message text": ("/v1/messages", {**CHAT, "max_tokens": 80}),
    "message calls": (
        "/v1/messages",
        {
            **CHAT,
            "max_tokens": 100,
            "tools": MESSAGES_FUNCTIONS,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
}


@pytest.fixture(scope="module")
def server():
    with reasoning_server() as server:
        yield server


def read_events(server: LiveServer, path: str, body: dict, most: float) -> int:
    """Read at most this number of events, and leave. Return the number of events."""
    count = 0
    with server.client() as client, client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines() if most else ():
            count += line.startswith("data: ")
            if count >= most:
                break
    return count


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if i else ()) for i, kind in enumerate(BODIES)],
)
def test_blocks_come_home_within_a_step_after_any_event(server, kind) -> None:
    path, body = BODIES[kind][0], {**BODIES[kind][1], **COMMON}
    num_events = read_events(server, path, body, float("inf"))
    assert num_events > 6
    num_cut = 0
    for most in range(num_events):
        before = server.service.snapshot.stats.num_generated_tokens
        read_events(server, path, body, most)
        wait_until(lambda: server.service.num_active == 0)
        num_steps = server.service.snapshot.stats.num_steps
        server.wait_until_idle()
        stats = server.service.snapshot.stats
        assert stats.num_steps <= num_steps + 1
        if most == 0:
            num_cut = stats.num_generated_tokens - before
    whole = server.service.snapshot.stats.num_generated_tokens
    read_events(server, path, body, float("inf"))
    server.wait_until_idle()
    assert num_cut < server.service.snapshot.stats.num_generated_tokens - whole
