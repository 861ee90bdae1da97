"""Edges of sliding windows: every length of a slot, for windows with every remainder.

Each slot has another length, so one call of an operation covers all lengths. Expected columns come
from the definition of a window: position t attends to the positions ``t - window + 1 .. t``.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.cache import blocks
from paged_jax.cache.blocks import BlockTables, check_invariants
from tests.support.block_tables import assert_unchanged, i32

C, M = 4, 6
LENGTHS = list(range(M * C + 1))
S = len(LENGTHS)
P = S * M + 1
WINDOWS = [1, 2, 4, 11]

# The window is static, so each window is a program of its own.
RESTORE = jax.jit(blocks.restore, static_argnames="max_tokens")
RESERVE = jax.jit(blocks.reserve, static_argnames="max_tokens")
SLIDE = jax.jit(blocks.slide)


def needed_columns(length: int, window: int) -> set[int]:
    """Return the columns with a token that the block of the next token attends to."""
    first = length // C * C
    return {position // C for position in range(max(first - window + 1, 0), length)}


def columns_of(tables: BlockTables) -> list[set[int]]:
    """Return the columns of each slot that have a block."""
    table = np.asarray(tables.block_tables)
    return [set(np.flatnonzero(row < tables.num_blocks).tolist()) for row in table]


def test_restore_refuses_what_does_not_fit_and_changes_nothing() -> None:
    """`max_tokens` is the maximum number of tokens, also if a slot needs fewer blocks for them."""
    tables = BlockTables.create(P, S, M, C, window=2)
    tables, _, ok = RESTORE(tables, i32([13] + [0] * (S - 1)), max_tokens=M * C)
    assert ok
    for most, counts, expected in (
        (M * C, [0, M * C, 1], True),
        (M * C, [0, M * C + 1], False),
        (M * C, [0, -1, 3], False),
        (M * C, [1, 3], False),  # slot 0 is not empty
        (10, [0, 10, 9], True),
        (10, [0, 9, 11], False),
        (10, [0, M * C], False),
    ):
        num_tokens = i32(counts + [0] * (S - len(counts)))
        after, _, ok = RESTORE(tables, num_tokens, max_tokens=most)
        assert bool(ok) == expected, (most, counts)
        if not expected:
            assert_unchanged(after, tables)
        else:
            assert after.lengths.tolist() == [13, *counts[1:], *[0] * (S - len(counts))]
            np.testing.assert_array_equal(after.block_tables[0], tables.block_tables[0])


@pytest.mark.parametrize("window", WINDOWS)
def test_restore_and_slide_keep_the_blocks_of_each_window(window) -> None:
    empty, lengths = BlockTables.create(P, S, M, C, window), i32(LENGTHS)
    needed = [needed_columns(length, window) for length in LENGTHS]
    restored, _, ok = RESTORE(empty, lengths, max_tokens=M * C)
    check_invariants(restored)
    assert ok and restored.lengths.tolist() == LENGTHS and columns_of(restored) == needed

    tables, _, ok = RESERVE(BlockTables.create(P, S, M, C), lengths, max_tokens=M * C)
    tables = replace(tables, retention=empty.retention, first_columns=empty.first_columns)
    whole = [set(range(-(-length // C))) for length in LENGTHS]
    assert ok and columns_of(tables) == whole
    # First every third slot, then the next one. The others keep all their blocks.
    is_slid = np.zeros(S, bool)
    for turn in range(2):
        mask = np.arange(S) % 3 == turn
        is_slid |= mask
        tables = SLIDE(tables, jnp.asarray(mask))
        check_invariants(tables)
        expected = [n if slid else w for n, w, slid in zip(needed, whole, is_slid, strict=True)]
        assert columns_of(tables) == expected and tables.lengths.tolist() == LENGTHS
        firsts = [
            -(-length // C) - len(columns)
            for length, columns in zip(LENGTHS, expected, strict=True)
        ]
        assert tables.first_columns is not None and tables.first_columns.tolist() == firsts
