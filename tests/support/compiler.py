"""Check for a C++ compiler for CPU kernels."""

import os
import shutil

import pytest

from paged_jax.kernels.cpu.library import SWITCH

_IS_FOUND = os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))

# Mark for tests that need a CPU kernel. Without a compiler, XLA computes these ops.
needs_compiler = pytest.mark.skipif(
    not _IS_FOUND or os.environ.get(SWITCH) == "0",
    reason=f"there is no C++ compiler, or {SWITCH} is 0",
)
