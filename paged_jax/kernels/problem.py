# pyright: strict, reportUnknownMemberType=false
"""Description of a call on pools of KV blocks: what decides whether a kernel supports it."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.formatting import listed
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op_args import (
    AttentionArgs,
    CopyArgs,
    Options,
    RaggedArgs,
    RopeWriteArgs,
    WriteArgs,
)
from paged_jax.kernels.pools import Pages, Pools

# The ops whose calls a `Problem` describes.
PoolOp = Literal["decode", "prefill", "ragged", "write", "rope_write", "copy_blocks"]

ATTENTION: tuple[PoolOp, ...] = ("decode", "prefill", "ragged")


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and options of a call, which determine the backends that support the call.

    Attributes:
      op: the op.
      sizes: pairs of a dimension letter and its size, see `paged_jax.dims`.
      q_dtype: dtype of the queries (attention), of the new keys and values (write), of `qkv`
        (rope_write), or of the pools (copy_blocks).
      pool_dtype: dtype of the pools.
      has_sinks: whether there are attention sinks.
      options: options of the op.
      lanes: size of the last dimension of the pool of keys: D, or D padded to a multiple of 128.
      shares_values: whether each value vector is the beginning of its key vector.
    """

    op: PoolOp
    sizes: tuple[tuple[str, int], ...]
    q_dtype: Any
    pool_dtype: Any
    has_sinks: bool
    options: Options
    lanes: int
    shares_values: bool = False

    @classmethod
    def of_attention(cls, args: AttentionArgs, options: Options) -> Self:
        """Describe a decode or a prefill."""
        *batch, H, D = args.q.shape
        sizes = dict(zip("BT", batch, strict=False)) | {"H": H, "D": D}
        sizes["M"] = args.block_tables.shape[1]
        return cls._of_pools(args.op, args.q.dtype, args.pools, options, sizes, args.sinks)

    @classmethod
    def of_ragged(cls, args: RaggedArgs, options: Options) -> Self:
        """Describe a ragged batch."""
        N, H, D = args.q.shape
        B, M = args.block_tables.shape
        sizes = {"N": N, "H": H, "D": D, "B": B, "M": M}
        return cls._of_pools("ragged", args.q.dtype, args.pages, options, sizes, args.sinks)

    @classmethod
    def of_write(cls, args: WriteArgs, options: None = None) -> Self:
        """Describe a write."""
        N, _, D = args.k.shape
        del options
        value_dim = None if args.v is None or args.v.shape[-1] == D else args.v.shape[-1]
        write_options, sizes = Options(value_dim=value_dim), {"N": N, "D": D}
        return cls._of_pools("write", args.k.dtype, args.pools, write_options, sizes)

    @classmethod
    def of_rope_write(cls, args: RopeWriteArgs, options: Options) -> Self:
        """Describe a write of a rotated projection."""
        N, K, width, D = args.qkv.shape
        sizes = {"N": N, "D": D, "H": K * (width - 2)}
        return cls._of_pools("rope_write", args.qkv.dtype, args.pools, options, sizes)

    @classmethod
    def of_copy(cls, args: CopyArgs, options: None = None) -> Self:
        """Describe a copy of blocks."""
        del options
        pools, D = args.pools, args.pools.k.shape[-1]
        value_dim = None if pools.v is None or pools.v.shape[-1] == D else pools.v.shape[-1]
        copy_options, sizes = Options(value_dim=value_dim), {"N": args.sources.size, "D": D}
        return cls._of_pools("copy_blocks", pools.k.dtype, pools, copy_options, sizes)

    @classmethod
    def _of_pools(
        cls,
        op: PoolOp,
        dtype: DTypeLike,
        pools: Pools | Pages,
        options: Options,
        sizes: dict[str, int],
        sinks: jax.Array | None = None,
    ) -> Self:
        sizes |= {"P": pools.num_blocks, "K": pools.num_kv_heads, "C": pools.block_size}
        if isinstance(pools, Pools):
            sizes["L"] = pools.k.shape[0]
        if options.value_dim is not None:
            sizes["U"] = options.value_dim
        return cls(
            op=op,
            sizes=tuple(sizes.items()),
            q_dtype=jnp.dtype(dtype),
            pool_dtype=pools.dtype,
            has_sinks=sinks is not None,
            options=options,
            lanes=pools[0].shape[-1],
            shares_values=pools.shares_values,
        )

    @property
    def value_dim(self) -> int:
        """Number of elements of a value: U, or D if `sizes` has no U."""
        return dict(self.sizes).get("U", self["D"])

    @property
    def kv(self) -> KVDtype:
        """The rules for storing keys and values in the dtype of the pools."""
        return KVDtype.of(self.pool_dtype)

    def pool_dtype_refusal(self, *supported: str) -> str | None:
        """Return why kernels for pools of these dtypes do not support the call, or None."""
        name = jnp.dtype(self.pool_dtype).name
        if name in supported:
            return None
        pools = "pages" if self.op == "ragged" else "pools"
        return f"{pools} must be {listed(*supported)}, got {name}"

    @property
    def separate_values_refusal(self) -> str | None:
        """Reason why kernels that need values of D elements do not support the call, or None.

        Such kernels support shorter values only if each value vector is the beginning of its key
        vector.
        """
        if self.shares_values or "U" not in dict(self.sizes) or self.value_dim == self["D"]:
            return None
        return (
            f"it reads a pool of values only if values have {self['D']} elements like keys, got "
            f"{self.value_dim}"
        )

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]
