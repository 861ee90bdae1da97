"""Products of rows with the weights of their groups on TPUs, by the kernel that comes with JAX.

It is megablox, after MegaBlocks (Gale et al., 2022, arXiv 2211.15841). `jax.lax.ragged_dot` is no
way to it: for weights that lie ``[X, out, in]`` XLA copies all of them first, and below 8 rows it
multiplies by all of them (v5e, jax 0.10.2 and 0.12.0).
"""

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.opaque_call import only_on

_gmm: Any = None
try:
    # Its package has a function of the same name.
    _gmm = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm").gmm
except (ImportError, AttributeError):
    pass

# Rows of a register of the narrowest type, and of a tile at most.
_ROWS, _MAX_ROWS = 16, 128
# Bytes of a tile of weights, and of whole rows of x: two of each are in VMEM, which has 16 MB.
_TILE_BYTES = 2 << 20
_LANES = 128


def refusal(x: Any, w: Any) -> str | None:
    """Why the kernel cannot multiply arrays of such shapes and types, or None if it can."""
    del x
    if _gmm is None:
        return f"jax {jax.__version__} has no megablox"
    if w.dtype not in (jnp.float32, jnp.bfloat16):
        return f"its weights are float32 or bfloat16, not {w.dtype}"
    return None


def grouped_linear(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, interpret: Interpret = False
) -> jax.Array:
    """See `paged_jax.kernels.grouped_linear`."""
    R, (_, N, K) = x.shape[0], w.shape
    tiling = choose_tiling(R, K, N, w.dtype)
    padding = -R % tiling[0]
    # HIGHEST keeps float32 from being multiplied in bfloat16 passes.
    with jax.default_matmul_precision("highest" if w.dtype == jnp.float32 else "default"):
        multiply = functools.partial(
            _gmm,
            preferred_element_type=jnp.float32,
            tiling=tiling,
            transpose_rhs=True,
            interpret=bool(interpret),
        )
        if not interpret:
            multiply = functools.partial(only_on, "tpu", multiply)
        out = multiply(jnp.pad(x.astype(w.dtype), ((0, padding), (0, 0))), w, group_sizes)
    # The kernel leaves memory as it was in rows of no group.
    is_of_group = jnp.arange(R, dtype=jnp.int32) < jnp.sum(group_sizes)
    return jnp.where(is_of_group[:, None], out[:R], 0)


def choose_tiling(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: Any
) -> tuple[int, int, int]:
    """Rows of x, numbers of a row and rows of a weight that one step of the grid multiplies.

    The steps of a group follow each other for each tile of rows of its weight. If these rows are
    whole, the kernel fetches them once, however many tiles of rows of x the group has; else once
    for each of those. Weights of groups without rows are in no step.

    Args:
      num_rows: of x.
      num_inputs, num_outputs: of a weight.
      dtype: type of the weights.

    Example:
      >>> choose_tiling(64, 2880, 5760, jnp.bfloat16), choose_tiling(512, 14336, 4096, jnp.bfloat16)
      ((64, 2880, 256), (128, 1024, 1024))
    """
    tile_rows = min(_MAX_ROWS, math.ceil(num_rows / _ROWS) * _ROWS)
    numbers = _TILE_BYTES // jnp.dtype(dtype).itemsize
    whole_rows = numbers // num_inputs // _LANES * _LANES
    if whole_rows and tile_rows * num_inputs <= numbers:
        return tile_rows, num_inputs, min(num_outputs, whole_rows)
    side = math.isqrt(numbers) // _LANES * _LANES
    return tile_rows, min(num_inputs, side), min(num_outputs, side)
