# pyright: strict
"""Pairs of jax and flax that work together, checked before Flax is imported.

The dependencies of a package cannot express them: releases of flax allow any later jax, although
`flax.nnx` uses names that a later jax no longer has. ``python -m tests.support.flax_pairs`` tries
all pairs and compares them with `FLAX_VERSIONS`.
"""

import contextlib
import functools
import importlib.metadata
import re
from typing import NamedTuple

import jax


class Range(NamedTuple):
    """Versions from `first` up to, but not including, `end`. None means no bound."""

    first: str
    end: str | None

    def __contains__(self, version: object) -> bool:
        parts = _parts(str(version))
        return _parts(self.first) <= parts and (self.end is None or parts < _parts(self.end))

    @property
    def requirement(self) -> str:
        """The range as in a requirement of pip, such as ">=0.12.1,<0.12.9"."""
        return f">={self.first}" + ("" if self.end is None else f",<{self.end}")


# Maps ranges of jax to the ranges of flax that work with them. Other versions of jax are
# unsupported. Newer versions of flax than the last tried one are allowed.
FLAX_VERSIONS = {
    Range("0.10.2", "0.11"): Range("0.12.1", None),
    Range("0.11", "0.11.1"): Range("0.12.7", None),
    Range("0.11.1", "0.11.2"): Range("0.12.9", None),
    Range("0.11.2", "0.13"): Range("0.12.10", None),
}


class UnsupportedVersionError(ImportError):
    """Raised if the installed jax and flax do not work. The message has a command that helps."""


def check_jax(jax_version: str) -> Range:
    """Return the versions of flax that work with a version of jax.

    Raises:
      UnsupportedVersionError: this jax is unsupported.
    """
    for range_of_jax, range_of_flax in FLAX_VERSIONS.items():
        if jax_version in range_of_jax:
            return range_of_flax
    ranges = list(FLAX_VERSIONS)
    supported = Range(ranges[0].first, ranges[-1].end).requirement
    raise UnsupportedVersionError(
        f"paged_jax: jax must be {supported}, got {jax_version}. Run: pip install --upgrade "
        f"'jax{supported}' flax"
    )


def check_flax(jax_version: str, flax_version: str) -> None:
    """Check that a version of flax works with a version of jax.

    Raises:
      UnsupportedVersionError: they do not work together, or this jax is unsupported.
    """
    flax = check_jax(jax_version)
    if flax_version not in flax:
        raise UnsupportedVersionError(
            f"paged_jax: flax must be {flax.requirement} with jax {jax_version}, got "
            f"{flax_version}. Run: pip install 'jax=={jax_version}' 'flax{flax.requirement}'"
        )


def check_installed_jax() -> None:
    """Call `check_jax` with the installed jax."""
    check_jax(jax.__version__)


@functools.cache
def check_installed_flax() -> None:
    """Call `check_flax` with the installed packages, without importing Flax.

    Without Flax it does nothing: the block allocator needs none.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        check_flax(jax.__version__, importlib.metadata.version("flax"))


def _parts(version: str) -> tuple[int, ...]:
    """Return the release number of a version: (0, 12, 0) for "0.12.0.dev3"."""
    release = re.match(r"\d+(\.\d+)*", version)
    assert release is not None, version
    return tuple(int(part) for part in release[0].split("."))
