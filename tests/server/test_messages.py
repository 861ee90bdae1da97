"""Messages of requests as chat templates get them."""

import pytest

from paged_jax.models.text.chat_template import ChatTemplate
from paged_jax.server.bodies import ChatBody, ToolParam
from paged_jax.server.chat_answers import template_messages


def messages_of(*messages):
    return template_messages(ChatBody.model_validate({"messages": list(messages)}).messages)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ("{}", "{}"),
        ("", "{}"),
        (None, "{}"),
        ({"a": 1}, '{"a": 1}'),
        ("{", '"{"'),
    ],
)
def test_as_messages_ignores_unknown_fields_of_calls(arguments, want) -> None:
    function = {"name": "f", "arguments": arguments, "extra_content": {"google": {}}}
    call = {"id": "1", "index": 0, "type": "function", "function": function}
    messages = messages_of({"role": "assistant", "content": None, "tool_calls": [call]})
    written = ChatTemplate("{{ messages[0].tool_calls | tojson }}").render(messages)
    function = f'{{"name": "f", "arguments": {want}}}'
    assert written == f'[{{"id": "1", "type": "function", "function": {function}}}]'


def test_tools_may_have_unknown_fields() -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "annotations": {"readOnly": True}}
    body = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    tool = ToolParam.model_validate(body)
    assert tool.function.parameters == {"type": "object"}


def test_as_messages_passes_on_what_templates_read() -> None:
    """The template gets what it gets from transformers, without fields that are null."""
    message = {"role": "assistant", "content": "a", "reasoning_content": "so", "tool_plan": "p"}
    parsed = ChatBody.model_validate({"messages": [{**message, "name": None, "thinking": None}]})
    assert template_messages(parsed.messages) == [message]
    template = ChatTemplate("{{ messages[0].reasoning_content }}|{{ messages[0].tool_plan }}")
    assert template.render(template_messages(parsed.messages)) == "so|p"
    for name, value in (("reasoning", "so"), ("thinking", "so"), ("reasoning_content", "so")):
        fields = {"role": "assistant", "content": None, "reasoning_content": "", name: value}
        parsed = ChatBody.model_validate({"messages": [fields]})
        assert template.render(template_messages(parsed.messages)) == "so|"


def test_as_messages_keeps_the_text_of_refusals() -> None:
    part = {"type": "refusal", "refusal": "No."}
    for fields in ({"content": [part]}, {"content": None, "refusal": "No."}, {"refusal": "No."}):
        parsed = ChatBody.model_validate({"messages": [{"role": "assistant", **fields}]})
        assert (
            ChatTemplate("{{ messages[0].content }}").render(template_messages(parsed.messages))
            == "No."
        )
