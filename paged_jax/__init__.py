"""Paged attention for JAX: block tables, attention kernels, models and text generation.

Each part can be used without the parts that follow it:

- Ops over pools of KV blocks: `paged_attention`, `paged_prefill_attention`,
  `ragged_paged_attention`, `paged_rope_write`, `paged_write`, `write_kv_pages`, `copy_blocks`.
- The paged KV cache: `PagedCache` with the functions of `paged_jax.cache`, and the block allocator
  alone, `paged_jax.blocks`.
- The model: `Decoder` and `PagedModel`.
- Text generation: `rollout` (a pure function), `Engine`, `AsyncEngine` and `LLM`.

Names are imported lazily, at their first use. A program that uses only the ops therefore imports
only jax, not Flax. ``__init__.pyi`` lists all public names and the modules that define them.
"""

from paged_jax.lazy_names import attach_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
