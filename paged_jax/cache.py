"""The KV cache: K and V of every token in blocks, and the tables that say which block is whose.

The pools are `[L, P, K, C, D]`: layer, block, KV head, token in the block, head dimension. One
block id stands for the same block in every layer and in both pools. A decode step, in each layer:

    cache, ok = reserve(cache, num_tokens)                               # room for the new tokens
    token_blocks, offsets = locate(cache.tables, slots, positions)       # where they go
    k = write(cache.k, new_k, layer=layer, blocks=token_blocks, offsets=offsets)

Every write is a scatter into the pool seen as rows `[L * P * K * C, D]`. Once the pool is donated,
that form is done in place by the compilers for CPU, GPU and TPU alike, whereas a
`dynamic_update_slice` makes the one for TPU lay the whole pool out anew. For the same reason pools
are passed around whole, with a layer index; slicing a layer out would copy it.

XLA's CPU backend cannot update a bfloat16 array in place (see `_set_rows`): there, keep pools in
float32 or float16.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from paged_jax import blocks as allocator
from paged_jax.blocks import BlockCopies, BlockTables
from paged_jax.dims import bind

# Rows of the pool are counted in int32, and so are those past its end that stand for "no row".
_MAX_ROWS = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """K and V of every token of every slot, and who holds which block.

    Attributes:
      k: [L, P, K, C, D], keys.
      v: [L, P, K, C, D], values.
      tables: the `BlockTables`: lengths, block tables and free blocks.

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

        Raises:
          ValueError: a size is not a positive integer, or the pool has more rows than int32 counts.
        """
        allocator.check_positive(
            "PagedCache.create",
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        tables = BlockTables.create(num_blocks, num_slots, max_blocks_per_slot, block_size)
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        _check_num_rows("PagedCache.create", shape)
        # Two arrays, not one used twice: a buffer can be donated only once.
        return cls(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), tables=tables)

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
        """Bytes of both pools; the tables come on top and are small."""
        return self.k.nbytes + self.v.nbytes


def reserve(
    cache: PagedCache, num_tokens: jax.Array, *, max_tokens: int = 1
) -> tuple[PagedCache, jax.Array]:
    """Make room for more tokens in every slot, copying the blocks that must not be written shared.

    As `paged_jax.blocks.reserve`, with its copies done in all layers. Each block that is copied
    costs reading and writing that block; where there is nothing to copy, the pools are not touched.

    Args:
      cache: the state; donate it, or both pools are copied.
      num_tokens: i32[S], how many tokens to add to each slot; 0 leaves a slot alone.
      max_tokens: upper bound on `num_tokens` (static).

    Returns:
      `(cache, ok)`. Where `ok`, bool[], is False the cache is unchanged.

    Raises:
      ValueError: `num_tokens` is not i32[S] or `max_tokens` is not a positive integer.
    """
    tables, copies, ok = allocator.reserve(cache.tables, num_tokens, max_tokens=max_tokens)
    k, v = _copy_blocks((cache.k, cache.v), copies)
    return PagedCache(k=k, v=v, tables=tables), ok


def fork(cache: PagedCache, parents: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Make slots into copies of other slots that share all blocks; see `paged_jax.blocks.fork`."""
    tables, ok = allocator.fork(cache.tables, parents)
    return replace(cache, tables=tables), ok


def release(cache: PagedCache, mask: jax.Array) -> PagedCache:
    """Empty the slots of `mask` bool[S]; see `paged_jax.blocks.release`."""
    return replace(cache, tables=allocator.release(cache.tables, mask))


