"""Tests of imports: modules import only lower layers, and only the libraries that they need.

``docs/design.md`` lists the layers.
"""

import ast
import functools
import importlib
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import paged_jax
from paged_jax import kernels
from tests.support import ROOT

PACKAGE = ROOT / "paged_jax"
NO_JAX = PACKAGE / "scheduler"


def read_floors() -> list[list[str]]:
    """Return the files and folders of each layer, such as ``cache/``; the lowest comes first."""
    text = (ROOT / "docs" / "design.md").read_text()
    block = text.split("<!-- floors -->")[1].split("```")[1]
    return [line.split("   ")[0].split() for line in block.splitlines()[1:]]


FLOORS = read_floors()
FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_a_layer() -> None:
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


@functools.cache
def imported_files(path: Path) -> set[Path]:
    """Return the files of the package that a file imports, at its top or inside functions."""
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
                # `paged_jax` imports public names lazily, so its other names hide a module.
                is_hidden = node.module == "paged_jax" and name not in MODULES
                assert not is_hidden or alias.name == "__version__", f"{path}: name the module"
    return {MODULES[name] for name in names if name in MODULES}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_import_only_lower_layers(path: Path) -> None:
    for imported in imported_files(path):
        assert floor_of(imported) <= floor_of(path), f"{path} must not import {imported}"


# `native` and `xla` are below the backends: C++ functions, and the plain meaning of each op.
BACKEND_FOLDERS = [
    path.parent
    for path in sorted((PACKAGE / "kernels").glob("*/backend.py"))
    if path.parent.name != "xla"
]


@pytest.mark.parametrize("folder", BACKEND_FOLDERS, ids=lambda folder: folder.name)
def test_a_backend_is_imported_only_by_its_own_files(folder: Path) -> None:
    """`kernels/op.py` imports backends by their names, when they are first used."""
    for path in FILES:
        if path.parent != folder:
            backends = [each for each in imported_files(path) if each.parent == folder]
            assert not backends, f"{path} must call the op instead of importing {backends}"


USE_BACKENDS = """
import sys
import jax.numpy as jnp
from paged_jax.kernels import BACKENDS, paged_attention
pool = jnp.ones((1, 1, 1, 4, 8))
for backend in (None, "reference", "xla"):
    if backend:
        q, table, length = jnp.ones((1, 1, 8)), jnp.zeros((1, 1), int), jnp.ones(1, int)
        paged_attention(q, pool, pool, table, length, backend=backend)
    names = [name for name in BACKENDS if f"paged_jax.kernels.{name}.backend" in sys.modules]
    print("paged_jax.kernels.reference" in sys.modules, *names)
"""


def test_a_backend_is_imported_when_it_is_first_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE_BACKENDS], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["False", "True", "True xla"]


def imported_roots(path: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


def test_scheduler_imports_no_jax() -> None:
    """The test follows the imports of every module of the scheduler."""
    seen, to_read = set(), set(NO_JAX.glob("*.py"))
    while to_read:
        path = to_read.pop()
        seen.add(path)
        assert not imported_roots(path) & {"jax", "jaxlib", "flax"}, f"{path} is not for jax"
        to_read |= imported_files(path) - seen


LIBRARIES = "flax orbax tokenizers jinja2 safetensors tqdm starlette llguidance".split()
SCRIPT = f"""
import sys
for name in sys.argv[1:]:
    exec(f"from paged_jax import {{name}}")
    print(name, *(each for each in {LIBRARIES} if each in sys.modules))
"""


def test_public_names_import_only_the_libraries_that_they_need() -> None:
    """A process imports the names in turn, so each line includes the libraries of earlier names."""
    names = ["paged_attention", "SamplingParams", "PagedCache", "Llama", "LLM"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        "paged_attention",
        "SamplingParams",
        "PagedCache flax",
        "Llama flax",
        "LLM flax tokenizers jinja2 safetensors",
    ]


@pytest.mark.parametrize("package", [paged_jax, kernels], ids=lambda each: each.__name__)
def test_lazy_packages_resolve_every_name(package: ModuleType) -> None:
    """A function or class must not have the name of a submodule, whose import would replace it."""
    submodules = {each.name for each in pkgutil.iter_modules(package.__path__)}
    public = {"cache", "cache_map", "distributed", "kernels"} if package is paged_jax else set()
    assert submodules & set(package.__all__) == public
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="unheard_of"):
        _ = package.unheard_of


@pytest.mark.parametrize("package", [paged_jax, kernels], ids=lambda each: each.__name__)
def test_errors_in_modules_of_lazy_names_are_shown(package: ModuleType, monkeypatch) -> None:
    """A library of another version often lacks an attribute, which is no ImportError by itself."""

    def fail(name: str) -> None:
        raise AttributeError(f"module 'jax' has no attribute 'old', needed by {name}")

    name = "paged_attention"
    assert getattr(package, name)
    monkeypatch.delitem(vars(package), name)
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ImportError, match="has no attribute 'old', needed by paged_jax") as raised:
        exec(f"from {package.__name__} import {name}")
    assert isinstance(raised.value.__cause__, AttributeError)
    assert "cannot import name" not in str(raised.value)


def test_names_of_lazy_packages_survive_pickling_and_star_imports() -> None:
    importlib.import_module("paged_jax.rollouts")
    names: dict[str, object] = {}
    exec("from paged_jax import *", names)
    assert set(paged_jax.__all__) <= set(names)
    assert pickle.loads(pickle.dumps(paged_jax.rollout)) is paged_jax.rollout
    assert pickle.loads(pickle.dumps(paged_jax.LLM)) is paged_jax.LLM
