"""Check for a C++ compiler for CPU kernels."""

import os
import shutil

import pytest

from paged_jax.kernels.cpu.library import SWITCH, processor

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
