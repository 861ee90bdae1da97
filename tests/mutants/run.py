"""Run the tests of mutants, each in its own process and with its own caches.

Importing libraries takes longer than most tests. So a server imports them once, and each test
process is a fork of it. The package itself is imported in the test process.
"""

import json
import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import change, report
from tests.mutants.mutant import Mutant
from tests.support import ROOT

# Tests of `make test`, and tests that only `make test-all` runs. Tests of machine code are not
# among the latter, because the tool compiles with `--unoptimised`.
CORE = "not slow and not peers and not exhaustive"
REST = "(slow or peers) and not exhaustive and not optimised"
TIERS = {"core": CORE, "rest": REST}

# Modules that find C++ kernels in the cache. Mutants of them start with an empty cache.
_FIND_KERNELS = (
    "paged_jax.kernels.native.compiler",
    "paged_jax.kernels.native.library",
    "paged_jax.user_cache",
)
# Libraries that most tests need. Missing ones are skipped.
_LIBRARIES = (
    "_pytest.assertion.rewrite",
    "_pytest.doctest",
    "flax.nnx",
    "huggingface_hub",
    "hypothesis.stateful",
    "jax.experimental.pallas.tpu",
    "jax.experimental.serialize_executable",
    "optax",
    "orbax.checkpoint",
    "safetensors",
    "tokenizers",
    "tqdm",
)
_PYTEST_OPTIONS = ("-p", "no:cacheprovider", "--unoptimised", "--hypothesis-seed=0")


@dataclass
class Result:
    """What the tests have found.

    Attributes:
      mutant: the mutant.
      outcome: ``killed``; ``survived``; ``timeout``; ``outdated``, the change does not fit the
        source text; or ``error``, the run proves nothing.
      tier: the tier of the test that failed: ``core`` or ``rest``.
      detail: the test that failed, or the reason of another outcome.
      cpu_seconds: CPU time of the test processes.
      seconds: elapsed time.
    """

    mutant: Mutant
    outcome: str
    tier: str = ""
    detail: str = ""
    cpu_seconds: float = 0.0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        names = ("outcome", "tier", "detail", "cpu_seconds", "seconds")
        return self.mutant._asdict() | {name: getattr(self, name) for name in names}


