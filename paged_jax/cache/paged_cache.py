"""The KV cache: K and V of every token in blocks, and the tables that say which block is whose.

The pools are `[L, P, K, C, D]`: layer, block, KV head, token in the block, head dimension. One
block id stands for the same block in every layer and in both pools. A decode step, in each layer:

    cache, ok = reserve(cache, num_tokens)                               # room for the new tokens
    token_blocks, offsets = locate(cache.tables, slots, positions)       # where they go
    pools = paged_write(pools.k, pools.v, k, v, token_blocks, offsets, layer=layer)

What writes to the pools and reads them is in `paged_jax.kernels`. A loop over layers carries
`cache.pools` whole, as its state; `replace_pools` puts them back.

On CPU, keep pools in float32, float16 or int8: XLA updates no others in place there.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from paged_jax.cache import blocks as allocator
from paged_jax.cache.blocks import BlockCopies, BlockTables, ReservePlan
from paged_jax.checks import check_positive
from paged_jax.dims import bind
from paged_jax.kernels.backend import Pools
from paged_jax.kernels.dispatch import backend_for
from paged_jax.kernels.quantisation import is_quantised
from paged_jax.kernels.writing import check_num_rows, copy_blocks
from paged_jax.kernels.xla.writing import set_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """K and V of every token of every slot, and which slot holds which block.

    Attributes:
      k: [L, P, K, C, D], keys: floating point, or int8 or float8_e4m3fn with scales.
      v: [L, P, K, C, D], values, as the keys.
      tables: the `BlockTables`: lengths, block tables and free blocks.
      k_scale: f32[L, P, K, C], what the numbers of each token and head are multiplied by; None
        unless the pools are quantised.
      v_scale: the same for the values.

    Example:
      >>> cache = PagedCache.create(
      ...     num_layers=2, num_blocks=8, num_kv_heads=1, block_size=4, head_dim=8,
      ...     num_slots=2, max_blocks_per_slot=4,
      ... )
      >>> cache, ok = reserve(cache, jnp.array([5, 0]), max_tokens=8)
      >>> bool(ok), cache.lengths.tolist(), cache.nbytes
      (True, [5, 0], 4096)
    """

    k: jax.Array
    v: jax.Array
    tables: BlockTables
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        num_slots: int,
        max_blocks_per_slot: int,
        dtype: DTypeLike = jnp.float32,
    ) -> "PagedCache":
        """Return a cache with empty slots and zeroed pools of `dtype`.

        int8 or float8_e4m3fn quantise K and V, each token and head with a scale of its own: half
        the memory of bfloat16 and a little more, ``4 / D`` bytes for each number.

        Raises:
          ValueError: a size is not a positive integer, or the pool has more rows than int32 counts.
        """
        check_positive(
            "PagedCache.create",
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        tables = BlockTables.create(num_blocks, num_slots, max_blocks_per_slot, block_size)
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        check_num_rows("PagedCache.create", shape)
        # Two arrays, not one used twice: a buffer can be donated only once.
        k, v = (jnp.zeros(shape, dtype) for _ in range(2))
        if not is_quantised(dtype):
            return cls(k=k, v=v, tables=tables)
        k_scale, v_scale = (jnp.zeros(shape[:-1], jnp.float32) for _ in range(2))
        return cls(k=k, v=v, tables=tables, k_scale=k_scale, v_scale=v_scale)

    @property
    def pools(self) -> Pools:
        """K and V with their scales, as kernels take them."""
        return Pools(self.k, self.v, self.k_scale, self.v_scale)

    def replace_pools(self, pools: Pools) -> "PagedCache":
        """Return the cache with other pools."""
        return replace(self, **pools._asdict())

    @property
    def block_tables(self) -> jax.Array:
        """i32[S, M], the blocks of each slot, then P."""
        return self.tables.block_tables

    @property
    def lengths(self) -> jax.Array:
        """i32[S], the number of tokens in each slot."""
        return self.tables.lengths

    @property
    def num_layers(self) -> int:
        """L."""
        return self.k.shape[0]

    @property
    def num_blocks(self) -> int:
        """P, the number of blocks in the pool; also the entry that stands for "no block"."""
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.k.shape[2]

    @property
    def block_size(self) -> int:
        """C, the number of tokens in a block."""
        return self.k.shape[3]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.k.shape[4]

    @property
    def num_slots(self) -> int:
        """S."""
        return self.tables.num_slots

    @property
    def nbytes(self) -> int:
        """Bytes of both pools and their scales, without the tables, which are small."""
        return sum(array.nbytes for array in self.pools if array is not None)


def reserve(
    cache: PagedCache,
    num_tokens: jax.Array,
    *,
    max_tokens: int = 1,
    backend: str | None = None,
) -> tuple[PagedCache, jax.Array]:
    """Make room for more tokens in every slot, copying the blocks that must not be written shared.

    As `paged_jax.blocks.reserve`, with its copies done in all layers. Each block that is copied
    costs reading and writing that block; where there is nothing to copy, the pools are not touched.

    Args:
      cache: the state; donate it, or both pools are copied.
      num_tokens: i32[S], how many tokens to add to each slot; 0 leaves a slot alone.
      max_tokens: upper bound on `num_tokens` (static).
      backend: backend of the copies, see `copy_blocks`; the platform's best where it has no copies.

    Returns:
      `(cache, ok)`. Where `ok`, bool[], is False the cache is unchanged.

    Raises:
      ValueError: `num_tokens` is not i32[S] or `max_tokens` is not a positive integer.
    """
    tables, copies, ok = allocator.reserve(cache.tables, num_tokens, max_tokens=max_tokens)
    return replace(_copy(cache, copies, backend), tables=tables), ok


def plan(
    cache: PagedCache, limits: jax.Array, most: jax.Array, *, max_tokens: int, backend: str | None
) -> tuple[PagedCache, ReservePlan]:
    """Plan room for tokens, and make the copies; see `paged_jax.blocks.plan`.

    The caller commits the plan before it does anything else with the tables, see `commit`.
    """
    planned = allocator.plan(cache.tables, limits, most, max_tokens=max_tokens)
    return _copy(cache, planned.copies, backend), planned


def commit(cache: PagedCache, planned: ReservePlan, lengths: jax.Array) -> PagedCache:
    """Take what was used of a plan, up to `lengths` i32[S]; see `paged_jax.blocks.commit`."""
    return replace(cache, tables=allocator.commit(cache.tables, planned, lengths))


def _copy(cache: PagedCache, copies: BlockCopies, backend: str | None) -> PagedCache:
    """The cache after these copies, in all layers."""
    pools = cache.pools
    pools = copy_blocks(
        pools.k, pools.v, copies.source, copies.target,
        k_scale=pools.k_scale, v_scale=pools.v_scale,
        backend=backend_for("copy_blocks", backend),
    )  # fmt: skip
    return cache.replace_pools(pools)


def fork(cache: PagedCache, parents: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Make slots into copies of other slots that share all blocks; see `paged_jax.blocks.fork`."""
    tables, ok = allocator.fork(cache.tables, parents)
    return replace(cache, tables=tables), ok


