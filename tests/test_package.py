"""Tests that sdist and wheel are complete, and that the wheel runs in a clean environment."""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support import ROOT

# Other folders of the repository. They must not be installed.
OTHERS = ("benchmarks", "docs", "examples", "kernels", "models", "tests")
BUNDLED = ROOT / "paged_jax" / "models" / "bundled"


def test_bundled_model_is_small() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 8 * 10**6


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """Build the sdist, and a wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def package_files() -> set[str]:
    """Return all files of the package in git."""
    listed = subprocess.run(
        ["git", "ls-files", "paged_jax"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(listed.stdout.split())


@pytest.mark.slow
def test_distributions_contain_the_whole_package(distributions) -> None:
    sdist, wheel = distributions
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert package_files() <= in_wheel
    assert package_files() <= in_sdist
    assert not [name for name in in_sdist if name.startswith("tests/data")]
    # The links at the root must not become packages, which could collide with other packages.
    assert not [name for name in in_wheel if name.startswith(OTHERS)]


def required(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the names of all direct and indirect dependencies, as installed here."""
    found: set[tuple[str, str]] = set()
    to_see = [("", distribution.requires)]
    while to_see:
        extra, lines = to_see.pop()
        for requirement in map(Requirement, lines or []):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            for each in {(requirement.name, extra) for extra in ("", *requirement.extras)} - found:
                found.add(each)
                to_see.append((each[1], importlib.metadata.requires(requirement.name)))
    return {name for name, _ in found}


def link(distribution: str, site: Path) -> None:
    """Make an installed distribution importable from another environment."""
    files = importlib.metadata.files(distribution) or []
    here = Path(str(importlib.metadata.distribution(distribution).locate_file("")))
    for name in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(here / name)


@pytest.fixture(scope="module")
def clean_python(distributions, tmp_path_factory) -> Path:
    """Create an environment with the wheel, and with links to its installed dependencies."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder)
    python = folder / "bin" / "python"
    # PYTHONPATH is removed, or pip would find the package of this folder.
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", distributions[1]], check=True, env=clean_environment())
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    [installed] = importlib.metadata.distributions(path=[str(site)])
    for name in required(installed):
        link(name, site)
    return python


def clean_environment() -> dict[str, str]:
    """Return the environment variables of a new user, without settings of the tests."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PYTHON"))}


@pytest.mark.slow
def test_wheel_runs_in_a_clean_environment(clean_python, tmp_path) -> None:
    args = ["-m", "paged_jax.generate", "--prompt", "It is", "--max-tokens", "3", "--json"]
    done = subprocess.run(
        [clean_python, *args], cwd=tmp_path, capture_output=True, text=True, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    [output] = json.loads(done.stdout)["outputs"]
    assert len(output["token_ids"]) == 3
