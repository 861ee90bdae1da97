"""The prefix cache: `publish`, `attach` and `forget`."""

import jax.numpy as jnp
import pytest

from paged_jax.cache import blocks
from paged_jax.cache.blocks import check_invariants
from tests.support.block_model import Content
from tests.support.block_tables import (
    ATTACH,
    RELEASE,
    RESERVE,
    C,
    M,
    P,
    as_arrays,
    assert_unchanged,
    attach,
    cached,
    contents_of,
    free_blocks,
    i32,
    make_tables,
    publish,
    publish_slot,
    rows,
)


def test_attach_shares_the_blocks_of_a_running_slot():
    tokens = list(range(2 * C + 1))
    tables = publish_slot(make_tables([2 * C + 1, 0, 0]), 0, tokens)
    tables, num_found = attach(tables, 2, contents_of([*tokens, 7, 7, 7]))
    assert num_found == 2 and rows(tables) == [[0, 1, 2], [], [0, 1]]
    assert tables.lengths.tolist() == [2 * C + 1, 0, 2 * C]
    assert tables.pool.ref_counts.tolist()[:3] == [2, 2, 1] and int(tables.pool.num_free) == P - 3
    check_invariants(tables)


def test_attach_removes_free_blocks_from_the_queue():
    tokens = list(range(3 * C))
    tables = publish_slot(make_tables([3 * C, 0, 0]), 0, tokens)
    tables = RELEASE(tables, jnp.array([True, True, True]))
    # Let the queue wrap around the end of the ring buffer.
    tables, _, _ = RESERVE(tables, i32([0, 2 * C, 0]), max_tokens=M * C)
    tables, num_found = attach(tables, 0, contents_of(tokens[: 2 * C]))
    assert num_found == 2 and rows(tables)[0] == [0, 1]
    assert free_blocks(tables) == [5, 6, 7, 8, 9, 10, 11, 2]
    check_invariants(tables)
    tables, num_found = attach(tables, 2, contents_of(tokens))
    assert num_found == 3 and rows(tables)[2] == [0, 1, 2]
    check_invariants(tables)


def test_attach_stops_at_the_first_miss():
    tokens = list(range(3 * C))
    tables = make_tables([3 * C, 0, 0])
    contents = contents_of(tokens)
    tables = publish(tables, [(0, 0, contents[0]), (0, 2, contents[2])])
    tables, num_found = attach(tables, 1, contents)
    assert num_found == 1 and rows(tables)[1] == [0]


def test_attach_looks_up_at_most_num_blocks():
    tokens = list(range(2 * C))
    tables = publish_slot(make_tables([2 * C, 0, 0]), 0, tokens)
    arrays = as_arrays(contents_of(tokens))
    for num_blocks, expected in ((1, 1), (0, 0), (-3, 0), (2**31 - 1, 2)):
        _, num_found = ATTACH(tables, i32(1), *arrays, i32(num_blocks))
        assert num_found == expected


@pytest.mark.parametrize("word", range(8))
def test_attach_compares_every_word_of_a_digest(word):
    [content] = contents_of(list(range(C)))
    tables = publish(make_tables([C, 0, 0]), [(0, 0, content)])
    digest = list(content.digest)
    digest[word] ^= 1
    after, num_found = attach(tables, 1, [Content(tuple(digest), content.token_ids)])
    assert num_found == 0
    assert_unchanged(after, tables)


def test_attach_distinguishes_digests_with_equal_first_words():
    contents = [Content((7, 7, 7, 7, 7, 7, 7, entry), [entry] * C) for entry in range(M)]
    tables = publish(make_tables([M * C, 0, 0]), [(0, m, contents[m]) for m in (3, 0, 1)])
    assert cached(tables) == {m: contents[m] for m in (0, 1, 3)}
    tables, num_found = attach(tables, 1, contents)
    assert num_found == 2 and rows(tables)[1] == [0, 1]
    tables, num_found = attach(tables, 2, [contents[3], contents[1], contents[0]])
    assert num_found == 3 and rows(tables)[2] == [3, 1, 0]


