"""Tests of the check that jax and flax work together."""

import os
import subprocess
import sys
import tomllib

import jax
import pytest

from paged_jax.flax_versions import FLAX_VERSIONS, UnsupportedVersionError, check_flax
from tests.support import ROOT


def test_check_flax_accepts_the_installed_versions() -> None:
    from flax.version import __version__ as flax_version

    check_flax(jax.__version__, flax_version)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (("0.9.2", "0.12.8"), r"jax must be >=0.10.2,<0.13, got 0.9.2. Run: pip install"),
        (("0.13.0", "0.12.12"), r"jax must be >=0.10.2,<0.13, got 0.13.0"),
        (("0.10.2", "0.12.0"), r"flax must be >=0.12.1 with jax 0.10.2, got 0.12.0. Run: pip"),
        (("0.12.0.1", "0.12.8"), r"flax must be >=0.12.10 with jax 0.12.0.1, got 0.12.8. Run: pip"),
        (("0.11.0", "0.12.6"), r"flax must be >=0.12.7 with jax 0.11.0, got 0.12.6"),
        (("0.11.1", "0.12.8"), r"flax must be >=0.12.9 with jax 0.11.1, got 0.12.8"),
        (("0.11.2", "0.12.9"), r"flax must be >=0.12.10 with jax 0.11.2, got 0.12.9"),
        (("0.12.0", "0.12.7"), r"pip install 'jax==0.12.0' 'flax>=0.12.10'$"),
    ],
)
def test_check_flax_rejects_versions_that_do_not_work(versions, message) -> None:
    with pytest.raises(UnsupportedVersionError, match=message):
        check_flax(*versions)


def test_table_has_the_bounds_of_the_package() -> None:
    """Flax's lowest version in the table is that of any jax, and pip installs no other jax."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    ranges = list(FLAX_VERSIONS)
    assert f"jax>={ranges[0].first},<{ranges[-1].end}" in dependencies
    lowest = min((each.first for each in FLAX_VERSIONS.values()), key=lambda x: x.split("."))
    assert f"flax>={lowest}" in dependencies
    for before, after in zip(ranges, ranges[1:], strict=False):
        assert before.end == after.first


_PROGRAM = """
import importlib.metadata, sys
import jax

import paged_jax

jax.__version__, flax = sys.argv[1:]
importlib.metadata.version = lambda name: flax
print(paged_jax.paged_attention.__name__ if flax else "", "flax" in sys.modules)
from paged_jax.__main__ import main
raise SystemExit(main(["plan", "--help"]))
"""


@pytest.mark.parametrize(
    ("jax_version", "flax_version", "says"),
    [("0.12.0", "0.12.8", "flax must be >=0.12.10 with"), ("0.8.3", "", "jax must be >=0.10.2,")],
)
def test_commands_report_unsupported_versions_in_a_line(jax_version, flax_version, says) -> None:
    """The ops work with any flax, and do not import it."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, jax_version, flax_version],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    [line] = done.stderr.splitlines()
    assert line.startswith(f"paged-jax: error: {says}") and "Run: pip install" in line
    assert done.returncode == 2
    assert done.stdout.split() == (["paged_attention", "False"] if flax_version else ["False"])
