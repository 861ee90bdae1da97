"""Sessions of agents with a real chat model, SmolLM2-135M-Instruct in GGUF.

The model is too small to be a good agent, and makes realistic mistakes. The tests check what
grammars and code guarantee for any model: loops end, calls follow their schemas, and streams and
whole answers are the same.
"""

import pytest

from paged_jax import LLM, Tokenizer
from paged_jax.models.gguf_file import GgufFile
from paged_jax.models.text.gguf_tokenizer import read_gguf_tokenizer
from paged_jax.server import Settings
from tests.support import agent_libraries, agent_sessions
from tests.support.agent_libraries import Report
from tests.support.live_server import LiveServer

pytestmark = [pytest.mark.slow, pytest.mark.peers]

# The template of the file has no tools. This one writes them as the models of Hermes do.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nFunctions:{% for tool in tools %}\n"
    "{{ tool.function | tojson }}{% endfor %}\nCall them as <tool_call>\n"
    '{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' if not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = "smollm2"


@pytest.fixture(scope="module")
def server(smollm2_file):
    arguments = read_gguf_tokenizer(GgufFile.open(smollm2_file))
    llm = LLM(
        smollm2_file,
        tokenizer=Tokenizer(**arguments | {"chat_template": TEMPLATE}),
        max_num_seqs=2,
        max_model_len=2048,
        num_blocks=256,
        max_chunk=128,
    )
    with LiveServer(llm, Settings(model_name=MODEL)) as server:
        yield server


def test_recorded_requests_in_the_style_of_codex(server) -> None:
    """Each request finds nearly all of its prompt in the prefix cache."""
    cached = agent_sessions.replay_codex(server, MODEL, temperature=0, max_output_tokens=48)
    assert cached > 5000


def test_recorded_requests_in_the_style_of_claude_code(server) -> None:
    assert agent_sessions.replay_claude(server, MODEL, temperature=0, max_tokens=48) > 3000


def test_loops_over_tools_end(server) -> None:
    sampling = {"temperature": 0, "num_required": 2}
    for run, limit in (
        (agent_sessions.run_codex_loop, {"max_output_tokens": 96}),
        (agent_sessions.run_claude_loop, {"max_tokens": 96}),
    ):
        assert 1 <= run(server, MODEL, **sampling, **limit) <= 10


def test_openai_agents_call_tools_and_return_an_object(server) -> None:
    runs = [
        agent_libraries.run_openai_agents(server.url, MODEL, is_stream=is_stream, temperature=0)
        for is_stream in (False, True)
    ]
    (report, counter, usage), (same, same_counter, same_usage) = runs
    assert isinstance(report, Report) and counter.num_calls > 0
    assert (same, same_counter.num_calls) == (report, counter.num_calls)
    assert same_usage.output_tokens == usage.output_tokens
    assert same_usage.input_tokens == usage.input_tokens


def test_pydantic_ai_returns_an_object_over_responses(server) -> None:
    report, _, usage = agent_libraries.run_pydantic_ai(
        server.url, MODEL, is_native=True, temperature=0
    )
    assert isinstance(report, Report) and usage.output_tokens > 0


def test_langchain_agents_return_an_object(server) -> None:
    report, counter, messages = agent_libraries.run_langchain(
        server.url, MODEL, uses_responses=True, temperature=0
    )
    assert isinstance(report, Report)
    calls = [call for message in messages for call in getattr(message, "tool_calls", ())]
    assert len([call for call in calls if call["name"] == "weather"]) == counter.num_calls
