"""Memory that a compiler has freed, and that the C library keeps."""

import ctypes
import functools
from collections.abc import Callable


def give_back_freed_memory() -> None:
    """Return free memory of the process to the system, where the C library has a way to.

    XLA takes hundreds of MB to compile a model's program and frees them in small pieces, which
    glibc keeps for this process: of the 135M shape's two programs 200 MB and more. Costs some ms.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc's; others have no such function
    except (AttributeError, OSError, TypeError):
        return None
