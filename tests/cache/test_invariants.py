"""Tests of the checks of the allocator's invariants."""

import pytest

from paged_jax.cache.blocks import check_invariants
from tests.support.block_tables import C, M, P, broken, make_tables


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"num_free must be 0 to 12", {"num_free": lambda x: x + P}),
        (r"head must be 0 to 11", {"head": lambda x: x - 4}),
        (r"free_queue must hold ids once", {"free_queue": lambda x: x.at[3].set(4)}),
        (r"free_queue must hold block ids", {"free_queue": lambda x: x.at[3].set(P)}),
        (r"lengths must fit", {"lengths": lambda x: x.at[0].set(-1)}),
        (r"lengths must fit", {"lengths": lambda x: x.at[0].set(M * C + 1)}),
        (r"block_tables\[0\] must cover the length", {"lengths": lambda x: x.at[0].set(C * 3)}),
        (r"block_tables\[0\] must be 12 past", {"lengths": lambda x: x.at[0].set(1)}),
        (r"block_tables\[0\] must hold a block", {"block_tables": lambda x: x.at[0, 1].set(0)}),
        (r"ref_counts\[2\] must be 1", {"ref_counts": lambda x: x.at[2].set(2)}),
        (r"ref_counts\[3\] must be 0 if", {"head": lambda x: x + 1, "num_free": lambda x: x - 1}),
        (
            r"ref_counts\[2\] must be 0 if",
            {"head": lambda x: x - 1, "num_free": lambda x: x + 1},
        ),
        (r"free_queue must hold cached blocks after", {"is_cached": lambda x: x.at[4].set(True)}),
        (r"digests must be unique", {"is_cached": lambda x: x.at[:2].set(True)}),
    ],
)
def test_check_invariants_names_the_violated_invariant(message, changes):
    tables = make_tables([C + 1, 2, 0])
    check_invariants(tables)
    with pytest.raises(AssertionError, match=f"check_invariants: {message}"):
        check_invariants(broken(tables, **changes))
