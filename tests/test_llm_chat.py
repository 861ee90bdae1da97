"""`LLM.chat`: chat templates and tools."""

import dataclasses
from pathlib import Path

import pytest
import tokenizers

from paged_jax import LLM, Tokenizer
from tests.support.generation import GREEDY, tokens_of
from tests.support.structured import HERMES_TEMPLATE, TOOLS
from tests.support.tiny_model import BOS, SIZES, save_tiny_model

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}: {{ m.content }}. {% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}{% if enable_thinking %}hm{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("chat"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, **SIZES)


def test_chat_uses_the_template(llm) -> None:
    messages = [{"role": "user", "content": "hello"}]
    [output] = llm.chat(messages, GREEDY, use_tqdm=False)
    expected = llm.tokenizer.encode("<s>u: hello. a: ", add_special_tokens=False)
    assert output.prompt_token_ids == expected
    assert expected.count(BOS) == 1
    several = llm.chat([messages, [{"role": "user", "content": "who"}]], GREEDY, use_tqdm=False)
    assert tokens_of(several[:1]) == tokens_of([output])
    assert several[1].prompt_token_ids != expected
    assert llm.chat([], GREEDY) == []
    message = dataclasses.make_dataclass("Message", ["role", "content", "name"])(
        "user", "hello", None
    )
    assert tokens_of(llm.chat([message], GREEDY, use_tqdm=False)) == tokens_of([output])
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}] * 2}]
    joined = [{"role": "user", "content": "helhel"}]
    assert llm.chat_prompt(parts) == llm.chat_prompt(joined)
    [thinking] = llm.chat(
        messages, GREEDY, chat_template_kwargs={"enable_thinking": True}, use_tqdm=False
    )
    assert llm.tokenizer.decode(thinking.prompt_token_ids).endswith("a: hm")
    with pytest.raises(ValueError, match="got 'tokenize'"):
        llm.chat(messages, GREEDY, chat_template_kwargs={"tokenize": False})
    with pytest.raises(ValueError, match="tools must be empty as the model's chat template has no"):
        llm.chat(messages, GREEDY, tools=TOOLS)


def test_chat_shows_tools_to_the_model(llm) -> None:
    backend = tokenizers.Tokenizer.from_str(llm.tokenizer.backend.to_str())
    tokenizer = Tokenizer(backend, chat_template=HERMES_TEMPLATE)
    able = LLM(llm.model, tokenizer=tokenizer, **SIZES)
    messages = [{"role": "user", "content": "hello"}]
    [output] = able.chat(messages, GREEDY, tools=TOOLS, use_tqdm=False)
    names = "".join(f"{tool['function']['name']}," for tool in TOOLS)
    shown, plain = (able.chat_prompt(messages, tools=each) for each in (TOOLS, None))
    assert output.prompt_token_ids == shown["prompt_token_ids"]
    before = tokenizer.encode(names, add_special_tokens=False)
    assert shown["prompt_token_ids"] == before + plain["prompt_token_ids"]


def test_chat_requires_a_template(llm, folder) -> None:
    tokenizer = Tokenizer(Tokenizer.from_folder(folder).backend)
    other = LLM(llm.model, tokenizer=tokenizer, **SIZES)
    with pytest.raises(ValueError, match="no chat template"):
        other.chat([{"role": "user", "content": "hello"}], use_tqdm=False)
