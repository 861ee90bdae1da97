# pyright: strict, reportUnknownMemberType=false
"""The paged KV cache: immutable state, and pure functions that return new state.

The subpackage `blocks` is the allocator. It manages reference counts, free blocks and block tables,
but no K and V. `PagedCache` adds the pools of K and V for each group of layers. The functions of
this package have the same names as the functions in `blocks`. They update the tables of a cache
and, where needed, its pools.
"""

from paged_jax.cache import blocks
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks import BlockTables, num_blocks_needed
from paged_jax.cache.contents import gather, read_blocks, register_caches, write_blocks
from paged_jax.cache.groups import CacheGroup, locate
from paged_jax.cache.paged_cache import (
    PagedCache,
    attach,
    forget,
    fork,
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
    "CacheGroup",
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