@pytest.mark.parametrize("place", range(C))
def test_attach_misses_if_the_digest_matches_but_a_token_does_not(place):
    [content] = contents_of(list(range(C)))
    tables = publish(make_tables([C, 0, 0]), [(0, 0, content)])
    token_ids = list(content.token_ids)
    token_ids[place] += 1
    after, num_found = attach(tables, 1, [Content(content.digest, token_ids)])
    assert num_found == 0
    assert_unchanged(after, tables)


def test_attach_uses_a_block_only_once_per_slot():
    [content] = contents_of(list(range(C)))
    tables = publish(make_tables([C, 0, 0]), [(0, 0, content)])
    tables, num_found = attach(tables, 1, [content, content])
    assert num_found == 1
    check_invariants(tables)


@pytest.mark.parametrize("slot", [0, -1, 3, 2**31 - 1, -(2**31)])
def test_attach_ignores_slots_that_are_not_empty_or_do_not_exist(slot):
    tokens = list(range(C))
    tables = publish_slot(make_tables([C, 0, 0]), 0, tokens)
    after, num_found = attach(tables, slot, contents_of(tokens))
    assert num_found == 0
    assert_unchanged(after, tables)


def test_attach_misses_for_a_digest_of_zeros():
    # Padding, and blocks that were never cached, have a digest of zeros.
    tables = make_tables([C, 0, 0])
    assert attach(tables, 1, [Content((0,) * 8, [0] * C)])[1] == 0


def test_publish_ignores_entries_without_a_full_block():
    tables = make_tables([C + 3, M * C, 0])
    [content] = contents_of(list(range(C)))
    entries = [(0, 1), (1, -1), (1, M), (2, 0), (-1, 0), (3, 0), (1, 2**31 - 1), (2**31 - 1, 0)]
    assert_unchanged(publish(tables, [(*entry, content) for entry in entries]), tables)


def test_publish_caches_a_digest_once():
    tables = make_tables([C, C, C])
    [content] = contents_of(list(range(C)))
    tables = publish(tables, [(1, 0, content), (0, 0, content)])
    assert cached(tables) == {1: content}
    after = publish(tables, [(2, 0, content)])
    assert_unchanged(after, tables)
    check_invariants(tables)


def test_publish_caches_a_block_once():
    tables = make_tables([C, 0, 0])
    first, second = contents_of(list(range(2 * C)))
    tables = publish(tables, [(0, 0, first), (0, 0, second)])
    assert cached(tables) == {0: first}
    assert_unchanged(publish(tables, [(0, 0, second)]), tables)


def test_publish_is_not_affected_by_ignored_entries():
    tables = make_tables([C, C, C])
    first, second = contents_of(list(range(2 * C)))
    tables = publish(tables, [(0, 0, first)])
    # The block of slot 0 is already cached, so slot 1 gets the digest.
    tables = publish(tables, [(0, 0, second), (1, 0, second), (2, 0, second)])
    assert cached(tables) == {0: first, 1: second}
    # The same in a single call, where the first entry caches the block of slot 0.
    tables = make_tables([C, C, C])
    tables = publish(tables, [(0, 0, first), (0, 0, second), (1, 0, second)])
    assert cached(tables) == {0: first, 1: second}


def test_forget_empties_the_prefix_cache():
    tokens = list(range(2 * C))
    tables = publish_slot(make_tables([2 * C, C, 0]), 0, tokens)
    tables = blocks.forget(RELEASE(tables, jnp.array([True, False, False])))
    check_invariants(tables)
    assert attach(tables, 2, contents_of(tokens))[1] == 0
    tables = publish(tables, [(1, 0, contents_of(tokens)[0])])
    assert attach(tables, 2, contents_of(tokens))[1] == 1
