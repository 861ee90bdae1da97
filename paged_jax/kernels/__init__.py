"""Public ops over pools of KV blocks, and grouped matmuls for mixtures of experts.

Each name is imported when it is first used. ``__init__.pyi`` lists the names and their modules.
"""

from paged_jax.flax_versions import check_installed_jax
from paged_jax.lazy_names import attach_names

check_installed_jax()

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
