"""The backend ``"xla"``: the plain meaning of each op."""

from paged_jax.kernels.backend import Backend

XLA_BACKEND = Backend({}, is_plain=True)
