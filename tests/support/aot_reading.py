"""Figures in the text of compiled programs."""

import re
from collections import Counter

# Prefixes of the names of this library's Triton kernels. XLA's kernels have other names.
OUR_KERNELS = ("paged_", "copy_blocks", "grouped_linear", "quantised_linear", "recurrent_")


def count_collectives(text: str) -> dict[str, int]:
    """Return the number of each kind of collective in a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return Counter(re.findall(rf" = \S.*? ({kinds})(?:-start)?\(", text))


def count_weight_reads(text: str) -> int:
    """Return the bytes of all reads of a model's parameters in a compiled program.

    A parameter counts once for each operation that takes it, or a bitcast of it. Operations that
    gather rows, such as embeddings, do not count.

    Args:
      text: the optimised HLO of a function with an argument ``model`` or ``w``.
    """
    entry = text[text.index("\nENTRY ") :]
    sizes: dict[str, int] = {}
    total = 0
    for line in entry.splitlines():
        if not (found := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line)):
            continue
        name, rest = found.groups()
        if " parameter(" in rest:
            if re.search(r'op_name="(?:model|w)\b', rest):
                sizes[name] = _num_bytes(rest)
            continue
        operation = re.match(r"\(?[^=]*?\s([\w-]+)\(", rest)
        operands = re.findall(r"%([\w.-]+)", rest.partition(", metadata=")[0])
        read = [operand for operand in operands if operand in sizes]
        if operation and operation[1] == "bitcast" and read:
            sizes[name] = sizes[read[0]]
        elif "gather" not in line:
            total += sum(sizes[operand] for operand in read)
    return total


def _num_bytes(shape: str) -> int:
    found = re.match(r"(\w+)\[([\d,]*)\]", shape)
    assert found, shape
    kind, dims = found.groups()
    bits = 8 if kind.startswith("f8") or kind == "pred" else int(re.findall(r"\d+", kind)[0])
    size = bits // 8
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size
