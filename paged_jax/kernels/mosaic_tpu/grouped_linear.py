"""Products of rows with the weights of their groups on TPUs, by the kernel that comes with JAX.

It is megablox, after MegaBlocks (Gale et al., 2022, arXiv 2211.15841). `jax.lax.ragged_dot` is no
way to it: for weights that lie ``[X, out, in]`` XLA copies all of them first, and below 8 rows it
multiplies by all of them (v5e, jax 0.10.2 and 0.12.0).
"""

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.kernels.backend import Interpret

_gmm: Any = None
try:
    # Its package has a function of the same name.
    _gmm = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm").gmm
except (ImportError, AttributeError):
    pass

# Rows of a register of the narrowest type, and of a tile at most.
_ROWS, _MAX_ROWS = 16, 128
# Bytes of a tile of weights, of which there are two in VMEM, which has 16 MB.
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
    """See `paged_jax.kernels.grouped_linear`; what is in rows of no group is not defined."""
    R, (_, N, K) = x.shape[0], w.shape
    tile_rows = min(_MAX_ROWS, math.ceil(R / _ROWS) * _ROWS)
    padding = -R % tile_rows
    side = math.isqrt(_TILE_BYTES // w.dtype.itemsize) // _LANES * _LANES
    # HIGHEST keeps float32 from being multiplied in bfloat16 passes.
    with jax.default_matmul_precision("highest" if w.dtype == jnp.float32 else "default"):
        out = _gmm(
            jnp.pad(x.astype(w.dtype), ((0, padding), (0, 0))),
            w,
            group_sizes,
            preferred_element_type=jnp.float32,
            tiling=(tile_rows, min(K, side), min(N, side)),
            transpose_rhs=True,
            interpret=bool(interpret),
        )
    return out[:R]
