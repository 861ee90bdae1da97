"""Tests of the structure of the code: names, and imports without cycles."""

import ast
import collections
import functools
import graphlib
from pathlib import Path

import pytest

from tests.test_imports import FILES, MODULES, PACKAGE, imported_files, name_of

# Maximum number of modules that the attention ops import, with their plain meaning and gradient.
MAX_FOR_ATTENTION = 20


def test_names_of_files_and_classes_are_unique() -> None:
    """File names are unique within a layer; files of backends are named after their op."""
    files, classes = collections.Counter(), collections.Counter()
    for path in FILES:
        is_of_backend = path.parent.parent == PACKAGE / "kernels"
        if path.name != "__init__.py" and not is_of_backend:
            files[path.relative_to(PACKAGE).parts[0], path.name] += 1
        tree = ast.parse(path.read_text())
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, number in files.items() if number > 1} == set()
    assert {name for name, number in classes.items() if number > 1} == set()


def test_imports_have_no_cycles() -> None:
    """Imports in `__init__` files and in functions count, and modules that are named in strings."""
    graph: dict[Path, set[Path]] = {}
    for path in FILES:
        named = {MODULES[name] for name in strings_in(path) & set(MODULES)}
        named = {each for each in named if each.name != "__init__.py"}  # folders of data files
        imported = imported_files(path) | named | lazily_imported(path)
        # The top of the package names all public modules, and is imported before them.
        is_top = path == PACKAGE / "__init__.py"
        graph[path] = set() if is_top else imported - {path, PACKAGE / "__init__.py"}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(name_of(path) for path in error.args[1]))


def lazily_imported(path: Path) -> set[Path]:
    """Return the files that the names in the ``.pyi`` beside an ``__init__.py`` come from."""
    stub = path.with_suffix(".pyi")
    if path.name != "__init__.py" or not stub.exists():
        return set()
    nodes = [x for x in ast.walk(ast.parse(stub.read_text())) if isinstance(x, ast.ImportFrom)]
    names = {f"{name_of(path)}.{node.module}" if node.level else node.module for node in nodes}
    return {MODULES[name] for name in names if name in MODULES}


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
