"""Models with random weights from NumPy, because JAX would compile a program for every shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.matrix_formats import SCALE


def random_llama(config: LlamaConfig, *, scale: float = 0.2, **options: Any) -> Decoder:
    """Create a model with random weights, including norms and biases (1 and 0 would hide errors).

    Args:
      config: configuration of the model.
      scale: standard deviation of the weights; with 0.4 the next token depends on all previous
        tokens.
      options: options of `Decoder`, without `rngs`.
    """
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options))
    graphdef, state = nnx.split(abstract)
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        if leaf.dtype == jnp.int8:
            return jnp.asarray(rng.integers(-127, 128, leaf.shape, np.int8))
        if SCALE in name:
            return jnp.asarray(scale / 64 * rng.uniform(0.5, 1.5, leaf.shape), jnp.float32)
        offset = 1.0 if "norm" in name else 0.0
        drawn = offset + scale * rng.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(drawn.astype(leaf.dtype))

    return nnx.merge(graphdef, jax.tree.map_with_path(fill, state))
