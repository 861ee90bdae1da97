"""Mutants: functions with a deliberate defect, which a quick test must find."""

import inspect
import sys
import textwrap
from typing import Any

import pytest


def mutate(patch: pytest.MonkeyPatch, owner: Any, name: str, before: str, after: str) -> None:
    """Replace a function or method by a copy with other source text.

    Args:
      patch: restores the function at the end of the test.
      owner: the module or class of the function.
      name: name of the function.
      before: text that occurs in the source once.
      after: its replacement.
    """
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(before) == 1, f"{name} must contain {before!r} once"
    module = sys.modules[function.__module__]
    defined: dict[str, Any] = {}
    exec(
        compile(source.replace(before, after), f"<mutant of {name}>", "exec"), vars(module), defined
    )
    patch.setattr(owner, name, defined[name])
