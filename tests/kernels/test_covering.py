"""Tests of covering arrays: rows contain every pair of values of every two factors."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import all_pairs, take_turns

FACTORS = st.lists(st.integers(1, 5), min_size=2, max_size=5).map(
    lambda counts: {f"factor {i}": range(count) for i, count in enumerate(counts)}
)


@given(FACTORS)
def test_all_pairs_has_every_pair_of_every_two_factors(factors) -> None:
    rows = all_pairs(factors)
    for a, b in itertools.combinations(factors, 2):
        pairs = {(row[a], row[b]) for row in rows}
        assert pairs == set(itertools.product(factors[a], factors[b]))
    assert all(list(row) == list(factors) for row in rows)


@given(FACTORS)
def test_all_pairs_has_no_row_without_a_new_pair(factors) -> None:
    seen = set()
    for row in all_pairs(factors):
        pairs = set(itertools.combinations(row.items(), 2))
        assert not pairs <= seen
        seen |= pairs


def test_take_turns_has_each_value_as_often_as_the_others_of_its_kind() -> None:
    rows = take_turns(all_pairs({"a": [(1, 2), (3,)], "b": ["xy", "z"], "c": ["u", "v", "w"]}))
    for name, kinds in {"a": [(1, 2), (3,)], "b": ["xy", "z"]}.items():
        for kind in kinds:
            counts = [sum(row[name] == value for row in rows) for value in kind]
            assert min(counts) > 0 and max(counts) - min(counts) <= 1
