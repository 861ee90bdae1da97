"""Tests of the user's cache folder."""

import logging
import os
import shutil
import subprocess
import sys

import jax
import pytest

from paged_jax import user_cache
from tests.support import ROOT


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_cache_folder_creates_folders_that_only_the_user_can_open(home) -> None:
    folder = user_cache.cache_folder("programs")
    assert folder == home / "paged_jax" / "programs"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert user_cache.cache_folder("programs") == folder


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_cache_folder_rejects_folders_that_others_may_write_to(home, mode) -> None:
    folder = user_cache.cache_folder("programs")
    folder.chmod(mode)
    assert user_cache.cache_folder("programs") is None
    assert user_cache.cache_folder() == home / "paged_jax"
    folder.chmod(0o700)
    (home / "paged_jax").chmod(mode)
    assert user_cache.cache_folder() is None
    assert user_cache.cache_folder("programs") is None, "others may replace the folder in it"


def test_cache_folder_rejects_folders_of_other_users(home, monkeypatch) -> None:
    user_cache.cache_folder()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert user_cache.cache_folder() is None


def test_cache_folder_is_none_if_it_cannot_be_created(home, monkeypatch) -> None:
    (home / "paged_jax").write_text("in the way")
    assert user_cache.cache_folder() is None


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077], ids=oct)
def test_read_returns_what_write_wrote_under_every_umask(home, umask) -> None:
    """Several distributions let the group of a user write to new files (umask 002)."""
    before = os.umask(umask)
    try:
        path = user_cache.cache_folder("programs") / "one"
        for content in (b"first", b"second"):
            user_cache.write(path, content)
            assert user_cache.read(path) == content
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_cache_folder_ignores_a_relative_path(home, monkeypatch, tmp_path) -> None:
    """XDG Base Directory Specification: paths must be absolute, others are ignored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    default = "Library/Caches" if sys.platform == "darwin" else ".cache"
    for value in ("caches", "./caches", "", "~/caches"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache.cache_folder() == tmp_path / "user" / default / "paged_jax"
    assert [path.name for path in tmp_path.iterdir()] == ["user"]


def test_cache_folder_warns_once_per_reason(home, monkeypatch, caplog) -> None:
    """The warning tells users why every start compiles everything."""
    user_cache._warn.cache_clear()
    folder = user_cache.cache_folder("programs")
    assert not caplog.records
    folder.chmod(0o770)
    with caplog.at_level(logging.WARNING, "paged_jax"):
        for _ in range(2):
            assert user_cache.cache_folder("programs") is None
        [record] = caplog.records
        assert f"{folder} belongs to another user, or others may write" in record.getMessage()
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/caches")
        assert user_cache.cache_folder("programs") is None
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 54321)  # of no account, so without a home folder
        assert user_cache.cache_folder("programs") is None
    assert len(caplog.records) == 3


def test_keep_compiled_programs_keeps_a_folder_that_is_set(home) -> None:
    before = jax.config.jax_compilation_cache_dir  # set by conftest.py
    assert before is not None
    user_cache.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == before


def test_folder_beside_programs_needs_the_cache_in_the_user_folder(home, monkeypatch) -> None:
    before = jax.config.jax_compilation_cache_dir
    assert user_cache.folder_beside_programs("lowered") is None
    programs = str(user_cache.cache_folder("programs"))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        shutil.rmtree(home)
        assert user_cache.folder_beside_programs("lowered") is None
        assert not home.exists()
        jax.config.update("jax_compilation_cache_dir", programs)
        assert user_cache.folder_beside_programs("lowered") == home / "paged_jax" / "lowered"
        jax.config.update("jax_enable_compilation_cache", False)
        assert user_cache.folder_beside_programs("lowered") is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.slow
def test_second_start_of_the_command_line_compiles_nothing(home) -> None:
    """The environment has none of JAX's cache variables, as on a user's machine."""
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {"XDG_CACHE_HOME": str(home), "JAX_LOG_COMPILES": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "paged_jax.generate", "--prompt", "It", "--max-tokens", "2"]

    def run(*options: str) -> tuple[str, int]:
        done = subprocess.run(
            [*command, *options], env=environment, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr.count("Persistent compilation cache hit")

    programs = home / "paged_jax" / "programs"
    first, hits = run("--no-compilation-cache")
    assert hits == 0 and not programs.exists()
    text, hits = run()
    assert text == first and hits < 5  # a process may compile a program twice
    kept = {path.name for path in programs.iterdir()}
    stored = {
        path: path.stat().st_mtime_ns for path in (home / "paged_jax" / "executables").iterdir()
    }
    again, hits = run()
    assert again == first and hits == 0  # all programs are executables of paged_jax
    assert {path.name for path in programs.iterdir() if path.name.endswith("-cache")} <= kept
    # A program that is compiled again would be written again.
    assert stored == {path: path.stat().st_mtime_ns for path in stored} and stored
