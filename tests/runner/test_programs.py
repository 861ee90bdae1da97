"""The list of programs, and the calls that `warmup` compiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.cache import PagedCache
from paged_jax.runner.programs import ProgramKey, list_calls, list_programs
from paged_jax.runner.sizes import Sizes, pack_tiles, tile_buckets

SIZES = Sizes(
    block_size=4,
    num_slots=6,
    max_model_len=32,
    max_chunk=32,
    max_steps=8,
    num_drafts=0,
    max_logit_bias=4,
    max_stop_ids=4,
)
KEY = ProgramKey(graphdef=None, treedef=None, cascade=False, backend=None)


@pytest.mark.parametrize(("max_steps", "is_shared"), [(1, True), (3, True), (8, True), (9, False)])
def test_list_programs_shares_programs_between_limits_of_decode_steps(max_steps, is_shared) -> None:
    one, other = (
        list_programs(KEY, sizes, num_top=4)
        for sizes in (SIZES, SIZES._replace(max_steps=max_steps))
    )
    assert (one == other) is is_shared
    assert other.decode.static["max_steps"] >= max_steps


def test_list_programs_shares_nothing_between_program_keys() -> None:
    one, other = (
        list_programs(key, SIZES, num_top=4) for key in (KEY, KEY._replace(backend="xla"))
    )
    assert not {id(program.jitted) for program in one} & {id(program.jitted) for program in other}


@pytest.mark.parametrize(
    ("num_drafts", "tile", "prefills"), [(0, None, ["1 x 16", "1 x 32"]), (2, 8, ["16", "40"])]
)
def test_list_calls_has_a_call_of_each_program(num_drafts, tile, prefills) -> None:
    sizes = SIZES._replace(num_drafts=num_drafts, tile=tile)
    cache = PagedCache.create(
        num_layers=1, num_blocks=2, num_kv_heads=1, block_size=4, head_dim=8, num_slots=6,
        max_blocks_per_slot=sizes.max_blocks_per_slot,
    )  # fmt: skip
    calls = list_calls(list_programs(KEY, sizes, num_top=4), sizes, cache)
    names = [call.name for call in calls]
    assert len(set(names)) == len(names)
    for kind, is_listed in (("decode", True), ("verification", num_drafts > 0)):
        wanted = [f"{kind} of {rows} samples" for rows in (1, 4, 6)]
        assert [name for name in names if name.startswith(kind)] == wanted * is_listed
    assert [name for name in names if name.startswith("prefill")] == [
        f"prefill of {size} tokens" for size in prefills
    ]
    slots = [call.args[1] for call in calls if call.name.startswith("prefill")]
    assert all(np.all(array == -1) for array in slots), "no slot changes"


@given(
    counts=st.lists(st.integers(1, 50), max_size=12),
    tile=st.sampled_from([1, 4, 8]),
    num_slots=st.sampled_from([1, 6]),
)
def test_pack_tiles_gives_every_chunk_consecutive_rows_of_one_batch(
    counts, tile, num_slots
) -> None:
    sizes = SIZES._replace(max_chunk=50, tile=tile, num_slots=num_slots)
    batches = pack_tiles(counts, sizes)
    assert [index for _, _, indices in batches for index in indices] == list(range(len(counts)))
    for width, num_rows, indices in batches:
        assert width == tile and num_rows in tile_buckets(sizes)
        needed = sum(-(-counts[index] // tile) for index in indices)
        assert 0 < needed <= num_rows
        # The next smaller program would not suffice.
        assert all(each < needed for each in tile_buckets(sizes) if each < num_rows)


def test_pack_tiles_puts_the_chunks_of_a_full_step_into_one_batch() -> None:
    """A step has up to `max_chunk` tokens of several prompts, whose last rows are padded."""
    sizes = SIZES._replace(max_chunk=512, tile=8, num_slots=16)
    assert pack_tiles([190, 201, 121], sizes) == [(8, 72, [0, 1, 2])]


def test_list_calls_of_default_sizes_has_at_most_24_calls() -> None:
    """Engine with 16 slots and chunks of 512 tokens: each program takes seconds at the start."""
    sizes = SIZES._replace(num_slots=16, max_model_len=512, max_chunk=512, block_size=16)
    cache = PagedCache.create(
        num_layers=1, num_blocks=2, num_kv_heads=1, block_size=16, head_dim=8, num_slots=16,
        max_blocks_per_slot=sizes.max_blocks_per_slot,
    )  # fmt: skip
    assert len(list_calls(list_programs(KEY, sizes, num_top=4), sizes, cache)) <= 24
