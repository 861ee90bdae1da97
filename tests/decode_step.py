"""The donated decode step of a whole model as shapes alone: lowered or compiled, never run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import Llama, PagedCache
from paged_jax.models.config import LlamaConfig

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
    """`Llama.decode` in bfloat16, over pools of about `pool_gigabytes`."""

    config: LlamaConfig
    pool_gigabytes: int
    block_size: int = 16
    batch: int = 64
    max_blocks_per_slot: int = 512
    scan_layers: bool = True

    @property
    def num_blocks(self) -> int:
        config = self.config
        heads = 2 * config.num_hidden_layers * config.num_key_value_heads
        return self.pool_gigabytes * 10**9 // (heads * self.block_size * config.head_dim * 2)

    def function(self) -> Callable[..., Any]:
        """The step, to be jitted with its second argument donated."""

        def decode_step(model: Llama, cache: PagedCache, token_ids: jax.Array, slots: jax.Array):
            return Llama.decode(model, cache, token_ids, slots)

        return decode_step

    def shapes(self, sharding: Any = None) -> tuple[Any, ...]:
        """Model, cache, tokens and slots as `jax.ShapeDtypeStruct`."""
        config, scan_layers = self.config, self.scan_layers
        model = nnx.eval_shape(
            lambda: Llama(config, dtype=jnp.bfloat16, scan_layers=scan_layers, rngs=nnx.Rngs(0))
        )
        cache = jax.eval_shape(
            lambda: PagedCache.create(
                num_layers=config.num_hidden_layers,
                num_blocks=self.num_blocks,
                num_kv_heads=config.num_key_value_heads,
                block_size=self.block_size,
                head_dim=config.head_dim,
                num_slots=self.batch,
                max_blocks_per_slot=self.max_blocks_per_slot,
                dtype=jnp.bfloat16,
            )
        )
        rows = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            (model, cache, rows, rows),
        )
