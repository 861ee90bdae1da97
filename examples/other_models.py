"""Run a model of another library in the engine: Qwen3 from Tunix.

    pip install "paged-jax[tunix]"
    python examples/other_models.py

The engine runs any `PagedModel`. The `PagedModel` of this example wraps
`tunix.models.qwen3.model.Qwen3` and uses its layers. Only its attention is replaced: instead of a
dense cache, an attention layer gets a function that computes paged attention.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]

from paged_jax import LLM, Heads, LlamaConfig, PagedModel, SamplingParams

# The function that replaces a layer's cache. It takes the heads of N tokens and returns the
# attention [N, H, D].
Attention = Callable[[Heads], jax.Array]


class PagedAttention(qwen3.Attention):
    """Attention layer of Tunix with paged attention instead of its own attention and cache."""

    def block(
        self,
        x: jax.Array,
        segment_pos: jax.Array,
        cache: Any,
        attn_mask: Any,
        segment_ids: Any = None,
    ) -> tuple[Any, jax.Array]:
        """Compute the layer for tokens [1, N, E]. Instead of a cache, get an `Attention`."""
        del attn_mask, segment_ids
        rotate = functools.partial(qwen3.apply_rope, positions=segment_pos, head_dim=self.head_dim)
        q, k = rotate(self.q_norm(self.q_proj(x))), rotate(self.k_norm(self.k_proj(x)))
        out = cache(Heads(q[0], k[0], self.v_proj(x)[0]))
        return cache, self.o_proj(out[None].astype(x.dtype))


class PagedQwen3(PagedModel):
    """Qwen3 of Tunix with a paged cache.

    Args:
      model: the model. It is not changed, and its arrays are shared.
      max_length: maximum number of tokens in a sequence. Tunix's config does not contain it.
      eos_token_ids: tokens that end a sequence.
    """

    def __init__(
        self, model: qwen3.Qwen3, *, max_length: int = 4096, eos_token_ids: tuple[int, ...] = ()
    ):
        sizes = model.config
        self.config = LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.embed_dim,
            intermediate_size=sizes.hidden_dim,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            max_position_embeddings=max_length,
            eos_token_ids=eos_token_ids,
        )
        self.model = nnx.merge(*nnx.split(model))
        for layer in self.model.layers:
            layer.attn = _paged(layer.attn)

    def hidden_states(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Any,
        carry: Any,
        backend: str | None = None,
    ) -> tuple[jax.Array, Any]:
        """Run the layers; see `PagedModel`."""
        x = self.model.embedder.encode(token_ids[None])
        for index, layer in enumerate(self.model.layers):

            def attention(heads: Heads, index: int = index) -> jax.Array:
                nonlocal carry
                out, carry = attend(index, heads, carry)
                return out

            _, x = layer(x, positions[None], attention, None)
        return x[0], carry

    def logits(self, x: jax.Array, backend: str | None = None) -> jax.Array:
        """Apply the last norm and the head; see `PagedModel`."""
        rows = self.model.final_norm(x.reshape(1, -1, x.shape[-1]))
        tied = self.model.config.use_tied_embedding
        logits = self.model.embedder.decode(rows) if tied else self.model.lm_head(rows)
        return logits.astype(jnp.float32).reshape(*x.shape[:-1], -1)


def _paged(attention: qwen3.Attention) -> PagedAttention:
    """Return a `PagedAttention` with the arrays of a layer."""
    paged = nnx.eval_shape(lambda: PagedAttention(attention.config, rngs=nnx.Rngs(0)))
    nnx.update(paged, nnx.state(attention))
    return paged


def tiny_qwen3(seed: int = 0) -> qwen3.Qwen3:
    """Return a small random model of Tunix."""
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-6,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(seed))


def main() -> None:
    """Generate with a random model, and compare the tokens with Tunix's forward pass."""
    model = tiny_qwen3()
    llm = LLM(PagedQwen3(model, max_length=64), block_size=4, num_blocks=32, max_num_seqs=2)
    prompts = [[3, 9, 27], [5, 25, 61, 49, 53, 9, 45]]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=8),
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = list(output.outputs[0].token_ids)
        tokens = jnp.array([prompt + token_ids])
        positions = jnp.arange(tokens.shape[1])[None]
        mask = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
        logits, _ = model(tokens, positions, None, mask)
        expected = np.argmax(logits[0, len(prompt) - 1 : -1], axis=-1).tolist()
        print(f"{prompt} -> {token_ids}, equal to Tunix's forward pass: {token_ids == expected}")


if __name__ == "__main__":
    main()
