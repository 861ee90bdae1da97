"""Chat templates in the style of model families, compared with transformers."""

import dataclasses
import json
import tomllib
from typing import Any

import pytest
import tokenizers
from packaging.requirements import Requirement
from tokenizers import models, pre_tokenizers

from paged_jax.models.text.chat_template import ChatTemplate, ChatTemplateError
from paged_jax.models.text.tokenizer import Tokenizer
from tests.support import ROOT


def _backend():
    return tokenizers.Tokenizer(models.WordLevel({"a": 0, "fa": 1}, unk_token="a"))


def test_render_uses_the_tool_template_for_chats_with_tools(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "a"}]
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    _backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(messages, tools=tools) == "T"
    assert tokenizer.apply_chat_template(messages, tools=[]) == "D"
    with pytest.raises(ChatTemplateError, match="has no tools"):
        tokenizer.encode_chat(messages, tools=tools)
    (tmp_path / "additional_chat_templates").mkdir()
    source = "{{ tools[0].function.name }}{{ messages[0].content }}"
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(source, encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(messages, tools=tools) == "fa"
    assert tokenizer.encode_chat(messages, tools=tools) == tokenizer.encode("fa") == [1]
    assert tokenizer.chat_template == "D"


# Small templates in the style of model families.
_IN_THE_STYLE_OF = {
    "llama 3": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- date_string + "\n" + system_message }}
{%- for t in tools or [] %}
    {{- t | tojson(indent=4) }}
{%- endfor %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call a message") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", ' + call.arguments | tojson + "}" }}
    {%- elif message.content is mapping or message.content is iterable %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}""",
    "gemma": """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
{{ '<start>' + role + '\n' + (loop.index0 % 2)|string }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}{{ '<end>\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start>model\n' }}{%- endif -%}""",
    "qwen 3": """{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not
           (message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is defined else '' %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- (loop.index0 > ns.last) ~ '|' ~ reasoning.strip('\n') ~ '|' ~ content }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}""",
    "gpt-oss": """{%- macro typed(spec, depth=0) -%}
    {%- if spec.type == "array" -%}{{ typed(spec['items'], depth + 1) }}[]
    {%- elif spec.enum is defined -%}{{ spec.enum | join(" | ") }}
    {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join("|") }}
    {%- else -%}{{ spec.type | default("any") }}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}{% set function = tool.function %}
    {%- for name, spec in function.parameters.properties.items() %}
        {{- name + ("" if name in (function.parameters.required or []) else "?") + ": " }}
        {{- typed(spec) + (";" if loop.last else ", ") }}
    {%- endfor %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.thinking and not loop.last %}{{- "<a>" + message.thinking }}{%- endif %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {{- message.content }}{{ reasoning_effort | default("medium") }}
{%- endfor %}""",
    "smollm 3": """{%- set today = strftime_now("%d %B %Y") -%}
{%- for message in messages -%}
    {%- set text = message.content if message.content is string else "" -%}
    {%- if message.role == "assistant" -%}
        {%- generation -%}{{ text.replace("/think", "").rstrip() }}{%- endgeneration -%}
    {%- else -%}{{ text | replace("e", "3") | upper }}{%- endif -%}
{%- endfor -%}
{{ today }}{% if xml_tools or python_tools %}{{ xml_tools|map("string")|join }}{% endif %}""",
    "command r": """{%- set roles = {"user": "U", "assistant": "A"} -%}
{%- macro document(d, i) %}{{ '{"%s": %d}' | format(d.title, i) }}{% endmacro -%}
{%- for m in messages | rejectattr("role", "equalto", "system") | list -%}
{{ roles[m.role] | default("?", true) }}
{%- for k, v in m | dictsort if k != "role" %}{{ k }}{% endfor %}
{%- endfor -%}
{%- for d in documents or [] %}{{ document(d, loop.index) }}{% endfor -%}
{{ tools | tojson(True, 2) if tools }}
{{- messages | map(attribute="role") | unique | list | tojson }}""",
}


@pytest.mark.peers
@pytest.mark.parametrize("family", _IN_THE_STYLE_OF)
def test_render_matches_transformers_for_templates_of_families(family):
    transformers = pytest.importorskip("transformers")
    template = _IN_THE_STYLE_OF[family]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é", "b": [1]}}}
    chats = [
        [{"role": "system", "content": " Be <kind>. "}, {"role": "user", "content": "Hi é\n"}],
        [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "<think>\nit is\n</think>\n\n4 "},
            {"role": "user", "content": "<r>5</r>"},
            {"role": "assistant", "content": "ok", "reasoning": "so"},
            {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "call"},
            {"role": "user", "content": "end"},
        ],
    ]
    names = {"type": "array", "items": {"type": ["string", "null"]}}
    properties = {"names": names, "way": {"enum": ["up", "down"], "type": "string"}, "x": {}}
    parameters = {"type": "object", "properties": properties, "required": ["way"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=_backend())
    ours = Tokenizer(_backend(), chat_template=template)
    for options in (
        {},
        {"tools": tools, "enable_thinking": False},
        {"documents": [{"title": "t", "text": "x"}], "add_generation_prompt": True},
    ):
        for chat in chats:
            options = {"add_generation_prompt": False, "bos_token": "<s>", **options}
            expected = theirs.apply_chat_template(
                chat, chat_template=template, tokenize=False, **options
            )
            assert ours.apply_chat_template(chat, **options) == expected
            assert len(expected) > 3


_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}


def _dumped(**fields):
    """Return a message as `openai.types.chat.ChatCompletionMessage.model_dump` gives it."""
    names = ("content", "refusal", "annotations", "audio", "function_call", "tool_calls")
    return {"role": "assistant", **dict.fromkeys(names), **fields}


_NULLS = [
    "{% for m in messages %}{{ m }}{% endfor %}",
    "{% for m in messages if m.content is defined or 'refusal' in m %}{{ m.content }}{% endfor %}",
    "{% for m in messages if m.tool_calls is defined %}{{ m.tool_calls | length }}{% endfor %}",
]


@pytest.mark.peers
@pytest.mark.parametrize("template", [*_NULLS, *_IN_THE_STYLE_OF.values()])
def test_render_omits_null_fields_like_transformers(template):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=_backend())
    chat = [
        {"role": "user", "content": "Hi", "name": None},
        _dumped(content="Hello", reasoning_content=None),
        {"role": "user", "content": "2 + 2?"},
        _dumped(tool_calls=[_CALL]),
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    options = {"tokenize": False, "add_generation_prompt": True, "chat_template": template}
    expected = None
    try:
        expected = theirs.apply_chat_template(chat, **options)
    except Exception:
        # The template concatenates the content even if there is none.
        chat[3] = {**chat[3], "content": ""}
        expected = theirs.apply_chat_template(chat, **options)
        del chat[3]["content"]
    assert ChatTemplate(template).render(chat) == expected


@pytest.mark.peers
def test_render_accepts_the_messages_of_a_client():
    chat = pytest.importorskip("openai.types.chat")
    text = json.dumps({"a": "é"})
    function = {"name": "f", "arguments": text}
    calls = [{"id": "c1", "type": "function", "function": function}]
    message = chat.ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": calls}
    )
    template = ChatTemplate("{{ messages | tojson(sort_keys=true) }}")
    expected = template.render([{"role": "assistant", "tool_calls": [_CALL]}])
    assert template.render([message]) == template.render([message.model_dump()]) == expected


@pytest.mark.parametrize("given", ['{"a":  "é"}', '{"a": "\\u00e9"}', {"a": "é"}])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_render_passes_arguments_as_an_object(given, is_wrapped):
    call = {"name": "f", "arguments": given}
    message = {"role": "assistant", "tool_calls": [{"function": call} if is_wrapped else call]}
    place = "messages[0].tool_calls[0]" + (".function" if is_wrapped else "")
    source = "{% for k, v in C.arguments.items() %}{{ k ~ v }}{% endfor %}{{ C.arguments|tojson }}"
    template = ChatTemplate(source.replace("C", place))
    assert template.render([message]) == 'aé{"a": "é"}'
    assert call == {"name": "f", "arguments": given}


@pytest.mark.peers
@pytest.mark.parametrize("expression", ["{{ A }}", "{{ 'x' + A + 'y' }}", "{{ 'x' ~ A }}"])
@pytest.mark.parametrize("text", ['{"a":  1}', '{"a": ', "[1]", "5"])
def test_render_passes_arguments_as_text_to_templates_that_concatenate(expression, text):
    """DeepSeek's templates do. Text that is not an object stays unchanged."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=_backend())
    source = expression.replace("A", "messages[0].tool_calls[0].function.arguments")
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert ChatTemplate(source).render(chat) == expected


def test_render_passes_empty_content_to_templates_that_need_content():
    template = ChatTemplate("{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}")
    chat = [{"role": "user", "content": "Hi"}, _dumped(tool_calls=[_CALL])]
    assert template.render(chat) == "user:Hi;assistant:;"
    refuses = ChatTemplate("{{ messages[0].content + 'x' }}{{ raise_exception('never') }}")
    with pytest.raises(ChatTemplateError, match="has no attribute 'content'"):
        refuses.render([_dumped()])


def test_render_shows_the_refusal_of_a_message_without_content():
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "refusal", "refusal": "No."}]
    for message in (_dumped(refusal="No."), _dumped(content=parts), _dumped(content="No.")):
        assert template.render([message]) == "No."


