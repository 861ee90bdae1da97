"""Runs of the C++ compiler that builds the kernels for CPUs."""

import atexit
import concurrent.futures
import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_TIMEOUT = 120.0  # maximum duration of a compiler run in seconds


class Unavailable(Exception):
    """Raised if a kernel cannot be compiled, loaded or used. The message is the reason."""


# Background compilations by command. The result is the content of the library.
_JOBS: dict[tuple[str, ...], concurrent.futures.Future[bytes]] = {}
_LOCK = threading.Lock()


def compile_in_background(command: list[str], cache_folder: Path | None) -> None:
    """Start to compile a library in a background thread. `compile_library` waits for it.

    Args:
      command: arguments of the compiler, without the output file. The last but one is the source.
      cache_folder: see `build_folder`.
    """
    with _LOCK:
        if tuple(command) in _JOBS:
            return
        job: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        thread = threading.Thread(
            target=_do, args=(job, command, cache_folder), name="paged_jax compiler", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no thread can be started
            thread.start()
            _JOBS[tuple(command)] = job


@functools.cache
def _limit() -> threading.Semaphore:
    """Return a semaphore that limits how many compilers run at a time; each takes 160 MB."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return threading.Semaphore(min(num_cores or 1, 4))


def _do(
    job: concurrent.futures.Future[bytes], command: list[str], cache_folder: Path | None
) -> None:
    with _limit():
        if not job.set_running_or_notify_cancel():
            return
        try:
            with build_folder(cache_folder) as temporary:
                path = Path(temporary) / "library.so"
                _run(command, path)
                job.set_result(path.read_bytes())
        except Exception as error:
            job.set_exception(error)


@atexit.register
def _end_jobs() -> None:
    """Cancel the jobs that wait, and let the others delete their temporary folders."""
    concurrent.futures.wait([job for job in _JOBS.values() if not job.cancel()])


def _forget_jobs() -> None:
    """Forget the jobs of the parent process. A forked process does not have their threads."""
    _JOBS.clear()
    _limit.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_jobs)


def compile_library(command: list[str], path: Path) -> None:
    """Compile the library `path`, or wait for `compile_in_background` with the same command.

    Raises:
      Unavailable: the library cannot be compiled.
      OSError: a file cannot be written.
    """
    job = _JOBS.get(tuple(command))
    if job is None:
        return _run(command, path)
    try:
        path.write_bytes(job.result())
    finally:
        _JOBS.pop(tuple(command), None)


def build_folder(cache_folder: Path | None) -> "tempfile.TemporaryDirectory[str]":
    """Create a temporary folder to compile in.

    It is in the cache folder if the default folder for temporary files is not usable.
    """
    for parent in (None, cache_folder):
        with contextlib.suppress(OSError):
            return temporary_folder(parent)
    raise Unavailable("there is no folder to compile in: make /tmp writable, or set TMPDIR")


def temporary_folder(parent: Path | None) -> "tempfile.TemporaryDirectory[str]":
    """Create a temporary folder in `parent`, or in the default place if it is None."""
    return tempfile.TemporaryDirectory(prefix="paged_jax", dir=parent, ignore_cleanup_errors=True)


def find_compiler() -> list[str]:
    """Return the compiler's command, from the environment variable CXX if it is set.

    Raises:
      Unavailable: there is no compiler, or CXX is not a command.
    """
    try:
        command = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise Unavailable(f"CXX must be a command, got {os.environ['CXX']}: {error}") from error
    if command:
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise Unavailable("there is no C++ compiler: install g++ or clang++, or set CXX to a compiler")


def _run(command: list[str], path: Path) -> None:
    if sys.platform == "win32":
        raise Unavailable("Windows is not supported")
    compiler = find_compiler()
    try:
        subprocess.run(
            [*compiler, *command, "-o", str(path)],
            check=True, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT,
            stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(path.parent)},
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        error_lines = [line for line in lines if "error" in line or "failed" in line] or lines[-1:]
        message = error_lines[0] if error_lines else f"exit status {error.returncode}"
        # Remove file names from the message, so that it is the same for all kernels and is logged
        # once.
        message = message.replace(str(path), "the file").replace(command[-2], "the source")
        raise Unavailable(f"{compiler[0]} says: {message}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler[0]} could not be run: {error}") from error
    if not path.is_file():
        raise Unavailable(f"{compiler[0]} wrote no file")
