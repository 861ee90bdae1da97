"""Arrows go down only: a module may import those of the layers below it, never those above."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "paged_jax"

# From the bottom up. Modules of one layer may import each other.
LAYERS = [
    {"checks", "dims", "sampling_params", "prefix"},
    {"kernels"},
    {"block_pool", "blocks"},
    {"cache", "sampling", "picture"},
    {"models"},
    {"outputs", "history", "decoding", "rollout", "sequence", "scheduler", "ngram"},
    {"request", "inputs", "steps", "runner", "memory"},
    {"engine"},
    {"llm", "progress", "async_engine", "beam_search", "cache_map"},
    {"command_line", "server"},
    {"generate", "plan", "serve"},
    {""},
]


def layer_of(module: str) -> int:
    """The layer of a module below ``paged_jax``, given as ``models.llama`` or ``""``."""
    first = module.split(".")[0]
    [index] = [i for i, layer in enumerate(LAYERS) if first in layer]
    return index


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported_modules(path: Path) -> set[str]:
    """Modules below ``paged_jax`` that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            names.add(node.module or "")
    below = {name.removeprefix("paged_jax.") for name in names if name.startswith("paged_jax.")}
    # `from paged_jax.cache import PagedCache` names an attribute, not a module.
    return {name for name in below if any(name.split(".")[0] in layer for layer in LAYERS)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_name)
def test_imports_point_down(path: Path) -> None:
    own = layer_of(module_name(path))
    for imported in imported_modules(path):
        assert layer_of(imported) <= own, f"{module_name(path)} must not import {imported}"


def imported_roots(path: Path) -> set[str]:
    """Top-level packages that a file imports, `paged_jax` itself left out."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[0] for name in names} - {"paged_jax"}


@pytest.mark.parametrize("name", ["outputs", "sampling_params", "prefix", "scheduler"])
def test_scheduler_side_imports_no_jax(name: str) -> None:
    """Nor does anything that these import."""
    seen, to_read = set(), {name}
    while to_read:
        path = (PACKAGE / to_read.pop().replace(".", "/")).with_suffix(".py")
        if path in seen or not path.exists():  # a name that is an attribute of its module
            continue
        seen.add(path)
        assert not imported_roots(path) & {"jax", "jaxlib", "flax"}, f"{path} is not for jax"
        to_read |= imported_modules(path)
