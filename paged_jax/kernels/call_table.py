"""Tables of measured entries for calls on GPUs, in JSON.

A table maps the name of a GPU, an op and the shape of a call to an entry. "measured" says how the
entry was measured::

    {"NVIDIA H200": {"decode": {"D128 G4 C16 q:bfloat16 pool:bfloat16": {
        "step_tokens": 64, "num_warps": 4, "num_stages": 3,
        "measured": "jax 0.11.2, commit 0123abc"}}}}
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp

from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.problem import ATTENTION, Problem

Entry = TypeVar("Entry")

_SIZE = r"([1-9]\d*)"
_SHAPE = re.compile(rf"D{_SIZE}(?: U{_SIZE})?(?: G{_SIZE})? C{_SIZE} q:(\w+) pool:(\w+)")


class CallShape(NamedTuple):
    """Sizes and dtypes of a call that, with the GPU and the op, identify its entry in a table.

    An entry applies to calls with any number of sequences, any lengths and any options.
    ``str(shape)`` is the key of the entry.

    Attributes:
      head_dim: elements of a key (D).
      group: query heads of a KV head (G); 0 if the op has no queries.
      block_size: tokens in a block (C).
      q_dtype: dtype of the queries (attention), of the new keys and values (write), of `qkv`
        (rope_write), or of the pools (copy_blocks).
      pool_dtype: dtype of the pools.
      value_dim: elements of a value (U), if U differs from D or if values are parts of the keys
        (latent attention); else 0.

    Example:
      >>> str(CallShape(128, 4, 16, "bfloat16", "int8"))
      'D128 G4 C16 q:bfloat16 pool:int8'
    """

    head_dim: int
    group: int
    block_size: int
    q_dtype: str
    pool_dtype: str
    value_dim: int = 0

    @classmethod
    def of(cls, problem: Problem) -> "CallShape":
        """Return the shape of the call that `problem` describes."""
        sizes, value_dim = dict(problem.sizes), problem.value_dim
        if value_dim == sizes["D"] and not problem.shares_values:
            value_dim = 0
        group = sizes["H"] // sizes["K"] if "H" in sizes else 0
        dtypes = (str(problem.q_dtype), str(problem.pool_dtype))
        return cls(sizes["D"], group, sizes["C"], *dtypes, value_dim)

    @property
    def kv(self) -> KVDtype:
        """The rules for storing keys and values in `pool_dtype`."""
        return KVDtype.of(self.pool_dtype)

    @classmethod
    def parse(cls, text: str) -> "CallShape":
        """Return the shape for which `str` returns `text`.

        Raises:
          ValueError: `text` does not have the form of such a string, or contains an unknown dtype.
        """
        match = _SHAPE.fullmatch(text)
        if match is None:
            example = cls(128, 4, 16, "bfloat16", "bfloat16")
            raise ValueError(f"a shape must look like '{example}', got {text!r}.")
        head_dim, value_dim, group, block_size = (int(size or 0) for size in match.groups()[:4])
        q_dtype, pool_dtype = match.groups()[4:]
        for name in (q_dtype, pool_dtype):
            try:
                jnp.dtype(name)
            except TypeError as error:
                raise ValueError(f"{error} in {text!r}.") from error
        return cls(head_dim, group, block_size, q_dtype, pool_dtype, value_dim)

    def __str__(self) -> str:
        value = f" U{self.value_dim}" if self.value_dim else ""
        group = f" G{self.group}" if self.group else ""
        dtypes = f"q:{self.q_dtype} pool:{self.pool_dtype}"
        return f"D{self.head_dim}{value}{group} C{self.block_size} {dtypes}"


# Entries by the name of the GPU, the op, and the shape of the call.
CallTable = Mapping[str, Mapping[str, Mapping[CallShape, Entry]]]


def parse_table(
    text: str, ops: Collection[str], parse_entry: Callable[[str, dict[str, Any]], Entry]
) -> CallTable[Entry]:
    """Parse a table in JSON.

    Args:
      text: the table, in the format that the module's docstring shows.
      ops: names of ops. The table must not have entries for other ops.
      parse_entry: function that takes an op and the fields of an entry (without "measured"), and
        returns the parsed entry. It raises a ValueError if a field is wrong.

    Raises:
      ValueError: the format is wrong. The message names the entry.
    """
    try:
        devices = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"parse_table: text must be JSON, got a syntax error: {error}.") from error
    table: dict[str, dict[str, dict[CallShape, Entry]]] = {}
    for kind, entries_of_ops in _items(devices, "the table"):
        table[kind] = {}
        for op, entries in _items(entries_of_ops, kind):
            if op not in ops:
                raise ValueError(
                    f"parse_table: an op must be one of {', '.join(ops)}, got {op!r} in {kind}."
                )
            parsed = table[kind][op] = {}
            for key, entry in _items(entries, f"{kind}, {op}"):
                fields = dict(_items(entry, f"{kind}, {op}, {key}"))
                try:
                    # Require the origin of each measurement, so that it can be reproduced.
                    if not isinstance(fields.pop("measured", None), str):
                        raise ValueError("'measured' must say how the entry was measured.")
                    shape = CallShape.parse(key)
                    if op in ATTENTION and not shape.group:
                        raise ValueError("the key must have a group, for example 'G4'.")
                    parsed[shape] = parse_entry(op, fields)
                except ValueError as error:
                    raise ValueError(f"parse_table: {kind}, {op}, {key}: {error}") from error
    return table


def _items(mapping: Any, where: str) -> Any:
    if not isinstance(mapping, dict):
        raise ValueError(f"parse_table: {where} must be an object, got {mapping!r}.")
    return mapping.items()
