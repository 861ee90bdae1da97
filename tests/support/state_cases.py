"""Steps of recurrent layers as shapes, to lower or compile without running them."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from paged_jax.kernels import recurrent
from paged_jax.kernels.state_rows import StateRows
from paged_jax.kernels.triton.tuning import GpuInfo
from tests.support.kernel_cases import H200, lower


@dataclasses.dataclass(frozen=True)
class StateCase:
    """One token of each sequence in a recurrent layer.

    Attributes:
      op: the recurrence.
      B: number of sequences.
      K: heads of keys.
      G: heads of values for each head of keys.
      D: elements of a key; tokens of a convolution (w).
      U: elements of a value; channels of a convolution.
      L: layers of the pool.
      P: entries of the pool.
      by_element: whether elements of a key decay at different rates (delta rule).
      dtype: dtype of the pool.
      backend: backend of the step; None for that of the platform.
    """

    op: Literal["delta", "state_space", "convolution"]
    B: int = 64
    K: int = 16
    G: int = 2
    D: int = 128
    U: int = 128
    L: int = 4
    P: int = 96
    by_element: bool = False
    dtype: str = "float32"
    backend: str | None = None

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a state."""
        if self.op == "convolution":
            return ((self.D - 1) * self.U,)
        tail = (self.D, self.U) if self.op == "delta" else (self.U, self.D)
        return (self.K * self.G, *tail)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.L * self.P * math.prod(self.state_shape) * jnp.dtype(self.dtype).itemsize

    def lower(self, platform: str, sharding: Any = None, gpu: GpuInfo = H200) -> jax.stages.Lowered:
        """Lower the step for ``"cuda"`` or ``"tpu"``, with the pool donated."""
        B, K, G, D, U = self.B, self.K, self.G, self.D, self.U

        def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        ids = array(B, dtype=jnp.int32)
        pool = array(self.L, self.P, *self.state_shape, dtype=self.dtype)
        if self.op == "delta":
            gates = array(B, 1, K, G, D) if self.by_element else array(B, 1, K, G)
            arrays = array(B, 1, K, D), array(B, 1, K, D), array(B, 1, K, G, U), gates
            arrays = (*arrays, array(B, 1, K, G))
        elif self.op == "state_space":
            arrays = array(B, 1, K, G, U), array(B, 1, K, D), array(B, 1, K, D), array(B, 1, K, G)
        else:
            arrays = array(B, 1, U), array(U, D, dtype=jnp.bfloat16)

        def step(pool, sources, entries, num_tokens, layer, *arrays):
            rows = StateRows(pool, layer, sources, entries, self.backend)
            if self.op == "convolution":
                x, filters = arrays
                out, rows = recurrent.causal_convolution(x, rows, filters, None, num_tokens)
            elif self.op == "delta":
                q, k, v, log_decay, beta = arrays
                out, rows = recurrent.delta_rule(q, k, v, log_decay, beta, rows, num_tokens)
            else:
                x, b, c, log_decay = arrays
                out, rows = recurrent.state_space(x, b, c, log_decay, rows, num_tokens)
            return out, rows.pool

        layer = array(dtype=jnp.int32)
        shapes = pool, ids, ids, ids, layer, *arrays
        return lower(step, *shapes, platform=platform, gpu=gpu, donate_argnums=0)
