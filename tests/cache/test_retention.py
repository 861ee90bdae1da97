"""The rules of all kinds of groups, compared with a plain count of the blocks that are needed."""

import numpy as np
import pytest

from paged_jax.cache.retention import AllTokens, LastState, LastTokens, Retention

C = 4
RULES = [AllTokens(), *map(LastTokens, (1, 4, 5, 6, 9))]


def needed_columns(rule: Retention, num_tokens: int) -> list[int]:
    """Return the columns that the next token, or the first position of its block, attends to."""
    num_blocks = -(-num_tokens // C)
    first = max(num_tokens // C * C + 1 - min(rule.num_tokens, num_tokens + C), 0)
    return [column for column in range(num_blocks) if (column + 1) * C > first]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_agree_with_the_columns_that_queries_need(rule):
    for num_tokens in range(40):
        columns = np.arange(-(-num_tokens // C))
        cursor, needed = rule.cursor(num_tokens, C), needed_columns(rule, num_tokens)
        assert columns[rule.is_kept(columns, cursor, C)].tolist() == needed
        assert rule.num_kept(num_tokens, C) == len(needed)
        assert [rule.kept_column(i, cursor, C) for i in range(len(needed))] == needed
        freed = [rule.freed_column(i, C) for i in range(rule.num_freed(cursor, C))]
        assert sorted(freed + needed) == columns.tolist()
        assert rule.frees or not freed


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_find_the_prefixes_that_have_all_needed_blocks(rule):
    rng = np.random.default_rng(0)
    for is_missing in rng.random((50, 6)) < 0.3:
        counts = np.arange(len(is_missing) + 1)
        num_missing = np.pad(np.cumsum(is_missing), (1, 0))
        found = rule.has_kept(num_missing, rule.cursor(counts * C, C), C)
        expected = [not is_missing[needed_columns(rule, n * C)].any() for n in counts]
        assert found.tolist() == expected


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_slots_never_hold_more_blocks_than_max_in_slot(rule):
    """Append tokens in programs of at most `most` tokens; blocks are freed before each program."""
    for most in (1, 3, 7):
        held = []
        for start in range(40):
            kept = needed_columns(rule, start)
            end = -(-(start + most) // C)
            held.append(len({*kept, *range(start // C, end)}))
        longest = 39 + most
        assert max(held) == rule.max_in_slot(longest, most, C)


def test_rules_serve_layers_that_attend_to_fewer_tokens():
    windows = [3, 5, 6, None]
    assert [LastTokens(5).serves(window) for window in windows] == [True, True, False, False]
    assert all(AllTokens().serves(window) for window in windows)


def test_a_decode_step_accesses_the_tokens_it_attends_to_or_a_state_twice():
    lengths, rules = (3, 8), (AllTokens(), LastTokens(5), LastState())
    accessed = [[rule.num_accessed(length, C) for length in lengths] for rule in rules]
    assert accessed == [[3, 8], [3, 5], [2 * C, 2 * C]]