def test_render_reads_texts_by_their_names_in_responses():
    kinds = ("text", "input_text", "output_text")
    parts = [{"type": kind, "text": kind[0]} for kind in kinds]
    message = {"role": "user", "content": parts}
    assert ChatTemplate("{{ messages[0].content }}").render([message]) == "tio"


_PARTS = {
    "parts only": "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'text' %}[{{ part.text | trim }}]{% endif %}{% endfor %}{% endfor %}",
    "parts by index": "{% for m in messages %}{{ m.content[0]['text'] }};{% endfor %}",
    "either": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
}


@pytest.mark.peers
@pytest.mark.parametrize("name", _PARTS)
def test_render_passes_parts_to_templates_that_read_no_text(name):
    """Templates of vision models would omit the whole message."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=_backend())
    parts = [{"type": "text", "text": " Hi "}, {"type": "text", "text": "you"}]
    chat = [{"role": "user", "content": parts}]
    template = ChatTemplate(_PARTS[name])
    expected = theirs.apply_chat_template(chat, chat_template=_PARTS[name], tokenize=False)
    assert template.render(chat) == expected
    as_text = [{"role": "user", "content": "Hi"}]
    as_parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert template.render(as_text) == template.render(as_parts)
    assert "Hi" in template.render(as_text)


def test_render_omits_null_fields_of_tools():
    template = ChatTemplate("{{ tools | tojson }}")
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    function = {"name": "f", "parameters": schema}
    dumped = {"type": "function", "function": {**function, "description": None, "strict": None}}
    text = template.render([], tools=[dumped])
    assert json.loads(text) == [{"type": "function", "function": function}]
    assert template.render([], tools=[]) == template.render([]) == "null"


def test_encode_chat_accepts_objects_with_any_role():
    source = "{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}"
    message = dataclasses.make_dataclass("Message", ["role", "content", "name"])
    tokenizer = Tokenizer(_backend(), chat_template=source)
    asked = [message("developer", "f", None), message("user", "a", None)]
    assert tokenizer.encode_chat(asked) == tokenizer.encode("fa") == [1]


_SOURCES = {"default": "D{{ bos_token }}", "tool_use": "T", "rag": "R"}


@pytest.mark.peers
@pytest.mark.parametrize(
    "templates",
    [
        _SOURCES,
        [{"name": name, "template": source} for name, source in _SOURCES.items()],
        _SOURCES["default"],
    ],
)
@pytest.mark.parametrize("file", [None, "J"])
def test_from_folder_chooses_the_same_template_as_transformers(tmp_path, templates, file):
    transformers = pytest.importorskip("transformers")
    _backend().save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": templates, "bos_token": "a"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    messages, tools = [{"role": "user", "content": "a"}], [{"type": "function", "function": {}}]
    cases: list[dict[str, Any]] = [{}, {"tools": tools}]
    for options in cases:
        expected = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.apply_chat_template(messages, **options) == expected


def test_apply_chat_template_provides_all_special_tokens(tmp_path):
    names = ["bos", "eos", "unk", "sep", "pad", "cls", "mask", "image"]
    source = "|".join(f"{{{{ {name}_token }}}}" for name in [*names, "audio"])
    config = {f"{name}_token": f"<{name}>" for name in names}
    config |= {"extra_special_tokens": {"audio_token": "<audio>"}, "chat_template": source}
    _backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": "a"}])
    assert text == "|".join(f"<{name}>" for name in [*names, "audio"])


def test_required_jinja2_has_no_known_sandbox_escape():
    """CVE-2025-27516 is fixed in 3.1.6."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [jinja2] = [each for each in map(Requirement, project["dependencies"]) if each.name == "jinja2"]
    assert jinja2.specifier.contains("3.1.6")
    assert not jinja2.specifier.contains("3.1.5")


