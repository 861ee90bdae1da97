"""The Llama family as one Flax module: a plain forward, prefill and decode over a paged cache."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from paged_jax.cache.paged_cache import PagedCache
from paged_jax.cache.sizes import num_blocks_needed
from paged_jax.checks import check_positive
from paged_jax.kernels import Pools, padded_head_dim
from paged_jax.kernels.rope import rms_norm
from paged_jax.models import loading
from paged_jax.models.arguments import Rows, as_rows, as_tokens
from paged_jax.models.config import LlamaConfig
from paged_jax.models.embedding import look_up, take_rows
from paged_jax.models.layer import Attend, Layer, causal_attention
from paged_jax.models.linear import linear
from paged_jax.models.paged_rows import (
    PagedRows,
    append_rows,
    chunk_attention,
    decode_attention,
)
from paged_jax.models.part import Part
from paged_jax.models.rope import inverse_frequencies, rotations
from paged_jax.models.weight import Weight, add_matrix, float_type, get_matrix


class Llama(nnx.Module):
    """A Llama-family decoder (Llama, Mistral, Qwen2, Qwen3) with or without a paged KV cache.

    Args:
      config: sizes and switches.
      dtype: type of the weights; of int8 are matrices only, each row with a scale, and the rest has
        ``config.dtype``. Activations and logits are float32.
      scan_layers: keep the layers stacked along a leading dimension ``L`` and scan over them, as
        suits TPUs and compiles soonest; otherwise keep one module a layer and unroll, as suits
        CPUs and GPUs, where a scan copies every layer's weights out of the stack.
      part: None, or what one of several devices computes of a model, within `jax.shard_map`:
        `config` is then that of one device, see `paged_jax.models.shards`.
      rngs: source of the initial weights.

    Example:
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
      ...                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> model(jnp.array([[1, 2, 3]])).shape
      (1, 3, 32)
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: Any = jnp.float32,
        scan_layers: bool = False,
        part: Part | None = None,
        rngs: nnx.Rngs,
    ):
        normal = nnx.initializers.normal(config.initializer_range)
        self.config = config
        self.scan_layers = scan_layers
        self.part = part
        table, floats = (config.vocab_size, config.hidden_size), float_type(dtype, config)
        # An embedding alone is not worth rounding: a step reads few rows of it.
        kind = dtype if config.tie_word_embeddings else floats
        add_matrix(self, "embed_tokens", normal(rngs.params(), table, floats), kind)
        layer = functools.partial(Layer, config, dtype=dtype, part=part)
        if scan_layers:

            @nnx.split_rngs(splits=config.num_hidden_layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stack(rngs: nnx.Rngs) -> Layer:
                return layer(rngs=rngs)

            self.layers = stack(rngs)
        else:
            self.layers = nnx.List(layer(rngs=rngs) for _ in range(config.num_hidden_layers))
        self.norm = nnx.Param(jnp.ones(config.hidden_size, floats))
        if not config.tie_word_embeddings:
            add_matrix(self, "lm_head", normal(rngs.params(), table, floats), dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Score whole sequences without a cache; differentiable in the weights.

        Args:
          token_ids: i32 ``[B, T]``. Right padding does not change the logits before it.

        Returns:
          float32 logits ``[B, T, V]``.

        Raises:
          ValueError: they are not that or, outside of `jit`, not in the vocabulary.
        """
        token_ids = as_tokens("Llama", self.config.vocab_size, token_ids)
        steps = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(steps, token_ids.shape)
        x, _ = self._run_layers(
            take_rows(_table(self, "embed_tokens"), token_ids),
            positions,
            causal_attention(self.config.sliding_window),
            (),
        )
        return self._logits(x)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path | None = None,
        *,
        dtype: Any = "auto",
        scan_layers: bool | None = None,
        sharding: Any = None,
    ) -> "Llama":
        """Load a Hugging Face folder, or a checkpoint of `save_checkpoint`.

        Weights go from the files to their devices without a second copy of the model in memory.

        Args:
          folder: a folder with ``config.json`` and safetensors, or a checkpoint; by default the
            small model that comes with this library.
          dtype: type of the weights: float32, bfloat16, float16, int8, or ``"auto"``, as saved.
          scan_layers: see `Llama`; by default on TPUs only.
          sharding: one `jax.sharding.Sharding` for all parameters, or a function of a parameter's
            name (``"layers.0.qkv_proj"``, or ``"layers.qkv_proj"`` when stacked) and shape.

        Raises:
          FileNotFoundError: no such folder, or no ``config.json`` in it.
          UnsupportedConfigError: the config asks for what this library does not build.
          WeightsError: the files do not hold the weights that the config describes.

        Example:
          >>> model = Llama.from_pretrained()
          >>> len(model.layers), model.config.vocab_size
          (5, 1536)
        """
        return loading.from_pretrained(
            cls, folder, dtype=dtype, scan_layers=scan_layers, sharding=sharding
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and safetensors, which transformers loads too.

        Raises:
          ValueError: weights are int8, or `LlamaConfig.to_dict` has no family for them.
        """
        loading.save_weights(self, folder)

    def create_cache(
        self,
        *,
        num_slots: int,
        max_length: int,
        num_blocks: int | None = None,
        block_size: int = 16,
        dtype: DTypeLike = jnp.float32,
    ) -> PagedCache:
        """Return an empty cache for this model, on the device that JAX uses by default.

        Args:
          num_slots, max_length, num_blocks, block_size, dtype: see the function `create_cache`.

        Example:
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
            dtype=dtype,
        )

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
          backend: backend of the attention and of products, see `paged_attention` and `linear`.

        Returns:
          float32 logits ``[B, V]`` after the last token of each row, the new cache, and ``ok``,
          bool ``[]``.

        Raises:
          ValueError: shapes or types do not fit together or, outside of `jit`, a slot appears twice
            or a token is outside of the vocabulary. Inside, rows with the same slot spoil each
            other's tokens, and such a token is taken for the first or the last of the vocabulary.
        """
        rows = as_rows("Llama.prefill", self.config.vocab_size, token_ids, slots, num_tokens)
        x, cache, ok, num_tokens = self._run_chunks(cache, rows, backend)
        last = jnp.maximum(num_tokens - 1, 0)[:, None, None]
        logits = self._logits(jnp.take_along_axis(x, last, axis=1)[:, 0], backend)
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
        rows = as_rows("Llama.score", self.config.vocab_size, token_ids, slots, num_tokens)
        x, cache, ok, _ = self._run_chunks(cache, rows, backend)
        return self._logits(x, backend), cache, ok

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
          cascade: whether blocks that all slots begin with are read once for all of them, see
            `cascade_attention` (static).
          backend: backend of the attention and of products, see `paged_attention` and `linear`.

        Returns:
          float32 logits ``[B, V]`` (of no meaning in rows left out), the new cache, and ``ok``,
          bool ``[]``.

        Raises:
          ValueError: see `prefill`; or the model has a sliding window, with which there is no
            `cascade`.

        Example:
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
            "Llama.decode", self.config.vocab_size, token_ids, slots
        )
        cache, ok, rows = append_rows(cache, slots, num_tokens, 1, backend)
        logits, pools = decode_rows(
            self, cache.pools, token_ids, rows, cascade=cascade, backend=backend
        )
        return logits, cache.replace_pools(pools), ok

    def _run_chunks(
        self, cache: PagedCache, rows: Rows, backend: str | None
    ) -> tuple[jax.Array, PagedCache, jax.Array, jax.Array]:
        """Append chunks: what the last layer gives for each token ``[B, T, E]``, the cache, ``ok``,
        and how many tokens of each row were taken ``[B]``."""
        token_ids, slots, num_tokens = rows
        B, T = token_ids.shape
        cache, ok, places = append_rows(cache, slots, num_tokens, T, backend)
        attend = chunk_attention(places, B, T, self.config.sliding_window, backend=backend)
        x, pools = self._run_layers(
            self._embed(token_ids.reshape(-1)), places.positions, attend, cache.pools, backend
        )
        return x.reshape(B, T, -1), cache.replace_pools(pools), ok, places.num_tokens

    def _embed(self, token_ids: jax.Array) -> jax.Array:
        return _embed(self, token_ids)

    def _logits(self, x: jax.Array, backend: str | None = None) -> jax.Array:
        return _logits(self, x, backend)

    def _run_layers(
        self,
        x: jax.Array,
        positions: jax.Array,
        attend: Attend,
        carry: Any,
        backend: str | None = None,
    ) -> tuple[jax.Array, Any]:
        cos, sin = rotations(positions, inverse_frequencies(self.config))
        if isinstance(self.layers, nnx.List):
            for index, layer in enumerate(self.layers):
                x, carry = layer(index, x, cos, sin, attend, carry, backend)
            return x, carry
        return _scan_layers(self.layers, self.config, x, cos, sin, attend, carry, backend)


def _embed(model: Llama, token_ids: jax.Array) -> jax.Array:
    find = look_up if model.part is None else model.part.look_up
    return find(_table(model, "embed_tokens"), token_ids)


def _logits(model: Llama, x: jax.Array, backend: str | None) -> jax.Array:
    head = _table(model, "embed_tokens" if model.config.tie_word_embeddings else "lm_head")
    normed = rms_norm(x, model.norm[...], model.config.rms_norm_eps)
    logits = linear(normed, head, backend=backend)
    return logits if model.part is None else model.part.gather(logits)


def _table(model: Llama, name: str) -> Weight:
    return get_matrix(model, name, model.norm[...].dtype)


def decode_rows(
    model: Llama,
    pools: Pools,
    token_ids: jax.Array,
    rows: PagedRows,
    *,
    cascade: bool = False,
    backend: str | None = None,
) -> tuple[jax.Array, Pools]:
    """As `Llama.decode`, of tokens whose places are known: blocks were reserved for them before.

    Args:
      model: the model.
      pools: K and V of the cache; donate them.
      token_ids: i32 ``[B]``.
      rows: places of these tokens, one a row, see `paged_rows.next_rows`.
      cascade, backend: see `Llama.decode`.

    Returns:
      float32 logits ``[B, V]`` (of no meaning in rows left out), and the new pools.

    Raises:
      ValueError: the model has a sliding window, with which there is no `cascade`.
    """
    window = model.config.sliding_window
    if cascade and window is not None:
        raise ValueError("Llama.decode: cascade must be False with a sliding window.")
    block_size = pools.k.shape[3]
    attend = decode_attention(rows, block_size, window, cascade=cascade, backend=backend)
    x, pools = model._run_layers(model._embed(token_ids), rows.positions, attend, pools, backend)
    return model._logits(x, backend), pools


def _scan_layers(
    layers: Layer,
    config: LlamaConfig,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    attend: Attend,
    carry: Any,
    backend: str | None,
) -> tuple[jax.Array, Any]:
    """Run layers that are stacked along their first dimension."""
    graphdef, stacked = nnx.split(layers)

    # The pools are the carry, never the scanned input or output: those would be copied.
    def body(state, layer_and_index):
        weights, index = layer_and_index
        layer = nnx.merge(graphdef, weights)
        return layer(index, state[0], cos, sin, attend, state[1], backend), None

    indices = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
    (x, carry), _ = lax.scan(body, (x, carry), (stacked, indices))
    return x, carry


def create_cache(
    config: LlamaConfig,
    *,
    num_slots: int,
    max_length: int,
    num_blocks: int | None = None,
    block_size: int = 16,
    dtype: DTypeLike = jnp.float32,
    platform: str | None = None,
) -> PagedCache:
    """Return an empty cache for models of a config.

    Args:
      config: configuration of the model.
      num_slots: S, sequences that it holds at once.
      max_length: most tokens of a sequence.
      num_blocks: P, which all slots share; by default enough for all of them at full length.
      block_size: C, tokens in a block.
      dtype: type of K and V; int8 and float8_e4m3fn quantise them, see `PagedCache.create`.
      platform: where it will be used, by default `jax.default_backend()`. On a TPU the last axis of
        the pools is padded, see `kernels.padded_head_dim`.

    Raises:
      ValueError: a size is not a positive integer, or the pool has more rows than int32 counts.
    """
    check_positive(
        "create_cache", max_length=max_length, num_slots=num_slots, block_size=block_size
    )
    width = num_blocks_needed(max_length, block_size)
    return PagedCache.create(
        num_layers=config.num_hidden_layers,
        num_blocks=num_slots * width if num_blocks is None else num_blocks,
        num_kv_heads=config.num_key_value_heads,
        block_size=block_size,
        head_dim=padded_head_dim(config.head_dim, platform or jax.default_backend()),
        num_slots=num_slots,
        max_blocks_per_slot=width,
        dtype=dtype,
    )
