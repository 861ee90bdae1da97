"""Tests on several simulated devices: those that use the fixture `devices`.

JAX counts its devices when it starts, so these tests cannot run in the process of other tests. All
such tests of a file run in one process with `NUM_DEVICES` devices, because a process takes seconds
to start. It sends its reports, which this process passes on as its own: each test passes or fails
for itself, with its message.

This is a pytest plugin, which a file with such tests names in `pytest_plugins`. A debugger needs
the tests in its own process: set `XLA_FLAGS=--xla_force_host_platform_device_count=8`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import jax
import pytest

NUM_DEVICES = 8
_FLAG = "--xla_force_host_platform_device_count="
# Variables for the process with several devices: the file descriptor for reports, and the tests.
_REPORTS, _TESTS = "PAGED_JAX_TEST_REPORTS", "PAGED_JAX_TEST_NAMES"


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """Return several devices. A test that uses this fixture runs in a separate process."""
    found = jax.devices()
    assert len(found) == NUM_DEVICES
    return found


def pytest_configure(config: pytest.Config) -> None:
    if _REPORTS in os.environ:
        # Other processes do not inherit these variables.
        descriptor, names = os.environ.pop(_REPORTS), os.environ.pop(_TESTS)
        config.pluginmanager.register(_Sender(config, int(descriptor), set(json.loads(names))))
    elif _FLAG not in os.environ.get("XLA_FLAGS", ""):
        config.pluginmanager.register(_Receiver(config))


class _Sender:
    """Runs some tests of a file and sends their reports, in the process with several devices."""

    def __init__(self, config: pytest.Config, descriptor: int, names: set[str]):
        self._config, self._names = config, names
        self._pipe = os.fdopen(descriptor, "w")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._names]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        print(json.dumps(data), file=self._pipe, flush=True)


class _Receiver:
    """Starts processes with several devices, and passes on their reports."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._process: _Process | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        if not _needs_devices(item):
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        items = item.session.items[item.session.items.index(item) :]
        later = [each for each in items if each.path == item.path and _needs_devices(each)]
        if self._process is None:
            self._process = _Process(self._config, later)
        # Tests of the file that need no devices may follow.
        is_last = nextitem is None or later == [item]
        for report in self._process.reports_of(item):
            if report.when == "teardown" and (is_last or self._process.has_ended):
                report.user_properties.append(("cpu_seconds", self._end(item)))
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # Remove fixtures that the next test does not share with the test before this one.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def pytest_unconfigure(self) -> None:
        """End the process of a run that stops early."""
        if self._process is not None:
            self._process.end(timeout=0)

    def _end(self, item: pytest.Item) -> float:
        """End the process, and return the CPU-seconds that none of its reports has."""
        assert self._process is not None
        self._process.end(timeout=60)
        known, self._process = self._process.cpu_seconds, None
        # `durations.py` counts from the last report that this process makes.
        call = pytest.CallInfo.from_call(lambda: None, "teardown")
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        return max(0.0, _cpu_seconds(report) - known)


class _Process:
    """A pytest process with several devices, for tests of a file.

    Attributes:
      has_ended: whether it ended by itself, after all its tests or with an error.
      cpu_seconds: sum of the reports so far.
    """

    def __init__(self, config: pytest.Config, items: list[pytest.Item]):
        self._config = config
        self.has_ended, self.cpu_seconds = False, 0.0
        self._output = tempfile.TemporaryFile("w+")
        descriptor, other_end = os.pipe()
        self._pipe = os.fdopen(descriptor)
        names = json.dumps([item.nodeid for item in items])
        flags = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}{NUM_DEVICES}"
        added = {"XLA_FLAGS": flags, _REPORTS: str(other_end), _TESTS: names}
        command = [sys.executable, "-m", "pytest", "-p", __name__, "-p", "no:xdist"]
        command += ["-p", "no:cacheprovider", "-o", "addopts=--strict-markers"]
        self._process = subprocess.Popen(
            [*command, "-m", config.getoption("markexpr"), str(items[0].path)],
            cwd=config.rootpath,
            env={**os.environ, **added},
            pass_fds=[other_end],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        os.close(other_end)

    def reports_of(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Yield the reports of a test. If the process ends too early, the test fails."""
        for line in self._pipe:
            data = json.loads(line)
            report = self._config.hook.pytest_report_from_serializable(
                config=self._config, data=data
            )
            self.cpu_seconds += _cpu_seconds(report)
            if report.nodeid == item.nodeid:
                yield report
                if report.when == "teardown":
                    return
        self.has_ended = True
        status = self._process.wait()
        self._output.seek(0)
        text = f"its process ended with status {status}:\n{self._output.read()[-5000:]}"
        for when, outcome, message in (("call", "failed", text), ("teardown", "passed", None)):
            yield pytest.TestReport(
                item.nodeid, item.location, dict(item.keywords), outcome, message, when
            )

    def end(self, timeout: float) -> None:
        """Wait until the process ends, and kill it after some seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe.close()
        self._output.close()


def _needs_devices(item: pytest.Item) -> bool:
    return "devices" in getattr(item, "fixturenames", ())


def _cpu_seconds(report: pytest.TestReport) -> float:
    return dict(report.user_properties).get("cpu_seconds", 0.0)
