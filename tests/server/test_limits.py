"""Limits of requests."""

import pytest

from paged_jax.server import Limits


@pytest.mark.parametrize(
    ("context", "size"), [(64, 2**20), (2**16, 2**20), (131_072, 2**21), (10**6, 16 * 10**6)]
)
def test_for_context_scales_max_body_bytes(context, size) -> None:
    assert Limits().for_context(context).max_body_bytes == size
    assert Limits(max_body_bytes=0).for_context(context).max_body_bytes == 0
