"""Tests of the structure of the code: the length of files, classes and functions, and imports.

The limits keep each file and class short enough to read. ruff checks docstrings.
"""

import ast
import collections
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.test_imports import BACKEND_FOLDERS, FILES, MODULES, PACKAGE, imported_files, name_of

# Maximum number of lines. A class counts together with its base classes in this package.
MAX_FILE, MAX_CLASS, MAX_FUNCTION = 500, 450, 60
# Functions and classes that may be longer, and why.
LONG = {
    "paged_jax.llm.LLM": "an engine with methods for lists of prompts",
    "paged_jax.models.llama.Llama": "with PagedModel, the interface of every model of the engine",
    "paged_jax.kernels.mosaic_tpu.kernel.attention_kernel": "a kernel",
    "paged_jax.kernels.triton.prefill._attend_kernel": "a kernel",
}

# Maximum number of files of the package, and of files with less than `SHORT` lines of which a
# reader gains little. Files with only a docstring mark a folder as a package.
MAX_FILES, MAX_SHORT, SHORT = 225, 12, 60
# Maximum number of modules in a chain of imports, and of modules that the attention ops import.
MAX_CHAIN, MAX_FOR_ATTENTION = 30, 12
# File names that two subjects may have: the options of the engine, and those of a model.
SHARED_NAMES = {"config.py"}


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_are_short() -> None:
    others = [
        path for name in ("benchmarks", "docs", "examples") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    assert {
        str(path): num_lines(path) for path in [*FILES, *others] if num_lines(path) > MAX_FILE
    } == {}


def test_files_are_few() -> None:
    assert len(FILES) <= MAX_FILES
    short = [name_of(path) for path in FILES if 1 < num_lines(path) < SHORT]
    assert len(short) <= MAX_SHORT, short


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


def definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield classes and functions with their full names, without those inside functions."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, name)


def length_of(node: ast.stmt) -> int:
    """Return the number of lines of a definition, without the docstring of a function."""
    lines = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
        lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def lengths(source: str, module: str) -> dict[str, int]:
    """Return the length of each class and function of a module."""
    return {name: length_of(node) for name, node in definitions(ast.parse(source).body, module)}


def base_classes(path: Path) -> dict[str, list[str]]:
    """Return the base classes of each class of a file, as full names."""
    tree = ast.parse(path.read_text())
    module = name_of(path)
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    bases = {}
    for name, node in definitions(tree.body, module):
        if isinstance(node, ast.ClassDef):
            names = [each.id for each in node.bases if isinstance(each, ast.Name)]
            bases[name] = [imported.get(each, f"{module}.{each}") for each in names]
    return bases


def test_functions_and_classes_are_short() -> None:
    lengths_of = {
        name: length
        for path in FILES
        for name, length in lengths(path.read_text(), name_of(path)).items()
    }
    bases = {name: names for path in FILES for name, names in base_classes(path).items()}

    def length_with_bases(name: str) -> int:
        """Return the length of a class together with its base classes in this package."""
        return lengths_of[name] + sum(
            map(length_with_bases, filter(bases.__contains__, bases[name]))
        )

    limits = {name: MAX_CLASS if name in bases else MAX_FUNCTION for name in lengths_of}
    found = lengths_of | {name: length_with_bases(name) for name in bases}
    assert {name for name, length in found.items() if length > limits[name]} == set(LONG)


def test_length_leaves_docstrings_of_functions_out() -> None:
    doc, body = '    """One.\n' + "\n" * 90 + '    """\n', "    pass\n"
    assert lengths("def f():\n" + doc + body * 59, "m") == {"m.f": 60}
    assert lengths("class C:\n  def f():\n" + body * 60, "m") == {"m.C": 62, "m.C.f": 61}


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


@functools.cache
def longest_chain(path: Path) -> tuple[str, ...]:
    """Return the longest chain of imports that begins with a file."""
    chains = [longest_chain(each) for each in imported_at_top(path) if each != path]
    return name_of(path), *max(chains, key=len, default=())


def test_chains_of_imports_are_short() -> None:
    longest = max(map(longest_chain, FILES), key=len)
    assert len(longest) <= MAX_CHAIN, " imports ".join(longest)


def test_attention_imports_few_modules() -> None:
    seen, to_read = set(), {MODULES["paged_jax.kernels.attention"]}
    while to_read:
        path = to_read.pop()
        seen.add(path)
        to_read |= imported_at_top(path) - seen
    assert len(seen) <= MAX_FOR_ATTENTION, sorted(map(name_of, seen))
