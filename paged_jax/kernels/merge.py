"""Two partial results of attention, over different keys, made one."""

import jax
import jax.numpy as jnp

from paged_jax.argument_names import names_arguments
from paged_jax.kernels.quantisation import wider_dtype


@names_arguments
def merge_attention(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge attention over some keys with attention of the same queries over other keys.

    The result is that of one softmax over both sets of keys (Dao et al., 2023, "Flash-Decoding").
    So sequences that share a long prefix can read it once for all their queries, and what follows
    it each for itself. Pass `sinks` to one of the two parts only. Differentiable.

    Args:
      out_a: ``[..., D]``, the first result.
      lse_a: f32 ``[...]``, its log-sum-exp; -inf where it saw no key.
      out_b: ``[..., D]``, the second result.
      lse_b: f32 ``[...]``.

    Returns:
      ``(out, lse)``: ``[..., D]`` in the dtype of `out_a`, and f32 ``[...]``.

    Raises:
      ValueError: the shapes do not fit together.

    Example:
      >>> ones, zeros, lse = jnp.ones((1, 4)), jnp.zeros((1, 4)), jnp.zeros(1)
      >>> out, lse = merge_attention(ones, lse, zeros, lse)
      >>> out.tolist(), round(float(lse[0]), 4)
      ([[0.5, 0.5, 0.5, 0.5]], 0.6931)
    """
    out_a, lse_a, out_b, lse_b = map(jnp.asarray, (out_a, lse_a, out_b, lse_b))
    if not (out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]):
        raise ValueError(
            "merge_attention: out_a, lse_a, out_b and lse_b must have shapes [..., D], [...], "
            f"[..., D] and [...], got {list(out_a.shape)}, {list(lse_a.shape)}, "
            f"{list(out_b.shape)} and {list(lse_b.shape)}."
        )
    dtype = wider_dtype(out_a.dtype, jnp.float32)
    peak = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    peak = jnp.where(jnp.isfinite(peak), peak, 0)
    weight_a, weight_b = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
    total = weight_a + weight_b
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    out = (weight_a / total)[..., None] * out_a.astype(dtype)
    out += (weight_b / total)[..., None] * out_b.astype(dtype)
    return out.astype(out_a.dtype), jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
