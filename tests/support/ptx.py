"""Interpreter of the PTX with which kernels convert weights, for machines without a GPU.

Semantics are those of NVIDIA's "Parallel Thread Execution ISA". A register holds an array, so that
a program runs for many inputs at once.
"""

import re
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

_Words = np.ndarray  # uint32


def run(code: str, operands: Sequence[_Words], num_results: int) -> list[_Words]:
    """Run the text of an inline assembly.

    Args:
      code: PTX, in which ``$0`` is the first result and the operands follow the results.
      operands: registers, uint32 arrays of the same shape.
      num_results: number of results.
    """
    registers = {f"${num_results + i}": operand for i, operand in enumerate(operands)}
    text = code.replace("{ .reg", " .reg").rstrip(" }")
    text = re.sub(r"\{(\w+), (\w+)\}", r"\1|\2", text).replace("{", " ").replace("}", " ")
    for statement in filter(None, map(str.strip, text.split(";"))):
        if statement.startswith(".reg"):
            continue
        name, _, arguments = statement.partition(" ")
        target, *sources = (each.strip() for each in arguments.split(","))
        values = [_read(source, registers, operands[0]) for source in sources]
        result = _execute(name, values)
        if "|" in target:
            low, high = target.split("|")
            registers[low], registers[high] = result & 0xFFFF, result >> 16
        else:
            registers[target] = result
    return [registers[f"${i}"] for i in range(num_results)]


def _read(source: str, registers: dict[str, _Words], like: _Words) -> _Words:
    if source in registers:
        return registers[source]
    number = int(source[2:], 16) if source.startswith(("0x", "0f")) else int(source)
    return np.full_like(like, number)


def halves(words: _Words, dtype: str) -> list[np.ndarray]:
    """Return the low and the high halves of words as numbers of a dtype of 16 bits, in float64."""
    parts = (words & 0xFFFF, words >> 16)
    return [part.astype(np.uint16).view(jnp.dtype(dtype)).astype(np.float64) for part in parts]


def join(low: np.ndarray, high: np.ndarray, dtype: str) -> _Words:
    """Round numbers to a dtype of 16 bits, and return words with two of them."""
    low, high = (
        np.asarray(part).astype(jnp.dtype(dtype)).view(np.uint16).astype(np.uint32)
        for part in (low, high)
    )
    return low | high << 16


def _execute(name: str, values: list[_Words]) -> _Words:
    for pattern, function in _INSTRUCTIONS.items():
        if match := re.fullmatch(pattern, name):
            return function(*match.groups(), *values)
    raise NotImplementedError(f"unknown PTX instruction {name}")


def _prmt(a: _Words, b: _Words, selectors: _Words) -> _Words:
    """Choose four bytes of ``b a``; the fourth bit of a selector repeats the byte's highest bit."""
    source = [word >> shift & 255 for word in (a, b) for shift in (0, 8, 16, 24)]
    result = np.zeros_like(a)
    for place in range(4):
        selector = selectors >> (4 * place) & 15
        byte = np.choose(selector & 7, source)
        byte = np.where(selector & 8, (byte >> 7) * 255, byte)
        result = result | byte.astype(np.uint32) << (8 * place)
    return result


def _lop3(a: _Words, b: _Words, c: _Words, table: _Words) -> _Words:
    """Look up each bit of the result in a table, by the bits of the operands."""
    result = np.zeros_like(a)
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        result |= (table >> index & 1) << bit
    return result


_DTYPES = {"bf16x2": "bfloat16", "f16x2": "float16"}


def _fma_pair(kind: str, a: _Words, b: _Words, c: _Words) -> _Words:
    parts = zip(*(halves(words, _DTYPES[kind]) for words in (a, b, c)), strict=True)
    # Sums of products of two such numbers are exact in float64.
    return join(*(x * y + z for x, y, z in parts), _DTYPES[kind])


def _float(words: _Words) -> np.ndarray:
    return words.view(np.float32).astype(np.float64)


def _as_float(numbers: np.ndarray) -> _Words:
    return numbers.astype(np.float32).view(np.uint32)


def _convert_fp8(words: _Words) -> _Words:
    bytes_ = [(words >> shift & 255).astype(np.uint8) for shift in (0, 8)]
    return join(*(each.view(jnp.float8_e4m3fn).astype(np.float32) for each in bytes_), "float16")


_INSTRUCTIONS: dict[str, Callable[..., _Words]] = {
    r"mov\.b32": lambda *x: x[0],
    r"shr\.u32": lambda x, n: x >> n,
    r"shl\.b32": lambda x, n: x << n,
    r"and\.b32": lambda x, y: x & y,
    r"or\.b32": lambda x, y: x | y,
    r"xor\.b32": lambda x, y: x ^ y,
    r"prmt\.b32": _prmt,
    r"lop3\.b32": _lop3,
    r"fma\.rn\.(bf16x2|f16x2)": _fma_pair,
    r"fma\.rn\.f32": lambda x, y, z: _as_float(_float(x) * _float(y) + _float(z)),
    r"mul\.rn\.f32": lambda x, y: _as_float(_float(x) * _float(y)),
    r"sub\.rn\.f32": lambda x, y: _as_float(_float(x) - _float(y)),
    r"cvt\.f32\.f16": lambda x: _as_float(halves(x, "float16")[0]),
    r"cvt\.rn\.f16x2\.e4m3x2": _convert_fp8,
    # The first operand becomes the high half.
    r"cvt\.rn\.(bf16x2|f16x2)\.f32": lambda kind, high, low: join(
        low.view(np.float32), high.view(np.float32), _DTYPES[kind]
    ),
}
