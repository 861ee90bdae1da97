"""The matrices of a model as `linear` takes them: floats, or int8 with a scale for each row.

An int8 matrix is two parameters: ``qkv_proj``, the numbers, and ``qkv_proj_scale``, float32, one
for each row of the output. A number is ``values * scale``, so that the largest of a row is 127, and
a row is off by at most half a scale anywhere (weight-only quantisation: inputs stay floats).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.kernels.linear import Stack, Weight
from paged_jax.models.config import LlamaConfig

SCALE = "_scale"  # what the name of a matrix is followed by


def quantise(w: Any) -> tuple[Any, Any]:
    """Round a matrix to int8: the numbers and their scales, arrays of NumPy or JAX as it is.

    Args:
      w: float32 ``[..., in]``.

    Returns:
      int8 ``[..., in]`` and float32 ``[...]``.

    Example:
      >>> values, scales = quantise(np.array([[1.0, -2.54], [0.0, 0.0]], np.float32))
      >>> values.tolist(), f"{scales[0]:.3f}"
      ([[50, -127], [0, 0]], '0.020')
    """
    xp = w.__array_namespace__()
    # Multiplied by inverses, as XLA does unasked, so that all give the same bits; not 0, which has
    # none.
    scales = xp.maximum(xp.abs(w).max(-1) * np.float32(1 / 127), xp.finfo(xp.float32).tiny)
    return xp.rint(w * (1 / scales)[..., None]).astype(xp.int8), scales


def float_type(dtype: Any, config: LlamaConfig) -> Any:
    """The type of what is not quantised: norms, biases, an embedding that is no output head."""
    return jnp.dtype(config.dtype if jnp.dtype(dtype) == jnp.int8 else dtype)


def float_dtype(model: Any) -> np.dtype:
    """The type of the floats of a `Llama`: of all weights, or of what is left beside int8."""
    return model.norm.dtype


def weight_dtype(model: Any) -> np.dtype:
    """The type of the matrices of a `Llama`: that of its floats, or int8."""
    head = "embed_tokens" if model.config.tie_word_embeddings else "lm_head"
    return getattr(model, head).dtype


def add_matrix(module: nnx.Module, name: str, w: jax.Array, dtype: Any) -> None:
    """Give a module a matrix, the parameter `name`, and `name_scale` if it is int8.

    Args:
      module: the module.
      name: the name of its parameter.
      w: floating point ``[..., in]``.
      dtype: the type that it is to have.
    """
    if jnp.dtype(dtype) != jnp.int8:
        setattr(module, name, nnx.Param(w.astype(dtype)))
        return
    values, scales = quantise(w.astype(jnp.float32))
    setattr(module, name, nnx.Param(values))
    setattr(module, name + SCALE, nnx.Param(scales))


def get_matrix(
    module: nnx.Module,
    name: str,
    dtype: Any,
    stack: nnx.Module | None = None,
    layer: jax.Array | None = None,
) -> Weight:
    """A matrix of a module.

    Args:
      module: the module.
      name: the name of its parameter.
      dtype: the type of its floats.
      stack: the stacked modules that it is a part of, if it is.
      layer: i32 ``[]``, which part.
    """
    values, scales = _parameters(module, name)
    if stack is None or layer is None:
        return Weight(values, scales, None, jnp.dtype(dtype))
    # Gradients are those of the copy.
    whole = Stack(*jax.lax.stop_gradient(_parameters(stack, name)), layer)
    return Weight(values, scales, whole, jnp.dtype(dtype))


def _parameters(module: nnx.Module, name: str) -> tuple[jax.Array, jax.Array | None]:
    scales = getattr(module, name + SCALE, None)
    return getattr(module, name)[...], None if scales is None else scales[...]
