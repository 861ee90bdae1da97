# pyright: strict, reportUnknownMemberType=false
"""Pools of KV blocks, and pages: the arrays that hold the keys and values of a cache."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from paged_jax.formatting import short_repr

# Keys or values.
Half = Literal["k", "v"]


@short_repr
class Pools(NamedTuple):
    """Keys and values of all blocks and layers, with scales if they are quantised.

    Attributes:
      k: ``[L, P, K, C, D]``, keys; floating point, or the dtype of a quantised pool.
      v: ``[L, P, K, C, U]``, values, of the same dtype as `k`; U is D in most models. None if
        each value vector is the beginning of its key vector (latent attention).
      k_scale: f32 ``[L, P, K, C]``, scale of the key of each token and head, which multiplies its
        elements; None if `k` is not quantised.
      v_scale: f32 ``[L, P, K, C]``, scale of the value of each token and head; None if `v` is None
        or the pools are not quantised.
    """

    k: jax.Array
    v: jax.Array | None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether the pools have scales, see `kv_dtypes`."""
        return self.k_scale is not None

    @property
    def shares_values(self) -> bool:
        """Whether each value vector is the beginning of its key vector (latent attention)."""
        return self.v is None

    @property
    def dtype(self) -> Any:
        """Dtype of keys and values."""
        return self.k.dtype

    @property
    def num_blocks(self) -> int:
        """Number of blocks (P)."""
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads (K)."""
        return self.k.shape[2]

    @property
    def block_size(self) -> int:
        """Number of tokens in a block (C)."""
        return self.k.shape[3]

    def map(self, function: Callable[[Any], Any]) -> "Pools":
        """Return new pools with a function applied to `k` and `v`, but not to the scales."""
        return self._replace(k=function(self.k), v=None if self.v is None else function(self.v))

    def place(self, half: Half, layer: Any, block: Any, head: Any, offset: Any) -> tuple[Any, Any]:
        """Return the array that stores the keys or values, and the index of tokens in this array.

        `half` is ``"k"`` or ``"v"``. `offset` is an offset in the block, or a range of offsets.
        """
        pool = self.v if half == "v" and self.v is not None else self.k
        return pool, (layer, block, head, offset)


class Pages(NamedTuple):
    """Keys and values of a layer in a single array, with the layout of JAX's ragged TPU kernel.

    Attributes:
      kv: ``[P, C, 2 * K, D]``, floating point or a dtype of `kv_dtypes`. Each token has the key of
        head 0, its value, the key of head 1, its value, and so on. Pages ``[P, C, 1, D]`` have the
        keys of a single KV head. Each value vector is then the beginning of its key vector.
    """

    kv: jax.Array

    # Pages have no scales per token. Instead, `ragged_paged_attention` has one factor for all keys,
    # and one factor for all values.
    k_scale = None
    v_scale = None
    is_quantised = False

    @property
    def dtype(self) -> Any:
        """Dtype of keys and values."""
        return self.kv.dtype

    @property
    def num_blocks(self) -> int:
        """Number of pages (P)."""
        return self.kv.shape[0]

    @property
    def shares_values(self) -> bool:
        """Whether each value vector is the beginning of its key vector (latent attention)."""
        return self.kv.shape[2] == 1

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads (K)."""
        return max(self.kv.shape[2] // 2, 1)

    @property
    def block_size(self) -> int:
        """Number of tokens in a page (C)."""
        return self.kv.shape[1]

    def map(self, function: Callable[[Any], Any]) -> "Pages":
        """Return new pages with a function applied to `kv`."""
        return Pages(function(self.kv))

    def place(self, half: Half, layer: Any, block: Any, head: Any, offset: Any) -> tuple[Any, Any]:
        """Return `kv`, and the index in `kv` at which the keys or values of tokens are stored.

        `half` is ``"k"`` or ``"v"``. `offset` is an offset in the page, or a range of offsets.
        """
        del layer  # pages have a single layer
        if self.shares_values:
            return self.kv, (block, offset, head)
        return self.kv, (block, offset, 2 * head + (1 if half == "v" else 0))
