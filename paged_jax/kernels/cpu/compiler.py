"""Runs of the C++ compiler that builds the kernels for CPUs."""

import concurrent.futures
import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_TIMEOUT = 120.0  # maximum duration of a compiler run in seconds


class Unavailable(Exception):
    """Raised if a kernel cannot be compiled, loaded or used. The message is the reason."""


# Libraries that background threads compile, by command. The result is None if there is no need.
_RUNNING: dict[tuple[str, ...], concurrent.futures.Future[bytes | None]] = {}


def compile_in_background(command: list[str], is_needless: Callable[[], bool]) -> None:
    """Start to compile a library. `compile_library` with the same command waits for it.

    Args:
      command: arguments of the compiler, without the output file.
      is_needless: called in the background; the library is not compiled if the result is True.
    """
    if tuple(command) not in _RUNNING:
        job = _threads().submit(_compile_if_needed, command, is_needless)
        _RUNNING[tuple(command)] = job


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), "paged_jax compiler")


def _compile_if_needed(command: list[str], is_needless: Callable[[], bool]) -> bytes | None:
    if is_needless():
        return None
    with build_folder(None) as temporary:
        path = Path(temporary) / "library.so"
        _run(command, path)
        return path.read_bytes()


def compile_library(command: list[str], path: Path) -> None:
    """Compile the library `path`, or take it from `compile_in_background`.

    Raises:
      Unavailable: the library cannot be compiled.
    """
    job, content = _RUNNING.pop(tuple(command), None), None
    if job is not None:
        with contextlib.suppress(Unavailable, OSError):  # try again below, which finds the reason
            content = job.result()
    if content is None:
        _run(command, path)
    else:
        path.write_bytes(content)


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
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise Unavailable(f"CXX must be a command, got {os.environ['CXX']}: {error}") from error
    if named:
        return named
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
        said = [line for line in lines if "error" in line or "failed" in line] or lines[-1:]
        text = said[0] if said else f"exit status {error.returncode}"
        # Remove file names from the message, so that it is the same for all kernels and is logged
        # once.
        text = text.replace(str(path), "the file").replace(command[-2], "the source")
        raise Unavailable(f"{compiler[0]} says: {text}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler[0]} could not be run: {error}") from error
    if not path.is_file():
        raise Unavailable(f"{compiler[0]} wrote no file")
