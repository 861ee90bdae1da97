"""Check for a C++ compiler for CPU kernels, and for kernels that XLA replaces."""

import os
import shutil
from collections.abc import Iterator

import pytest

from paged_jax.kernels.native.library import SWITCH, missing_kernels, processor

_IS_FOUND = os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))

# Mark for tests that need a CPU kernel. Without a compiler, XLA computes these ops.
needs_compiler = pytest.mark.skipif(
    not _IS_FOUND or os.environ.get(SWITCH) == "0",
    reason=f"there is no C++ compiler, or {SWITCH} is 0",
)

# Mark for tests that need a CPU kernel with int8 inputs.
needs_vnni = pytest.mark.skipif(
    needs_compiler.args[0] or "avx512_vnni" not in processor(),
    reason="there is no C++ compiler, or the processor lacks AVX512-VNNI",
)

# Kernels that `check_kernels` has reported, with the reasons.
_REPORTED: set[tuple[object, str]] = set()


def check_kernels() -> None:
    """Fail if this process has replaced a kernel by XLA, although there is a compiler.

    Programs would still compute the right results, so no other test would find a kernel that cannot
    be compiled or loaded, or that fails its self-test. Each kernel is reported once.
    """
    if needs_compiler.args[0]:
        return
    new = [pair for pair in missing_kernels().items() if pair not in _REPORTED]
    _REPORTED.update(new)
    if new:
        reasons = [
            " ".join(filter(None, (kernel.op, kernel.code, f"{kernel.dtype}: {reason}")))
            for kernel, reason in new
        ]
        pytest.fail("XLA replaces kernels for CPUs:\n" + "\n".join(reasons), pytrace=False)


def check_log(log: str) -> None:
    """Fail if a log says that XLA replaces a kernel, although there is a compiler."""
    if not needs_compiler.args[0]:
        lines = [line for line in log.splitlines() if "are replaced by XLA" in line]
        assert not lines, "\n".join(lines)


@pytest.fixture(autouse=True)
def kernels_are_not_replaced() -> Iterator[None]:
    """Call `check_kernels` after each test of a folder; its `conftest.py` imports this fixture.

    A test that makes a kernel unavailable on purpose replaces `library._MISSING`.
    """
    yield
    check_kernels()
