"""Tests of drawings of block tables."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.cache import blocks
from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.blocks.table_drawing import draw_tables, locate_token
from tests.support.block_tables import RESERVE


@pytest.fixture(scope="module")
def tables() -> BlockTables:
    """Slot 1 holds 6 tokens, slot 2 is its copy, slot 3 holds 9 other tokens; slot 0 is empty."""
    tables = BlockTables.create(70, num_slots=4, max_blocks_per_slot=3, block_size=4)
    # Not jitted, like in an interactive session. Slot 0 is released, so the blocks of the other
    # slots are not in the order of their ids.
    tables, _, ok = blocks.reserve(tables, jnp.array([5, 0, 0, 3]), max_tokens=12)
    tables, _, more = blocks.reserve(tables, jnp.array([0, 6, 0, 6]), max_tokens=12)
    tables = blocks.release(tables, jnp.array([True, False, False, False]))
    tables, forked = blocks.fork(tables, jnp.array([-1, -1, 1, -1]))
    assert ok and more and forked
    blocks.check_invariants(tables)
    return tables


def parse_row(text: str, slot: int) -> list[tuple[int, int, int, int, int]]:
    """Return (logical, physical, first token, last token, tokens) of the blocks of a slot."""
    [section] = re.findall(rf"sequence in slot {slot}, .*\n((?:    .*\n)*)", text)
    pattern = r"logical +(\d+) -> physical +(\d+) +tokens (\d+)\.\.(\d+) +(\d+) of 4 places"
    return [tuple(map(int, found)) for found in re.findall(pattern, section)]


def test_draw_tables_counts_blocks(tables) -> None:
    text = draw_tables(tables, "after the fork")
    assert text.splitlines()[0] == "after the fork: 5 of 70 blocks in use, 65 free"


def test_draw_tables_maps_logical_to_physical_blocks(tables) -> None:
    text = draw_tables(tables, "now")
    assert re.findall(r"sequence in slot (\d), (\d+) tokens", text) == [
        ("1", "6"),
        ("2", "6"),
        ("3", "9"),
    ]
    rows = np.asarray(tables.block_tables)
    for slot, length in ((1, 6), (2, 6), (3, 9)):
        expected = []
        for logical in range(-(-length // 4)):
            first, last = 4 * logical, min(length, 4 * logical + 4) - 1
            expected.append((logical, int(rows[slot, logical]), first, last, last - first + 1))
        assert parse_row(text, slot) == expected
    # Otherwise the test would not notice if physical and logical blocks were swapped.
    assert all(np.ptp(rows[slot, :2]) != 1 or rows[slot, 0] > 1 for slot in (1, 2, 3))


def test_draw_tables_shows_sharing(tables) -> None:
    text = draw_tables(tables, "now")
    assert text.count("shared by 2") == 4  # both blocks, seen from both slots
    counts = np.asarray(tables.pool.ref_counts)
    symbols = "".join(re.findall(r"^ +\d+  ([.\d]+)$", text, re.MULTILINE))
    assert symbols == "".join("." if count == 0 else str(count) for count in counts)
    assert sorted(symbols.replace(".", "")) == ["1", "1", "1", "2", "2"]


def test_draw_tables_limits_counts_to_nine() -> None:
    tables = BlockTables.create(2, num_slots=12, max_blocks_per_slot=1, block_size=4)
    tables, _, _ = RESERVE(tables, jnp.array([3] + [0] * 11), max_tokens=4)
    tables, ok = jax.jit(blocks.fork)(tables, jnp.array([-1] + [0] * 11))
    assert ok
    text = draw_tables(tables, "now")
    assert text.count("shared by 12") == 12
    assert text.splitlines()[-1].split() == ["0", "9."]


def test_draw_tables_locates_first_middle_and_last_token(tables) -> None:
    text = draw_tables(tables, "now")
    row = tables.block_tables[3].tolist()
    [section] = re.findall(r"sequence in slot 3, .*\n((?:    .*\n)*)", text)
    assert re.findall(r"token \d+: .*", section) == [
        f"token 0: logical block 0, physical block {row[0]}, offset 0",
        f"token 4: logical block 1, physical block {row[1]}, offset 0",
        f"token 8: logical block 2, physical block {row[2]}, offset 0",
    ]


def test_draw_tables_of_one_token() -> None:
    tables = BlockTables.create(2, num_slots=1, max_blocks_per_slot=1, block_size=4)
    tables, _, _ = RESERVE(tables, jnp.array([1]))
    text = draw_tables(tables, "now")
    assert text.count("token 0:") == 1
    assert parse_row(text, 0) == [(0, int(tables.block_tables[0, 0]), 0, 0, 1)]


def test_locate_token_reads_the_table(tables) -> None:
    row = tables.block_tables[1].tolist()
    for position in range(6):
        assert locate_token(tables, 1, position) == (
            f"token {position}: logical block {position // 4}, "
            f"physical block {row[position // 4]}, offset {position % 4}"
        )


def test_draw_tables_omits_freed_blocks() -> None:
    tables = BlockTables.create(8, num_slots=1, max_blocks_per_slot=8, block_size=4, window=6)
    for _ in range(2):
        tables, _, ok = RESERVE(tables, jnp.array([10]), max_tokens=10)
        assert ok
    tables, _, ok = RESERVE(tables, jnp.array([1]), max_tokens=10)
    text = draw_tables(tables, "later")
    first = int(tables.first_columns[0])
    assert first == 3 and f"logical   0 to {first - 1} were freed" in text
    assert [row[0] for row in parse_row(text, 0)] == [3, 4, 5]
    assert "token 12: logical block 3, physical block" in text
    assert locate_token(tables, 0, 2) == "token 2: logical block 0, freed"
