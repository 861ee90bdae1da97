"""Profiles of `jax.profiler`: what the engine and its device do, in ranges with names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax


def check_profile_folder(folder: str) -> None:
    """See that profiles can be written, before hours of work are spent on one.

    Raises:
      ValueError: the folder cannot be made.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--profile must be a folder to write to, got {folder}: {error.strerror}."
        ) from None


def start_profile(folder: str) -> None:
    """Record what happens from now on, in all threads, until `jax.profiler.stop_trace`.

    Raises:
      RuntimeError: it is recorded already.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of a Python function would bury the ranges
    jax.profiler.start_trace(folder, profiler_options=options)


@contextlib.contextmanager
def profiled(folder: str | None) -> Iterator[None]:
    """A context whose profile is written to a folder; None records nothing."""
    if folder is None:
        yield
        return
    start_profile(folder)
    try:
        yield
    finally:
        jax.profiler.stop_trace()
