"""Tests of the recorded environment, also on a machine without git."""

import re
import shutil

import pytest

from benchmarks.common import environment
from tests.support import ROOT


@pytest.mark.skipif(
    not ((ROOT / ".git").exists() and shutil.which("git")), reason="not a repository of git"
)
def test_the_commit_is_that_of_the_repository() -> None:
    assert re.fullmatch("[0-9a-f]{7,}", environment.environment()["commit"] or "")


def test_without_git_the_commit_is_what_the_environment_says(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("PAGED_JAX_COMMIT", raising=False)
    assert environment.environment()["commit"] is None
    monkeypatch.setenv("PAGED_JAX_COMMIT", "0123abc")
    assert environment.environment()["commit"] == "0123abc"
