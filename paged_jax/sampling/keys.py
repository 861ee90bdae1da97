"""Random keys as they are kept on the device: threefry key data, u32[..., 2]."""

import jax


def as_key(key_data: jax.Array) -> jax.Array:
    """The key that `jax.random` draws with."""
    # Named, so that a user's jax_default_prng_impl does not change what a seed means.
    return jax.random.wrap_key_data(key_data, impl="threefry2x32")


def fold_in(key_data: jax.Array, number: jax.Array) -> jax.Array:
    """Derive the data of another random key from that of a key and a number."""
    return jax.random.key_data(jax.random.fold_in(as_key(key_data), number))
