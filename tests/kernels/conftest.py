"""Marks tests of machine code, and fails tests in which XLA replaces a kernel for CPUs.

Tests of compiled backends are marked as `optimised`: they check the machine code that users get.
"""

import pytest

from tests.support.compiler import kernels_are_not_replaced

__all__ = ["kernels_are_not_replaced"]

_FILES = {
    "test_attention.py",
    "test_cascade.py",
    "test_gradients.py",
    "test_latent.py",
    "test_rope_write.py",
    "test_writing.py",
}
_INTERPRETED = {"triton", "mosaic_tpu"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in `_FILES`, except tests of kernels that run in the interpreter."""
    for item in items:
        if item.path.parent.name == "kernels" and item.path.name in _FILES:
            params = getattr(item, "callspec", None)
            names = params.params.values() if params else ()
            if not _INTERPRETED & {name for name in names if isinstance(name, str)}:
                item.add_marker("optimised")
