"""Benchmarks of paged_jax, compared with peers in the same run: ``python -m benchmarks.NAME``.

`benchmarks.harness` has the parts that they share.
"""
