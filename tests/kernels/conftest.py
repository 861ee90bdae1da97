"""Marks of kernel tests, kernels that XLA replaces, and programs compiled ahead of time.

Tests of compiled backends are `optimised`: they check the machine code that users get. A test fails
if XLA replaces a kernel for CPUs. The summary counts the programs that were compiled ahead of time.
"""

import os
import sys
from collections import Counter
from typing import Any

import pytest

from tests.support import aot_store
from tests.support.compiler import kernels_are_not_replaced

__all__ = ["kernels_are_not_replaced"]

_FILES = {
    "test_attention.py",
    "test_cascade.py",
    "test_gradients.py",
    "test_latent.py",
    "test_rope_write.py",
    "test_writing.py",
}
_INTERPRETED = {"triton", "mosaic_tpu"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in `_FILES`, except tests of kernels that run in the interpreter.

    Tests in files `test_aot_*` need compilers for other devices, except the tests of the store.
    """
    for item in items:
        if item.path.parent.name != "kernels":
            continue
        if item.path.name.startswith("test_aot_") and item.path.name != "test_aot_store.py":
            item.add_marker("aot")
            # The first test of a file compiles the programs of all, within the limit of the stage.
            item.add_marker(pytest.mark.timeout(0))
        if item.path.name in _FILES:
            params = getattr(item, "callspec", None)
            names = params.params.values() if params else ()
            if not _INTERPRETED & {name for name in names if isinstance(name, str)}:
                item.add_marker("optimised")


# Counts of the workers of pytest-xdist, in the process that started them.
_COUNTS = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for tests of programs that are compiled ahead of time."""
    parser.addoption(
        "--aot-update",
        action="store_true",
        help=f"write new results of ahead-of-time compilation to {aot_store.PATH.name}",
    )
    parser.addoption(
        "--aot-verify",
        action="store_true",
        help="compile everything ahead of time, and compare with the stored results",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the mode of the scripts that compile."""
    for mode in ("update", "verify"):
        if config.getoption(f"--aot-{mode}", default=False):
            os.environ[aot_store.MODE] = mode


def _counts() -> Counter[str]:
    """Return the counts of programs of this process; most processes compile none."""
    module = sys.modules.get("tests.support.aot_cases")
    return module.COUNTS if module else Counter()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of a worker."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["aot"] = dict(_counts())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a worker that ended; a worker that crashed has none."""
    counts = node.config.stash.setdefault(_COUNTS, Counter())
    counts.update(getattr(node, "workeroutput", {}).get("aot", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell how many programs were compiled, so that an old file of results is visible."""
    counts = terminalreporter.config.stash.get(_COUNTS, Counter()) + _counts()
    if counts:
        numbers = ", ".join(f"{counts[kind]} {kind}" for kind in ("stored", "compiled", "verified"))
        terminalreporter.line(f"results of ahead-of-time compilation: {numbers}")
