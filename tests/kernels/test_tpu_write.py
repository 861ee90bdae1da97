"""Tests of the kernel for TPUs that writes keys and values, interpreted, against NumPy.

All comparisons are bit for bit. Unused places of the pools are NaN. Cost: 12 CPU-seconds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import paged_rope_write
from paged_jax.kernels.mosaic_tpu import write as tpu_write
from paged_jax.kernels.op import choose_backend
from paged_jax.kernels.op_args import WriteArgs
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.writing import paged_write

L, P, K, C, LANES = 2, 12, 3, 16, 128
LAYER = 1
ON_TPU = {"backend": "mosaic_tpu", "interpret": True}


def poisoned(dtype, *, has_values: bool = True, lanes: int = LANES, C: int = C) -> Pools:
    unused = 77 if dtype == np.int8 else np.nan
    pools = [np.full((L, P, K, C, lanes), unused, dtype) for _ in range(1 + has_values)]
    return Pools(*pools, *[None] * (4 - len(pools)))


def tokens(num_tokens: int, D: int = LANES) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(num_tokens, K, D)).astype(np.float32) for _ in range(2)]


def check_write(pools: Pools, blocks, offsets, *, layer: int = LAYER, D: int = LANES) -> None:
    """Write tokens, and compare all places of the pools with NumPy's assignments."""
    blocks, offsets = np.asarray(blocks, np.int32), np.asarray(offsets, np.int32)
    arrays = [pool for pool in pools if pool is not None]
    new: list = tokens(len(blocks), D)[: len(arrays)]
    want = [pool.copy() for pool in arrays]
    for token, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        if 0 <= block < P and 0 <= offset < arrays[0].shape[3] and 0 <= layer < L:
            for pool, values in zip(want, new, strict=True):
                pool[layer, block, :, offset, :D] = values[token].astype(pool.dtype)
    k, v = new if len(new) > 1 else (*new, None)
    arguments = *pools[:2], k, v, blocks, offsets
    run = jax.jit(lambda layer: paged_write(*arguments, layer=layer, **ON_TPU))
    got = [pool for pool in run(np.int32(layer)) if pool is not None]
    for pool, expected in zip(got, want, strict=True):
        bits = f"u{expected.dtype.itemsize}"
        got_bits, want_bits = (
            np.ascontiguousarray(x[..., :D]).view(bits) for x in (np.asarray(pool), expected)
        )
        np.testing.assert_array_equal(got_bits, want_bits)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_decode_writes_a_token_of_each_block(dtype) -> None:
    """Tokens with a block or an offset out of range are dropped."""
    blocks = np.random.default_rng(1).permutation(P)[:7]
    offsets = np.array([0, 15, 7, 8, 3, 16, -1])
    blocks[2] = P
    check_write(poisoned(dtype), blocks, offsets)


@pytest.mark.parametrize("order", ["a prompt", "any order"])
def test_tokens_of_a_tile_share_its_buffer(order, monkeypatch) -> None:
    """There are three grid steps, which also share tiles."""
    monkeypatch.setattr(tpu_write, "_STEP_TOKENS", 20)
    places = np.arange(5, 58)
    if order == "any order":
        places = np.random.default_rng(2).permutation(places)
    check_write(poisoned(jnp.bfloat16), places // C, places % C)


def test_keys_alone_are_written_with_padding_in_small_steps(monkeypatch) -> None:
    monkeypatch.setattr(tpu_write, "_STEP_BYTES", 4 * K * 8 * 256 * 4)  # four tiles
    pools = poisoned(jnp.float32, has_values=False, lanes=256, C=8)
    check_write(pools, np.arange(9), np.arange(9) % 8, D=200)


@pytest.mark.parametrize("layer", [-1, L])
def test_nothing_is_written_to_a_layer_out_of_range(layer) -> None:
    check_write(poisoned(jnp.bfloat16), [3, 4], [0, 9], layer=layer)


def test_rope_write_has_the_bits_of_xla() -> None:
    rng = np.random.default_rng(3)
    qkv = rng.normal(size=(5, K, 4, LANES)).astype(np.float32)
    cos, sin = rng.normal(size=(2, 5, LANES // 2)).astype(np.float32)
    pools, blocks, offsets = poisoned(jnp.bfloat16), np.arange(5), np.array([3, 0, 15, 8, 7])
    arguments = *pools[:2], qkv, cos, sin, blocks, offsets
    results = [
        jax.jit(lambda backend=backend: paged_rope_write(*arguments, layer=LAYER, **backend))()
        for backend in (ON_TPU, {"backend": "xla"})
    ]
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view("u2"), np.asarray(want).view("u2"))


def test_vmap_writes_as_a_loop() -> None:
    """Pools and new tokens have a dimension more than their places."""
    pools = [jnp.asarray(np.stack([pool, pool])) for pool in poisoned(jnp.bfloat16)[:2]]
    k, v = (jnp.asarray(np.stack([new, -new])) for new in tokens(4))
    blocks, offsets = jnp.array([3, 0, 7, 3]), jnp.array([1, 9, 15, 2])

    def write(backend: dict, *arrays: jax.Array):
        return paged_write(*arrays, blocks, offsets, layer=LAYER, **backend)

    got = jax.jit(jax.vmap(functools.partial(write, ON_TPU)))(*pools, k, v)
    for index in range(2):
        want = write({"backend": "xla"}, *(x[index] for x in (*pools, k, v)))
        for pool, expected in zip(got[:2], want[:2], strict=True):
            np.testing.assert_array_equal(
                np.asarray(pool[index]).view("u2"), np.asarray(expected).view("u2")
            )
    lowered = jax.jit(jax.vmap(functools.partial(write, {}))).trace(*pools, k, v)
    assert "tpu_custom_call" in lowered.lower(lowering_platforms=("tpu",)).as_text()


def test_write_lowers_with_64_bit_types() -> None:
    pools, (k, v) = poisoned(jnp.bfloat16), tokens(4)
    places = np.arange(4, dtype=np.int32)
    with jax.enable_x64(True):
        traced = jax.jit(lambda *arrays: paged_write(*arrays, layer=LAYER)).trace(
            *pools[:2], k, v, places, places
        )
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def _problem(pools: Pools, num_tokens: int = 4, D: int = LANES, U: int = LANES) -> Problem:
    shapes = [jax.ShapeDtypeStruct((num_tokens, K, size), jnp.float32) for size in (D, U)]
    places = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    return Problem.of_write(WriteArgs(pools, *shapes, places, places, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (_problem(poisoned(np.int8)), "pools must be bfloat16 or float32, got int8"),
        (_problem(poisoned(jnp.bfloat16, lanes=64), D=64, U=64), "a multiple of 128"),
        (_problem(poisoned(jnp.bfloat16), D=128, U=64), "the same for keys and values"),
        (_problem(poisoned(jnp.bfloat16, C=4)), "the block size must be a multiple of 8, got 4"),
        (_problem(poisoned(jnp.bfloat16), 2**17), "must fit scalar memory"),
    ],
)  # fmt: skip
def test_writes_that_the_kernel_does_not_support_are_left_to_xla(problem, reason) -> None:
    chosen = choose_backend(problem, "tpu")
    assert chosen.backend == "xla" and reason in chosen.reason
    assert choose_backend(_problem(poisoned(jnp.bfloat16)), "tpu").backend == "mosaic_tpu"
