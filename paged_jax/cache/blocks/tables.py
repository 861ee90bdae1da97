"""The block tables: a row of block ids for each slot, over the pool that they come from."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from paged_jax.argument_names import names_arguments
from paged_jax.cache import block_pool
from paged_jax.cache.block_pool import BlockPool, require
from paged_jax.cache.sizes import first_kept_column, num_blocks_needed
from paged_jax.checks import check_positive
from paged_jax.dims import bind
from paged_jax.short_repr import cut, integers, shortened

# Sums of two block ids or of two token positions must fit in int32.
_MAX_SIZE = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTables:
    """The blocks of every slot, and the pool they come from.

    Attributes:
      pool: the `BlockPool`.
      block_tables: i32[S, M], the blocks of each slot in the order of its tokens, then P.
      lengths: i32[S], the number of tokens in each slot; 0 if it is empty.
      block_size: C, the number of tokens in a block (static).
      window: None, or how many last tokens are attended to, the query's own included (static).
          Blocks that no token to come attends to are given back when the slot next grows, and
          there is P in their columns.
      first_columns: None without a window, else i32[S], the first column that is still held: at
          most `first_kept_column`.

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(
      ...     num_blocks=6, num_slots=3, max_blocks_per_slot=4, block_size=4
      ... )
      >>> tables, copies, ok = reserve(tables, jnp.array([6, 0, 1]), max_tokens=8)
      >>> bool(ok), tables.block_tables.tolist()
      (True, [[0, 1, 6, 6], [6, 6, 6, 6], [2, 6, 6, 6]])
    """

    pool: BlockPool
    block_tables: jax.Array
    lengths: jax.Array
    block_size: int = field(metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    first_columns: jax.Array | None = None

    def __repr__(self) -> str:
        use = describe_use(self)
        return shortened(self) if use is None else cut(f"BlockTables({use})")

    @classmethod
    @names_arguments
    def create(
        cls,
        num_blocks: int,
        num_slots: int,
        max_blocks_per_slot: int,
        block_size: int,
        window: int | None = None,
    ) -> "BlockTables":
        """Return `num_slots` empty slots over a pool of `num_blocks` free blocks.

        Raises:
          ValueError: a size is not a positive integer, or so large that block ids or token
              positions would not fit in int32.
        """
        check_positive(
            "BlockTables.create",
            num_blocks=num_blocks,
            num_slots=num_slots,
            max_blocks_per_slot=max_blocks_per_slot,
            block_size=block_size,
            **({} if window is None else {"window": window}),
        )
        _check_below("num_blocks", num_blocks, "Use fewer, larger blocks.")
        _check_below(
            "max_blocks_per_slot * block_size",
            max_blocks_per_slot * block_size,
            "Use shorter block tables.",
        )
        return cls(
            pool=BlockPool.create(num_blocks, block_size),
            block_tables=jnp.full((num_slots, max_blocks_per_slot), num_blocks, jnp.int32),
            lengths=jnp.zeros(num_slots, jnp.int32),
            block_size=block_size,
            window=window,
            first_columns=None if window is None else jnp.zeros(num_slots, jnp.int32),
        )

    @property
    def window_state(self) -> tuple[int, jax.Array] | None:
        """`window` and `first_columns`, of which there are both or neither; None for neither."""
        if self.window is None or self.first_columns is None:
            return None
        return self.window, self.first_columns

    @property
    def num_slots(self) -> int:
        """S, the number of slots."""
        return self.block_tables.shape[0]

    @property
    def max_blocks_per_slot(self) -> int:
        """M, the number of blocks a slot can hold."""
        return self.block_tables.shape[1]

    @property
    def num_blocks(self) -> int:
        """P, the number of blocks in the pool; also the entry that stands for "no block"."""
        return self.pool.num_blocks


def check_invariants(tables: BlockTables) -> None:
    """Check on the host that no block is lost, free and held at once, or held by mistake.

    For tests and debugging: it copies the state to the host, and cannot be called inside `jit`.

    Raises:
      AssertionError: naming the first invariant that does not hold, and where.

    Example:
      >>> check_invariants(BlockTables.create(4, 2, 2, 4))
    """
    block_pool.check_invariants(tables.pool)
    table, lengths = np.asarray(tables.block_tables), np.asarray(tables.lengths)
    num_blocks = tables.num_blocks

    is_length = (lengths >= 0) & (lengths <= table.shape[1] * tables.block_size)
    require(is_length.all(), "lengths", "fit the tables", lengths.tolist())
    begins = _checked_first_columns(tables, lengths)
    ends = num_blocks_needed(lengths, tables.block_size)
    for slot, row in enumerate(table.tolist()):
        left, held, rest = np.split(row, [begins[slot], ends[slot]])
        name = f"block_tables[{slot}]"
        require(np.all((0 <= held) & (held < num_blocks)), name, "cover the length", row)
        require(len(np.unique(held)) == len(held), name, "hold a block once", row)
        require(np.all(left == num_blocks), name, f"be {num_blocks} before first_columns", row)
        require(np.all(rest == num_blocks), name, f"be {num_blocks} past the length", row)

    entries = np.bincount(table[table < num_blocks], minlength=num_blocks)
    for block, count in enumerate(np.asarray(tables.pool.ref_counts).tolist()):
        rule = f"be {entries[block]}, as in the tables"
        require(count == entries[block], f"ref_counts[{block}]", rule, count)


def _checked_first_columns(tables: BlockTables, lengths: np.ndarray) -> np.ndarray:
    """The first column that each slot holds, which the window of its next token must not precede.

    Of how much lies between the two nothing can be known here: it is what the last program added.
    """
    if tables.window is None:
        require(tables.first_columns is None, "first_columns", "be None", tables.first_columns)
        return np.zeros_like(lengths)
    first_columns = np.asarray(tables.first_columns)
    kept = first_kept_column(lengths, tables.window, tables.block_size)
    is_kept = (first_columns >= 0) & (first_columns <= kept)
    rule = f"be 0 to {kept.tolist()}, where windows begin"
    require(is_kept.all(), "first_columns", rule, first_columns.tolist())
    return first_columns


def as_slot_values(
    function: str, name: str, values: ArrayLike, dtype: DTypeLike, tables: BlockTables
) -> jax.Array:
    """An argument `[S]` of the tables' slots as an array of `dtype`, or ValueError."""
    values = jnp.asarray(values)
    bind(function, block_tables=(tables.block_tables, "SM"), **{name: (values, "S")})
    return check_dtype(function, name, values, dtype)


def check_dtype(function: str, name: str, values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The values if they are of `dtype`, else ValueError."""
    if values.dtype != dtype:
        raise ValueError(
            f"{function}: {name} must be {jnp.dtype(dtype).name}, got {values.dtype}. Cast it."
        )
    return values


def _check_below(name: str, size: int, advice: str) -> None:
    if size >= _MAX_SIZE:
        raise ValueError(
            f"BlockTables.create: {name} must be below {_MAX_SIZE}, got {size}. {advice}"
        )


def describe_use(tables: BlockTables) -> str | None:
    """Return the number of used blocks and the lengths of the slots as text, for a `repr`.

    Returns None if the arrays cannot be read or have extra dimensions, as inside `jax.vmap`.
    """
    num_free = integers(tables.pool.num_free, 0)
    lengths = integers(tables.lengths, 1)
    shape = getattr(tables.pool.ref_counts, "shape", ())
    if num_free is None or lengths is None or len(shape) != 1:
        return None
    window = "" if tables.window is None else f", window {tables.window}"
    return (
        f"{shape[0] - int(num_free)} of {shape[0]} blocks of {tables.block_size} tokens in use"
        f"{window}, lengths {shortened(lengths.tolist())}"
    )
