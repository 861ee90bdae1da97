"""One change to the syntax tree of one function, and the import hook that applies it.

A change is a pattern and its replacement, both as source text. They are parsed, so white space,
comments and line breaks do not matter. The pattern must match exactly one node of the function.

The hook works on the module as it is imported: no file of the package is changed, and no bytecode
of the changed module is written. `run` copies this file to a folder on PYTHONPATH, where
`sitecustomize` installs the hook in a test process and in each Python process that it starts. So
this file only imports the standard library.
"""

import ast
import importlib.machinery
import importlib.util
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Environment variable that names the JSON file of the change, see `install`.
VARIABLE = "PAGED_JAX_MUTANT"


class OutdatedError(Exception):
    """The function or the pattern does not exist, or exists more than once."""


def changed_module(source: str, function: str, before: str, after: str) -> ast.Module:
    """Return the syntax tree of a module with one changed node.

    Args:
      source: source text of the module.
      function: name of a function, or of a variable that the module or a class assigns. Names of
        methods and inner functions follow after dots: ``Class.method``, ``outer.inner``.
      before: an expression or one statement.
      after: an expression, or statements, that replace it. ``pass`` deletes a statement.

    Raises:
      OutdatedError: no single node of the function matches `before`.
    """
    tree = ast.parse(source)
    scopes: list[Any] = [tree]
    for name in function.split("."):
        scopes = [node for scope in scopes for node in definitions(scope, name)]
    if not scopes:
        raise OutdatedError(f"there is no {function}")
    pattern, new = _parse(before), _parse(after)
    if isinstance(pattern, ast.expr) and not isinstance(new, ast.expr):
        pattern = ast.Expr(pattern)
    if isinstance(pattern, list):
        raise ValueError(f"must be an expression or one statement, got {before!r}")
    if not isinstance(new, list) and ast.dump(new) == ast.dump(pattern):
        raise ValueError(f"{after!r} must differ from {before!r}")
    replacer = _Replacer(pattern, new)
    for scope in scopes:
        replacer.visit(scope)
    if replacer.num_matches != 1:
        raise OutdatedError(f"{before!r} must occur once in {function}, not {replacer.num_matches}")
    return ast.fix_missing_locations(tree)


def _parse(text: str) -> ast.expr | ast.stmt | list[ast.stmt]:
    """Return an expression, one statement, or several statements."""
    text = textwrap.dedent(text).strip()
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        body = ast.parse(text).body
        return body[0] if len(body) == 1 else body


def definitions(scope: ast.AST, name: str) -> Iterator[ast.stmt]:
    """Yield the definitions of a name in a scope, but not those in functions or classes in it."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                yield node
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in map(_name_of, targets):
            yield node
        yield from definitions(node, name)


def _name_of(target: ast.AST | None) -> str | None:
    return target.id if isinstance(target, ast.Name) else None


class _Replacer(ast.NodeTransformer):
    """Replaces each node that is equal to a pattern, and counts the nodes."""

    def __init__(self, pattern: ast.AST, new: Any):
        self._kind, self._pattern, self._new = type(pattern), ast.dump(pattern), new
        self.num_matches = 0

    def visit(self, node: ast.AST) -> Any:
        if type(node) is self._kind and ast.dump(node) == self._pattern:  # without positions
            self.num_matches += 1
            return self._new
        return self.generic_visit(node)


# The import hook


def install() -> None:
    """Change a module when this process imports it.

    The environment variable `VARIABLE` names a JSON file with the arguments of `changed_module`,
    the name of the `module`, and a folder `reports`. The hook leaves a file ``applied-PID`` there,
    or ``failed-PID`` with an error.
    """
    if path := os.environ.get(VARIABLE):
        sys.meta_path.insert(0, _Finder(json.loads(Path(path).read_text())))


class _Finder:
    """Finds the module to change, and leaves all others to the other finders."""

    def __init__(self, change: dict[str, str]):
        self._change = change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._change["module"]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None:
            return None
        loader = _Loader(name, spec.origin)
        loader.change = self._change
        return importlib.util.spec_from_file_location(
            name,
            spec.origin,
            loader=loader,
            submodule_search_locations=spec.submodule_search_locations,
        )


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the changed source text of a module, without reading or writing bytecode."""

    change: dict[str, str]

    def get_code(self, fullname: str) -> Any:
        change, pid = self.change, os.getpid()
        try:
            source = self.get_data(self.path).decode()
            arguments = change["function"], change["before"], change["after"]
            tree = changed_module(source, *arguments)
            code = compile(tree, self.path, "exec", dont_inherit=True)
        except Exception:
            Path(change["reports"], f"failed-{pid}").write_text(traceback.format_exc())
            raise
        Path(change["reports"], f"applied-{pid}").touch()
        return code