@pytest.mark.parametrize(
    "template",
    [
        # The first three escape from the sandbox of jinja2 3.1.5.
        "{{ ('{0.__globals__}'|attr('format'))(raise_exception) }}",
        "{{ ('{0.__globals__}'|safe|attr('format'))(strftime_now) }}",
        "{{ ('{x.__globals__}'|attr('format_map'))({'x': strftime_now}) }}",
        "{{ (['{0.__globals__}']|map(attribute='format')|first)(strftime_now) }}",
        "{% set f = '{0.__globals__}'.format %}{{ f(strftime_now) }}",
        "{{ strftime_now|attr('__globals__') }}{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_render_runs_templates_in_a_sandbox(template):
    try:
        text = ChatTemplate(template).render([])
    except ChatTemplateError as error:
        text = str(error)
    assert "__name__" not in text
    assert text == "" or "unsafe" in text


# Templates that know some roles: they leave out other messages, or refuse the chat.
_KNOWS = (
    "{% for m in messages %}{% if ROLES %}{{ m.role }}:{{ m.content }};{% else %}ELSE"
    "{% endif %}{% endfor %}"
)


def _knowing(roles: str, otherwise: str = "") -> ChatTemplate:
    return ChatTemplate(_KNOWS.replace("ROLES", roles).replace("ELSE", otherwise))


@pytest.mark.parametrize(
    ("roles", "otherwise", "role"),
    [
        ("m.role in ('system', 'user', 'assistant')", "", "system"),
        ("m.role in ('system', 'user', 'assistant')", "{{ raise_exception('no') }}", "system"),
        ("m.role != 'nobody'", "", "developer"),
        ("m.role in ('developer', 'user', 'assistant')", "", "developer"),
        ("m.role in ('user', 'assistant')", "{{ raise_exception('no') }}", "developer"),
    ],
)
def test_with_known_roles_renames_developer_if_unknown(roles, otherwise, role) -> None:
    """Developer messages replace OpenAI's system messages and must not get lost."""
    user, told = {"role": "user", "content": "a"}, {"role": "developer", "content": "b"}
    for messages in ([told, user], [user, {"role": "assistant", "content": "c"}, told, user]):
        want = [{**each, "role": role} if each is told else each for each in messages]
        assert _knowing(roles, otherwise).with_known_roles(messages) == want


@pytest.mark.parametrize("role", ["developer", "system", "critic", "function"])
def test_with_known_roles_rejects_omitted_roles(role) -> None:
    user, told = {"role": "user", "content": "a"}, {"role": role, "content": "b"}
    with pytest.raises(ChatTemplateError, match=f"^encode_chat: messages.1.role must .* '{role}'"):
        _knowing("m.role in ('user', 'assistant')").with_known_roles([user, told])
    # Some templates write a system message only at the beginning.
    template = _knowing("m.role == 'user' or loop.first")
    assert template.with_known_roles([told, user]) == [told, user]
    with pytest.raises(ChatTemplateError, match="Make it the first one"):
        template.with_known_roles([user, told])


def test_encode_chat_keeps_developer_messages() -> None:
    source = _KNOWS.replace("ROLES", "m.role in ('system', 'user')").replace("ELSE", "")
    backend = tokenizers.Tokenizer(models.WordLevel({"x": 0, "system:a;": 1}, unk_token="x"))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer = Tokenizer(backend, chat_template=source)
    assert tokenizer.encode_chat([{"role": "developer", "content": "a"}]) == [1]
    with pytest.raises(ChatTemplateError, match="got 'critic'"):
        tokenizer.encode_chat([{"role": "critic", "content": "a"}])
