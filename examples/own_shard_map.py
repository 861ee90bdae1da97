"""Run your own model on several devices: explicit sharding around paged attention.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/own_shard_map.py

The model below uses a mesh with explicit axes: the type of each array contains its sharding, and
matrix multiplications name the sharding of their result. The ops over blocks do not accept such
arrays, so they run in `jax.shard_map`, where each device has its KV heads and their query heads.
No communication is needed inside; `einsum` adds the sum over devices after `out`.

    [B, E] --einsum--> [B, K@heads, G + 2, D] --shard_map--> [B, K@heads, G, D] --einsum--> [B, E]

The program gives the same result on any number of devices that divides the number of KV heads.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from paged_jax import PagedCache, paged_attention, paged_rope_write
from paged_jax.cache import locate, reserve

# Layers, KV heads, query heads of a KV head, head dimension, hidden size, vocabulary.
L, K, G, D, E, V = 2, 4, 2, 16, 64, 128
WHOLE = PartitionSpec()
OF_HEADS = {  # arrays that are sharded over KV heads; all others are replicated
    "qkv": PartitionSpec(None, "heads"),  # [L, K, G + 2, D, E]
    "out": PartitionSpec(None, "heads"),  # [L, K, G, D, E]
    "pools": PartitionSpec(None, None, "heads"),  # [L, P, K, C, D]
    "activations": PartitionSpec(None, "heads"),  # [B, K, ...]
}


def make_weights(mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Return random weights on their devices."""
    shapes = {"embed": (V, E), "qkv": (L, K, G + 2, D, E), "out": (L, K, G, D, E), "head": (V, E)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.device_put(
            jax.random.normal(key, shape) / shape[-1] ** 0.5,
            NamedSharding(mesh, OF_HEADS.get(name, WHOLE)),
        )
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def make_cache(mesh: jax.sharding.Mesh, num_slots: int, max_length: int) -> PagedCache:
    """Return an empty cache: pools are sharded, the allocator and the tables replicated."""
    cache = PagedCache.create(
        num_layers=L,
        num_blocks=num_slots * max_length // 8,
        num_kv_heads=K,
        block_size=8,
        head_dim=D,
        num_slots=num_slots,
        max_blocks_per_slot=max_length // 8,
    )
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), cache_specs(cache))
    return jax.device_put(cache, places)


def cache_specs(cache: PagedCache) -> Any:
    """Return the sharding of each array of a cache."""
    specs = jax.tree.map(lambda _: WHOLE, cache)
    return specs.replace_pools(jax.tree.map(lambda _: OF_HEADS["pools"], cache.pools))


def take_places(cache: PagedCache) -> tuple[PagedCache, jax.Array, jax.Array]:
    """Reserve a token in each slot. Each device runs the whole allocator."""
    slots, positions = jnp.arange(cache.num_slots, dtype=jnp.int32), cache.lengths
    cache, _ = reserve(cache, jnp.ones_like(slots))
    return cache, *locate(cache.tables, slots, positions)


def attend(qkv: jax.Array, cache: PagedCache, blocks: jax.Array, offsets: jax.Array, layer: int):
    """Rotate, write K and V, and attend with a token per slot, for the heads of a device."""
    angles = (cache.lengths - 1)[:, None] * 1e4 ** -jnp.linspace(0, 1, D // 2, endpoint=False)
    assert cache.v is not None  # only pools of latent attention have no values
    q, pools = paged_rope_write(
        cache.k, cache.v, qkv, jnp.cos(angles), jnp.sin(angles), blocks, offsets, layer=layer
    )
    out = paged_attention(q, pools.k, pools.v, cache.block_tables, cache.lengths, layer=layer)
    return out.reshape(out.shape[0], -1, G, D), cache.replace_pools(pools)


def decode(weights: dict[str, jax.Array], cache: PagedCache, token_ids: jax.Array):
    """Append tokens i32[B] to the slots; return the most probable next tokens and the cache."""
    specs, heads = cache_specs(cache), OF_HEADS["activations"]
    # The check of varying values in shard_map does not support these kernels.
    on_each = functools.partial(jax.shard_map, check_vma=False)
    cache, blocks, offsets = on_each(
        take_places, in_specs=(specs,), out_specs=(specs, WHOLE, WHOLE)
    )(cache)
    x = weights["embed"].at[token_ids].get(out_sharding=WHOLE)
    for layer in range(L):
        qkv = jnp.einsum("be,kgde->bkgd", x, weights["qkv"][layer])
        out, cache = on_each(
            functools.partial(attend, layer=layer),
            in_specs=(heads, specs, WHOLE, WHOLE),
            out_specs=(heads, specs),
        )(qkv, cache, blocks, offsets)
        # Each device has the sum over its own heads. out_sharding adds the sum over devices.
        x += jnp.einsum("bkgd,kgde->be", out, weights["out"][layer], out_sharding=WHOLE)
    logits = jnp.einsum("be,ve->bv", x, weights["head"])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


def generate(num_devices: int, num_tokens: int) -> tuple[list[list[int]], int]:
    """Return the tokens of two sequences, and the number of all-reduces in a step."""
    mesh = jax.make_mesh(
        (num_devices,),
        ("heads",),
        axis_types=(AxisType.Explicit,),
        devices=jax.devices()[:num_devices],
    )
    with jax.set_mesh(mesh):
        weights, cache = make_weights(mesh), make_cache(mesh, num_slots=2, max_length=64)
        token_ids = jax.device_put(jnp.array([3, 7], jnp.int32), NamedSharding(mesh, WHOLE))
        step = jax.jit(decode, donate_argnums=1).lower(weights, cache, token_ids).compile()
        rows = []
        for _ in range(num_tokens):
            token_ids, cache = step(weights, cache, token_ids)
            rows.append(token_ids.tolist())
    return list(map(list, zip(*rows, strict=True))), str(step.as_text()).count(" all-reduce(")


def main() -> None:
    """Generate on all devices, or on the number of devices that was given."""
    parser = argparse.ArgumentParser(description="Your own model on several devices.")
    parser.add_argument("--devices", type=int, default=jax.device_count())
    parser.add_argument("--tokens", type=int, default=20)
    args = parser.parse_args()
    sequences, num_sums = generate(args.devices, args.tokens)
    print(f"{args.devices} devices, {num_sums} all-reduces in a step of {L} layers")
    for token_ids in sequences:
        print(*token_ids)


if __name__ == "__main__":
    main()
