"""What all tests share: strict broadcasting, and where the real data is."""

import os
from pathlib import Path

import hypothesis
import jax
import pytest

from tests.support import ROOT

# An example that compiles takes as long as the machine is slow.
hypothesis.settings.register_profile("paged_jax", deadline=None)
hypothesis.settings.load_profile("paged_jax")

jax.config.update("jax_numpy_rank_promotion", "raise")

# Scripts that set the environment for the JAX that they import; doctest would import them here.
collect_ignore = ["support/aot_gpu.py", "support/aot_tpu.py"]


# Linux lets a process have 65,530 memory maps (vm.max_map_count), a compiled program takes several,
# and XLA crashes when it gets no more.
_MAX_MAPS = 30_000
_MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Forget compiled programs before they are too many for one process."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MAX_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real models, configs and texts, which are not part of the project."""
    folder = Path(os.environ.get("PAGED_JAX_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set PAGED_JAX_TEST_DATA")
    return folder
