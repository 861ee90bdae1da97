"""What an engine runs: a model whose attention is handed to it, and so may read a paged cache.

A subclass says what its layers compute, and leaves attention to a function that it is given::

    PagedModel   prefill, score, decode     reserve blocks, find places, choose the attention
                     |
    subclass     hidden_states(token_ids, positions, attend, carry)
                     in layer i:    out, carry = attend(i, Heads(q, k, v), carry)
                     |
                 logits(hidden)

Keys and values reach the cache, and attention reads them there, inside `attend`: the model sees
neither blocks nor lengths. `Llama` is one such model; `examples/other_models.py` has another one,
of somebody else's.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from paged_jax.arguments import check_positive, names_arguments
from paged_jax.cache.groups import CacheGroup
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.cache.sequence_blocks import max_blocks_in_slot, num_blocks_needed
from paged_jax.kernels import Pools, padded_head_dim
from paged_jax.models.arguments import Rows, as_rows
from paged_jax.models.config import LlamaConfig
from paged_jax.models.layer import Attend, Carry
from paged_jax.models.paged_rows import (
    PagedRows,
    append_rows,
    check_layers,
    chunk_attention,
    decode_attention,
)

# Pools of a cache, or of each of its groups.
CachePools = TypeVar("CachePools", Pools, tuple[Pools, ...])


class PagedModel(nnx.Module):
    """A decoder over a paged KV cache: what `Engine`, `LLM` and `rollout` run.

    Subclasses set `config` and define `hidden_states` and `logits`; the rest follows.

    Attributes:
      config: sizes of the model. Those of the cache are layers, KV heads, head dimension and
        vocabulary; `max_position_embeddings` bounds sequences, `eos_token_ids` end them,
        `windows` are those of the layers, and hidden sizes are what memory is planned by. How
        the model computes is its own business.

    Example:
      >>> from paged_jax import Heads, LlamaConfig
      >>> class Counter(PagedModel):              # what follows is the number of tokens so far
      ...     def __init__(self):
      ...         self.config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8,
      ...             num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
      ...         self.ones = nnx.Param(jnp.ones(8))
      ...     def hidden_states(self, token_ids, positions, attend, carry, backend=None):
      ...         x = jnp.broadcast_to(self.ones[...], (token_ids.size, 1, 8))
      ...         out, carry = attend(0, Heads(x, x, x), carry)
      ...         return out[:, 0] * (positions[:, None] + 1), carry
      ...     def logits(self, x, backend=None):
      ...         return jax.nn.one_hot(jnp.round(x[..., 0]).astype(jnp.int32), 32)
      >>> model = Counter()                     # or LLM(model), or rollout(model, ...)
      >>> cache = model.create_cache(num_slots=1, max_length=16)
      >>> prefill = jax.jit(Counter.prefill, donate_argnames="cache")
      >>> logits, cache, ok = prefill(
      ...     model, cache, jnp.array([[5, 5, 5]]), jnp.array([0]), jnp.array([3]))
      >>> int(jnp.argmax(logits)), cache.lengths.tolist()
      (3, [3])
    """

    config: LlamaConfig

    def hidden_states(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend[Carry],
        carry: Carry,
        backend: str | None = None,
    ) -> tuple[jax.Array, Carry]:
        """Run the layers over tokens, whatever sequences they belong to.

        Args:
          token_ids: i32 ``[N]``; some may be padding, and belong to no sequence.
          positions: i32 ``[N]``, of each in its sequence; -1 for padding.
          attend: function of a layer's number, `Heads` and the carry to attention's output
            ``[N, H, D]`` in any floating type, and the carry. Each layer calls it once, in order;
            the number may be traced, in a scan, where all layers have the same window.
          carry: what the first call of `attend` is given. In `jit` it holds the cache's pools: hand
            it on as a scan's carry.
          backend: backend that was asked for; None for the best one.

        Returns:
          What `logits` takes, ``[N, E]``, and the last carry.
        """
        raise NotImplementedError

    def logits(self, x: jax.Array, backend: str | None = None) -> jax.Array:
        """Score what follows: float32 ``[..., V]`` from rows of the hidden states ``[..., E]``."""
        raise NotImplementedError

    @property
    def float_dtype(self) -> np.dtype:
        """The type of the model's floats, in which K and V are kept by default."""
        return self.weight_dtype

    @property
    def weight_dtype(self) -> np.dtype:
        """The type of the model's matrices: that of its largest array."""
        arrays = jax.tree.leaves(nnx.state(self))
        return max(arrays, key=lambda array: array.size).dtype

    @names_arguments
    def create_cache(
        self,
        *,
        num_slots: int,
        max_length: int,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_tokens: int | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> PagedCache:
        """Return an empty cache for this model, on the device that JAX uses by default.

        Args:
          num_slots, max_length, num_blocks, block_size, max_tokens, dtype: see the function
            `create_cache`.

        Example:
          >>> from paged_jax import Llama
          >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
          ...                      num_hidden_layers=1, num_attention_heads=2,
          ...                      num_key_value_heads=1)
          >>> model = Llama(config, rngs=nnx.Rngs(0))
          >>> cache = model.create_cache(num_slots=4, max_length=100, num_blocks=16)
          >>> cache.k.shape, cache.block_tables.shape     # [L, P, K, C, D], [S, M]
          ((1, 16, 1, 16, 8), (4, 7))
        """
        return create_cache(
            self.config,
            num_slots=num_slots,
            max_length=max_length,
            num_blocks=num_blocks,
            block_size=block_size,
            max_tokens=max_tokens,
            dtype=dtype,
        )

    @names_arguments
    def prefill(
        self,
        cache: PagedCache,
        token_ids: jax.Array,
        slots: jax.Array,
        num_tokens: jax.Array,
        *,
        backend: str | None = None,
    ) -> tuple[jax.Array, PagedCache, jax.Array]:
        """Append a chunk of prompt to each of some slots and score what follows it.

        Pure: jit it with the cache donated. Blocks are reserved here; where they do not suffice,
        or a slot does not exist, nothing changes and ``ok`` is false.

        Args:
          cache: the cache; whatever the slots already hold is context.
          token_ids: i32 ``[B, T]``, each row padded at its end.
          slots: i32 ``[B]``, the distinct slots of the rows; a negative one leaves its row out.
          num_tokens: i32 ``[B]``, tokens in each row, 1 to T.
          backend: backend of the attention, see `paged_attention`, and of what else the model does.

        Returns:
          float32 logits ``[B, V]`` after the last token of each row, the new cache, and ``ok``,
          bool ``[]``.

        Raises:
          ValueError: shapes or types do not fit together or, outside of `jit`, a slot appears twice
            or a token is outside of the vocabulary. Inside, rows with the same slot spoil each
            other's tokens, and such a token is taken for the first or the last of the vocabulary.
        """
        rows = as_rows(self._name("prefill"), self.config.vocab_size, token_ids, slots, num_tokens)
        x, cache, ok, num_tokens = self._run_chunks(cache, rows, backend)
        last = jnp.maximum(num_tokens - 1, 0)[:, None, None]
        logits = self.logits(jnp.take_along_axis(x, last, axis=1)[:, 0], backend)
        return logits, cache, ok

    def score(
        self,
        cache: PagedCache,
        token_ids: jax.Array,
        slots: jax.Array,
        num_tokens: jax.Array,
        *,
        backend: str | None = None,
    ) -> tuple[jax.Array, PagedCache, jax.Array]:
        """As `prefill`, but score what follows each token of the chunks and not only the last.

        Args:
          cache, slots, num_tokens, backend: see `prefill`.
          token_ids: i32 ``[B, T]``, each row padded at its end.

        Returns:
          float32 logits ``[B, T, V]`` (of no meaning in the padding), the new cache, and ``ok``,
          bool ``[]``.

        Raises:
          ValueError: see `prefill`.
        """
        rows = as_rows(self._name("score"), self.config.vocab_size, token_ids, slots, num_tokens)
        x, cache, ok, _ = self._run_chunks(cache, rows, backend)
        return self.logits(x, backend), cache, ok

    @names_arguments
    def decode(
        self,
        cache: PagedCache,
        token_ids: jax.Array,
        slots: jax.Array,
        *,
        cascade: bool = False,
        backend: str | None = None,
    ) -> tuple[jax.Array, PagedCache, jax.Array]:
        """Append one token to each of some slots and score what follows it.

        Pure: jit it with the cache donated. A block is taken where a slot crosses a boundary or
        writes into a shared block; where blocks do not suffice nothing changes and ``ok`` is
        false.

        Args:
          cache: the cache.
          token_ids: i32 ``[B]``.
          slots: i32 ``[B]``, the distinct slots of the rows; a negative one leaves its row out.
          cascade: whether blocks that all slots begin with are read once for all of them, in layers
            without a sliding window, see `cascade_attention` (static).
          backend: backend of the attention, see `paged_attention`, and of what else the model does.

        Returns:
          float32 logits ``[B, V]`` (of no meaning in rows left out), the new cache, and ``ok``,
          bool ``[]``.

        Raises:
          ValueError: see `prefill`; or all layers have a sliding window, with which there is no
            `cascade`.

        Example:
          >>> from paged_jax import Llama
          >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
          ...                      num_hidden_layers=1, num_attention_heads=2,
          ...                      num_key_value_heads=1)
          >>> model = Llama(config, rngs=nnx.Rngs(0))
          >>> cache = PagedCache.create(num_layers=1, num_blocks=8, num_kv_heads=1, block_size=4,
          ...                           head_dim=8, num_slots=2, max_blocks_per_slot=4)
          >>> decode = jax.jit(Llama.decode, donate_argnames="cache")
          >>> logits, cache, ok = decode(model, cache, jnp.array([3, 7]), jnp.array([0, 1]))
          >>> logits.shape, bool(ok), cache.lengths.tolist()
          ((2, 32), True, [1, 1])
        """
        token_ids, slots, num_tokens = as_rows(
            self._name("decode"), self.config.vocab_size, token_ids, slots
        )
        cache, ok, rows = append_rows(cache, slots, num_tokens, 1, backend)
        logits, pools = self.decode_rows(
            cache.group_pools, token_ids, rows, cascade=cascade, backend=backend
        )
        return logits, cache.replace_group_pools(pools), ok

    def decode_rows(
        self,
        pools: CachePools,
        token_ids: jax.Array,
        rows: PagedRows,
        *,
        cascade: bool = False,
        backend: str | None = None,
    ) -> tuple[jax.Array, CachePools]:
        """As `decode`, of tokens whose places are known: blocks were reserved for them before.

        Args:
          pools: the pools of each group of the cache; donate them.
          token_ids: i32 ``[B]``.
          rows: places of these tokens, one a row, see `paged_rows.next_rows`.
          cascade, backend: see `decode`.

        Returns:
          float32 logits ``[B, V]`` (of no meaning in rows left out), and the new pools.

        Raises:
          ValueError: all layers have a sliding window, with which there is no `cascade`; or the
            cache is for other layers.
        """
        windows = self.config.sliding_windows
        if cascade and None not in windows:
            raise ValueError(
                f"{self._name('decode')}: cascade must be False where all layers have a sliding "
                "window."
            )
        check_layers(self._name("decode"), rows, windows)
        attend = decode_attention(rows, windows, cascade=cascade, backend=backend)
        x, pools = self.hidden_states(token_ids, rows.positions, attend, pools, backend)
        return self.logits(x, backend), pools

    def _name(self, method: str) -> str:
        """What messages begin with."""
        return f"{type(self).__name__}.{method}"

    def _run_chunks(
        self, cache: PagedCache, rows: Rows, backend: str | None
    ) -> tuple[jax.Array, PagedCache, jax.Array, jax.Array]:
        """Append chunks: what the last layer gives for each token ``[B, T, E]``, the cache, ``ok``,
        and how many tokens of each row were taken ``[B]``."""
        token_ids, slots, num_tokens = rows
        B, T = token_ids.shape
        cache, ok, places = append_rows(cache, slots, num_tokens, T, backend)
        check_layers(self._name("prefill"), places, self.config.sliding_windows)
        attend = chunk_attention(places, B, T, self.config.sliding_windows, backend=backend)
        x, pools = self.hidden_states(
            token_ids.reshape(-1), places.positions, attend, cache.group_pools, backend
        )
        return x.reshape(B, T, -1), cache.replace_group_pools(pools), ok, places.num_tokens


def create_cache(
    config: LlamaConfig,
    *,
    num_slots: int,
    max_length: int,
    num_blocks: int | None = None,
    block_size: int = 16,
    max_tokens: int | None = None,
    dtype: DTypeLike = jnp.float32,
    platform: str | None = None,
) -> PagedCache:
    """Return an empty cache for models of a config.

    Layers with the same sliding window form a group of the cache. They keep only the window of a
    sequence, and the tokens that were appended last.

    Args:
      config: configuration of the model.
      num_slots: S, sequences that it holds at once.
      max_length: most tokens of a sequence.
      num_blocks: P, which all slots share, of the layers that keep most; by default enough for all
        slots at full length. Layers with a shorter window have as many, or fewer that are enough
        for all slots.
      block_size: C, tokens in a block.
      max_tokens: most tokens that one program appends to a slot; by default `max_length`, with
        which windows save no memory. More than that fit just where other slots hold less.
      dtype: type of K and V; int8 and float8_e4m3fn quantise them, see `PagedCache.create`.
      platform: where it will be used, by default `jax.default_backend()`. On a TPU the last axis of
        the pools is padded, see `kernels.padded_head_dim`.

    Raises:
      ValueError: a size is not a positive integer, or the pool has more rows than int32 counts.

    Example:
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...     num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, sliding_window=32,
      ...     layer_types=("sliding_attention", "sliding_attention", "full_attention"))
      >>> cache = create_cache(config, num_slots=4, max_length=1024, max_tokens=64)
      >>> [group.pools.k.shape for group in cache.groups]     # [L, P, K, C, D]
      [(1, 256, 1, 16, 8), (2, 28, 1, 16, 8)]
    """
    max_tokens = max_length if max_tokens is None else max_tokens
    check_positive(
        "create_cache",
        max_length=max_length,
        num_slots=num_slots,
        block_size=block_size,
        max_tokens=max_tokens,
    )
    width = num_blocks_needed(max_length, block_size)
    groups: list[CacheGroup] = []
    for window, layers in config.layer_groups:
        most = num_slots * max_blocks_in_slot(window, max_length, max_tokens, block_size)
        if groups:
            num_blocks = min(groups[0].num_blocks, most)
        elif num_blocks is None:
            num_blocks = most
        groups.append(
            CacheGroup.create(
                num_layers=len(layers),
                num_blocks=num_blocks,
                num_kv_heads=config.num_key_value_heads,
                block_size=block_size,
                head_dim=padded_head_dim(config.head_dim, platform or jax.default_backend()),
                num_slots=num_slots,
                max_blocks_per_slot=width,
                dtype=dtype,
                window=window,
            )
        )
    places = {
        layer: (index, number)
        for index, group in enumerate(config.layer_groups)
        for number, layer in enumerate(group.layers)
    }
    return PagedCache(tuple(groups), tuple(places[layer] for layer in range(len(places))))
