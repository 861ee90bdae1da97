"""Guard of the changes of an engine's state."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from paged_jax.engine.change_guard import ChangeGuard


def test_change_interrupted_before_it_starts_blocks_no_other(monkeypatch) -> None:
    """A traceback, such as the one that an interactive session keeps, holds the generator."""
    guard = ChangeGuard(lambda: None)

    def interrupt(function: Callable[..., Any]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
        patch.setattr(contextlib, "contextmanager", interrupt)
        guard.change()
    with guard.change(), pytest.raises(RuntimeError, match="must not overlap"):
        guard.change()
    assert kept.tb
