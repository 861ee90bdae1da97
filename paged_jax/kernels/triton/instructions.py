"""Instructions of NVIDIA GPUs that JAX's lowering of `jnp` does not reach, with `jnp` beside them.

Assembly has no meaning where there is no GPU, so `choose_instructions` asks whether the kernel is
interpreted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.triton.pallas import plgpu


class Instructions(NamedTuple):
    """What a kernel computes with, compiled or interpreted.

    Attributes:
      exp2: ``2 ** (x * factor - shift)`` of f32 ``x`` and ``shift``; the factor is a number, or an
        array that broadcasts to ``x``, as ``shift`` does. In two instructions where it is compiled:
        `jnp.exp2` takes three more for each weight to keep those below 1e-38, which here are 0, and
        the compiler makes no fused multiply-add of what comes before it.
      split_words: the even and the odd lanes of a tile of words (`tiles.as_words`) of a 1-byte
        type, in float16, in which each number of int8 and float8_e4m3fn is exact. Two numbers at a
        time where it is compiled: 1.25 instructions a number for int8 and 0.75 for float8_e4m3fn,
        where the compiler's own conversions take three and more.
      barrier: all threads of a program wait for each other; what each has written, the others see.
        An interpreted program has one.
    """

    exp2: Callable[[jax.Array, float | jax.Array, jax.Array], jax.Array]
    split_words: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
    barrier: Callable[[], None]


def choose_instructions(interpret: Interpret) -> Instructions:
    """The instructions of a kernel that is interpreted, or is not."""
    if interpret:
        return Instructions(_interpreted_exp2, _interpreted_split_words, lambda: None)
    return Instructions(_compiled_exp2, _compiled_split_words, _compiled_barrier)


def _interpreted_exp2(x: jax.Array, factor: float | jax.Array, shift: jax.Array) -> jax.Array:
    return jnp.exp2(x * factor - shift)


def _compiled_exp2(x: jax.Array, factor: float | jax.Array, shift: jax.Array) -> jax.Array:
    arrays = [x, jnp.broadcast_to(-shift, x.shape)]
    if isinstance(factor, jax.Array):
        operand = "$3"
        arrays.append(jnp.broadcast_to(factor, x.shape))
    else:
        operand = f"0f{np.float32(factor).view(np.uint32):08X}"
    return _run(
        f"{{ .reg .f32 t; fma.rn.ftz.f32 t, $1, {operand}, $2; ex2.approx.ftz.f32 $0, t; }}",
        arrays,
        jnp.float32,
    )


def _interpreted_split_words(words: jax.Array, pool_dtype: Any) -> tuple[jax.Array, jax.Array]:
    # The first of two numbers is the low byte: GPUs are little-endian.
    low, high = words, lax.shift_right_logical(words, jnp.int16(8))
    even, odd = (
        lax.bitcast_convert_type(x.astype(jnp.int8), pool_dtype).astype(jnp.float16)
        for x in (low, high)
    )
    return even, odd


# The bytes of two words, b0 to b3, in one register. A byte in the low bits of 0x6400, which is 1024
# in float16, adds its number, and its sign flipped adds 128: lop3 0x6a is ``(a & b) ^ c``.
_INT8 = (
    "{ .reg .b32 c; mov.b32 c, 0x64806480;"
    " lop3.b32 $0, $1, 0x00FF00FF, c, 0x6a; sub.rn.f16x2 $0, $0, c; }",
    "{ .reg .b32 c, t; mov.b32 c, 0x64806480; shr.u32 t, $1, 8;"
    " lop3.b32 $0, t, 0x00FF00FF, c, 0x6a; sub.rn.f16x2 $0, $0, c; }",
)
# b0 and b2 side by side, b1 and b3 too: the assembler makes one permutation of the two.
_FLOAT8 = tuple(
    "{ .reg .b16 even, odd; .reg .b32 t; prmt.b32 t, $1, 0, 0x3120; mov.b32 {even, odd}, t;"
    f" cvt.rn.f16x2.e4m3x2 $0, {turn}; }}"
    for turn in ("even", "odd")
)


def _compiled_split_words(words: jax.Array, pool_dtype: Any) -> tuple[jax.Array, jax.Array]:
    code = _INT8 if pool_dtype == jnp.int8 else _FLOAT8
    even, odd = (_run(half, [words], jnp.float16, pack=2) for half in code)
    return even, odd


def _compiled_barrier() -> None:
    plgpu.debug_barrier()


def _run(code: str, arrays: list[jax.Array], dtype: Any, pack: int = 1) -> jax.Array:
    """Assembly of one result, for `pack` elements at a time, which fill registers of 32 bits."""
    kind = "f" if arrays[0].dtype == jnp.float32 else "r"
    # One of two results does not lower (JAX 0.11.2).
    [result] = plgpu.elementwise_inline_asm(
        code,
        args=arrays,
        constraints=f"={kind}" + f",{kind}" * len(arrays),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arrays[0].shape, dtype)],
    )
    return result
