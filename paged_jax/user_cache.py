"""The user's cache folder for compiled programs and kernels."""

import functools
import logging
import os
import stat
import sys
import tempfile
from pathlib import Path

import jax

_logger = logging.getLogger(__name__)


def cache_folder(*names: str) -> Path | None:
    """Return a cache folder that only this user can write to; create it if it is missing.

    The folder is ``paged_jax`` in ``$XDG_CACHE_HOME``. The default is ``~/.cache``
    (``~/Library/Caches`` on macOS); it is also used if the variable is a relative path, as the XDG
    specification demands. The content is loaded as machine code. So a folder of another user, or
    one that others may write to, is not used. One warning says so.

    Args:
      *names: folders below it.

    Returns:
      The folder; None if it cannot be created or used.
    """
    try:
        folder = _caches() / "paged_jax"
        for each in (folder, *(folder.joinpath(*names[: i + 1]) for i in range(len(names)))):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(each):
                _warn(f"{each} belongs to another user, or others may write to it")
                return None
    except (OSError, RuntimeError) as error:  # a read-only or full disk, or no home folder
        _warn(str(error))
        return None
    return folder.joinpath(*names)


def _caches() -> Path:
    """Return the folder with the caches of all programs of this user."""
    named = Path(os.environ.get("XDG_CACHE_HOME", "")).expanduser()
    if named.is_absolute():
        return named
    return Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache").expanduser()


@functools.cache
def _warn(reason: str) -> None:
    """Warn once per reason."""
    _logger.warning(
        "The next process compiles everything again: %s. "
        "Set XDG_CACHE_HOME to a folder that only this user can write to.",
        reason,
    )


def _is_own(path: Path) -> bool:
    if not hasattr(os, "getuid"):  # Windows, where a user's folders are closed to others
        return True
    status = path.stat()
    writers = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid == os.getuid() and not status.st_mode & writers


def read(path: Path) -> bytes | None:
    """Return the content of a file of `write`; None if it is missing or not only this user's."""
    try:
        return path.read_bytes() if _is_own(path) else None
    except OSError:
        return None


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: other processes see all of it or nothing.

    A failure is only logged, because a cache is not needed for correct results.

    Args:
      path: file in a `cache_folder`.
      content: the new content.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.touch(mode=0o600)  # `read` rejects files that a group may write to
            whole.write_bytes(content)
            os.replace(whole, path)
    except OSError as error:  # a disk that is full, or read-only
        _logger.info("%s is not kept: %s", path.name, error)


def keep_compiled_programs() -> None:
    """Let the next process find the programs that this one compiles, as JAX would if told to.

    Nothing changes where JAX has been told: by the variable JAX_COMPILATION_CACHE_DIR, or by
    JAX_ENABLE_COMPILATION_CACHE=false.
    """
    config = jax.config
    is_off = not getattr(config, "jax_enable_compilation_cache", True)
    if is_off or config.jax_compilation_cache_dir is not None:  # pyright: ignore
        return
    folder = cache_folder("programs")
    if folder is None:
        return
    config.update("jax_compilation_cache_dir", str(folder))
    # However small a program is: there are dozens of them, and each costs the time of loading.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0)


def folder_beside_programs(name: str) -> Path | None:
    """A `cache_folder` for what belongs to the programs that `keep_compiled_programs` keeps.

    Returns:
      The folder; None where JAX keeps nothing, or what it has been told elsewhere.
    """
    kept_in = jax.config.jax_compilation_cache_dir  # pyright: ignore
    if kept_in is None or not getattr(jax.config, "jax_enable_compilation_cache", True):
        return None
    return cache_folder(name) if kept_in == str(cache_folder("programs")) else None
