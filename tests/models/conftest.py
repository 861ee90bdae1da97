"""Fails tests of models in which XLA replaces a kernel for CPUs."""

from tests.support.compiler import kernels_are_not_replaced

__all__ = ["kernels_are_not_replaced"]
