"""`give_back_freed_memory`: what was freed in small pieces belongs to the system again."""

import ctypes
from pathlib import Path

import pytest

from paged_jax.runner import heap

PIECE, COUNT = 4000, 20_000  # below the size from which glibc takes pages for a piece of its own


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(heap._malloc_trim() is None, reason="the C library has no malloc_trim")
def test_freed_pieces_go_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE) for _ in range(COUNT)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    *others, last = pieces  # which keeps the heap from shrinking by itself
    for piece in others:
        libc.free(piece)
    before = resident_bytes()
    heap.give_back_freed_memory()
    assert before - resident_bytes() > PIECE * COUNT // 2
    libc.free(last)


def test_c_libraries_without_it_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(heap, "_malloc_trim", lambda: None)
    heap.give_back_freed_memory()
