"""Rules of the house that a reader cannot check at a glance: every public name is documented."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "paged_jax"
FILES = sorted(PACKAGE.rglob("*.py"))


def undocumented(source: str) -> list[str]:
    """Public names of a module that have no docstring; "" is the module itself."""
    return list(_undocumented(ast.parse(source), ""))


def _undocumented(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[str]:
    if not ast.get_docstring(node):
        yield name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return  # names inside a function are its own
    for each in node.body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not each.name.startswith("_"):
                yield from _undocumented(each, f"{name}.{each.name}".removeprefix("."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_public_name_is_documented(path: Path) -> None:
    assert undocumented(path.read_text()) == []


def test_undocumented_finds_what_has_no_docstring() -> None:
    source = '''
def documented():
    """It is."""
    def inside(): ...
def bare(): ...
class Both:
    """It is."""
    def bare(self): ...
    async def also(self): ...
    def _private(self): ...
    def __len__(self): ...
class _Private:
    def method(self): ...
'''
    assert undocumented(source) == ["", "bare", "Both.bare", "Both.also"]
