"""Digests of the blocks of a sequence."""

import hashlib

import numpy as np
import pytest

from paged_jax.cache.digests import PrefixChain, digest_words, link_digest, root_digest

ROOT = root_digest(b"weights")


def test_link_digest_is_sha256_of_parent_and_little_endian_tokens():
    tokens = bytes([1, 0, 0, 0, 0, 2, 0, 0])
    assert link_digest(ROOT, [1, 512]) == hashlib.sha256(ROOT + tokens).digest()


def test_root_digest_depends_on_weights_and_salt():
    pairs = [(b"a", ""), (b"b", ""), (b"a", "b"), (b"ab", ""), (b"", "ab"), (b"", "")]
    assert len({root_digest(*pair) for pair in pairs}) == len(pairs)


def test_digests_cover_everything_before_the_block():
    base = [1, 2, 3, 4, 5, 6]
    digests = PrefixChain(ROOT, 2).digests(base)
    assert len(set(digests)) == 3
    for position in range(6):
        changed = [token + 10 * (i == position) for i, token in enumerate(base)]
        other = PrefixChain(ROOT, 2).digests(changed)
        is_equal = [a == b for a, b in zip(digests, other, strict=True)]
        assert is_equal == [block < position // 2 for block in range(3)]
    elsewhere = PrefixChain(root_digest(b"weights", "salt"), 2).digests(base)
    assert not set(digests) & set(elsewhere)


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_chain_grows_with_its_sequence(block_size):
    tokens = list(range(13))
    grown = PrefixChain(ROOT, block_size)
    for length in range(14):
        digests = list(grown.digests(tokens[:length]))
        assert len(digests) == length // block_size
        assert digests == PrefixChain(ROOT, block_size).digests(tokens[:length])


def test_chain_computes_each_digest_once(monkeypatch):
    calls = []

    def counting_link(parent, token_ids):
        calls.append(token_ids)
        return link_digest(parent, token_ids)

    monkeypatch.setattr("paged_jax.cache.digests.link_digest", counting_link)
    chain = PrefixChain(ROOT, 2)
    for length in (5, 5, 8):
        chain.digests(list(range(length)))
    assert calls == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_digest_words_keep_all_bits():
    digests = [ROOT, link_digest(ROOT, [1])]
    words = digest_words(digests)
    assert words.shape == (2, 8) and words.dtype == np.uint32
    assert words.astype("<u4").tobytes() == b"".join(digests)
    assert digest_words([]).shape == (0, 8)
