"""Backends of calls on GPUs that were measured faster than the default, which `op` decides.

Several backends have kernels for the same GPU. ``python -m benchmarks.gpu.defaults`` reads results
of measurements, and writes the fastest backend of each call to `gpu_defaults.json`::

    {"NVIDIA H200": {"decode": {"D128 G4 C16 q:bfloat16 pool:bfloat16": {
        "backend": "mosaic_gpu",
        "us": {"64 x 8192": {"mosaic_gpu": 612.1, "triton": 640.5}},
        "measured": "jax 0.12.0, commit 0123abc"}}}}

The environment variable PAGED_JAX_GPU_DEFAULTS names another file to read instead.

The table has entries only for measured calls. An entry is found by the GPU, the op, the sizes and
the dtypes of a call. It applies to any number of sequences, any lengths and any options. For calls
without an entry, the order of the backends in `paged_jax.kernels.op` decides.
"""

import functools
import importlib.resources
import os
from pathlib import Path
from typing import Any, get_args

from paged_jax.kernels.call_table import CallShape, CallTable, parse_table
from paged_jax.kernels.gpu_device import device
from paged_jax.kernels.problem import PoolOp, Problem

# Environment variable with the path of a table to read instead of `gpu_defaults.json`.
DEFAULTS_VARIABLE = "PAGED_JAX_GPU_DEFAULTS"


def measured_backend(device_kind: str, problem: Problem) -> str | None:
    """Return the fastest backend's name for a call on a GPU; None if the table has no entry."""
    calls = _measured().get(device_kind, {}).get(problem.op, {})
    return calls.get(CallShape.of(problem)) if calls else None


def preference(backend: str, problem: Problem) -> str | None:
    """Return why a backend is preferred to others for a call on this GPU, or None if it is not."""
    kind = device().kind
    if measured_backend(kind, problem) != backend:
        return None
    return f"it was measured faster on this device, {kind}"


@functools.cache
def _measured() -> CallTable[str]:
    path = os.environ.get(DEFAULTS_VARIABLE)
    shipped = importlib.resources.files("paged_jax.kernels") / "gpu_defaults.json"
    return parse((Path(path) if path else shipped).read_text(encoding="utf-8"))


def parse(text: str) -> CallTable[str]:
    """Parse a table in the format of `gpu_defaults.json`, see the module's docstring.

    Raises:
      ValueError: the format is wrong. The message names the entry.

    Example:
      >>> parse('{"NVIDIA H200": {"decode": {}}}')
      {'NVIDIA H200': {'decode': {}}}
    """
    return parse_table(text, get_args(PoolOp), _parse_entry)


def _parse_entry(_: str, fields: dict[str, Any]) -> str:
    backend = fields.get("backend")
    if not isinstance(backend, str):
        raise ValueError(f"backend must be a string, got {backend!r}.")
    return backend
