"""The KV cache in blocks, and which slot holds which: immutable state, and pure functions over it.

`blocks` is the allocator alone: reference counts, free blocks and block tables, without any K or V.
`PagedCache` adds the pools, and the functions here are those of `blocks`, done in the pools too.
`GroupedCache` is several of them, for layers of which some have a sliding window.
"""

from paged_jax.cache import blocks
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks import BlockTables, num_blocks_needed
from paged_jax.cache.contents import gather, read_blocks, register_caches, write_blocks
from paged_jax.cache.grouped_cache import GroupedCache
from paged_jax.cache.paged_cache import (
    PagedCache,
    attach,
    forget,
    fork,
    locate,
    publish,
    release,
    reorder,
    reserve,
    restore,
    truncate,
)

register_caches()

__all__ = [
    "BlockPool",
    "BlockTables",
    "GroupedCache",
    "PagedCache",
    "attach",
    "blocks",
    "forget",
    "fork",
    "gather",
    "locate",
    "num_blocks_needed",
    "publish",
    "read_blocks",
    "release",
    "reorder",
    "reserve",
    "restore",
    "truncate",
    "write_blocks",
]
