"""What all tests share: strict broadcasting, one compilation cache, and where the real data is."""

import gc
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import hypothesis
import jax
import pytest

from paged_jax.models.llama import Llama
from tests.support import ROOT
from tests.support.tiny_model import save_tiny_model

# What files cost, and the tests of that.
pytest_plugins = ["tests.support.durations", "pytester"]

# An example that compiles takes as long as the machine is slow.
hypothesis.settings.register_profile("paged_jax", deadline=None)
hypothesis.settings.load_profile("paged_jax")

jax.config.update("jax_numpy_rank_promotion", "raise")

# Scripts that set the environment for the JAX that they import; doctest would import them here.
collect_ignore = ["support/aot_gpu.py", "support/aot_parallel.py", "support/aot_tpu.py"]


# Linux lets a process have 65,530 memory maps (vm.max_map_count), a compiled program takes several,
# and XLA crashes when it gets no more.
_MAX_MAPS = 30_000
_MAPS = Path("/proc/self/maps")
_TESTS = itertools.count(1)

# Where pytest's configuration keeps the folder of this run.
_CACHE = pytest.StashKey[str]()
# Processes read entries that others are writing, or were writing when they were killed. What cannot
# be read is compiled again: no reason for a warning in a test, or on the stderr of a program.
_UNREADABLE = "ignore:Error reading persistent compilation cache entry"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unoptimised",
        action="store_true",
        help="compile in a third of the time, to slower machine code than users get",
    )


def _compile_in_less_time() -> None:
    """In this process, and in those that it starts."""
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # XLA's older emitters of fusions take half as long as those of MLIR, and jax 0.11 has them no
    # more. XLA reads this with the first array.
    if jax.__version_info__ < (0, 11):
        flags = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs between all processes of this run, and with no other run.

    The environment carries the cache to the workers of pytest-xdist, which start later, and to
    what tests start. A cache that the environment names already is used instead, and kept.
    """
    config.addinivalue_line("filterwarnings", _UNREADABLE)
    if hasattr(config, "workerinput"):
        return
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # Of a shell's background job, and of all that it starts: tests interrupt some of that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--unoptimised"):
        _compile_in_less_time()
    filters = [os.environ.get("PYTHONWARNINGS"), _UNREADABLE]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, filters))
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="paged_jax_tests_")
    os.environ["XDG_CACHE_HOME"] = config.stash[_CACHE]  # where kernels for CPUs are kept
    # However small a program: to write it took no time that could be measured.
    settings = {
        "jax_compilation_cache_dir": config.stash[_CACHE],
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        # The one is for this process, which has imported JAX, the other for those that will.
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache of this run."""
    if (folder := config.stash.get(_CACHE, None)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave exhaustive tests out unless `-m` names them; another `-m` leaves them out, too."""
    if "exhaustive" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Forget compiled programs before they are too many for one process.

    Best between two files, which share few. To count maps takes milliseconds, so it is done seldom.
    """
    yield
    is_last = nextitem is None or nextitem.path != item.path
    if _MAPS.exists() and (is_last or next(_TESTS) % 16 == 0):
        if _MAPS.read_bytes().count(b"\n") > (_MAX_MAPS // 2 if is_last else _MAX_MAPS):
            jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real models, configs and texts, which are not part of the project."""
    folder = Path(os.environ.get("PAGED_JAX_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set PAGED_JAX_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """Hugging Face folder of the tiny model, to read; a test that changes one saves its own."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder) -> Llama:
    """The tiny model that all tests share; one that gives it other weights loads its own."""
    return Llama.from_pretrained(tiny_folder)


@pytest.fixture
def no_collector() -> Generator[None]:
    """No collector of cycles: an object is freed with the last reference to it, or not at all."""
    gc.disable()
    yield
    gc.enable()
