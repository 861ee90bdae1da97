"""Return of freed memory to the operating system."""

import ctypes
from pathlib import Path

import pytest

from paged_jax.runner import freed_memory

PIECE, COUNT = 4000, 20_000  # glibc allocates separate pages only for larger pieces


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(freed_memory._malloc_trim() is None, reason="the C library has no malloc_trim")
def test_give_back_freed_memory_returns_small_pieces_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE) for _ in range(COUNT)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    *others, last = pieces  # prevents the heap from shrinking without malloc_trim
    for piece in others:
        libc.free(piece)
    before = resident_bytes()
    freed_memory.give_back_freed_memory()
    assert before - resident_bytes() > PIECE * COUNT // 2
    libc.free(last)


def test_give_back_freed_memory_without_malloc_trim_does_nothing(monkeypatch) -> None:
    monkeypatch.setattr(freed_memory, "_malloc_trim", lambda: None)
    freed_memory.give_back_freed_memory()
