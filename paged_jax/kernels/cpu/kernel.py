"""Names of the C++ kernels for CPUs: ops, dtypes and codes of weights, and static parameters."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.backend import Options

# Dtypes of weights and pools, each with the name of its type in the C++ sources.
ELEMENTS: dict[Any, str] = {
    jnp.dtype(jnp.float32): "Float32",
    jnp.dtype(jnp.bfloat16): "Bfloat16",
    jnp.dtype(jnp.float16): "Float16",
    jnp.dtype(jnp.int8): "Int8",
    jnp.dtype(jnp.float8_e4m3fn): "Float8",
}


# Codes of quantised weights, each with the name of its type in the C++ sources. One kernel
# multiplies by all codes of packed 4-bit values.
PACKED = "packed"
CODE_ELEMENTS = {"int8": "Int8", "float8_e4m3fn": "Float8", PACKED: "Packed"}

FloatOp = Literal[
    "decode", "prefill", "linear", "grouped_linear", "set_rows",
    "delta_step", "state_space_step", "convolution_step",
]  # fmt: skip
QuantisedOp = Literal["quantised_linear", "quantised_grouped_linear"]
KernelOp = FloatOp | QuantisedOp


class Kernel(NamedTuple):
    """A kernel for a dtype.

    Attributes:
      op: the op, which is also the name of the C++ source.
      dtype: dtype of the pools or of the weights. For quantised weights, the dtype that inputs are
        rounded to, float32 or bfloat16.
      code: a name in `CODE_ELEMENTS` if the weights are quantised, else None.
    """

    op: KernelOp
    dtype: Any
    code: str | None = None


def attention_attributes(
    options: Options,
    has_scales: bool,
    has_sinks: bool,
    is_interleaved: bool,
    shares_values: bool = False,
) -> dict[str, np.generic]:
    """Return the static parameters of the attention kernels."""
    return {
        "scale": np.float32(options.scale),
        "sliding_window": np.int32(options.sliding_window or 0),
        "soft_cap": np.float32(options.soft_cap or 0),
        "has_scales": np.int32(has_scales),
        "has_sinks": np.int32(has_sinks),
        "is_interleaved": np.int32(is_interleaved),
        "shares_values": np.int32(shares_values),
    }
