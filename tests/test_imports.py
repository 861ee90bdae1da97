"""Imports run down only: a file may import those of the floors above it in the list, never others.

The one list of floors stands in ``docs/design.md``.
"""

import ast
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "paged_jax"
NO_JAX = PACKAGE / "scheduler"


def read_floors() -> list[list[str]]:
    """The names of each floor, from the bottom up: ``cache/`` or ``llm.py``."""
    text = (ROOT / "docs" / "design.md").read_text()
    block = text.split("<!-- floors -->")[1].split("```")[1]
    return [line.split("   ")[0].split() for line in block.splitlines()[1:]]


FLOORS = read_floors()
FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_a_floor() -> None:
    listed = sorted(name for names in FLOORS for name in names)
    found = {path.relative_to(PACKAGE).parts for path in FILES}
    assert listed == sorted({parts[0] + "/" * (len(parts) > 1) for parts in found})
    assert len(FLOORS) <= 11


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in FILES}


def floor_of(path: Path) -> int:
    parts = path.relative_to(PACKAGE).parts
    [index] = [i for i, names in enumerate(FLOORS) if parts[0] + "/" * (len(parts) > 1) in names]
    return index


def imported_files(path: Path) -> set[Path]:
    """Files of the package that one imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: imports are absolute"
            for alias in node.names:
                # `from paged_jax.cache import PagedCache` names an attribute, not a module.
                name = f"{node.module}.{alias.name}"
                names.add(name if name in MODULES else node.module)
    return {MODULES[name] for name in names if name in MODULES}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_run_down(path: Path) -> None:
    for imported in imported_files(path):
        assert floor_of(imported) <= floor_of(path), f"{path} must not import {imported}"


def imported_roots(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


def test_scheduler_imports_no_jax() -> None:
    """Nor does anything that it imports."""
    seen, to_read = set(), set(NO_JAX.glob("*.py"))
    while to_read:
        path = to_read.pop()
        seen.add(path)
        assert not imported_roots(path) & {"jax", "jaxlib", "flax"}, f"{path} is not for jax"
        to_read |= imported_files(path) - seen
