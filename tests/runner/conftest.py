"""Fixtures of the tests of `paged_jax.runner`."""

import pytest

from paged_jax.models.decoder import Decoder
from tests.support.compiler import kernels_are_not_replaced

__all__ = ["kernels_are_not_replaced"]


@pytest.fixture(scope="package")
def model(tiny_model: Decoder) -> Decoder:
    """Return the model of all tests of decoding, which share its compiled programs."""
    return tiny_model
