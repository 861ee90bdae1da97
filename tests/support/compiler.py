"""Whether kernels for CPUs can be compiled here."""

import os
import shutil

import pytest

from paged_jax.kernels.cpu.library import SWITCH

_IS_FOUND = os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))

# For tests that need one of those kernels; where none can be had, XLA does the work.
needs_compiler = pytest.mark.skipif(
    not _IS_FOUND or os.environ.get(SWITCH) == "0",
    reason=f"there is no C++ compiler, or {SWITCH} is 0",
)
