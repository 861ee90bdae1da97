"""What counts as a failure, and how it is reported.

This is a pytest plugin. A skipped test is a failure unless `ALLOWED_SKIPS` has its reason, so a run
cannot become green because something is missing. Failures are printed when they happen, with
``--failures-to FILE`` to a file.
"""

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Patterns of the reasons for which tests may be skipped, and why that is right.
ALLOWED_SKIPS = {
    "no data from outside of the repository": "it belongs to others",
    "no SmolLM2": "the chat model is an optional download of 98 MB",
    "this jax (is too old for Mosaic GPU|has no simulator of a GPU|has no such kernels)": (
        "the oldest supported jax has no Mosaic GPU; the newest runs these tests"
    ),
    "XLA has one emitter of fusions": "the test compares two emitters of the oldest jax",
    "this processor cannot run code for": "the kernels exist in versions for several processors",
    "the processor lacks AVX512-VNNI": "such kernels cannot run here",
    "there is no C\\+\\+ compiler|no C\\+\\+ compiler": (
        "XLA computes these ops without a compiler; .ci/run requires one"
    ),
    "there is a device for a kernel|there is one": "the test needs a machine without a GPU",
    "(Chromium|nginx|clang\\+\\+|g\\+\\+) is missing": (
        "pip cannot install them; .ci/run requires them"
    ),
    "no Docker here": "the test only parses the file where no Docker is installed",
    "the extra tunix is not installed": "it needs other versions; .ci/run installs them",
    "no llama-cpp-python|compressed_tensors is missing": "pip would change other packages",
    "not a repository of git": "an unpacked archive has no commit to name",
    "reads /proc|the C library has no malloc_trim": "other systems than Linux",
}
_ALLOWED = re.compile("|".join(f"({pattern})" for pattern in ALLOWED_SKIPS))


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure unless its reason is allowed."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not _ALLOWED.search(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped, which only tests/support/verdicts.py can allow: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_skip(report)
    return report


class _Failures:
    """Prints failures when they happen, in the process that reports to the user."""

    def __init__(self, config: pytest.Config, path: Path | None) -> None:
        self._config, self._path = config, path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._print(f"{report.nodeid} ({report.when})", report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._print(f"{report.nodeid} (collection)", report)

    def _print(self, name: str, report: Any) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        # The last line of a traceback is the error. Long tracebacks are in the summary.
        lines = report.longreprtext.splitlines()[-30:]
        text = "\n".join([f"FAILED {name}", *([crash.message] if crash else []), *lines])
        if self._path:
            with self._path.open("a") as file:
                print(text, file=file)
        else:
            self._config.get_terminal_writer().write(f"\n{text}\n", flush=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("reporting").addoption(
        "--failures-to", metavar="FILE", type=Path, help="append failures when they happen"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config, config.getoption("--failures-to")))
