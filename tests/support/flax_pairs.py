"""Try all pairs of jax and flax, and compare them with `paged_jax.flax_versions`.

``python -m tests.support.flax_pairs`` needs Python 3.12 or later, the dependencies of the package,
and a package index. It installs each version into a folder of its own (2 GB), imports the model
with each pair, and traces a forward pass and a rollout; a pair takes five CPU-seconds. Then it
resolves the package's requirements for each Python. The exit status is 1 if a pair that the table
allows fails, if a pair that works is refused although pip would install it, or if a fresh
installation gets a pair that the table refuses.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from paged_jax.flax_versions import UnsupportedVersionError, check_flax
from tests.support import ROOT

_TRIAL = """
import jax
import jax.numpy as jnp
from paged_jax import flax_versions

flax_versions.check_flax = lambda *versions: None
from flax import nnx
from paged_jax import Llama, LlamaConfig, rollout

config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, num_key_value_heads=1)
graphdef, weights = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
tokens = jnp.ones((1, 3), jnp.int32)
jax.eval_shape(lambda weights: nnx.merge(graphdef, weights)(tokens), weights)
jax.eval_shape(
    lambda weights: rollout(nnx.merge(graphdef, weights), tokens, jnp.array([3]), max_tokens=4),
    weights,
)
"""


def main() -> int:
    """Print a line for each pair and each Python, and return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        all_jax, all_flax = _versions("jax"), _versions("flax")
        for version in all_jax:
            _install(folder, "jax", version, f"jaxlib=={version}")
        for version in all_flax:
            _install(folder, "flax", version)
        results = [_try(folder, jax, flax) for jax in all_jax for flax in all_flax]
    results += [_resolve(python) for python in ("3.11", "3.12", "3.13", "3.14")]
    return 0 if all(results) else 1


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _requirements() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["dependencies"]


def _versions(package: str) -> list[str]:
    """Return all published versions that the package's requirement allows, the oldest first."""
    from packaging.requirements import Requirement

    [allowed] = [x.specifier for x in map(Requirement, _requirements()) if x.name == package]
    listed = re.search(r"Available versions: (.*)", _pip("index", "versions", package))
    assert listed is not None
    return [*allowed.filter(listed[1].split(", "))][::-1]


def _install(folder: Path, package: str, version: str, *others: str) -> None:
    target = str(folder / f"{package}-{version}")
    _pip("install", "--quiet", "--no-deps", "--target", target, f"{package}=={version}", *others)


def _try(folder: Path, jax: str, flax: str) -> bool:
    """Try a pair, and return whether the table says the same."""
    own = folder / f"flax-{flax}"
    paths = [str(folder / f"jax-{jax}"), str(own), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _TRIAL], cwd=folder, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(paths), "JAX_PLATFORMS": "cpu"}, text=True,
    )  # fmt: skip
    works, is_allowed = done.returncode == 0, _is_allowed(jax, flax)
    [metadata] = importlib.metadata.distributions(name="flax", path=[str(own)])
    agrees = is_allowed == works or (works and not _accepts(metadata.requires or [], jax))
    reason = "" if works else done.stderr.strip().splitlines()[-1]
    mark = "" if agrees else "THE TABLE IS WRONG: "
    print(f"jax {jax} flax {flax}: {mark}{'works' if works else 'fails'} {reason}", flush=True)
    return agrees


def _is_allowed(jax: str, flax: str) -> bool:
    try:
        check_flax(jax, flax)
    except UnsupportedVersionError:
        return False
    return True


def _accepts(requirements: list[str], jax: str) -> bool:
    """Return whether the requirements of a release of flax accept a version of jax."""
    from packaging.requirements import Requirement

    parsed = map(Requirement, requirements)
    return all(jax in x.specifier for x in parsed if x.name == "jax" and not x.marker)


def _resolve(python: str) -> bool:
    """Return whether a fresh installation with a Python gets a pair that the table allows."""
    with tempfile.TemporaryDirectory() as name:
        report = _pip(
            "install", "--dry-run", "--quiet", "--report", "-", "--target", name,
            "--python-version", python, "--only-binary=:all:", *_requirements(),
        )  # fmt: skip
    installed = {
        x["metadata"]["name"]: x["metadata"]["version"] for x in json.loads(report)["install"]
    }
    is_allowed = _is_allowed(installed["jax"], installed["flax"])
    mark = "" if is_allowed else "THE TABLE REFUSES "
    print(f"Python {python}: {mark}jax {installed['jax']} flax {installed['flax']}", flush=True)
    return is_allowed


if __name__ == "__main__":
    sys.exit(main())
