"""A model of one's own on several devices: explicit sharding outside, paged attention within.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/own_shard_map.py

The model below computes under a mesh with explicit axes: the type of each array says how it is
divided, and each product how its result shall be. The ops over blocks do not take such arrays, so
that they lie in `jax.shard_map`, in which every device sees its KV heads and the queries that read
them. Nothing is sent there; what has to be is the sum behind `out`, which `einsum` is asked for.

    [B, E] --einsum--> [B, K@heads, G + 2, D] --shard_map--> [B, K@heads, G, D] --einsum--> [B, E]

The same program runs on any number of devices that divides the KV heads, with the same result.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from paged_jax import PagedCache, paged_attention, paged_rope_write
from paged_jax.cache import locate, reserve

L, K, G, D, E, V = 2, 4, 2, 16, 64, 128  # layers, KV heads, their queries, head dim, hidden, tokens
WHOLE = PartitionSpec()
OF_HEADS = {  # what is divided, by its KV heads; all else is whole on each device
    "qkv": PartitionSpec(None, "heads"),  # [L, K, G + 2, D, E]
    "out": PartitionSpec(None, "heads"),  # [L, K, G, D, E]
    "pools": PartitionSpec(None, None, "heads"),  # [L, P, K, C, D]
    "activations": PartitionSpec(None, "heads"),  # [B, K, ...]
}


def make_weights(mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Random weights, each on its devices."""
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
    """An empty cache: K and V divided, the allocator and its tables whole on each device."""
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
    """How a cache is divided."""
    specs = jax.tree.map(lambda _: WHOLE, cache)
    return specs.replace_pools(jax.tree.map(lambda _: OF_HEADS["pools"], cache.pools))


def take_places(cache: PagedCache) -> tuple[PagedCache, jax.Array, jax.Array]:
    """Room for one token more in each slot. Each device runs the allocator for itself."""
    slots, positions = jnp.arange(cache.num_slots, dtype=jnp.int32), cache.lengths
    cache, _ = reserve(cache, jnp.ones_like(slots))
    return cache, *locate(cache.tables, slots, positions)


def attend(qkv: jax.Array, cache: PagedCache, blocks: jax.Array, offsets: jax.Array, layer: int):
    """Rotate and write K and V of a token a slot, and attend: of the heads of one device."""
    angles = (cache.lengths - 1)[:, None] * 1e4 ** -jnp.linspace(0, 1, D // 2, endpoint=False)
    q, pools = paged_rope_write(
        cache.k, cache.v, qkv, jnp.cos(angles), jnp.sin(angles), blocks, offsets, layer=layer
    )
    out = paged_attention(q, pools.k, pools.v, cache.block_tables, cache.lengths, layer=layer)
    return out.reshape(out.shape[0], -1, G, D), cache.replace_pools(pools)


def decode(weights: dict[str, jax.Array], cache: PagedCache, token_ids: jax.Array):
    """Append a token i32[B] to each slot: the most probable next ones, and the cache."""
    specs, heads = cache_specs(cache), OF_HEADS["activations"]
    # JAX's check of what varies over the devices does not know these kernels.
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
        # Each device has the sum over its heads; that over all devices is asked for here.
        x += jnp.einsum("bkgd,kgde->be", out, weights["out"][layer], out_sharding=WHOLE)
    logits = jnp.einsum("be,ve->bv", x, weights["head"])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


def generate(num_devices: int, num_tokens: int) -> tuple[list[list[int]], int]:
    """Tokens of two sequences, and how many sums over the devices a step has."""
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
    """Generate on all devices, or as many as asked for."""
    parser = argparse.ArgumentParser(description="A model of one's own on several devices.")
    parser.add_argument("--devices", type=int, default=jax.device_count())
    parser.add_argument("--tokens", type=int, default=20)
    args = parser.parse_args()
    sequences, num_sums = generate(args.devices, args.tokens)
    print(f"{args.devices} devices, {num_sums} sums in a step of {L} layers")
    for token_ids in sequences:
        print(*token_ids)


if __name__ == "__main__":
    main()
