# pyright: strict, reportUnknownMemberType=false
"""Base class of models with a paged KV cache, which `Engine`, `LLM` and `rollout` can run.

A subclass defines the computation of its layers, and calls a given function for attention::

    PagedModel   prefill, score, decode     reserve blocks, make an AttentionMetadata
                     |
    subclass     hidden_states(token_ids, positions, attend, carry)
                     in layer i:    out, carry = attend(i, Heads(q, k, v), carry)
                     |
                 logits(hidden)

`attend` writes keys and values into the cache, and attends to the cache, see `paged_attention`. The
model itself does not handle blocks or lengths. `Decoder` is one such model,
`examples/other_models.py` shows another one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from paged_jax.arguments import ArgumentError, check_positive, names_arguments
from paged_jax.cache.attention_metadata import AttentionMetadata
from paged_jax.cache.groups import CacheGroup
from paged_jax.cache.paged_cache import PagedCache, reserve_rows
from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.kernels import padded_head_dim
from paged_jax.kernels.op import BACKENDS, exact_variants, is_exact
from paged_jax.kernels.platforms import default_kv_dtype
from paged_jax.kernels.weight_formats import Weight, WeightFormat
from paged_jax.models.config import ModelConfig
from paged_jax.models.layer_attention import Attend, Carry
from paged_jax.models.layer_groups import layer_places
from paged_jax.models.matrix_formats import MatrixFormats
from paged_jax.models.paged_attention import (
    DecodeAttention,
    DraftAttention,
    DraftCarry,
    PrefillAttention,
    check_layers,
    count_common_blocks,
)
from paged_jax.models.recurrent_states import DraftStates, GroupPools, create_states
from paged_jax.models.sequence_attention import SequenceAttention
from paged_jax.models.step_arrays import StepArrays, as_step_arrays


class OutputHead(NamedTuple):
    """The steps of `PagedModel.logits`: a matmul, and an elementwise function of its result.

    Attributes:
      x: input of the matmul, float32 ``[..., E]``.
      weight: weight of the matmul, ``[V, E]``.
      finish: function of the result of the matmul, float32, which computes the logits. It uses no
        arrays.
    """

    x: jax.Array
    weight: Weight
    finish: Callable[[jax.Array], jax.Array]


class PagedModel(nnx.Module):
    """A decoder with a paged KV cache.

    Subclasses set `config` and define `hidden_states` and `logits`.

    Attributes:
      config: sizes of the model. The number of layers, the KV heads, the head dimension and the
        sliding windows determine the cache. Token ids are checked against the vocabulary size.
        `max_position_embeddings` limits the length of sequences, and `eos_token_ids` end them.
        Memory planning uses the hidden sizes. All other fields are used only by the subclass.
      numerics: ``"fast"`` or ``"exact"``, see `with_numerics`.
      cache_dtype: name of the dtype of the caches for this model, see `with_numerics`; None for the
        dtype that an engine uses by default, see `kv_dtype`.
      exact_backend: name of the backend for exact numerics without a given backend; None until
        `with_numerics` chooses it.
      int8_activations: whether matmuls round inputs to int8, see `with_int8_activations`.

    Example:
      >>> from paged_jax import Heads, LlamaConfig
      >>> class Counter(PagedModel):              # predicts the number of tokens so far
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

    config: ModelConfig
    numerics: str = "fast"
    cache_dtype: str | None = None
    exact_backend: str | None = None
    int8_activations: bool = False

    def with_int8_activations(self) -> Self:
        """Return the model with the same weights, whose matmuls round their inputs to int8.

        Only matmuls by weights with a code in `weight_formats.INT8_CODES` round their inputs.
        """
        if self.int8_activations:
            return self
        model = nnx.merge(*nnx.split(self))
        model.int8_activations = True
        return model

    def with_numerics(
        self,
        numerics: str | None = None,
        cache_dtype: DTypeLike | None = None,
        backend: str | None = None,
    ) -> Self:
        """Return the model with the same weights and other numerics.

        With ``"exact"``, the bits of a log-probability depend only on the tokens before it, the
        weights and the dtype of the cache. They do not depend on the batch, on chunks, on the
        prefix cache, or on whether an engine, `rollout`, `log_probs` or ``model(token_ids)``
        computes it. ``"fast"`` promises no equal bits.

        Args:
          numerics: ``"fast"`` or ``"exact"``; None to keep the model's.
          cache_dtype: dtype to which `rollout`, `log_probs` and exact numerics round keys and
            values, as the cache of an engine does; None to keep the model's.
          backend: backend of exact numerics, ``"cpu"`` or ``"xla"``. They give different bits, so
            `log_probs` needs the engine's. None to keep the model's, at first the C++ kernels if
            they are available.

        Raises:
          ValueError: this model or machine does not support exact numerics.
        """
        numerics = self.numerics if numerics is None else numerics
        dtype = self.cache_dtype if cache_dtype is None else jnp.dtype(cache_dtype).name
        exact_backend = self.exact_backend
        if numerics == "exact":
            exact_backend = self._choose_exact_backend(dtype or self.kv_dtype.name, backend)
        elif numerics != "fast":
            rule = f"must be 'fast' or 'exact', got {numerics!r}."
            raise ArgumentError("with_numerics", rule, "numerics")
        settings = numerics, dtype, exact_backend
        if settings == (self.numerics, self.cache_dtype, self.exact_backend):
            return self
        model = nnx.merge(*nnx.split(self))
        model.numerics, model.cache_dtype, model.exact_backend = settings
        return model

    def _choose_exact_backend(self, cache_dtype: str, backend: str | None) -> str:
        """Return the exact backend for a backend that `with_numerics` got."""
        reason = self.exact_refusal()
        if reason is not None:
            raise ArgumentError("with_numerics", f"must be 'fast' {reason}.", "numerics")
        codes, dtype = self.matrix_formats.codes, self.float_dtype
        for name in exact_variants(backend or self.exact_backend):
            reason = BACKENDS[name].unavailable_for(codes, dtype, cache_dtype)
            if reason is None:
                return name
        rule = (
            f"must be 'fast' with backend={backend!r}, got 'exact': {reason}. Pass another backend."
        )
        raise ArgumentError("with_numerics", rule, "numerics")

    def exact_refusal(self) -> str | None:
        """Return why the model does not support exact numerics, or None if it does.

        The result is a phrase, such as "for a model with recurrent layers". A subclass supports
        exact numerics if all its sums over rows are `kernels.linear.sum_rows` with its `backend`,
        and all its matmuls are `linear` or `grouped_linear` with its `backend`.
        """
        return f"for the model class {type(self).__name__}"

    def resolve_backend(self, backend: str | None) -> str | None:
        """Return the backend of the model's ops, which is an exact one with exact numerics.

        Raises:
          ValueError: numerics are exact, and the backend has no exact variant.
        """
        if self.numerics == "fast":
            return backend
        return exact_variants(backend or self.exact_backend)[0]

    def final_states(self, token_ids: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """Return the hidden states of whole sequences, computed without a cache.

        The function is differentiable. Keys and values are rounded to `kv_dtype`.

        Args:
          token_ids: i32 ``[B, T]``, each row padded at its end.
          num_tokens: i32 ``[B]``, number of tokens in each row.

        Returns:
          The input of `logits`, float32 ``[B, T, E]``, arbitrary in the padding.
        """
        # Exact numerics need a single program, because XLA fuses operations of a program.
        run: Any = _final_states if self.numerics == "fast" else _final_states_in_jit
        return run(self, token_ids, num_tokens)

    def run_sequences(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend[Any],
        backend: str | None,
    ) -> jax.Array:
        """Embed the tokens of whole sequences and run the layers, differentiably.

        By default, this is `hidden_states`. A subclass whose embedding is not differentiable there
        replaces it.

        Args:
          token_ids: i32 ``[B, T]``.
          positions: i32 ``[B, T]``, -1 for padding.
          attend: see `hidden_states`; the inputs of layers may be ``[B, T, ...]``.
          backend: see `hidden_states`.

        Returns:
          The hidden states, float32 ``[B, T, E]``.
        """
        flat = token_ids.reshape(-1), positions.reshape(-1)
        x, _ = self.hidden_states(*flat, attend, (), backend)
        return x.reshape(*token_ids.shape, -1)

    def hidden_states(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend[Carry],
        carry: Carry,
        backend: str | None = None,
    ) -> tuple[jax.Array, Carry]:
        """Embed tokens, which may belong to several sequences, and run the layers.

        Args:
          token_ids: i32 ``[N]``. Some of the tokens may be padding.
          positions: i32 ``[N]``, position of each token in its sequence; -1 for padding.
          attend: function that computes the attention of a layer. It takes the layer's index,
            `Heads` ``[N, ...]`` and the carry, and returns the output ``[N, H, D]`` and the new
            carry. The layers must call it once each, in order. In a scan over layers, the index may
            be traced if all layers have the same window.
          carry: the pools of the cache, for the first call of `attend`. In a scan over layers, make
            it part of the scan's carry.
          backend: backend that the user has selected; None for the best available backend.

        Returns:
          The hidden states ``[N, E]``, which are the input of `logits`, and the carry returned by
          the last call of `attend`.
        """
        raise NotImplementedError

    def logits(self, x: jax.Array, backend: str | None = None) -> jax.Array:
        """Compute the logits float32 ``[..., V]`` of hidden states ``[..., E]``."""
        raise NotImplementedError

    def output_head(self, x: jax.Array, backend: str | None = None) -> OutputHead | None:
        """Return the steps of `logits`, or None if it has others.

        With them, the gradient of `log_probs` can use a part of the vocabulary at a time.
        """
        del x, backend
        return None

    @property
    def float_dtype(self) -> np.dtype:
        """Dtype of the floating-point parameters, which the engine by default uses for K and V."""
        return self.weight_dtype

    @property
    def kv_dtype(self) -> np.dtype:
        """Dtype to which `rollout` and `log_probs` round keys and values.

        This is `cache_dtype`, or the dtype of the weights, as for ``kv_dtype="auto"`` of an engine.
        """
        if self.cache_dtype is not None:
            return jnp.dtype(self.cache_dtype)
        return default_kv_dtype(self.float_dtype, jax.default_backend())

    @property
    def weight_dtype(self) -> np.dtype:
        """Dtype of the weight matrices; by default the dtype of the largest parameter."""
        arrays = jax.tree.leaves(nnx.state(self))
        return max(arrays, key=lambda array: array.size).dtype

    @property
    def matrix_formats(self) -> MatrixFormats:
        """Storage format of each matrix; by default all matrices have the dtype `weight_dtype`."""
        return MatrixFormats(WeightFormat(self.weight_dtype.name))

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
        num_states: int | None = None,
    ) -> PagedCache:
        """Return an empty cache for this model, on the device that JAX uses by default.

        For the arguments, see the function `create_cache`.

        Example:
          >>> from paged_jax import Llama, LlamaConfig
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
            num_states=num_states,
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
        """Append a prompt chunk to each of several slots, and return the next-token logits.

        The function is pure. Call it in `jit` and donate the cache. It reserves the blocks that it
        needs. If there are not enough free blocks, or a slot does not exist, nothing is appended
        and ``ok`` is False.

        Args:
          cache: the cache. Each chunk is appended to the tokens that its slot already holds.
          token_ids: i32 ``[B, T]``, each row padded at the end.
          slots: i32 ``[B]``, slot of each row, distinct. Rows with a negative slot are skipped.
          num_tokens: i32 ``[B]``, number of tokens in each row, 1 to T.
          backend: backend of attention, see `paged_attention`, and of the model's other ops.

        Returns:
          Logits float32 ``[B, V]`` after the last token of each row (arbitrary in skipped rows),
          the new cache, and ``ok``, bool ``[]``.

        Raises:
          ValueError: shapes or dtypes are wrong, or do not fit together. Outside of `jit`, also if
            a slot appears twice or a token is not in the vocabulary. Inside `jit`, rows with the
            same slot overwrite each other's tokens, and tokens are clamped to the vocabulary.
        """
        arrays = token_ids, slots, num_tokens
        backend = self.resolve_backend(backend)
        x, cache, ok, metadata = self._run_chunks("prefill", cache, arrays, backend)
        last = jnp.maximum(metadata.num_tokens - 1, 0)[:, None, None]
        logits = self.logits(jnp.take_along_axis(x, last, axis=1)[:, 0], backend)
        return logits, cache, ok

    def prefill_tiles(
        self,
        cache: PagedCache,
        token_ids: jax.Array,
        slots: jax.Array,
        num_tokens: jax.Array,
        *,
        backend: str | None = None,
    ) -> tuple[jax.Array, PagedCache, jax.Array]:
        """Append prompt chunks that are split into several short rows, to avoid padding.

        Several rows may have the same slot. Their tokens are appended in the order of the rows. All
        other arguments are as in `prefill`.

        Returns:
          The hidden states ``[B, T, E]``, from which `logits` computes logits; the new cache; and
          ``ok``, bool ``[]``.

        Raises:
          ValueError: see `prefill`.
        """
        arrays = token_ids, slots, num_tokens
        backend = self.resolve_backend(backend)
        x, cache, ok, _ = self._run_chunks("prefill_tiles", cache, arrays, backend, has_tiles=True)
        return x, cache, ok

    def score(
        self,
        cache: PagedCache,
        token_ids: jax.Array,
        slots: jax.Array,
        num_tokens: jax.Array,
        *,
        backend: str | None = None,
    ) -> tuple[jax.Array, PagedCache, jax.Array]:
        """Append prompt chunks like `prefill`, and return the logits after each of their tokens.

        The arguments are as in `prefill`.

        Returns:
          Logits float32 ``[B, T, V]`` (arbitrary in the padding), the new cache, and ``ok``, bool
          ``[]``.

        Raises:
          ValueError: see `prefill`.
        """
        arrays = token_ids, slots, num_tokens
        backend = self.resolve_backend(backend)
        x, cache, ok, _ = self._run_chunks("score", cache, arrays, backend)
        return self.logits(x, backend), cache, ok

    def score_drafts(
        self,
        cache: PagedCache,
        token_ids: jax.Array,
        slots: jax.Array,
        num_tokens: jax.Array,
        *,
        backend: str | None = None,
    ) -> tuple[jax.Array, PagedCache, jax.Array, DraftStates]:
        """Append draft tokens like `score`, but do not change the states of recurrent layers.

        Returns:
          The three results of `score`, and the states that wait. After verification, call
          `DraftStates.advance` with the number of accepted tokens in each row, and then
          `paged_cache.accept_drafts`.
        """
        name, arrays = self._name("score"), (token_ids, slots, num_tokens)
        backend = self.resolve_backend(backend)
        token_ids, slots, num_tokens = as_step_arrays(name, self.config.vocab_size, *arrays)
        B, T = token_ids.shape
        cache, ok, metadata = reserve_rows(
            cache, slots, num_tokens, max_tokens=T, backend=backend, has_drafts=True
        )
        check_layers(name, metadata, self.config.sliding_windows)
        attend = DraftAttention(PrefillAttention(metadata, self.config, backend))
        x, carry = self.hidden_states(
            token_ids.reshape(-1),
            metadata.positions,
            attend,
            DraftCarry(cache.group_pools, ()),
            backend,
        )
        drafts = DraftStates(metadata, carry.recurrences, backend)
        cache = cache.replace_group_pools(carry.pools)
        return self.logits(x.reshape(B, T, -1), backend), cache, ok, drafts

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
        """Append one token to each of several slots, and return the next-token logits.

        The function is pure. Call it in `jit` and donate the cache. It reserves a block for each
        slot whose last block is full or shared with another slot. If there are not enough free
        blocks, nothing is appended and ``ok`` is False.

        Args:
          cache: the cache.
          token_ids: i32 ``[B]``, token to append to each slot.
          slots: i32 ``[B]``, slot of each row, distinct. Rows with a negative slot are skipped.
          cascade: whether layers without a sliding window read blocks that all slots share once per
            step, instead of once for each slot, see `cascade_attention` (static).
          backend: backend of attention, see `paged_attention`, and of the model's other ops.

        Returns:
          Next-token logits float32 ``[B, V]`` (arbitrary in skipped rows), the new cache, and
          ``ok``, bool ``[]``.

        Raises:
          ValueError: see `prefill`; or `cascade` is true, and all layers have a sliding window.

        Example:
          >>> from paged_jax import Llama, LlamaConfig
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
        vocab_size = self.config.vocab_size
        token_ids, slots, num_tokens = as_step_arrays(
            self._name("decode"), vocab_size, token_ids, slots
        )
        cache, ok, metadata = reserve_rows(cache, slots, num_tokens, max_tokens=1, backend=backend)
        logits, pools = self.decode_at(
            cache.group_pools, token_ids, metadata, cascade=cascade, backend=backend
        )
        return logits, cache.replace_group_pools(pools), ok

    def decode_at(
        self,
        pools: GroupPools,
        token_ids: jax.Array,
        metadata: AttentionMetadata,
        *,
        cascade: bool = False,
        backend: str | None = None,
    ) -> tuple[jax.Array, GroupPools]:
        """Run a decode step like `decode`, but with blocks that the caller has already reserved.

        Args:
          pools: pools of each group of the cache, see `PagedCache.group_pools`. Donate them in
            `jit`.
          token_ids: i32 ``[B]``, new token of each row.
          metadata: places of these tokens in the cache, see `PlannedRows.at_step`.
          cascade: see `decode`.
          backend: see `decode`.

        Returns:
          Next-token logits float32 ``[B, V]`` (arbitrary in skipped rows), and the new pools.

        Raises:
          ValueError: `cascade` is true, and all layers have a sliding window; or the cache does not
            have the layers and windows of the model.
        """
        name = self._name("decode")
        if cascade and None not in self.config.sliding_windows:
            raise ValueError(
                f"{name}: cascade must be False if all layers have a sliding window, got True."
            )
        backend = self.resolve_backend(backend)
        if cascade and is_exact(backend):
            raise ValueError(f"{name}: cascade must be False with exact numerics, got True.")
        check_layers(name, metadata, self.config.sliding_windows)
        if cascade:
            metadata = count_common_blocks(metadata, self.config)
        attend = DecodeAttention(metadata, self.config, backend)
        x, pools = self.hidden_states(token_ids, metadata.positions, attend, pools, backend)
        return self.logits(x, backend), pools

    def _name(self, method: str) -> str:
        """Return the qualified name of a method, such as ``"Decoder.decode"``, for errors."""
        return f"{type(self).__name__}.{method}"

    def _run_chunks(
        self,
        method: str,
        cache: PagedCache,
        arrays: StepArrays,
        backend: str | None,
        *,
        has_tiles: bool = False,
    ) -> tuple[jax.Array, PagedCache, jax.Array, AttentionMetadata]:
        """Reserve blocks for the chunks of a prefill step, and run the layers over the chunks.

        Returns:
          The hidden states ``[B, T, E]``, the new cache, ``ok``, and the metadata of the tokens.
        """
        name = self._name(method)
        token_ids, slots, num_tokens = as_step_arrays(
            name, self.config.vocab_size, *arrays, has_tiles=has_tiles
        )
        B, T = token_ids.shape
        cache, ok, metadata = reserve_rows(
            cache, slots, num_tokens, max_tokens=T, backend=backend, has_tiles=has_tiles
        )
        check_layers(name, metadata, self.config.sliding_windows)
        attend = PrefillAttention(metadata, self.config, backend)
        x, pools = self.hidden_states(
            token_ids.reshape(-1), metadata.positions, attend, cache.group_pools, backend
        )
        return x.reshape(B, T, -1), cache.replace_group_pools(pools), ok, metadata


