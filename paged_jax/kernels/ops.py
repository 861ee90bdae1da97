"""All ops by name. Each is defined beside its public function."""

from collections.abc import Mapping

from paged_jax.kernels.attention import DECODE, PREFILL
from paged_jax.kernels.linear import GROUPED_LINEAR, LINEAR, SUM_ROWS
from paged_jax.kernels.op import Op
from paged_jax.kernels.ragged import RAGGED
from paged_jax.kernels.recurrent import ADVANCE_ROWS
from paged_jax.kernels.writing import COPY_BLOCKS, ROPE_WRITE, WRITE

_ALL = (
    DECODE, PREFILL, RAGGED, WRITE, ROPE_WRITE, COPY_BLOCKS,
    LINEAR, SUM_ROWS, GROUPED_LINEAR, ADVANCE_ROWS,
)  # fmt: skip

OPS: Mapping[str, Op] = {op.name: op for op in _ALL}
