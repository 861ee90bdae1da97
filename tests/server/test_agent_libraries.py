"""Agent libraries, unchanged, with tools and an output type, and the settings in docs/agents.md."""

import os
import re
import subprocess
import sys
import tomllib

import pytest

from paged_jax.server import Settings
from tests.support import ROOT, agent_libraries
from tests.support.agent_libraries import Report
from tests.support.agent_sessions import agent_engine
from tests.support.live_server import LiveServer

KEY = "secret key"
PAGE = (ROOT / "docs" / "agents.md").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    engine = agent_engine(tmp_path_factory.mktemp("agents"))
    with LiveServer(engine, Settings(model_name="bundled")) as server:
        yield server


@pytest.mark.peers
@pytest.mark.parametrize("is_stream", [False, True])
def test_openai_agents_call_tools_and_return_an_object(server, is_stream) -> None:
    report, counter, usage = agent_libraries.run_openai_agents(
        server.url, "bundled", is_stream=is_stream, temperature=1
    )
    assert isinstance(report, Report) and counter.num_calls > 0
    assert usage.requests > 1 and usage.output_tokens > 0


@pytest.mark.peers
@pytest.mark.parametrize("is_native", [False, True])
def test_pydantic_ai_returns_an_object_over_responses(server, is_native) -> None:
    report, counter, usage = agent_libraries.run_pydantic_ai(
        server.url, "bundled", is_native=is_native, temperature=1
    )
    assert isinstance(report, Report) and usage.output_tokens > 0
    assert counter.num_calls == usage.tool_calls <= 1


@pytest.mark.peers
@pytest.mark.parametrize("uses_responses", [False, True])
def test_langchain_agents_return_an_object(server, uses_responses) -> None:
    report, counter, messages = agent_libraries.run_langchain(
        server.url, "bundled", uses_responses=uses_responses, temperature=1
    )
    assert isinstance(report, Report)
    calls = [call for message in messages for call in getattr(message, "tool_calls", ())]
    assert len([call for call in calls if call["name"] == "weather"]) == counter.num_calls <= 1


# The page


@pytest.fixture(scope="module")
def page_server(tmp_path_factory):
    """Server with the name and a key, as on the page."""
    engine = agent_engine(tmp_path_factory.mktemp("page"), ends_early=True)
    with LiveServer(engine, Settings(model_name="mine", api_keys=(KEY,))) as server:
        yield server


SAMPLES = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.peers
def test_samples_of_the_page_get_an_answer(page_server) -> None:
    """They run in a separate process, because they leave connections open."""
    source = ""
    for sample in SAMPLES:
        source += sample + "\nassert response and message\n" if "response =" in sample else ""
        source += sample + "\nassert result\n" if "result =" in sample else ""
        source += sample + "\nassert answer.choices\n" if "answer =" in sample else ""
    assert len(SAMPLES) == 5 and source.count("assert") == len(SAMPLES)
    source = source.replace("http://127.0.0.1:5000", page_server.url).replace('"KEY"', repr(KEY))
    # Offline, huggingface_hub's client would not even send requests to this machine.
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120, env=environment)


def test_settings_for_codex_are_toml() -> None:
    [source] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    settings = tomllib.loads(source)
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["wire_api"] == "responses" and provider["base_url"].endswith("/v1")
