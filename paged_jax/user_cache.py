"""A folder of the user's own for what can be made again: compiled programs and kernels."""

import logging
import os
import stat
import sys
import tempfile
from pathlib import Path

import jax

_logger = logging.getLogger(__name__)


def cache_folder(*names: str) -> Path | None:
    """A folder for caches that nobody but this user can write to, made if need be.

    ``paged_jax`` in ``$XDG_CACHE_HOME``, by default ``~/.cache`` (``~/Library/Caches`` on macOS).
    What lies in it is loaded as machine code, so a folder that belongs to others, or that others
    may write to, is not used.

    Args:
      *names: folders below it.

    Returns:
      The folder; None if there can be none.
    """
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser() / "paged_jax"
        for each in (folder, *(folder.joinpath(*names[: i + 1]) for i in range(len(names)))):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(each):
                return None
    except (OSError, RuntimeError):  # no disk, or no home
        return None
    return folder.joinpath(*names)


def _is_own(path: Path) -> bool:
    if not hasattr(os, "getuid"):  # Windows, where a user's folders are closed to others
        return True
    status = path.stat()
    writers = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid == os.getuid() and not status.st_mode & writers


def read(path: Path) -> bytes | None:
    """What a file holds that `write` has written; None if it is not there, or not this user's."""
    try:
        return path.read_bytes() if _is_own(path) else None
    except OSError:
        return None


def write(path: Path, content: bytes) -> None:
    """Write a file in one step: other processes see all of it or nothing. It may fail, in silence.

    Args:
      path: file in a `cache_folder`.
      content: what it is to hold.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
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
