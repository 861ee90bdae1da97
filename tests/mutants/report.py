"""A pytest plugin that writes the outcome of a run to the file that `VARIABLE` names.

`run` copies this file to a folder on PYTHONPATH, so it imports nothing of this project.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "PAGED_JAX_MUTANT_REPORT"

_REPORT: dict[str, Any] = {"failed": [], "uncollected": [], "num_passed": 0}


@pytest.hookimpl(trylast=True)
def pytest_configure(config: Any) -> None:
    """Register the markers that `run` selects, for projects that do not use all of them.

    A failed example of Hypothesis is proof enough, so it is not made smaller, which takes minutes.
    """
    # Pytest's own finder takes the files that are named on the command line, whose doctests run.
    sys.meta_path.sort(key=lambda finder: type(finder).__name__ != "_Finder")
    for name in ("slow", "peers", "optimised", "exhaustive"):
        config.addinivalue_line("markers", name)
    if hypothesis := sys.modules.get("hypothesis"):
        phases = [phase for phase in hypothesis.Phase if phase.name in ("explicit", "generate")]
        settings = hypothesis.settings
        settings.register_profile("mutants", settings(), phases=phases)
        settings.load_profile("mutants")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _REPORT["uncollected"].append(report.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed and report.nodeid not in _REPORT["failed"]:
        _REPORT["failed"].append(report.nodeid)
    _REPORT["num_passed"] += report.passed and report.when == "call"


def pytest_sessionfinish() -> None:
    times = os.times()
    used = times.user + times.system + times.children_user + times.children_system
    Path(os.environ[VARIABLE]).write_text(json.dumps(_REPORT | {"cpu_seconds": round(used, 1)}))
