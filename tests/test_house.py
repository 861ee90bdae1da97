"""Rules of the house that a reader cannot check at a glance.

Every public name is documented; files, classes and functions are short; imports go in no circle.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.test_imports import FILES, PACKAGE, imported_files, name_of

# Maximum number of lines. A class counts together with its base classes in this package.
MAX_FILE, MAX_CLASS, MAX_FUNCTION = 500, 450, 60
# Functions and classes that may be longer, and why.
LONG = {
    "paged_jax.llm.LLM": "an engine with methods for lists of prompts",
    "paged_jax.models.llama.Llama": "with PagedModel, the interface of every model of the engine",
    "paged_jax.kernels.cascade.cascade_attention": "a public op: checks, then the op and its merge",
    "paged_jax.kernels.mosaic_tpu.kernel.attention_kernel": "a kernel",
    "paged_jax.kernels.triton.prefill._attend_kernel": "a kernel",
}


def undocumented(source: str) -> list[str]:
    """Public names of a module that have no docstring; "" is the module itself.

    An ``@overload`` is documented by its implementation.
    """
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
            is_overload = any(ast.unparse(x) == "overload" for x in each.decorator_list)
            if not each.name.startswith("_") and not is_overload:
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


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_are_short() -> None:
    others = [
        path for name in ("benchmarks", "docs", "examples") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    assert {
        str(path): num_lines(path) for path in [*FILES, *others] if num_lines(path) > MAX_FILE
    } == {}


def definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    """Classes and functions with their full names; those inside functions are part of these."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, name)


def length_of(node: ast.stmt) -> int:
    """Lines of a definition, without the docstring of a function."""
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


LENGTHS = {
    name: length
    for path in FILES
    for name, length in lengths(path.read_text(), name_of(path)).items()
}
BASES = {name: bases for path in FILES for name, bases in base_classes(path).items()}


def length_with_bases(name: str) -> int:
    """Return the length of a class together with its base classes in this package."""
    return LENGTHS[name] + sum(map(length_with_bases, filter(BASES.__contains__, BASES[name])))


def test_functions_are_short() -> None:
    functions = {name: length for name, length in LENGTHS.items() if name not in BASES}
    found = {name: length for name, length in functions.items() if length > MAX_FUNCTION}
    assert {name: length for name, length in found.items() if name not in LONG} == {}


def test_classes_are_short_together_with_their_bases() -> None:
    found = {name: length_with_bases(name) for name in BASES}
    assert {
        name: length for name, length in found.items() if length > MAX_CLASS and name not in LONG
    } == {}


def test_length_leaves_docstrings_of_functions_out() -> None:
    doc, body = '    """One.\n' + "\n" * 90 + '    """\n', "    pass\n"
    assert lengths("def f():\n" + doc + body * 59, "m") == {"m.f": 60}
    assert lengths("class C:\n  def f():\n" + body * 60, "m") == {"m.C": 62, "m.C.f": 61}


def test_imports_go_in_no_circle() -> None:
    # An `__init__` names what is in its folder, and imports it; its files do not import it back.
    graph = {path: imported_files(path) for path in FILES if path.name != "__init__.py"}
    graph = {path: {each for each in imported if each in graph} for path, imported in graph.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(name_of(path) for path in error.args[1]))