def locate(
    tables: BlockTables, slots: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Find the block, and the place in it, of tokens given by slot and position.

    Args:
      tables: the block tables.
      slots: i32[N], the slot of each token. A negative one marks padding.
      positions: i32[N], the position of each token in its slot, from 0.

    Returns:
      `(blocks, offsets)`, both i32[N]. The block is P, which `write` ignores, where there is no
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


def write(
    pool: jax.Array,
    new: jax.Array,
    *,
    layer: int | jax.Array,
    blocks: jax.Array,
    offsets: jax.Array,
) -> jax.Array:
    """Write one layer's K or V of N tokens to their places; in place if the pool is donated.

    Args:
      pool: [L, P, K, C, D].
      new: [N, K, D], cast to the dtype of the pool.
      layer: the layer, a Python integer or i32[].
      blocks: i32[N]. Tokens whose block is no block, such as P, are dropped.
      offsets: i32[N], the token's place in its block, below C. No two tokens share a place.

    Returns:
      The pool, [L, P, K, C, D]. Differentiable in `pool` and `new`.

    Raises:
      ValueError: shapes that do not agree, a Python `layer` that does not exist, or a pool with
        more rows than int32 counts.

    Example:
      >>> pool = jnp.zeros((2, 4, 1, 8, 16))
      >>> places = dict(blocks=jnp.array([3, 4]), offsets=jnp.array([7, 0]))
      >>> pool = write(pool, jnp.ones((2, 1, 16)), layer=1, **places)
      >>> float(pool.sum()), float(pool[1, 3, 0, 7].sum())
      (16.0, 16.0)
    """
    arrays = dict(pool=(pool, "LPKCD"), new=(new, "NKD"), blocks=(blocks, "N"))
    sizes = bind("write", **arrays, offsets=(offsets, "N"))
    _check_layer("write", layer, sizes["L"])
    _check_num_rows("write", pool.shape, num_new=sizes["N"] * sizes["K"])
    num_layers, num_blocks, num_kv_heads, block_size, head_dim = pool.shape

    is_kept = (blocks >= 0) & (blocks < num_blocks) & (layer >= 0) & (layer < num_layers)
    is_kept &= (offsets >= 0) & (offsets < block_size)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    first_heads = (layer * num_blocks + jnp.where(is_kept, blocks, 0)) * num_kv_heads
    rows_NK = (first_heads[:, None] + heads[None, :]) * block_size + offsets[:, None]
    # A block of P would fall into the next layer, so dropped rows are sent past the whole pool,
    # each to its own place, since JAX differentiates a scatter only if its indices are unique.
    rows = pool.reshape(-1, head_dim)
    past_NK = rows.shape[0] + jnp.arange(rows_NK.size, dtype=jnp.int32).reshape(rows_NK.shape)
    index = jnp.where(is_kept[:, None], rows_NK, past_NK).reshape(-1)
    rows = _set_rows(rows, index, new.astype(pool.dtype).reshape(-1, head_dim))
    return rows.reshape(pool.shape)


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

    def read(pool: jax.Array) -> jax.Array:
        return jnp.where(is_token[:, None, None], pool[layer, blocks, :, offsets], 0)

    return read(cache.k), read(cache.v)


def _copy_blocks(pools: tuple[jax.Array, ...], copies: BlockCopies) -> tuple[jax.Array, ...]:
    """Copy blocks in all layers of every pool, one at a time so that no temporary is large.

    The loop runs once per real copy. Copying one block for each slot in a single scatter instead
    would touch S blocks at every step, almost always for nothing.
    """
    num_layers, num_blocks, num_kv_heads, block_size, head_dim = pools[0].shape
    (num_slots,) = copies.source.shape
    is_copy = copies.source < num_blocks
    (order,) = jnp.nonzero(is_copy, size=num_slots, fill_value=0)
    num_block_rows = num_kv_heads * block_size
    layers_L1 = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * num_blocks
    in_block = jnp.arange(num_block_rows, dtype=jnp.int32)

    def rows_of(block: jax.Array) -> jax.Array:
        return ((layers_L1 + block) * num_block_rows + in_block[None, :]).reshape(-1)

    def copy(i: jax.Array, pools_rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        source = rows_of(copies.source[order[i]])
        target = rows_of(copies.target[order[i]])
        return tuple(_set_rows(rows, target, rows[source]) for rows in pools_rows)

    num_copies = jnp.sum(is_copy, dtype=jnp.int32)
    pools_rows = tuple(pool.reshape(-1, head_dim) for pool in pools)
    pools_rows = lax.fori_loop(jnp.int32(0), num_copies, copy, pools_rows)
    return tuple(rows.reshape(pools[0].shape) for rows in pools_rows)


@jax.custom_jvp
def _set_rows(rows: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    """Scatter `new` [N, D] to `rows` at distinct `index` i32[N]; those past the end are dropped.

    XLA's CPU backend computes a bfloat16 scatter (or dynamic_update_slice) in float32, converting
    the whole array there and back at every call. Scattering its bits as uint16 leaves one pass over
    the array when a program first writes to it and one at its end, however many writes there are:
    between writes the casts cancel. Remove once a donated bfloat16 scatter is in place on CPU.
    """
    if rows.dtype != jnp.bfloat16:
        return _set_rows_as_is(rows, index, new)
    # Elsewhere bfloat16 is scattered in place as it is, and the casts would be what copies.
    return lax.platform_dependent(rows, index, new, cpu=_set_rows_as_bits, default=_set_rows_as_is)


def _set_rows_as_is(rows: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    return rows.at[index].set(new, mode="drop", unique_indices=True)


def _set_rows_as_bits(rows: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(rows, jnp.uint16)
    bits = _set_rows_as_is(bits, index, lax.bitcast_convert_type(new, jnp.uint16))
    return lax.bitcast_convert_type(bits, rows.dtype)


@_set_rows.defjvp
def _set_rows_jvp(primals, tangents):
    # Needed because the derivative of a cast of bits is zero for JAX, without a warning.
    rows, index, new = primals
    rows_dot, _, new_dot = tangents
    return _set_rows(rows, index, new), _set_rows_as_is(rows_dot, index, new_dot)


def _check_layer(function: str, layer: int | jax.Array, num_layers: int) -> None:
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise ValueError(
            f"{function}: layer must be 0 to {num_layers - 1}, got {layer}. Pass a layer."
        )


def _check_num_rows(function: str, shape: tuple[int, ...], num_new: int = 0) -> None:
    num_layers, num_blocks, num_kv_heads, block_size, _ = shape
    num_rows = num_layers * num_blocks * num_kv_heads * block_size
    if num_rows + num_new > _MAX_ROWS:
        raise ValueError(
            f"{function}: the pool must have at most {_MAX_ROWS - num_new} rows L * P * K * C, got "
            f"{num_rows}. Use fewer blocks, or shard the KV heads over devices."
        )
