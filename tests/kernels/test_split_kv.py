"""Tests of the parts of the GPU decode kernel: they cover each sequence, and are balanced."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.kernels.kv_split import (
    KVPart,
    KVSplit,
    choose_num_parts,
    find_part,
)

# Elements of the vector of lengths, and program instances: more than any split here has.
ROWS, PROGRAMS = 8, 64


def find_all(split: KVSplit, lengths) -> KVPart:
    """Return the parts of `PROGRAMS` program instances as arrays."""
    # Elements past the batch are ignored.
    vector = jnp.asarray([*lengths, *[10**6] * (ROWS - len(lengths))], jnp.int32)
    programs = jnp.arange(PROGRAMS, dtype=jnp.int32)
    return jax.tree.map(np.asarray, jax.vmap(lambda n: find_part(split, vector, n))(programs))


@st.composite
def splits(draw) -> tuple[KVSplit, list[int]]:
    lengths = draw(st.lists(st.integers(0, 200), min_size=1, max_size=ROWS))
    num_parts = draw(st.integers(1, 40))
    window = draw(st.none() | st.integers(1, 250))
    return KVSplit(len(lengths), num_parts, draw(st.sampled_from((16, 64))), 200, window), lengths


@given(splits())
def test_find_part_covers_every_token_once_with_balanced_parts(drawn) -> None:
    split, lengths = drawn
    parts = find_all(split, lengths)
    assert not parts.is_there[split.num_programs :].any()
    sizes = parts.end - parts.begin
    assert (sizes[~parts.is_there] == 0).all()
    most = max(math.ceil(sizes.sum() / split.num_parts), 1)
    for b, length in enumerate(lengths):
        mine = np.flatnonzero(parts.is_there & (parts.sequence == b))
        tokens = [
            parts.first[n] + step * split.step_tokens + i
            for n in mine
            for step in range(parts.begin[n], parts.end[n])
            for i in range(split.step_tokens)
        ]
        # The last step ends with the sequence.
        assert (parts.length[mine] == length).all()
        visible = range(length)[-split.window :] if split.window else range(length)
        assert [t for t in tokens if t < length] == list(visible)
        # There are no more parts than necessary.
        assert len(mine) == max(math.ceil(sizes[mine].sum() / most), 1)
        assert sizes[mine].max() - sizes[mine].min() <= 1
        np.testing.assert_array_equal(parts.index[mine], np.arange(len(mine)))
        assert (parts.count[mine] == len(mine)).all()


def test_num_programs_is_enough_for_the_worst_case() -> None:
    """Each of the five sequences with tokens has one more step than its parts can have."""
    split = KVSplit(8, 5, 16, 200)
    # There are 29 steps, at most 6 per part: one part per sequence, and four more.
    parts = find_all(split, [16 * steps for steps in (7, 7, 7, 7, 1, 0, 0, 0)])
    assert parts.is_there.sum() == split.num_programs == 12


def test_num_programs_is_at_most_the_number_of_steps() -> None:
    split = KVSplit(1, 99, 64, 1024)
    assert split.num_programs == 16
    assert find_all(split, [1024]).is_there.sum() == 16


@pytest.mark.parametrize("batch", [1, 2, 8, 24, 25, 64, 256, 1024])
@pytest.mark.parametrize("kv_heads", [1, 8, 1024])
def test_choose_num_parts_fills_the_gpu(batch, kv_heads) -> None:
    num_parts = choose_num_parts(batch, kv_heads, 2048, 396)
    num_programs = kv_heads * KVSplit(batch, num_parts, 64, 2048 * 64).num_programs
    if 2 * batch <= 396 // kv_heads:
        # All run at the same time, and fill the GPU.
        assert 396 - kv_heads < num_programs <= 396
    else:
        assert num_parts == max(3 * 396 // kv_heads, 1)


def test_choose_num_parts_splits_nothing_if_it_saves_little() -> None:
    for batch in (1, 64, 1024):
        assert [choose_num_parts(batch, 8, steps, 396) for steps in (0, 1, 2, 4)] == [0] * 4
    assert choose_num_parts(1, 8, 8, 396) > 0
    assert choose_num_parts(256, 8, 8, 396) == 0
    # A program instance has no registers for that many lengths.
    assert choose_num_parts(10_000, 8, 2048, 396) == 0
