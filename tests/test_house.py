"""Tests of the structure of the code: names, and imports without cycles."""

import ast
import collections
import functools
import graphlib
from pathlib import Path

import pytest

from tests.test_imports import BACKEND_FOLDERS, FILES, MODULES, PACKAGE, imported_files, name_of

# Maximum number of modules that the attention ops import.
MAX_FOR_ATTENTION = 12
# File names that two subjects may have: the options of the engine, and those of a model.
SHARED_NAMES = {"config.py"}


def test_names_of_files_and_classes_are_unique() -> None:
    """Files of backends are named after the op that they implement."""
    files, classes = collections.Counter(), collections.Counter()
    for path in FILES:
        if path.name != "__init__.py" and path.parent not in BACKEND_FOLDERS:
            files[path.name] += 1
        tree = ast.parse(path.read_text())
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, number in files.items() if number > 1} <= SHARED_NAMES
    assert {name for name, number in classes.items() if number > 1} == set()


def test_imports_have_no_cycles() -> None:
    """An `__init__` imports names of its folder, and files of the folder do not import it."""
    graph = {path: imported_files(path) for path in FILES if path.name != "__init__.py"}
    graph = {path: {each for each in imported if each in graph} for path, imported in graph.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(name_of(path) for path in error.args[1]))


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
