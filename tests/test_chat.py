"""Tests of the command line `chat`, and of its conversations."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paged_jax import LLM, SamplingParams, chat
from paged_jax.chat import Conversation, main
from paged_jax.monitoring import Status
from tests.support.live_server import wait_until
from tests.support.tiny_model import EOS, SIZES, save_tiny_model

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


def test_commands_are_not_messages(run, llm) -> None:
    status, out, err = run("/help", "/stats", "one", "/stats", "/reset", "/stats")
    assert (status, out) == (0, expected_answer(llm, user("one")) + "\n")
    lines = err.splitlines()
    help, *stats = lines[1:-1]
    assert all(command in help for command in ("/reset", "/stats", "Ctrl-C", "Ctrl-D"))
    memory = r"conversation: (\d) messages \| memory: .+ for 20 blocks .+ for the weights"
    counts = [found[1] for line in stats if (found := re.fullmatch(memory, line))]
    assert counts == ["0", "2", "0"]
    [first, second] = [line for line in stats if line.startswith("last answer: 6 tokens, ")]
    assert first == second and first.endswith("tokens, 0 cached")


def test_unknown_commands_are_not_messages(run, llm) -> None:
    status, out, err = run("/stat", "one", "/exit", "why")
    assert (status, out) == (0, expected_answer(llm, user("one")) + "\n")
    assert "There is no command /stat. /reset starts a new conversation" in err
    assert "There is no command /exit" not in err


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


class Terminal:
    """The chat in a pseudo-terminal, as its user sees it: typed keys and shown text.

    A small process owns the terminal and copies between it and two pipes.
    """

    def __init__(self, *arguments: str):
        spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
        chat = [sys.executable, "-m", "paged_jax.chat", *arguments]
        self._process = subprocess.Popen(
            [sys.executable, "-c", spawn, *chat],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TERM": "dumb"},
        )
        self.text = ""
        self._start = 0  # of the text that `wait_for` has not found yet
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as shown:
            while data := os.read(shown.fileno(), 4096):
                self.text += data.decode()

    def type(self, keys: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(keys.encode())
        self._process.stdin.flush()

    def wait_for(self, pattern: str) -> str:
        """Wait for a text after the last found one, and return it with all text before it."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: re.search(pattern, self.text[self._start :]), 120)
        found = re.search(pattern, self.text[self._start :])
        assert found is not None, self.text
        shown = self.text[self._start :][: found.end()]
        self._start += found.end()
        return shown

    def wait(self) -> int:
        """Wait for the end of the program, and return its exit code."""
        return self._process.wait(60)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # hangs up
        self._process.terminate()
        self._process.wait(60)
        self._reader.join()


@pytest.mark.slow
def test_terminal_stops_answers_and_keeps_the_chat(tmp_path) -> None:
    """Ctrl-C stops an answer of thousands of tokens, not the program."""
    folder = save_tiny_model(tmp_path, chat_template=TEMPLATE, context=4096)
    # No answer ends by itself.
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [EOS]}))
    sizes = ["--block-size", "4", "--num-blocks", "1024", "--max-chunk", "16"]
    sampling = ["--temperature", "0", "--max-tokens", "3900"]
    with Terminal("--model", str(folder), *sizes, *sampling) as terminal:
        terminal.wait_for("> ")
        for message in ("why", "one"):
            terminal.type(f"{message}\n")
            # Text of the answer, after status lines that are erased.
            terminal.wait_for(message + r"\r\n(compiling[^\r]*\r *\r)*(?!com)[\s\S]{10}")
            terminal.type("\x03")
            terminal.wait_for(r"\[stopped\]\r\n> ")
            terminal.type("/stats\n")
            stats = terminal.wait_for(r"the weights\r\n> ")
            num_tokens, num_prompt, num_cached = map(
                int, re.findall(r"(\d+) (?:tokens,|cached)", stats)
            )
            assert re.search(r"[\d.]+ tokens/s \| first token: [\d.]+ s", stats), terminal.text
            assert 0 < num_tokens < 3000
            assert (num_cached > 0) == (message == "one") and num_cached < num_prompt
        assert "conversation: 4 messages" in stats
        # Ctrl-C without an answer ends nothing, and drops the line.
        terminal.type("typed\x03")
        terminal.wait_for(r"Ctrl-D ends the program\)\r\n> ")
        terminal.type("/reset\n")
        terminal.wait_for("> ")
        terminal.type("/stats\n")
        terminal.wait_for("conversation: 0 messages")
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "Traceback" not in terminal.text and "first token:" in terminal.text.splitlines()[-1]


def test_model_without_a_chat_template_gives_one_line(run, tiny_folder) -> None:
    status, out, err = run("why", model=tiny_folder)
    assert (status, out) == (1, "")
    assert "chat template" in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("paged_jax.chat: error: ")
