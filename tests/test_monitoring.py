"""Tests of status lines and bars on a terminal, in a notebook and in a pipe."""

import io
import sys
from types import SimpleNamespace

import pytest

from paged_jax import LLM, SamplingParams
from paged_jax.monitoring import Status, is_interactive
from tests.support.tiny_model import SIZES


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use(monkeypatch, place: str) -> io.StringIO:
    """Replace stderr. This is no fixture, because pytest would replace stderr afterwards."""
    stream = Terminal() if place == "terminal" else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    if place == "notebook":  # looks like a Jupyter kernel to `tqdm`
        shell = SimpleNamespace(config={"IPKernelApp": {}})
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return stream


def last_line(stream: io.StringIO) -> str:
    """Return the text in the current line of a terminal."""
    cells: list[str] = []
    for part in stream.getvalue().split("\n")[-1].split("\r"):
        cells[: len(part)] = part
    return "".join(cells).rstrip()


def test_say_replaces_the_line_on_a_terminal(monkeypatch) -> None:
    terminal = use(monkeypatch, "terminal")
    status = Status(has_lines=True)
    status.say("loading a rather large model")
    assert last_line(terminal) == "loading a rather large model ..."
    status.say("compiling")
    assert last_line(terminal) == "compiling ..."
    status.clear()
    assert last_line(terminal) == ""


def test_say_writes_lines_to_a_pipe(monkeypatch) -> None:
    pipe = use(monkeypatch, "pipe")
    status = Status(has_lines=True)
    for line in ("loading", "compiling"):
        status.say(line)
    status.clear()
    Status().say("of a library")
    assert pipe.getvalue() == "loading ...\ncompiling ...\n"


def test_mute_keeps_the_line_for_text(monkeypatch) -> None:
    terminal = use(monkeypatch, "terminal")
    status = Status(has_lines=True)
    status.mute()
    status.say("compiling")
    assert terminal.getvalue() == ""
    status.leave_line()
    assert terminal.getvalue() == "\n"
    status.say("again")
    assert last_line(terminal) == "again ..."


def test_bar_is_hidden_in_a_pipe(monkeypatch) -> None:
    pipe = use(monkeypatch, "pipe")
    assert not is_interactive()
    status = Status()
    with status.bar("requests", unit="req", total=2):
        status.say("compiling decode")
        status.advance(1, lambda elapsed: "never")
        status.move_to(1, 2, "decode")
    assert pipe.getvalue() == ""


@pytest.mark.parametrize("place", ["terminal", "notebook"])
def test_bar_is_shown(monkeypatch, place) -> None:
    stream = use(monkeypatch, place)
    assert is_interactive()
    status = Status()
    with status.bar("requests", unit="req", total=2):
        status.say("compiling decode")
        assert "compiling decode" in last_line(stream)
        status.clear()
        assert last_line(stream) == ""
        for _ in range(2):
            status.advance(1, lambda elapsed: "9 tokens/s")
    assert "requests: 100%" in stream.getvalue() and "2/2" in stream.getvalue()
    with Status(is_shown=False).bar("hidden", unit="req"):
        pass
    assert "hidden" not in stream.getvalue()


def test_move_to_sets_the_total(monkeypatch) -> None:
    terminal = use(monkeypatch, "terminal")
    status = Status()
    with status.bar("compiling", unit="program"):
        for done in range(1, 4):
            status.move_to(done, 3, f"program {done}")
    assert "3/3" in terminal.getvalue() and "program 3" in terminal.getvalue()


def test_ipython_shell_in_a_pipe_is_no_notebook(monkeypatch) -> None:
    use(monkeypatch, "pipe")
    for shell in (None, SimpleNamespace(config={"TerminalIPythonApp": {}})):
        fake = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", fake)
        assert not is_interactive()


def test_generate_and_warmup_show_bars_in_a_notebook(monkeypatch, tiny_folder) -> None:
    notebook = use(monkeypatch, "notebook")
    llm = LLM(tiny_folder, **SIZES)
    llm.generate(["ab"], SamplingParams(max_tokens=1))
    assert "compiling" in notebook.getvalue() and "1/1" in notebook.getvalue()
    monkeypatch.setattr(llm.core.runner, "warmup", lambda report: report(48, 49, "decode"))
    llm.warmup()
    assert "48/49" in notebook.getvalue()
    length = len(notebook.getvalue())
    llm.generate(["ab"], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(notebook.getvalue()) == length
