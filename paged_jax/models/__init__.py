"""Models with a paged KV cache, loading of their weights, and their tokenizers."""

from paged_jax.flax_versions import check_installed_flax

check_installed_flax()
