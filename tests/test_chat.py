"""Tests of the command line `chat`, and of its conversations."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from paged_jax import LLM, SamplingParams, chat
from paged_jax.chat import Conversation, main
from paged_jax.monitoring import Status
from tests.support.tiny_model import SIZES, save_tiny_model

# One letter and the text of each message; the context has 64 tokens.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}: {{ m.content }}. {% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
FLAGS = ["--block-size", "4", "--num-blocks", "20", "--max-chunk", "16", "--max-num-seqs", "4"]
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, **SIZES, steps_per_dispatch=1)


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Return a function that runs the command line with lines on standard input."""

    def run(*lines: str, flags: tuple[str, ...] = (), model: Path = folder) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        arguments = ["--model", str(model), "--temperature", "0", "--max-tokens", "6"]
        status = main([*arguments, *FLAGS, *flags])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def expected_answer(llm: LLM, *messages: dict[str, str]) -> str:
    [output] = llm.chat(messages, PARAMS, use_tqdm=False)
    return output.outputs[0].text


def test_answers_follow_from_the_whole_conversation(run, llm) -> None:
    first = expected_answer(llm, user("why"))
    second = expected_answer(llm, user("why"), assistant(first), user("one"))
    assert second != expected_answer(llm, user("one")), "the history has no effect"
    status, out, err = run("why", "  ", "one")
    assert (status, out) == (0, f"{first}\n{second}\n")
    assert err.splitlines()[0] == "loading the model ..."
    assert "first token:" in err.splitlines()[-1]


def test_clear_starts_a_new_conversation_with_the_same_system_message(run, llm) -> None:
    system = {"role": "system", "content": "be"}
    answer = expected_answer(llm, system, user("one"))
    assert answer != expected_answer(llm, user("one")), "the system message has no effect"
    _, out, _ = run("why", "/clear", "one", flags=("--system", "be"))
    assert out.splitlines()[-1] == answer


def test_oldest_messages_are_dropped_from_a_long_conversation(llm) -> None:
    system = {"role": "system", "content": "be"}
    conversation = Conversation(llm, PARAMS, "be")
    said = []
    for _ in range(6):
        answer = "".join(conversation.answer("one"))
        said += [user("one"), assistant(answer)]
    first, *kept = conversation.messages
    assert first == system and kept == said[-len(kept) :]
    # The prompt of the last answer took three quarters of the context, and had no room for more.
    before = said[-len(kept) - 2 : -1]
    assert num_tokens(llm, system, *before[2:]) <= 48 < num_tokens(llm, system, *before)
    assert answer == expected_answer(llm, system, *before[2:])


def num_tokens(llm: LLM, *messages: dict[str, str]) -> int:
    prompt: Any = llm.chat_prompt(messages)
    return len(prompt["prompt_token_ids"])


def test_message_that_exceeds_the_context_is_an_error_that_ends_nothing(run, llm) -> None:
    status, out, err = run("x" * 90, "one")
    assert (status, out) == (0, expected_answer(llm, user("one")) + "\n")
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "64" in error


def test_closing_an_answer_keeps_its_text_and_frees_its_blocks(llm) -> None:
    whole = expected_answer(llm, user("why"))
    conversation = Conversation(llm, PARAMS)
    parts = conversation.answer("why")
    part = next(parts)
    parts.close()
    assert part and whole.startswith(part) and part != whole
    assert conversation.messages == [user("why"), assistant(part)]
    assert not llm.has_unfinished
    assert "".join(conversation.answer("one")) == expected_answer(
        llm, user("why"), assistant(part), user("one")
    )


class InterruptedConversation:
    """Conversation in which the user presses Ctrl-C after the first part of an answer."""

    def answer(self, message: str) -> Any:
        yield message[:2]
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_terminal", [True, False])
def test_interrupt_stops_only_the_answer_on_a_terminal(monkeypatch, capsys, is_terminal) -> None:
    stdin = io.StringIO()
    monkeypatch.setattr(stdin, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", stdin)
    conversation: Any = InterruptedConversation()
    if not is_terminal:
        with pytest.raises(KeyboardInterrupt):
            chat._print_answer(conversation, "why", Status())
        return
    chat._print_answer(conversation, "why", Status())
    assert capsys.readouterr().out == "wh [stopped]\n"


def test_model_without_a_chat_template_gives_one_line(run, tiny_folder) -> None:
    status, out, err = run("why", model=tiny_folder)
    assert (status, out) == (1, "")
    assert "chat template" in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("paged_jax.chat: error: ")