@dataclass
class Workshop:
    """Folders and options of the test processes.

    Args:
      folder: an empty folder for hooks and caches.
      root: the folder from which the tests run.
      options: options of pytest.
      limit: seconds after which the tests of a mutant are stopped.
      libraries: modules to import once for all test processes.
    """

    folder: Path
    root: Path = ROOT
    options: Sequence[str] = _PYTEST_OPTIONS
    limit: float = 900
    libraries: Sequence[str] = _LIBRARIES
    _kernels: Path = field(init=False)

    def __post_init__(self) -> None:
        # JAX reads these variables when it is imported. It finds programs by their text, which
        # depends on the change.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        self._hooks, self._kernels = self.folder / "hooks", self.folder / "kernels"
        self._hooks.mkdir()
        self._kernels.mkdir()
        shutil.copy(change.__file__, self._hooks / "mutant_change.py")
        shutil.copy(report.__file__, self._hooks / "mutant_report.py")
        (self._hooks / "sitecustomize.py").write_text(
            "import mutant_change\n\nmutant_change.install()\n"
        )

    def run(self, mutant: Mutant, tiers: Sequence[str]) -> Result:
        """Run the tests of a mutant, one tier after the other, until a test fails."""
        try:
            mutant.check(self.root)
        except (change.OutdatedError, SyntaxError, ValueError) as error:
            return Result(mutant, "outdated", detail=str(error))
        result, has_run = Result(mutant, "survived"), False
        for tier in tiers:
            found = self._run_tier(mutant, tier)
            found.cpu_seconds += result.cpu_seconds
            found.seconds += result.seconds
            has_run |= found.detail != "no tests"
            if found.outcome != "survived":
                return found
            result = found
        if not has_run:
            result.outcome, result.detail = "error", "no tests"
        return result

    def _run_tier(self, mutant: Mutant, tier: str) -> Result:
        names = ("module", "function", "before", "after")
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            reports = Path(name) / "reports"
            reports.mkdir()
            values = {key: getattr(mutant, key) for key in names} | {"reports": str(reports)}
            (file := Path(name) / "mutant.json").write_text(json.dumps(values))
            result = Result(mutant, "survived", tier)
            started = time.monotonic()
            keeps_kernels = mutant.module not in _FIND_KERNELS
            options = ["-x", "-m", TIERS[tier], *mutant.tests]
            code, found, output = self._pytest(Path(name), options, file, keeps_kernels)
            result.seconds = round(time.monotonic() - started, 1)
            result.cpu_seconds = found.get("cpu_seconds", 0.0)
            failures = [path.read_text() for path in reports.glob("failed-*")]
            is_applied = any(reports.glob("applied-*"))
        if failures:
            result.outcome, result.detail = "error", failures[0]
        elif code is None:
            result.outcome, result.detail = "timeout", f"more than {self.limit:.0f} s"
        elif code == 5:
            result.detail = "no tests"
        elif not found or code not in (0, 1):
            result.outcome, result.detail = "error", f"pytest ended with {code}:\n{output}"
        elif not is_applied:
            result.outcome, result.detail = "error", f"no process has imported {mutant.module}"
        elif found["failed"]:
            result.outcome, result.detail = "killed", found["failed"][0]
        elif code == 1 or not found["num_passed"]:
            result.outcome, result.detail = "error", f"no test has passed or failed:\n{output}"
        return result

    def passes_without(self, tests: Sequence[str]) -> list[str]:
        """Return the tests that fail, or do not run, without a mutant."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            code, found, output = self._pytest(Path(name), tests, None, True, len(tests))
        if code == 0:
            return []
        return found["failed"] if code == 1 and found else [f"pytest ended with {code}:\n{output}"]

    def _pytest(
        self, folder: Path, options: Sequence[str], file: Path | None, keeps_kernels: bool, times=1
    ) -> tuple[int | None, dict[str, Any], str]:
        """Run pytest; return its exit status (None if it was stopped), report and output."""
        xdg = folder / "cache"
        kernels = xdg / "paged_jax" / "kernels"
        kernels.parent.mkdir(parents=True, mode=0o700)
        if keeps_kernels:
            shutil.copytree(self._kernels, kernels)
            kernels.chmod(0o700)
        paths = [str(self._hooks), str(self.root), str(ROOT), os.environ.get("PYTHONPATH")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # Bytecode of modules without a change.
            "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode"),
            # Programs that the package stores are found by its files, which do not change.
            "XDG_CACHE_HOME": str(xdg),
            # Examples that failed with one mutant must not run with the next.
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
            report.VARIABLE: str(folder / "report.json"),
        }
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env.pop(change.VARIABLE, None)
        if file is not None:
            env[change.VARIABLE] = str(file)
        arguments = ["-p", "mutant_report", "-q", "--no-header", "--tb=short"]
        arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of imported libraries
        arguments += [*self.options, *options]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*self.libraries])
        output = folder / "output"
        process = context.Process(
            target=_run_pytest, args=(arguments, env, str(self.root), str(output))
        )
        process.start()
        process.join(self.limit * times)
        code = process.exitcode
        _end(process)
        text = output.read_text(errors="replace") if output.exists() else ""
        if keeps_kernels and kernels.is_dir():
            for path in kernels.glob("*.so"):
                if not (self._kernels / path.name).exists():
                    shutil.copy(path, self._kernels)
        written = folder / "report.json"
        found = json.loads(written.read_text()) if written.exists() else {}
        return code, found, "\n".join(text.splitlines()[-20:])


def _run_pytest(arguments: list[str], env: dict[str, str], root: str, output: str) -> None:
    """Run pytest in a process that has only imported libraries, and end the process.

    The process is like a new one: it has the variables `env`, its folder, output and import hook.
    """
    os.setsid()  # with all processes that it starts, see `_end`
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(root)
    file = os.open(output, os.O_CREAT | os.O_WRONLY)
    for target in (1, 2):
        os.dup2(file, target)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdout, sys.stderr = (open(target, "w", closefd=False) for target in (1, 2))
    sys.stdin = open(0, closefd=False)
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    sys.pycache_prefix, sys.dont_write_bytecode = env["PYTHONPYCACHEPREFIX"], False
    change.install()
    sys.exit(pytest.main(arguments))


def _end_with_parent() -> None:
    """Kill this process and its children when the process that runs the mutants has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Kill a process and all processes that it has left."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def run_all(
    mutants: Sequence[Mutant], tiers: Sequence[str], workshop: Workshop, num_jobs: int, show: Any
) -> list[Result]:
    """Run mutants, and then, without a mutant, the tests that have killed them.

    Args:
      mutants: the mutants to run.
      tiers: keys of `TIERS`.
      workshop: runs the tests.
      num_jobs: maximum number of simultaneous test processes.
      show: called with each result.
    """

    def run(mutant: Mutant) -> Result:
        result = workshop.run(mutant, tiers)
        show(result)
        return result

    with ThreadPoolExecutor(num_jobs) as pool:
        results = list(pool.map(run, mutants))
    killers = list(dict.fromkeys(result.detail for result in results if result.outcome == "killed"))
    failed = workshop.passes_without(killers) if killers else []
    for result in results:
        if result.outcome != "killed":
            continue
        unknown = [message for message in failed if message not in killers]
        if result.detail in failed or unknown:
            result.outcome = "error"
            result.detail += " also fails without a mutant" if not unknown else f": {unknown[0]}"
            show(result)
    return results
