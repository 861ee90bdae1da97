"""Tests of the structure of the code: names, and imports without cycles."""

import ast
import collections
import functools
import graphlib
from pathlib import Path

import pytest

from tests.test_imports import BACKEND_FOLDERS, FILES, MODULES, PACKAGE, imported_files, name_of

# Maximum number of modules that the attention ops import.
MAX_FOR_ATTENTION = 13


def test_names_of_files_and_classes_are_unique() -> None:
    """File names are unique within a layer; files of backends are named after their op."""
    files, classes = collections.Counter(), collections.Counter()
    for path in FILES:
        if path.name != "__init__.py" and path.parent not in BACKEND_FOLDERS:
            files[path.relative_to(PACKAGE).parts[0], path.name] += 1
        tree = ast.parse(path.read_text())
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, number in files.items() if number > 1} == set()
    assert {name for name, number in classes.items() if number > 1} == set()


def test_imports_have_no_cycles() -> None:
    """Imports in `__init__` files and in functions count, and modules that are named in strings.

    Backends are imported by name, and call the public ops of kernels/. So cycles are allowed there.
    """
    graph: dict[Path, set[Path]] = {}
    for path in FILES:
        if path.parent == PACKAGE or path.relative_to(PACKAGE).parts[0] != "kernels":
            named = {MODULES[name] for name in strings_in(path) & set(MODULES)}
            named = {each for each in named if each.name != "__init__.py"}  # folders of data files
            graph[path] = (imported_files(path) | named) - {path, PACKAGE / "__init__.py"}
    graph = {path: {each for each in imported if each in graph} for path, imported in graph.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(name_of(path) for path in error.args[1]))


def strings_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


@functools.cache
def imported_at_top(path: Path) -> frozenset[Path]:
    """Return the files of the package that a file imports when it is imported."""
    body = ast.parse(path.read_text()).body
    names = set()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in MODULES else node.module)
    return frozenset(MODULES[name] for name in names & set(MODULES)) - {PACKAGE / "__init__.py"}


def test_attention_imports_few_modules() -> None:
    seen, to_read = set(), {MODULES["paged_jax.kernels.attention"]}
    while to_read:
        path = to_read.pop()
        seen.add(path)
        to_read |= imported_at_top(path) - seen
    assert len(seen) <= MAX_FOR_ATTENTION, sorted(map(name_of, seen))
