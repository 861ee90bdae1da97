"""Functions that call Pallas' Triton kernels, and operations for these kernels in PTX.

Interpreted kernels use `jnp` functions instead of PTX.

JAX deprecated this backend of Pallas in 0.11. If JAX does not have it, `refusal` returns the
reason, and other backends run the ops.

Since JAX 0.11, a Triton kernel can only be lowered for a known GPU. JAX takes a GPU of this
process, or the device of the abstract mesh (`jax.sharding.use_abstract_mesh`) under which the
kernel was traced. If there is no GPU, `pallas_call` therefore traces kernels under a mesh that
names the GPU of `gpu_device.device`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh

from paged_jax.kernels import gpu_device
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.opaque_call import only_on

# XLA compiles Triton kernels only for GPUs with this compute capability or a higher one, that is,
# not for Turing, Volta and earlier GPUs.
_LEAST_CAPABILITY = (8, 0)

plgpu: Any = None
try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    pass


def refusal() -> str | None:
    """Return why this version of JAX cannot build the kernels, or None if it can."""
    return f"jax {jax.__version__} has no Triton backend of Pallas" if plgpu is None else None


def gpu_refusal() -> str | None:
    """Return why kernels cannot be compiled for `gpu_device.device`, or None if they can."""
    gpu = gpu_device.device()
    if gpu.compute_capability < _LEAST_CAPABILITY:
        needed, capability = (
            ".".join(map(str, x)) for x in (_LEAST_CAPABILITY, gpu.compute_capability)
        )
        return (
            f"XLA compiles Triton for compute capability {needed} and later only, and {gpu.kind} "
            f"has {capability}"
        )
    return None


def pallas_call(
    kernel: Callable, out_shape: Any, *, interpret: Interpret, **options: Any
) -> Callable:
    """Return `pl.pallas_call` of a kernel, interpreted or for the GPU of `gpu_device.device`."""
    if interpret:
        return pl.pallas_call(kernel, out_shape, interpret=interpret, **options)
    mesh = _mesh_of_device()
    if mesh is None:
        return partial(only_on, "cuda", pl.pallas_call(kernel, out_shape, **options))
    # Create the types of the results under the caller's mesh, before `mesh` is set. Otherwise, they
    # would contain `mesh` and differ from the types of other arrays, so JAX would retrace every
    # function that is called with a result.
    out_types = jax.tree.map(lambda out: ShapedArray(out.shape, out.dtype), out_shape)
    call = pl.pallas_call(kernel, out_types, **options)

    def run(*arrays: Any) -> Any:
        with use_abstract_mesh(mesh):
            return call(*arrays)

    return partial(only_on, "cuda", run)


def _mesh_of_device() -> AbstractMesh | None:
    """Return a mesh without axes that names the GPU of `gpu_device.device`.

    If JAX knows the GPU without such a mesh, return None.
    """
    if not (gpu_device.is_assumed() and get_abstract_mesh().empty):
        # Keep the current mesh if it has axes, because the arrays are sharded over it.
        return None
    device = gpu_device.device()
    gpu = AbstractDevice(device.kind or "NVIDIA H100", device.num_cores, "gpu")
    return AbstractMesh((), (), abstract_device=gpu)


class Instructions(NamedTuple):
    """Operations that are PTX in compiled kernels, and `jnp` functions in interpreted kernels.

    Attributes:
      exp2: function of f32 `x`, `factor` and f32 `shift` that returns
        ``2 ** (x * factor - shift)``. `factor` is a Python number or an array. `factor` and `shift`
        broadcast to `x`. The PTX takes two instructions per element, and gives 0 for results below
        1e-38. `jnp.exp2` takes three more instructions to compute such results, and the compiler
        does not fuse it with the multiplication and the subtraction.
      split_words: function of a tile of words (`tiles.as_words`) and the dtype of the pool, a key
        of `SPLIT_WORDS`. It returns the even and the odd lanes in float16, which represents them
        exactly. The PTX converts two elements at a time, in 1.25 instructions per int8 element and
        0.75 instructions per float8_e4m3fn element. The compiler's own conversions take three or
        more.
      barrier: function that waits until all threads of the program instance have called it. Each
        thread then sees what the others have stored. An interpreted program instance has a single
        thread.
    """

    exp2: Callable[[jax.Array, float | jax.Array, jax.Array], jax.Array]
    split_words: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
    barrier: Callable[[], None]


def choose_instructions(interpret: Interpret) -> Instructions:
    """Return the instructions of an interpreted or a compiled kernel."""
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
    return run_ptx(
        f"{{ .reg .f32 t; fma.rn.ftz.f32 t, $1, {operand}, $2; ex2.approx.ftz.f32 $0, t; }}",
        arrays,
        jnp.float32,
    )


def _interpreted_split_words(words: jax.Array, pool_dtype: Any) -> tuple[jax.Array, jax.Array]:
    # The first element of a word is its low byte, because GPUs are little-endian.
    low, high = words, lax.shift_right_logical(words, jnp.int16(8))
    even, odd = (
        lax.bitcast_convert_type(x.astype(jnp.int8), pool_dtype).astype(jnp.float16)
        for x in (low, high)
    )
    return even, odd


# PTX that converts the even and the odd elements of int8 words to float16. A register holds two
# words, with the bytes b0 to b3. The float16 number 1024 is 0x6400. If a byte is put into its low
# bits, the number is 1024 plus the byte. Flipping the sign bit of an int8 adds 128 to it, so 1152
# (0x6480) is subtracted. The instruction lop3 with 0x6a computes ``(a & b) ^ c``.
_INT8 = (
    "{ .reg .b32 c; mov.b32 c, 0x64806480;"
    " lop3.b32 $0, $1, 0x00FF00FF, c, 0x6a; sub.rn.f16x2 $0, $0, c; }",
    "{ .reg .b32 c, t; mov.b32 c, 0x64806480; shr.u32 t, $1, 8;"
    " lop3.b32 $0, t, 0x00FF00FF, c, 0x6a; sub.rn.f16x2 $0, $0, c; }",
)
# PTX that converts the even and the odd elements of float8_e4m3fn words to float16. `prmt` reorders
# the bytes to b0, b2, b1, b3. The assembler merges the two equal `prmt` instructions.
_FLOAT8 = tuple(
    "{ .reg .b16 even, odd; .reg .b32 t; prmt.b32 t, $1, 0, 0x3120; mov.b32 {even, odd}, t;"
    f" cvt.rn.f16x2.e4m3x2 $0, {turn}; }}"
    for turn in ("even", "odd")
)

# PTX code for `Instructions.split_words`, by the dtype of the pool. Pools of other 8-bit dtypes are
# unsupported.
SPLIT_WORDS = {"int8": _INT8, "float8_e4m3fn": _FLOAT8}


def _compiled_split_words(words: jax.Array, pool_dtype: Any) -> tuple[jax.Array, jax.Array]:
    code = SPLIT_WORDS[pool_dtype.name]
    even, odd = (run_ptx(half, [words], jnp.float16, pack=2) for half in code)
    return even, odd


def _compiled_barrier() -> None:
    plgpu.debug_barrier()


def run_ptx(code: str, arrays: Sequence[jax.Array], dtype: Any, pack: int = 1) -> jax.Array:
    """Run PTX code on groups of `pack` consecutive elements of the arrays.

    Return an array of `dtype` with the shape of the arrays. Registers have 32 bits, so that four
    8-bit or two 16-bit elements share a register. The registers of the result come first, then the
    registers of each array.
    """

    def registers(dtype: Any) -> list[str]:
        kind = "f" if dtype == jnp.float32 else "r"
        return [kind] * max(pack * jnp.dtype(dtype).itemsize // 4, 1)

    constraints = [f"={kind}" for kind in registers(dtype)]
    constraints += [kind for array in arrays for kind in registers(array.dtype)]
    # Inline assembly with two results fails to lower in JAX 0.11.2.
    [result] = plgpu.elementwise_inline_asm(
        code,
        args=list(arrays),
        constraints=",".join(constraints),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arrays[0].shape, jnp.dtype(dtype))],
    )
    return result
