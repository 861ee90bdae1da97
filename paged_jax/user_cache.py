"""The folder that caches compiled programs and kernels for the current user."""

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

import jax
from platformdirs import user_cache_path

_logger = logging.getLogger(__name__)


def cache_folder(*names: str) -> Path | None:
    """Return a cache folder that only this user can write to. Create it if it is missing.

    The folder is ``paged_jax`` in the user's cache folder: ``$XDG_CACHE_HOME`` if that is an
    absolute path, otherwise the platform's default (``~/.cache`` on Linux). Its files are run as
    machine code. So it is not used if it belongs to another user or if others may write to it.

    Args:
      *names: names of nested subfolders, for example ``"a", "b"`` for ``paged_jax/a/b``.

    Returns:
      The folder; None if it cannot be created or must not be used. The reason is then logged as a
      warning, once per process.
    """
    try:
        folder = user_cache_path("paged_jax", appauthor=False)
        for path in (folder, *(folder.joinpath(*names[: i + 1]) for i in range(len(names)))):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(path):
                _warn(f"{path} belongs to another user, or others may write to it")
                return None
    except (OSError, RuntimeError) as error:  # a read-only or full disk, or no home folder
        _warn(str(error))
        return None
    return folder.joinpath(*names)


@functools.cache
def _warn(reason: str) -> None:
    """Log a warning that nothing is cached. Each reason is logged only once."""
    _logger.warning(
        "The next process compiles everything again: %s. "
        "Set XDG_CACHE_HOME to a folder that only this user can write to.",
        reason,
    )


def _is_private(path: Path) -> bool:
    if not hasattr(os, "getuid"):  # on Windows, other users cannot write to a user's folders
        return True
    status = path.stat()
    writers = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid == os.getuid() and not status.st_mode & writers


def read(path: Path) -> bytes | None:
    """Return the content of a file; None if it is missing or other users may write to it.

    Args:
      path: a file that `write` wrote.
    """
    try:
        return path.read_bytes() if _is_private(path) else None
    except OSError:
        return None


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: other processes read either the old or the new content.

    Errors are only logged, because the program also works without the cache.

    Args:
      path: a file in a `cache_folder`.
      content: the new content.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            temporary = Path(folder) / path.name
            temporary.touch(mode=0o600)  # `read` rejects files that other users may write to
            temporary.write_bytes(content)
            os.replace(temporary, path)
    except OSError as error:  # a full or read-only disk
        _logger.info("%s is not cached: %s", path.name, error)


def keep_compiled_programs() -> None:
    """Turn on JAX's compilation cache, in the folder ``programs`` of `cache_folder`.

    Nothing is changed if the user has set a folder with JAX_COMPILATION_CACHE_DIR, or has turned
    the cache off with JAX_ENABLE_COMPILATION_CACHE=false.
    """
    config = jax.config
    is_off = not getattr(config, "jax_enable_compilation_cache", True)
    if is_off or config.jax_compilation_cache_dir is not None:  # pyright: ignore
        return
    folder = cache_folder("programs")
    if folder is None:
        return
    config.update("jax_compilation_cache_dir", str(folder))
    # By default, JAX does not cache programs that compile in less than a second. An engine has
    # dozens of such programs, so cache them too.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0)


def folder_beside_programs(name: str) -> Path | None:
    """Return a `cache_folder` for data that is stored together with the compiled programs.

    Args:
      name: name of the folder.

    Returns:
      The folder; None if JAX's compilation cache is off, or is not in the folder that
      `keep_compiled_programs` sets, or if `cache_folder` returns None.
    """
    programs = jax.config.jax_compilation_cache_dir  # pyright: ignore
    if programs is None or not getattr(jax.config, "jax_enable_compilation_cache", True):
        return None
    return cache_folder(name) if programs == str(cache_folder("programs")) else None
