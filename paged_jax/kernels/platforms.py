# pyright: strict, reportUnknownMemberType=false
"""What the devices of a platform do: default dtype of K and V, copies, formats of weights.

Models, loaders and memory plans ask these questions before they make arrays or programs. A platform
is ``jax.Device.platform``: ``"cpu"`` (the CPU of this machine), ``"gpu"`` or ``"tpu"``. CPUs with
the C++ kernels (`native`) differ from CPUs without them, and from other platforms, because XLA for
CPUs converts whole arrays of small floats to float32.
"""

from collections.abc import Collection

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paged_jax.kernels.bits import bits_of
from paged_jax.kernels.native import library, weights
from paged_jax.kernels.native.kernels import ELEMENTS, NativeKernel, kernel_code, matmul_kernel
from paged_jax.kernels.weight_formats import INT8_CODES
from paged_jax.kernels.weight_store import PlainWeights, WeightStore


def sets_rows_in_place(platform: str, dtype: DTypeLike) -> bool:
    """Return whether `rows.set_rows` updates arrays of a dtype in place on a platform."""
    dtype = jnp.dtype(dtype)
    if platform != "cpu" or bits_of(dtype) is None:
        return True
    return dtype in ELEMENTS and library.load(NativeKernel("set_rows", dtype)).target is not None


def default_kv_dtype(weights_dtype: DTypeLike, platform: str) -> np.dtype:
    """Return the dtype of a cache for weights of a floating-point type, unless the user chooses it.

    Example:
      >>> default_kv_dtype("bfloat16", "gpu").name
      'bfloat16'
    """
    dtype = jnp.dtype(weights_dtype)
    # On a CPU without the C++ kernels, use float32, because XLA would copy a whole bfloat16 pool to
    # float32 at every write.
    is_in_place = dtype == jnp.bfloat16 and sets_rows_in_place(platform, dtype)
    return dtype if platform != "cpu" or is_in_place else jnp.dtype(jnp.float32)


def default_block_size(platform: str) -> int:
    """Return the number of tokens in a block of an engine's cache, unless the user chooses it.

    On TPUs, the kernels issue a copy for each block, and issuing the copies of blocks of 16 tokens
    takes longer than the copies.

    Example:
      >>> default_block_size("gpu"), default_block_size("tpu")
      (16, 128)
    """
    return 128 if platform == "tpu" else 16


def copies_weights(platform: str, dtype: DTypeLike, *, has_experts: bool) -> bool:
    """Return whether programs for a platform convert all weights to float32 before multiplying.

    Args:
      platform: name of the platform.
      dtype: dtype of the weights.
      has_experts: whether the model is a mixture of experts.
    """
    dtype = jnp.dtype(dtype)
    copied = (jnp.float16, jnp.int8, jnp.bfloat16) if has_experts else (jnp.float16, jnp.int8)
    if platform != "cpu" or dtype not in copied:
        return False
    return library.load(matmul_kernel(dtype.name, jnp.bfloat16)).target is None


def int8_inputs_refusal(platform: str, codes: Collection[str]) -> str | None:
    """Compile the kernels that round inputs to int8; return why they cannot be used.

    Args:
      platform: name of the platform.
      codes: codes of the model's matrices, see `WeightFormat`.

    Returns:
      A phrase, such as "on a processor without AVX512-VNNI". It is None if at least one of the
      codes has such a kernel, and all of these kernels can be used.
    """
    if platform != "cpu":
        return f"on a device of {platform}"
    if "avx512_vnni" not in library.processor():
        return "on a processor without AVX512-VNNI"
    if not (rounded := [code for code in codes if code in INT8_CODES]):
        return f"for a model without matrices in {', '.join(INT8_CODES)}"
    names, dtype = {kernel_code(code) for code in rounded}, jnp.dtype(jnp.int8)
    kernels = (NativeKernel("quantised_linear", dtype, name) for name in sorted(names))
    reasons = (library.load(kernel).reason for kernel in kernels)
    return next(
        (f"without C++ kernels ({reason})" for reason in reasons if reason is not None), None
    )


def reads_stacked_weights(platform: str) -> bool:
    """Return whether a platform's kernels read weights in place from the stack of all layers."""
    return platform == "cpu" and weights.are_available()


def attends_to_tiles(platform: str) -> bool:
    """Return whether prefill attention on a platform is faster for chunks cut into tiles.

    A tile has a few queries of a chunk, and is a row of the batch. The C++ kernels for CPUs are
    fast for tiles. XLA's loop over rows and the kernels for GPUs and TPUs are faster for whole
    chunks.
    """
    return platform == "cpu" and weights.are_available()


def weight_store(platform: str, backend: str | None = None) -> WeightStore:
    """Return what chooses the formats and layouts of a model's weights.

    Args:
      platform: platform of the devices that hold the weights.
      backend: name of the backend that will read the weights, or None for the best backend. A
        backend other than the platform's own reads the plain layout.
    """
    is_native = platform == "cpu" and backend in (None, "cpu")
    return weights.NativeWeights() if is_native else PlainWeights()


def load_cpu_kernels(program: bytes) -> None:
    """Register the C++ kernels for CPUs that a serialised executable calls.

    Call it before `jax.experimental.serialize_executable.deserialize_and_load`. A process that
    compiles its own programs does not need it.

    Args:
      program: the bytes that `jax.experimental.serialize_executable.serialize` returned. If the
        program calls none of these kernels, nothing is done.

    Raises:
      ValueError: a kernel is not available: the program was compiled for another processor, jaxlib
        or version of paged_jax, or the kernel cannot be compiled here.

    Example:
      >>> load_cpu_kernels(b"an executable without calls")  # does nothing
    """
    if (target := library.load_called(program)) is not None:
        raise ValueError(
            f"load_cpu_kernels: program must only call kernels of this machine and this version "
            f"of paged_jax, got a call of {target}. Compile the program on this machine."
        )
