"""Use the ops over blocks in an Equinox model: prompts, decoding, and a shared prefix.

    pip install equinox
    python examples/equinox_model.py

The cache is a pytree, so it passes through `eqx.filter_jit` like any other argument. The decode
step donates it, so that the pools are updated in place. The model has random weights; the program
checks that decoding through the cache gives the logits of a plain forward pass.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from paged_jax import PagedCache, paged_attention, paged_prefill_attention, paged_write
from paged_jax.cache import fork, locate, reserve

# Layers, hidden size, query heads, KV heads, head dimension, vocabulary, longest sequence.
L, E, H, K, D, V, MAX_LENGTH = 2, 64, 4, 2, 16, 100, 64

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


class Block(eqx.Module):
    """A layer: attention and an MLP, each with a norm and a residual."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.qkv = eqx.nn.Linear(E, (H + 2 * K) * D, use_bias=False, key=keys[0])
        self.out = eqx.nn.Linear(H * D, E, use_bias=False, key=keys[1])
        self.mlp = eqx.nn.MLP(E, E, 4 * E, depth=1, key=keys[2])
        self.norms = eqx.nn.RMSNorm(E), eqx.nn.RMSNorm(E)

    def __call__(self, x: jax.Array, layer: int, attend: Attend) -> jax.Array:
        """Run the layer on rows ``[N, E]``."""
        heads = jax.vmap(self.qkv)(jax.vmap(self.norms[0])(x)).reshape(-1, H + 2 * K, D)
        q, k, v = jnp.split(heads, (H, H + K), axis=1)
        attended = attend(layer, q, k, v).reshape(-1, H * D)
        x = x + jax.vmap(self.out)(attended)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    """A small transformer with learned positions. `attend` supplies the attention."""

    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, L + 2)
        self.embed = eqx.nn.Embedding(V, E, key=keys[0])
        self.positions = eqx.nn.Embedding(MAX_LENGTH, E, key=keys[1])
        self.blocks = [Block(key) for key in keys[2:]]

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Return logits ``[N, V]`` of tokens ``[N]`` at positions ``[N]``."""
        x = jax.vmap(self.embed)(tokens) + jax.vmap(self.positions)(positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attend)
        return x @ self.embed.weight.T


def plain(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Return logits ``[T, V]`` of a sequence ``[T]``, without a cache."""

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        del layer
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return model(tokens, jnp.arange(tokens.size), attend)


@eqx.filter_jit(donate="all-except-first")
def prefill(model: Transformer, cache: PagedCache, tokens: jax.Array, slot: jax.Array) -> Any:
    """Put a prompt ``[T]`` into an empty slot; return its last logits and the cache."""
    T = tokens.size
    new = jnp.where(jnp.arange(cache.num_slots) == slot, T, 0)
    cache, ok = reserve(cache, new, max_tokens=T)
    slots = jnp.where(ok, jnp.full(T, slot), -1)
    blocks, offsets = locate(cache.tables, slots, jnp.arange(T))
    pools = cache.pools

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal pools
        pools = paged_write(pools.k, pools.v, k, v, blocks, offsets, layer=layer)
        row, lengths = cache.block_tables[slot][None], jnp.full(1, T)
        return paged_prefill_attention(q[None], *pools[:2], row, lengths, lengths, layer=layer)[0]

    logits = model(tokens, jnp.arange(T), attend)
    return logits[-1], cache.replace_pools(pools), ok


@eqx.filter_jit(donate="all-except-first")
def decode(model: Transformer, cache: PagedCache, tokens: jax.Array) -> Any:
    """Append one token to every slot; return logits ``[S, V]`` and the cache."""
    slots = jnp.arange(cache.num_slots)
    cache, ok = reserve(cache, jnp.ones_like(slots))
    positions = cache.lengths - 1
    blocks, offsets = locate(cache.tables, jnp.where(ok, slots, -1), positions)
    pools = cache.pools

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal pools
        pools = paged_write(pools.k, pools.v, k, v, blocks, offsets, layer=layer)
        return paged_attention(q, *pools[:2], cache.block_tables, cache.lengths, layer=layer)

    logits = model(tokens, positions, attend)
    return logits, cache.replace_pools(pools), ok


def main() -> None:
    """Decode two continuations of one prompt, and compare them with the plain forward pass."""
    model = Transformer(jax.random.key(0))
    cache = PagedCache.create(
        num_layers=L,
        num_blocks=16,
        num_kv_heads=K,
        block_size=8,
        head_dim=D,
        num_slots=2,
        max_blocks_per_slot=MAX_LENGTH // 8,
    )
    prompt = jax.random.randint(jax.random.key(1), (20,), 0, V)
    logits, cache, ok = prefill(model, cache, prompt, jnp.array(0))
    assert ok
    # Both slots now read the same blocks. The first write to the last block copies it.
    cache, ok = fork(cache, jnp.array([-1, 0]))
    assert ok
    print(f"after the fork: {cache.tables}")
    best = jnp.argsort(logits)[-2:]
    sequences = [[*prompt.tolist(), token] for token in best.tolist()]
    for _ in range(10):
        tokens = jnp.array([sequence[-1] for sequence in sequences])
        logits, cache, ok = decode(model, cache, tokens)
        assert ok
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.append(token)
    for sequence, row in zip(sequences, logits, strict=True):
        expected = plain(model, jnp.array(sequence[:-1]))[-1]
        assert jnp.allclose(row, expected, atol=1e-4), "the cache changed the logits"
        print(sequence[20:])
    print(f"at the end: {cache.tables}")


if __name__ == "__main__":
    main()
