"""Default backends of calls on GPUs, from measurements.

Several backends have kernels for the same GPU. ``python -m benchmarks.gpu.defaults`` reads results
of measurements, and writes the faster backend of each call to `gpu_defaults.json`::

    {"NVIDIA H200": {"decode": {"D128 G4 C16 q:bfloat16 pool:bfloat16": {
        "backend": "mosaic_gpu",
        "us": {"64 x 8192": {"mosaic_gpu": 612.1, "triton": 640.5}},
        "measured": "jax 0.12.0, commit 0123abc"}}}}

The environment variable PAGED_JAX_GPU_DEFAULTS names another file to read instead.

The table has entries only for measured calls. The keys of an entry are the GPU, the op, and the
sizes and dtypes, so it applies to calls with any number of sequences, any lengths and any options.
For calls without an entry, the order of the backends in `paged_jax.kernels.dispatch` decides.
"""

import functools
import importlib.resources
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from paged_jax.kernels.backend import Op, Problem

# Environment variable with the path of a table to read instead of `gpu_defaults.json`.
DEFAULTS_VARIABLE = "PAGED_JAX_GPU_DEFAULTS"


class CallKey(NamedTuple):
    """Properties of a call that, with the GPU and the op, identify its entry in the table.

    ``str(key)`` is the name of the entry in `gpu_defaults.json`.

    Attributes:
      head_dim: elements of a key (D).
      value_dim: elements of a value (U), if U differs from D or if values are parts of the keys
        (latent attention); else 0.
      group: query heads of a KV head (G); 0 if the op has no queries.
      block_size: tokens in a block (C).
      q_dtype: dtype of the queries (attention), of the new keys and values (write), of `qkv`
        (rope_write), or of the pools (copy_blocks).
      pool_dtype: dtype of the pools.

    Example:
      >>> str(CallKey(128, 0, 4, 16, "bfloat16", "int8"))
      'D128 G4 C16 q:bfloat16 pool:int8'
    """

    head_dim: int
    value_dim: int
    group: int
    block_size: int
    q_dtype: str
    pool_dtype: str

    @classmethod
    def of(cls, problem: Problem) -> "CallKey":
        """Return the key of the call that `problem` describes."""
        sizes, value_dim = dict(problem.sizes), problem.value_dim
        if value_dim == sizes["D"] and not problem.shares_values:
            value_dim = 0
        group = sizes["H"] // sizes["K"] if "H" in sizes else 0
        dtypes = (str(problem.q_dtype), str(problem.pool_dtype))
        return cls(sizes["D"], value_dim, group, sizes["C"], *dtypes)

    def __str__(self) -> str:
        value, group = (
            f" {letter}{size}" if size else ""
            for letter, size in (("U", self.value_dim), ("G", self.group))
        )
        dtypes = f"q:{self.q_dtype} pool:{self.pool_dtype}"
        return f"D{self.head_dim}{value}{group} C{self.block_size} {dtypes}"


# Maps the name of a GPU, then an op, then the string of a `CallKey` to the name of the fastest
# backend.
Defaults = Mapping[str, Mapping[str, Mapping[str, str]]]


def measured_backend(device_kind: str, problem: Problem) -> str | None:
    """Return the fastest backend's name for a call on a GPU; None if the table has no entry."""
    calls = _measured().get(device_kind, {}).get(problem.op, {})
    return calls.get(str(CallKey.of(problem))) if calls else None


@functools.cache
def _measured() -> Defaults:
    own = os.environ.get(DEFAULTS_VARIABLE)
    shipped = importlib.resources.files("paged_jax.kernels") / "gpu_defaults.json"
    return parse((Path(own) if own else shipped).read_text(encoding="utf-8"))


_KEY = re.compile(r"D\d+( U\d+)?( G\d+)? C\d+ q:\w+ pool:\w+")


def parse(text: str) -> Defaults:
    """Parse a table in the format of `gpu_defaults.json`, see the module's docstring.

    Raises:
      ValueError: the format is wrong; the message says where.

    Example:
      >>> parse('{"NVIDIA H200": {"decode": {}}}')
      {'NVIDIA H200': {'decode': {}}}
    """
    try:
        devices = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"gpu_defaults.parse: text must be JSON, got an error: {error}."
        ) from error
    table: dict[str, dict[str, dict[str, str]]] = {}
    for kind, ops in _items(devices, "the table"):
        table[kind] = {}
        for op, calls in _items(ops, kind):
            if op not in get_args(Op):
                names = ", ".join(get_args(Op))
                raise ValueError(
                    f"gpu_defaults.parse: an op must be one of {names}, got {op!r} in {kind}."
                )
            table[kind][op] = {
                key: _backend(key, entry, f"{kind}, {op}")
                for key, entry in _items(calls, f"{kind}, {op}")
            }
    return table


def _items(mapping: Any, where: str) -> Any:
    if not isinstance(mapping, dict):
        raise ValueError(f"gpu_defaults.parse: {where} must be an object, got {mapping!r}.")
    return mapping.items()


def _backend(key: str, entry: Any, where: str) -> str:
    if not _KEY.fullmatch(key):
        example = CallKey(128, 0, 4, 16, "bfloat16", "int8")
        raise ValueError(
            f"gpu_defaults.parse: a key of {where} must look like {str(example)!r}, got {key!r}."
        )
    fields = dict(_items(entry, f"{where}, {key}"))
    for name in ("backend", "measured"):
        if not isinstance(fields.get(name), str):
            raise ValueError(
                f"gpu_defaults.parse: {name} of {where}, {key} must be a string, got "
                f"{fields.get(name)!r}."
            )
    return fields["backend"]
