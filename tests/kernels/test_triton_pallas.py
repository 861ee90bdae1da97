"""Tests of the instructions of the GPU kernels: PTX and its interpreted form give equal results.

PTX cannot run here. A small interpreter executes the few instructions on NumPy arrays of registers,
as NVIDIA's manual (PTX ISA 8) defines them.
"""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.triton import pallas, tiles

TYPES = pytest.mark.parametrize("pool_dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])


def all_pairs(pool_dtype) -> np.ndarray:
    """Return all pairs of bytes in a dtype, even -128, NaN and -0, which rounding never yields."""
    pairs = np.stack(np.meshgrid(*2 * [np.arange(256, dtype=np.uint8)]), axis=-1)
    return pairs.reshape(-1).view(pool_dtype)


@TYPES
def test_interpreted_split_words_converts_every_byte(pool_dtype) -> None:
    pool = all_pairs(pool_dtype)
    words = tiles.as_words(jnp.asarray(pool))
    even, odd = pallas.choose_instructions(True).split_words(words, jnp.dtype(pool_dtype))
    assert even.dtype == odd.dtype == jnp.float16
    np.testing.assert_array_equal(even, pool[::2].astype(np.float32))
    np.testing.assert_array_equal(odd, pool[1::2].astype(np.float32))


@TYPES
def test_compiled_split_words_converts_every_byte(pool_dtype) -> None:
    pool = all_pairs(pool_dtype)
    # A register has two words of a pair each. The first word is the low half.
    registers = pool.view(np.uint32)
    code = pallas._INT8 if pool_dtype == jnp.int8 else pallas._FLOAT8
    for turn, half in enumerate(code):
        got = execute(half, registers).view(np.float16)
        np.testing.assert_array_equal(got, pool[turn::2].astype(np.float32))


def execute(code: str, argument: np.ndarray) -> np.ndarray:
    """Execute PTX with u32 numbers in ``$1``, and return ``$0``."""
    values = {"$1": argument.astype(np.uint32)}

    def read(name: str):
        return values[name] if name in values else np.uint32(int(name, base=0))

    for statement in filter(None, (part.strip() for part in code.strip("{} ").split(";"))):
        op, operands = statement.split(maxsplit=1)
        if op == ".reg":
            continue
        if halves := re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", operands):
            assert op == "mov.b32"
            low, high, source = halves.groups()
            values[low], values[high] = read(source) & 0xFFFF, read(source) >> 16
            continue
        result, *sources = operands.split(", ")
        values[result] = np.asarray(OPERATIONS[op](*map(read, sources)))
    return values["$0"]


def lop3(a, b, c, table):
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            terms = (x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
            result |= np.bitwise_and.reduce(list(np.broadcast_arrays(*terms)))
    return result


def prmt(a, b, selector):
    source = np.uint64(a) | np.uint64(b) << np.uint64(32)
    selected = (
        (source >> np.uint64(8 * (int(selector) >> 4 * i & 7)) & np.uint64(0xFF))
        << np.uint64(8 * i)
        for i in range(4)
    )
    return sum(selected, start=np.uint64(0)).astype(np.uint32)


def sub_f16x2(a, b):
    # Each half of a register is a number.
    a, b = (np.broadcast_to(x, np.shape(a)).astype(np.uint32) for x in (a, b))
    return (a.view(np.float16) - b.copy().view(np.float16)).view(np.uint32)


def cvt_f16x2_e4m3x2(a):
    return a.astype(np.uint16).view(jnp.float8_e4m3fn).astype(np.float16).view(np.uint32)


OPERATIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "sub.rn.f16x2": sub_f16x2,
    "cvt.rn.f16x2.e4m3x2": cvt_f16x2_e4m3x2,
}
