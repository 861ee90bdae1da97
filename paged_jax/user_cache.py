"""A folder of the user's own for what can be made again: compiled programs and kernels."""

import os
import stat
import sys
from pathlib import Path

import jax


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


def _is_own(folder: Path) -> bool:
    if not hasattr(os, "getuid"):  # Windows, where a user's folders are closed to others
        return True
    status = folder.stat()
    writers = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid == os.getuid() and not status.st_mode & writers


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
