"""Sessions of coding agents: recorded requests and loops over tools, with the bundled model."""

import pytest

from paged_jax.server import Settings
from tests.support import agent_sessions
from tests.support.live_server import LiveServer

pytestmark = pytest.mark.peers

SAMPLING = {"temperature": 1, "seed": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    engine = agent_sessions.agent_engine(tmp_path_factory.mktemp("agents"))
    with LiveServer(engine, Settings(model_name="bundled")) as server:
        yield server


def test_recorded_requests_in_the_style_of_codex(server) -> None:
    assert agent_sessions.replay_codex(server, "bundled", **SAMPLING, max_output_tokens=32) > 500


def test_recorded_requests_in_the_style_of_claude_code(server) -> None:
    assert agent_sessions.replay_claude(server, "bundled", **SAMPLING, max_tokens=32) > 300


@pytest.mark.parametrize("run", [agent_sessions.run_codex_loop, agent_sessions.run_claude_loop])
def test_loops_over_tools_end(server, run) -> None:
    assert 3 <= run(server, "bundled", num_required=3, **SAMPLING) <= 10
