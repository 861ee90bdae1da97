"""Common setup of all tests: strict broadcasting, a compilation cache, and real data."""

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
from platformdirs import user_cache_path

from examples import fetch_smollm2
from paged_jax.models.llama import Llama
from paged_jax.runner import runner
from tests.support import ROOT
from tests.support.tiny_model import save_tiny_model
from tests.support.workload import full_batch

# The plugin that measures the cost of files, and its tests.
pytest_plugins = ["tests.support.durations", "pytester"]

# The time of an example that compiles depends on the machine.
hypothesis.settings.register_profile("paged_jax", deadline=None)
hypothesis.settings.load_profile("paged_jax")

jax.config.update("jax_numpy_rank_promotion", "raise")

# Scripts that set environment variables before they import JAX; doctest would import them in this
# process.
collect_ignore = ["support/aot_gpu.py", "support/aot_parallel.py", "support/aot_tpu.py"]


# Linux limits a process to 65,530 memory maps (vm.max_map_count). A compiled program uses several,
# and XLA crashes at the limit.
_MAX_MAPS = 30_000
_MAPS = Path("/proc/self/maps")
_TESTS = itertools.count(1)

# Variable that names the file of a real chat model, see `smollm2_file`.
_SMOLLM2 = "PAGED_JAX_SMOLLM2"

# Key of the run's cache folder in pytest's configuration.
_CACHE = pytest.StashKey[str]()
# Processes may read entries that are incomplete because another process writes them or was killed.
# JAX compiles such programs again, so no test or program needs to warn.
_UNREADABLE = "ignore:Error reading persistent compilation cache entry"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unoptimised",
        action="store_true",
        help="compile in a third of the time, to slower machine code than users get",
    )


# XLA passes that `--unoptimised` leaves out. They take a fifth of the time of a compilation, and
# only make programs faster: they simplify loops, and divide work between threads.
_SKIPPED_PASSES = (
    "simplify-while-loops",
    "while-loop-constant-sinking",
    "while-loop-invariant-code-motion",
    "while-loop-trip-count-annotator",
    "cpu-parallel-task-assigner",
    "tree_reduction_rewriter",
)


def _compile_in_less_time() -> None:
    """Reduce optimisation in this process and its child processes."""
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # XLA reads this variable when the first array is created. One LLVM module per program takes
    # a tenth less CPU time than one per thread.
    flags = [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_parallel_codegen_split_count=1",
        f"--xla_disable_hlo_passes={','.join(_SKIPPED_PASSES)}",
    ]
    # XLA's older fusion emitters take half as long as the MLIR emitters; jax 0.11 no longer has
    # them.
    if jax.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs between all processes of this run, but not with other runs.

    An environment variable passes the cache to the workers of pytest-xdist, which start later, and
    to processes that tests start. If the environment already names a cache, it is used and kept.
    """
    config.addinivalue_line("filterwarnings", _UNREADABLE)
    if hasattr(config, "workerinput"):
        return
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # The shell ignores SIGINT in background jobs, and child processes inherit this. Tests
        # interrupt processes.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--unoptimised"):
        _compile_in_less_time()
    filters = [os.environ.get("PYTHONWARNINGS"), _UNREADABLE]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, filters))
    # Look for the model in the user's cache folder, which the lines below replace.
    os.environ.setdefault(_SMOLLM2, str(user_cache_path("paged_jax", appauthor=False) / "models"))
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="paged_jax_tests_")
    os.environ["XDG_CACHE_HOME"] = config.stash[_CACHE]  # cache of the C++ kernels
    # Programs of any size: writing them took no measurable time.
    settings = {
        "jax_compilation_cache_dir": config.stash[_CACHE],
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        # The first line is for this process, which has imported JAX, the second for child
        # processes.
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_collection_finish() -> None:
    """Exclude modules, and everything else that exists, from the search for cycles."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache of this run."""
    if (folder := config.stash.get(_CACHE, None)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect exhaustive tests unless `-m` names them."""
    if "exhaustive" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Clear compiled programs before this process reaches the limit of memory maps.

    This happens between two files, because files share few programs. Counting maps takes
    milliseconds, so it happens rarely.
    """
    yield
    is_last = nextitem is None or nextitem.path != item.path
    if _MAPS.exists() and (is_last or next(_TESTS) % 16 == 0):
        if _MAPS.read_bytes().count(b"\n") > (_MAX_MAPS // 2 if is_last else _MAX_MAPS):
            jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of real models, configs and texts, which are not part of the project."""
    folder = Path(os.environ.get("PAGED_JAX_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set PAGED_JAX_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """Return the GGUF file of a real chat model, which `examples/fetch_smollm2.py` downloads."""
    path = Path(os.environ[_SMOLLM2])
    path = path / fetch_smollm2.NAME if path.is_dir() else path
    if not fetch_smollm2.is_smollm2(path):
        pytest.skip(f"no model at {path}; run examples/fetch_smollm2.py, or set {_SMOLLM2}")
    return path


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """Return the Hugging Face folder of the tiny model, which tests must not modify."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder) -> Llama:
    """Return the shared tiny model. A test that changes its weights loads its own."""
    return Llama.from_pretrained(tiny_folder)


@pytest.fixture
def padded_rows(monkeypatch) -> None:
    """Let engines pad a single row to all slots, which saves a third of their programs."""
    monkeypatch.setattr(runner, "row_bucket", full_batch)


@pytest.fixture
def no_collector() -> Generator[None]:
    """Disable the cycle collector: objects are freed with their last reference, or not at all."""
    gc.disable()
    yield
    gc.enable()
