"""Common setup of all tests: strict broadcasting, a compilation cache, and real data.

Nothing here imports JAX before a test needs it, because the process that distributes the tests to
others needs none.
"""

import gc
import hashlib
import importlib.metadata
import itertools
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from platformdirs import user_cache_path

from tests.support import ROOT

if TYPE_CHECKING:
    from paged_jax.models.decoder import Decoder

# The plugins that measure costs and decide what fails, and their tests.
pytest_plugins = ["tests.support.durations", "tests.support.verdicts", "pytester"]

# The time of an example that compiles depends on the machine.
hypothesis.settings.register_profile("paged_jax", deadline=None)
hypothesis.settings.load_profile("paged_jax")

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


def _set_jax(name: str, value: object) -> None:
    """Set an option of JAX in this process and its child processes."""
    os.environ[name.upper()] = str(value)
    # Without this module, JAX reads the variable later.
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(name, value)


def _compile_in_less_time() -> None:
    """Reduce optimisation in this process and its child processes."""
    _set_jax("jax_disable_most_optimizations", True)
    # XLA reads this variable when the first array is created. One LLVM module per program takes
    # a tenth less CPU time than one per thread.
    flags = [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_parallel_codegen_split_count=1",
        f"--xla_disable_hlo_passes={','.join(_SKIPPED_PASSES)}",
    ]
    # XLA's older fusion emitters take half as long as the MLIR emitters; jax 0.11 no longer has
    # them.
    if importlib.metadata.version("jax").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def _kept_folder(folder: Path) -> str:
    """Return the part of a folder of kept programs that fits this machine and these packages.

    JAX finds a program by its whole text, options and jaxlib, and the package finds a C++ kernel by
    its sources, flags and compiler. The folder's name adds what they leave out: the processor.
    """
    text = [importlib.metadata.version("jaxlib"), platform.python_version(), platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        text += sorted({line for line in lines if line.startswith(("model name", "flags"))})
    return str(folder.resolve() / hashlib.sha256("\n".join(text).encode()).hexdigest()[:16])


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs between all processes of this run, but not with other runs.

    An environment variable passes the cache to the workers of pytest-xdist, which start later, and
    to processes that tests start. If `PAGED_JAX_CI_CACHE` names a folder, programs are kept there
    for later runs. If the environment already names a cache of JAX, it is used and kept.
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
    if kept := os.environ.get("PAGED_JAX_CI_CACHE"):
        folder = _kept_folder(Path(kept))
    else:
        folder = config.stash[_CACHE] = tempfile.mkdtemp(prefix="paged_jax_tests_")
    os.environ["XDG_CACHE_HOME"] = folder  # cache of the C++ kernels
    # Programs of any size: writing them took no measurable time.
    _set_jax("jax_compilation_cache_dir", folder)
    _set_jax("jax_persistent_cache_min_compile_time_secs", 0)
    _set_jax("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without tests of this run, because importing them takes time.

    These are files without examples in docstrings, and files without `optimised` tests if only
    those run.
    """
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    is_module = not collection_path.name.startswith("test_")
    if is_module and ">>> " not in text:
        return True
    expression = config.getoption("markexpr").replace("not optimised", "")
    # `kernels/conftest.py` marks tests without naming the marker in their files.
    if "optimised" in expression and collection_path.parent.name != "kernels":
        return is_module or "mark.optimised" not in text or None
    return None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse implicit broadcasting in the processes that run tests.

    It is no variable of the environment, because programs that tests start run as users run them.
    """
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", 0):
        import jax

        jax.config.update("jax_numpy_rank_promotion", "raise")


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
            import jax

            jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of real models, configs and texts, which are not part of the project."""
    folder = Path(os.environ.get("PAGED_JAX_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no data from outside of the repository: set PAGED_JAX_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """Return the GGUF file of a real chat model, which `examples/fetch_smollm2.py` downloads."""
    from examples import fetch_smollm2

    path = Path(os.environ[_SMOLLM2])
    path = path / fetch_smollm2.NAME if path.is_dir() else path
    if not fetch_smollm2.is_smollm2(path):
        pytest.skip(f"no SmolLM2: run examples/fetch_smollm2.py, or set {_SMOLLM2}")
    return path


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """Return the Hugging Face folder of the tiny model, which tests must not modify."""
    from tests.support.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder) -> "Decoder":
    """Return the shared tiny model. A test that changes its weights loads its own."""
    from paged_jax.models.decoder import Decoder

    return Decoder.from_pretrained(tiny_folder)


@pytest.fixture
def padded_rows(monkeypatch) -> None:
    """Let engines pad a single row to all slots, which saves a third of their programs."""
    from paged_jax.runner import runner
    from tests.support.workload import full_batch

    monkeypatch.setattr(runner, "row_bucket", full_batch)


@pytest.fixture
def no_collector() -> Generator[None]:
    """Disable the cycle collector: objects are freed with their last reference, or not at all."""
    gc.disable()
    yield
    gc.enable()
