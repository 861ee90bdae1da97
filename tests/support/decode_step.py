"""Donated steps of a whole model as shapes, to lower or compile without running them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import Llama, PagedCache
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import decode_steps
from tests.support.kernel_cases import lower

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
)
LLAMA_3_70B = dataclasses.replace(
    LLAMA_3_8B,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
)
LLAMA_3_405B = dataclasses.replace(
    LLAMA_3_8B,
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
)
SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
QWEN_3_1B7 = LlamaConfig(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    qk_norm=True,
    tie_word_embeddings=True,
    max_position_embeddings=40960,
)


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """`Llama.decode`, by default in bfloat16, over pools of about `pool_gigabytes`."""

    config: LlamaConfig
    pool_gigabytes: float
    block_size: int = 16
    batch: int = 64
    max_blocks_per_slot: int = 512
    scan_layers: bool = True
    dtype: str = "bfloat16"  # dtype of the weights
    pool_dtype: str = "bfloat16"
    backend: str | None = None  # of the ops, as for `Llama.decode`

    @property
    def num_blocks(self) -> int:
        config = self.config
        heads = 2 * config.num_hidden_layers * config.num_key_value_heads
        block_bytes = (
            heads * self.block_size * config.head_dim * jnp.dtype(self.pool_dtype).itemsize
        )
        return int(self.pool_gigabytes * 10**9) // block_bytes

    def function(self) -> Callable[..., Any]:
        """Return the step, to be jitted with its second argument donated."""
        backend = self.backend

        def decode_step(model: Llama, cache: PagedCache, token_ids: jax.Array, slots: jax.Array):
            return Llama.decode(model, cache, token_ids, slots, backend=backend)

        return decode_step

    def shapes(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return model, cache, tokens and slots as `jax.ShapeDtypeStruct`."""
        model, cache = self._model(), self._cache()
        rows = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return _placed((model, cache, rows, rows), sharding)

    def lower(self, platform: str, sharding: Any = None) -> jax.stages.Lowered:
        """Lower the step for ``"cuda"`` or ``"tpu"``, with its cache or state donated."""
        shapes = self.shapes(sharding)
        return lower(self.function(), *shapes, platform=platform, donate_argnums=1)

    def _model(self) -> Llama:
        config, dtype, scan_layers = self.config, self.dtype, self.scan_layers
        return nnx.eval_shape(
            lambda: Llama(config, dtype=dtype, scan_layers=scan_layers, rngs=nnx.Rngs(0))
        )

    def _cache(self) -> PagedCache:
        config = self.config
        return jax.eval_shape(
            lambda: PagedCache.create(
                num_layers=config.num_hidden_layers,
                num_blocks=self.num_blocks,
                num_kv_heads=config.num_key_value_heads,
                block_size=self.block_size,
                head_dim=config.head_dim,
                num_slots=self.batch,
                max_blocks_per_slot=self.max_blocks_per_slot,
                dtype=self.pool_dtype,
            )
        )


@dataclasses.dataclass(frozen=True)
class PrefillStep(DecodeStep):
    """`Llama.prefill` of `chunk` tokens for each sequence of the batch."""

    chunk: int = 2048

    def function(self) -> Callable[..., Any]:
        """Return the step, to be jitted with its second argument donated."""
        backend = self.backend

        def prefill_step(
            model: Llama,
            cache: PagedCache,
            token_ids: jax.Array,
            slots: jax.Array,
            num_tokens: jax.Array,
        ):
            return Llama.prefill(model, cache, token_ids, slots, num_tokens, backend=backend)

        return prefill_step

    def shapes(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return model, cache, tokens, slots and their numbers as `jax.ShapeDtypeStruct`."""
        token_ids = jax.ShapeDtypeStruct((self.batch, self.chunk), jnp.int32)
        rows = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return _placed((self._model(), self._cache(), token_ids, rows, rows), sharding)


@dataclasses.dataclass(frozen=True)
class DecodeLoop(DecodeStep):
    """`decode_steps`: up to `max_steps` of these steps, with sampling."""

    max_steps: int = 8

    def function(self) -> Callable[..., Any]:
        """Return the loop, to be jitted with its second argument donated."""
        max_steps = self.max_steps

        def decode_loop(model: Llama, state: DecodeState, slots: jax.Array, num_steps: jax.Array):
            return decode_steps(model, state, slots, num_steps, max_steps=max_steps)

        return decode_loop

    def shapes(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return model, state, slots and number of steps as `jax.ShapeDtypeStruct`."""
        cache, vocab_size = self._cache(), self.config.vocab_size
        state = jax.eval_shape(lambda cache: DecodeState.create(cache, vocab_size), cache)
        slots = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        num_steps = jax.ShapeDtypeStruct((), jnp.int32)
        return _placed((self._model(), state, slots, num_steps), sharding)


def _place(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _placed(shapes: tuple[Any, ...], sharding: Any) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: _place(x, sharding), shapes)