def _final_states(model: PagedModel, token_ids: jax.Array, num_tokens: jax.Array) -> jax.Array:
    backend = model.resolve_backend(None)
    steps = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(steps < num_tokens[:, None], steps, -1)
    attend = SequenceAttention(model.config, num_tokens, model.kv_dtype, backend)
    return model.run_sequences(token_ids, positions, attend, backend)


_final_states_in_jit = jax.jit(_final_states)


def create_cache(
    config: ModelConfig,
    *,
    num_slots: int,
    max_length: int,
    num_blocks: int | None = None,
    block_size: int = 16,
    max_tokens: int | None = None,
    dtype: DTypeLike = jnp.float32,
    num_states: int | None = None,
    platform: str | None = None,
) -> PagedCache:
    """Return an empty cache for a model configuration.

    Layers with the same sliding window and the same KV shape form a group of the cache. Each group
    has its own blocks. A group with a window keeps only the blocks of the window, and the blocks of
    the tokens that the last program appended. Recurrent layers have states instead of blocks.

    Args:
      config: configuration of the model.
      num_slots: number of slots (S), the maximum number of sequences in the cache.
      max_length: maximum number of tokens of a sequence.
      num_blocks: number of blocks (P) in the first group, shared by all slots; None for as many
        blocks as all slots need at `max_length`. The first group is the one that keeps the most
        tokens. Other groups without a window also have P blocks. A group with a window has
        ``min(P, S * w)`` blocks, where w is the maximum number of blocks that a slot holds in this
        group.
      block_size: tokens per block (C).
      max_tokens: maximum number of tokens that a program (for example a call of `prefill`) appends
        to a slot. It determines w. A program may append more tokens to a slot if other slots hold
        fewer blocks. None means `max_length`, and then windows save no memory.
      dtype: dtype of K and V, see `PagedCache.create`.
      num_states: number of states of recurrent layers, at least `num_slots`; None for `num_slots`.
        States beyond `num_slots` are used for snapshots in the prefix cache, see
        `paged_cache.publish`.
      platform: platform on which the cache is used; None for `jax.default_backend()`. On TPUs the
        last dimensions of the pools are padded, see `kernels.padded_head_dim` and
        `padded_state_shape`.

    Raises:
      ValueError: a size is not a positive integer, or a pool has more rows than int32 can count.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...     num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, sliding_window=32,
      ...     layer_types=("sliding_attention", "sliding_attention", "full_attention"))
      >>> cache = create_cache(config, num_slots=4, max_length=1024, max_tokens=64)
      >>> [group.pools.k.shape for group in cache.groups]     # [L, P, K, C, D]
      [(1, 256, 1, 16, 8), (2, 28, 1, 16, 8)]
    """
    max_tokens = max_length if max_tokens is None else max_tokens
    for chunk in filter(None, dict.fromkeys(config.attention_chunks)):
        if chunk % block_size:
            raise ValueError(
                f"create_cache: block_size must divide the model's attention_chunk_size of {chunk},"
                f" got {block_size}."
            )
    check_positive(
        "create_cache",
        max_length=max_length,
        num_slots=num_slots,
        block_size=block_size,
        max_tokens=max_tokens,
    )
    width = num_blocks_needed(max_length, block_size)
    target_platform = platform or jax.default_backend()
    groups: list[CacheGroup] = []
    for group in config.layer_groups:
        kv, rule = group.kv, group.retention
        assert kv is not None
        max_blocks = num_slots * rule.max_in_slot(max_length, max_tokens, block_size)
        if groups:
            num_blocks = rule.num_pool_blocks(groups[0].num_blocks, max_blocks)
        elif num_blocks is None:
            num_blocks = max_blocks
        groups.append(
            CacheGroup.create(
                num_layers=group.num_pool_layers,
                num_blocks=num_blocks,
                num_kv_heads=kv.num_kv_heads,
                block_size=block_size,
                head_dim=padded_head_dim(kv.head_dim, target_platform),
                value_dim=padded_head_dim(kv.value_dim, target_platform),
                num_slots=num_slots,
                max_blocks_per_slot=width,
                dtype=dtype,
                window=rule,
            )
        )
    places = layer_places(config.layer_groups, config.kv_sources)
    if not config.state_groups:
        return PagedCache(tuple(groups), places)
    num_states = num_slots if num_states is None else num_states
    states = create_states(config, num_states, num_slots, block_size, dtype, target_platform)
    of_states = layer_places(config.state_groups, range(config.num_hidden_layers))
    recurrent = tuple(place and (len(groups), *place) for place in of_states)
    return PagedCache((*groups, states), places, recurrent)