def release(cache: PagedCache, mask: jax.Array) -> PagedCache:
    """Empty the slots of `mask` bool[S]; see `paged_jax.blocks.release`."""
    return replace(cache, tables=allocator.release(cache.tables, mask))


def reorder(cache: PagedCache, parents: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Make slots into what other slots were, all at once; see `paged_jax.blocks.reorder`."""
    tables, ok = allocator.reorder(cache.tables, parents)
    return replace(cache, tables=tables), ok


def truncate(cache: PagedCache, lengths: jax.Array, *, max_tokens: int) -> PagedCache:
    """Shorten slots to `lengths` i32[S]; see `paged_jax.blocks.truncate`."""
    tables = allocator.truncate(cache.tables, lengths, max_tokens=max_tokens)
    return replace(cache, tables=tables)


def attach(
    cache: PagedCache,
    slot: ArrayLike,
    digests: jax.Array,
    token_ids: jax.Array,
    num_blocks: ArrayLike,
) -> tuple[PagedCache, jax.Array]:
    """Start an empty slot with the cached prefix of its tokens; see `paged_jax.blocks.attach`."""
    tables, num_found = allocator.attach(cache.tables, slot, digests, token_ids, num_blocks)
    return replace(cache, tables=tables), num_found


def publish(
    cache: PagedCache,
    slots: jax.Array,
    columns: jax.Array,
    digests: jax.Array,
    token_ids: jax.Array,
) -> PagedCache:
    """Let full blocks be found by their digests; see `paged_jax.blocks.publish`."""
    tables = allocator.publish(cache.tables, slots, columns, digests, token_ids)
    return replace(cache, tables=tables)


def forget(cache: PagedCache) -> PagedCache:
    """Let no block be found any more; see `paged_jax.blocks.forget`."""
    return replace(cache, tables=allocator.forget(cache.tables))


def read_blocks(cache: PagedCache, slot: ArrayLike, first: ArrayLike, *, width: int) -> Pools:
    """Copy blocks of one slot out of the pools, in every layer, to be kept elsewhere.

    With `write_blocks` this is the way of a sequence to host memory and back. One `width` for
    sequences of all lengths, in several calls, takes one compiled program.

    Args:
      cache: the cache; only read, so do not donate it.
      slot: i32[], the slot.
      first: i32[], the column of its row of the block table to begin with.
      width: how many columns to copy (static).

    Returns:
      `Pools` with the bits of these blocks: K and V [L, width, K, C, D] and, of quantised pools,
      their scales [L, width, K, C]. What the slot does not hold is zeros.

    Raises:
      ValueError: `width` is not a positive integer.

    Example:
      >>> cache = PagedCache.create(
      ...     num_layers=2, num_blocks=8, num_kv_heads=1, block_size=4, head_dim=8,
      ...     num_slots=2, max_blocks_per_slot=4,
      ... )
      >>> cache, _ = reserve(cache, jnp.array([5, 0]), max_tokens=8)
      >>> saved = read_blocks(cache, 0, 0, width=2)
      >>> cache = release(cache, jnp.array([True, False]))
      >>> cache, _ = reserve(cache, jnp.array([0, 5]), max_tokens=8)
      >>> cache = write_blocks(cache, 1, 0, saved)
      >>> saved.k.shape, cache.lengths.tolist()
      ((2, 2, 1, 4, 8), [0, 5])
    """
    check_positive("read_blocks", width=width)
    blocks = _held_blocks(cache, slot, first, width)
    is_held = blocks < cache.num_blocks
    layers_L1 = jnp.arange(cache.num_layers, dtype=jnp.int32)[:, None]
    rows_LN = layers_L1 * cache.num_blocks + jnp.where(is_held, blocks, 0)[None, :]

    def read(pool: jax.Array) -> jax.Array:
        # As rows: `pool[:, blocks]` makes XLA for TPU change the layout of the scales, where P is
        # the fastest axis.
        values = pool.reshape(-1, *pool.shape[2:])[rows_LN]
        return jnp.where(is_held.reshape(1, -1, *[1] * (pool.ndim - 2)), values, 0)

    return jax.tree.map(read, cache.pools)


def write_blocks(cache: PagedCache, slot: ArrayLike, first: ArrayLike, values: Pools) -> PagedCache:
    """Write what `read_blocks` returned into the blocks of a slot; the tables do not change.

    Args:
      cache: the cache; donate it, or both pools are copied.
      slot: i32[], the slot, given room with `reserve`. Blocks that it shares change for all.
      first: i32[], the column of its row of the block table to begin with.
      values: the blocks. What the slot has no block for is dropped.

    Raises:
      ValueError: `values` are not blocks of such pools.
    """
    width = _check_values(cache.pools, values)
    blocks = _held_blocks(cache, slot, first, width)
    num_layers, num_blocks = cache.num_layers, cache.num_blocks
    layers_L1 = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    columns = jnp.arange(width, dtype=jnp.int32)
    is_held = blocks < num_blocks
    # Dropped blocks are sent past the end, each to its own place: a block of P would fall into the
    # next layer, and the places must be distinct.
    past_LN = num_layers * num_blocks + layers_L1 * width + columns[None, :]
    rows_LN = jnp.where(is_held[None, :], layers_L1 * num_blocks + blocks[None, :], past_LN)

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        rows, new = (x.reshape(-1, *x.shape[2:]) for x in (pool, new))
        return set_rows(rows, rows_LN.reshape(-1), new).reshape(pool.shape)

    def put_scale(scale: jax.Array, new: jax.Array) -> jax.Array:
        # Number by number: as rows, XLA for TPU would change their layout, as P is their fastest
        # axis.
        L, _, K, C = scale.shape
        layers, _, heads, offsets = (x.astype(jnp.int32) for x in jnp.ogrid[:L, :1, :K, :C])
        places = jnp.where(is_held, blocks, num_blocks + columns)[None, :, None, None]
        return scale.at[layers, places, heads, offsets].set(new, mode="drop", unique_indices=True)

    scales = jax.tree.map(put_scale, cache.pools[2:], values[2:])
    pools = Pools(put(cache.k, values.k), put(cache.v, values.v), *scales)
    return cache.replace_pools(pools)


def _held_blocks(cache: PagedCache, slot: ArrayLike, first: ArrayLike, width: int) -> jax.Array:
    """The blocks of a slot in `width` columns of the table, i32[width]; P where it holds none."""
    columns = jnp.asarray(first, jnp.int32) + jnp.arange(width, dtype=jnp.int32)
    return cache.block_tables.at[jnp.asarray(slot, jnp.int32), columns].get(
        mode="fill", fill_value=cache.num_blocks, wrap_negative_indices=False
    )


def _check_values(pools: Pools, values: Pools) -> int:
    """Raise ValueError unless `values` could come from `pools`; return how many blocks they are."""
    if pools.is_quantised != values.is_quantised:
        raise ValueError(
            "write_blocks: values must have scales just if the pools do. Pass what read_blocks of "
            "such a cache returned."
        )
    width = values.k.shape[1] if values.k.ndim > 1 else 0
    for name, pool, new in zip(Pools._fields, pools, values, strict=True):
        if pool is None or new is None:
            continue
        shape = (pool.shape[0], width, *pool.shape[2:])
        if new.shape != shape or new.dtype != pool.dtype:
            raise ValueError(
                f"write_blocks: values.{name} must be {pool.dtype} {list(shape)}, got {new.dtype} "
                f"{list(new.shape)}. Pass what read_blocks of such a cache returned."
            )
    return width


def locate(
    tables: BlockTables, slots: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Find the block, and the place in it, of tokens given by slot and position.

    Args:
      tables: the block tables.
      slots: i32[N], the slot of each token. A negative one marks padding.
      positions: i32[N], the position of each token in its slot, from 0.

    Returns:
      `(blocks, offsets)`, both i32[N]. The block is P, which `paged_write` drops, where there is no
      such slot or the position is not below the slot's length.

    Raises:
      ValueError: `slots` and `positions` differ in shape.

    Example:
      >>> tables = BlockTables.create(8, num_slots=2, max_blocks_per_slot=4, block_size=4)
      >>> tables, _, _ = allocator.reserve(tables, jnp.array([5, 2]), max_tokens=8)
      >>> [x.tolist() for x in locate(tables, jnp.array([0, 1, 1]), jnp.array([4, 1, 2]))]
      [[1, 2, 8], [0, 1, 2]]
    """
    bind("locate", slots=(slots, "N"), positions=(positions, "N"))
    is_slot = (slots >= 0) & (slots < tables.num_slots)
    row = jnp.where(is_slot, slots, 0)
    is_token = is_slot & (positions >= 0) & (positions < tables.lengths[row])
    column = jnp.where(is_token, positions // tables.block_size, 0)
    blocks = jnp.where(is_token, tables.block_tables[row, column], tables.num_blocks)
    return blocks, positions % tables.block_size


def gather(
    cache: PagedCache, slot: int | jax.Array, *, layer: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Lay the K and V of one slot out in the order of its tokens, for references and tests.

    Args:
      cache: the cache.
      slot: the slot, a Python integer or i32[].
      layer: the layer, a Python integer or i32[].

    Returns:
      `(k, v)`, both [M * C, K, D]: the slot's tokens, then zeros, whatever the pools hold there.
      Of quantised pools, in float32 and multiplied by the scales; else as they are.

    Raises:
      ValueError: a Python `slot` or `layer` that does not exist.
    """
    _check_layer("gather", layer, cache.num_layers)
    if isinstance(slot, int) and not 0 <= slot < cache.num_slots:
        raise ValueError(
            f"gather: slot must be 0 to {cache.num_slots - 1}, got {slot}. Pass a slot."
        )
    slots = jnp.full(cache.block_tables.shape[1] * cache.block_size, slot, jnp.int32)
    positions = jnp.arange(slots.size, dtype=jnp.int32)
    blocks, offsets = locate(cache.tables, slots, positions)
    is_token = blocks < cache.num_blocks
    blocks = jnp.where(is_token, blocks, 0)

    def read(pool: jax.Array, scale: jax.Array | None) -> jax.Array:
        tokens = pool[layer, blocks, :, offsets]
        if scale is not None:
            tokens = tokens.astype(scale.dtype) * scale[layer, blocks, :, offsets][..., None]
        return jnp.where(is_token[:, None, None], tokens, 0)

    return read(cache.k, cache.k_scale), read(cache.v, cache.v_scale)


def _check_layer(function: str, layer: int | jax.Array, num_layers: int) -> None:
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise ValueError(
            f"{function}: layer must be 0 to {num_layers - 1}, got {layer}. Pass a layer."
        )
