"""Whether what all devices compute for themselves is the same on each of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Odd, so that a product with it loses no bit.
_FACTOR = np.uint32(0x9E3779B1)


class ReplicaError(RuntimeError):
    """Devices that must compute the same have not."""


def agree(tree: object, axis_name: str) -> jax.Array:
    """Whether a tree of arrays is the same, bit for bit, on all devices of an axis; bool ``[]``.

    Within `jax.shard_map`. A digest of 32 bits is compared: a single number that differs is found
    for certain, and of other differences all but one in 2^32.
    """
    digests = lax.all_gather(_digest(tree), axis_name)
    return jnp.all(digests == digests[0])


def _digest(tree: object) -> jax.Array:
    digest = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = _bits(jnp.asarray(leaf)).reshape(-1)
        places = lax.iota(jnp.uint32, bits.size) * jnp.uint32(2) + jnp.uint32(1)
        digest = digest * _FACTOR + jnp.sum(bits * places, dtype=jnp.uint32)
    return digest


def _bits(x: jax.Array) -> jax.Array:
    """Each number as a uint32 of its own."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.uint32)
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
