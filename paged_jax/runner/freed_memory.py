"""Freed host memory, which is returned to the operating system after a compilation."""

import ctypes
import functools
from collections.abc import Callable


def give_back_freed_memory() -> None:
    """Return freed memory to the operating system, if the C library is glibc.

    XLA needs hundreds of MB to compile a program of a model, and frees them in small pieces. glibc
    keeps them in the process instead of returning them to the operating system: more than 200 MB
    after two programs of a 135M model are compiled. The call takes a few ms.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # only glibc has it
    except (AttributeError, OSError, TypeError):
        return None
