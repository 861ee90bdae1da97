"""Rules of the house that a reader cannot check at a glance.

Every public name is documented; files, classes and functions are short; imports go in no circle.
"""

import ast
import graphlib
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.test_imports import FILES, PACKAGE, imported_files, name_of

# In lines: of a file, of half of the package's files, of a class, of a function.
MAX_FILE, MAX_MEDIAN, MAX_CLASS, MAX_FUNCTION = 500, 180, 300, 60
# Functions that may be longer, and why.
LONG = {
    "paged_jax.engine.parts.EngineParts.__init__": "hands each argument to the part it is for",
    "paged_jax.kernels.cascade.cascade_attention": "a public op: checks, then the op and its merge",
    "paged_jax.kernels.mosaic_tpu.kernel.attention_kernel": "a kernel",
    "paged_jax.kernels.triton.prefill._attend_kernel": "a kernel",
}


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


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_are_short() -> None:
    others = [
        path for name in ("benchmarks", "docs", "examples") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    assert {
        str(path): num_lines(path) for path in [*FILES, *others] if num_lines(path) > MAX_FILE
    } == {}
    assert statistics.median(map(num_lines, FILES)) <= MAX_MEDIAN


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


def too_long(source: str, module: str) -> dict[str, int]:
    """Classes and functions above the limits, with their lengths."""
    found = {}
    for name, node in definitions(ast.parse(source).body, module):
        most = MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION
        if length_of(node) > most and name not in LONG:
            found[name] = length_of(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_classes_and_functions_are_short(path: Path) -> None:
    assert too_long(path.read_text(), name_of(path)) == {}


def test_too_long_leaves_docstrings_out() -> None:
    doc, body = '    """One.\n' + "\n" * 90 + '    """\n', "    pass\n"
    assert too_long("def f():\n" + doc + body * 59, "m") == {}
    assert too_long("class C:\n  def f():\n" + body * 60, "m") == {"m.C.f": 61}
    assert too_long("class C:\n" + body * 300, "m") == {"m.C": 301}


def test_imports_go_in_no_circle() -> None:
    # An `__init__` names what is in its folder, and imports it; its files do not import it back.
    graph = {path: imported_files(path) for path in FILES if path.name != "__init__.py"}
    graph = {path: {each for each in imported if each in graph} for path, imported in graph.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(name_of(path) for path in error.args[1]))
