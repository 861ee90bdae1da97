"""Covering arrays: few rows that contain every pair of values of every two factors.

Nearly all defects of a kernel depend on a single size, dtype or variant, or on two of them (Kuhn et
al., 2004, "Software Fault Interactions"). All pairs need tens of rows, and all combinations
thousands.
"""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def all_pairs(factors: Mapping[str, Sequence[Hashable]]) -> list[dict[str, Hashable]]:
    """Choose rows greedily, until every pair of values of two factors occurs in a row.

    Args:
      factors: the values of each factor, by its name.

    Returns:
      The rows, each with a value of every factor. Equal factors give equal rows.

    Example:
      >>> len(all_pairs({"a": [1, 2], "b": "xy", "c": [True, False]}))
      4
    """
    uncovered = dict.fromkeys(
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    )
    rows = []
    while uncovered:
        row = dict(next(iter(uncovered)))
        for name in factors:
            if name not in row:
                row[name] = max(
                    factors[name],
                    key=lambda value: _num_covered(row, (name, value), factors, uncovered),
                )
        rows.append({name: row[name] for name in factors})
        for pair in itertools.combinations(rows[-1].items(), 2):
            uncovered.pop(pair, None)
    return rows


def take_turns(
    rows: Sequence[Mapping[str, tuple[Hashable, ...]]],
) -> list[dict[str, Hashable]]:
    """Replace the alternatives in each row by their values, cycling through equal alternatives.

    Example:
      >>> take_turns([{"a": (1, 2)}, {"a": (3,)}, {"a": (1, 2)}])
      [{'a': 1}, {'a': 3}, {'a': 2}]
    """
    turns = {item: itertools.cycle(item[1]) for row in rows for item in row.items()}
    return [{item[0]: next(turns[item]) for item in row.items()} for row in rows]


def once_in_core(rows: Iterable[Mapping[str, Hashable] | Iterable[Hashable]]) -> list[Any]:
    """Mark the rows as `slow` that the core does not need.

    The core needs each value of each factor once; the full tier has all rows.

    Args:
      rows: for `pytest.mark.parametrize`, the values of all factors, or one mapping of them.

    Returns:
      The rows in their order.

    Example:
      >>> [len(row.marks) for row in once_in_core([(1, "x"), (1, "y"), (2, "y"), (2, "x")])]
      [0, 1, 0, 1]
    """
    params = [(row,) if isinstance(row, Mapping) else tuple(row) for row in rows]
    values = [
        set(param[0].items()) if isinstance(param[0], Mapping) else set(enumerate(param))
        for param in params
    ]
    uncovered = set().union(*values)
    chosen = set()
    while uncovered:
        best = max(range(len(params)), key=lambda index: len(values[index] & uncovered))
        chosen.add(best)
        uncovered -= values[best]
    return [
        pytest.param(*param, marks=[] if index in chosen else pytest.mark.slow)
        for index, param in enumerate(params)
    ]


def _num_covered(
    row: Mapping[str, Hashable],
    item: tuple[str, Hashable],
    factors: Mapping[str, Sequence[Hashable]],
    uncovered: Mapping[Pair, None],
) -> int:
    """Return the number of new pairs that a value of another factor adds to a row."""
    names = list(factors)
    pairs = (sorted((item, known), key=lambda pair: names.index(pair[0])) for known in row.items())
    return sum(tuple(pair) in uncovered for pair in pairs)
