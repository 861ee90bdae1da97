"""What is shipped: sdist and wheel are whole, and run where nothing else is installed."""

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT

# What lies beside the package, and must not be installed with it.
OTHERS = ("benchmarks", "docs", "examples", "kernels", "models", "tests")
BUNDLED = ROOT / "paged_jax" / "models" / "bundled"


def test_bundled_model_is_small() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 8 * 10**6


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def package_files() -> set[str]:
    """Everything below the package that git knows of."""
    listed = subprocess.run(
        ["git", "ls-files", "paged_jax"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(listed.stdout.split())


@pytest.mark.slow
def test_distributions_hold_the_whole_package(distributions) -> None:
    sdist, wheel = distributions
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert package_files() <= in_wheel
    assert package_files() <= in_sdist
    # The links at the root would otherwise become packages that collide with other people's.
    assert not [name for name in in_wheel if name.startswith(OTHERS)]


@pytest.mark.slow
def test_wheel_runs_in_a_clean_environment(distributions, tmp_path) -> None:
    _, wheel = distributions
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    # As a stranger starts it: without what the tests have set and compiled, and without a path to
    # this folder, where pip would find the package installed already.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PYTHON"))}
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True, env=env)
    done = subprocess.run(
        [python, "-m", "paged_jax.generate", "--prompt", "It is", "--max-tokens", "3", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    [output] = json.loads(done.stdout)["outputs"]
    assert len(output["token_ids"]) == 3
