"""Tests of `paged_write` and `copy_blocks` on all backends, against NumPy, bit for bit.

Unused places of the pools are NaN, or 77 in int8 pools, so that wrong reads and writes are visible.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from paged_jax.kernels.kv_dtypes import QUANTISED, KVDtype, quantise
from paged_jax.kernels.native import library
from paged_jax.kernels.platforms import sets_rows_in_place
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.writing import copy_blocks, paged_write
from tests.support.compiler import needs_compiler

L, P, K, C, D = 2, 5, 3, 4, 8
LAYER = 1
# The number of places in the pool. Tests with the same dtype share a program.
N = P * C
FLOATING = [jnp.float32, jnp.float16, jnp.bfloat16]
DTYPES = [*FLOATING, *QUANTISED]
BACKENDS = {"xla": {}, "triton": {"interpret": jax.default_backend() != "gpu"}}


@pytest.fixture(params=BACKENDS)
def backend(request) -> dict:
    """Keyword arguments of a backend that runs on any platform."""
    return {"backend": request.param} | BACKENDS[request.param]


@pytest.fixture(params=DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def dtype(request):
    return jnp.dtype(request.param)


def poisoned(dtype, shape=(L, P, K, C, D)) -> Pools:
    value = 77 if dtype == jnp.int8 else jnp.nan
    num_scales = 2 if KVDtype.of(dtype).has_scales else 0
    scales = [np.full(shape[:4], np.nan, np.float32) for _ in range(num_scales)]
    return Pools(*(np.full(shape, value, dtype) for _ in range(2)), *scales)


def scales_of(pools: Pools) -> dict:
    return {"k_scale": pools.k_scale, "v_scale": pools.v_scale}


def run_write(pools: Pools, k, v, blocks, offsets, **options) -> Pools:
    return paged_write(pools.k, pools.v, k, v, blocks, offsets, **scales_of(pools), **options)


def run_copy(pools: Pools, sources, targets, **options) -> Pools:
    return copy_blocks(pools.k, pools.v, sources, targets, **scales_of(pools), **options)


@functools.cache
def program(function):
    return jax.jit(function, static_argnames=("backend", "interpret"))


def write(pools: Pools, k, v, blocks, offsets, *, layer: int = LAYER, **backend) -> Pools:
    """Call `run_write` in a program that calls with the same shapes share, for any layer."""
    return program(run_write)(pools, k, v, blocks, offsets, layer=np.int32(layer), **backend)


def copy(pools: Pools, sources, targets, **backend) -> Pools:
    """Call `run_copy` in a program that calls with the same shapes share."""
    return program(run_copy)(pools, sources, targets, **backend)


def make_tokens(num_tokens: int, dtype=np.float32, K=K, D=D) -> np.ndarray:
    """Return random K and V, ``[2, N, K, D]``."""
    return np.random.default_rng(0).normal(size=(2, num_tokens, K, D)).astype(dtype)


def make_places(num_tokens: int, P=P, C=C) -> tuple[np.ndarray, np.ndarray]:
    """Return different places in random order. Every fifth token has a block out of range."""
    places = np.random.default_rng(1).permutation(P * C)[:num_tokens]
    blocks = np.where(np.arange(num_tokens) % 5 == 3, 10**6, places // C)
    return blocks.astype(np.int32), (places % C).astype(np.int32)


QUANTISE = jax.jit(quantise, static_argnums=1)


def expected_write(
    pools: Pools, k, v, blocks, offsets, layer=LAYER, quantise: Callable[..., Any] = QUANTISE
) -> Pools:
    pools = jax.tree.map(np.copy, pools)
    for pool, scale, new in ((pools.k, pools.k_scale, k), (pools.v, pools.v_scale, v)):
        if scale is not None:
            values, scales = quantise(new, pool.dtype)
            new, scales = np.asarray(values), np.asarray(scales)
        for n, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
            if 0 <= block < pool.shape[1] and 0 <= offset < pool.shape[3]:
                pool[layer, block, :, offset, : new.shape[-1]] = new[n].astype(pool.dtype)
                if scale is not None:
                    scale[layer, block, :, offset] = scales[n]
    return pools


def assert_same_bits(pools: Pools, expected: Pools, head_dim: int | None = None) -> None:
    """Check that pools are equal bit for bit; if `head_dim` is given, only in the first lanes."""
    for got, want in zip(jax.tree.leaves(pools), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        lanes = slice(head_dim if got.ndim == 5 else None)
        bits = f"u{got.dtype.itemsize}"
        got, want = (np.ascontiguousarray(x[..., lanes]).view(bits) for x in (got, want))
        np.testing.assert_array_equal(got, want)


def test_paged_write_matches_numpy(backend, dtype):
    pools, (k, v), places = poisoned(dtype), make_tokens(N), make_places(N)
    written = write(pools, k, v, *places, **backend)
    assert_same_bits(written, expected_write(pools, k, v, *places))


SHAPES = [
    (1, 1, 8, 1, jnp.int8),
    (8, 16, 128, 33, jnp.bfloat16),
    (2, 4, 256, 70, jnp.int8),
    (2, 8, 80, 20, jnp.int8),
    (5, 128, 96, 9, jnp.bfloat16),
    (7, 2, 10, 3, jnp.bfloat16),
    (3, 16, 10, 17, jnp.int8),
]


@pytest.mark.parametrize(
    ("name", "K", "C", "D", "num_tokens", "dtype"),
    [*(("triton", *shape) for shape in SHAPES), *(("xla", *shape) for shape in SHAPES[:3])],
)
def test_paged_write_any_shape(name, K, C, D, num_tokens, dtype):
    """The kernel cuts tokens and lanes into tiles; XLA is given them whole."""
    backend = {"backend": name} | BACKENDS[name]
    num_blocks = num_tokens // C + 2
    pools = poisoned(dtype, (L, num_blocks, K, C, D))
    k, v = make_tokens(num_tokens, jnp.bfloat16, K, D)
    places = make_places(num_tokens, num_blocks, C)
    written = write(pools, k, v, *places, **backend)
    assert_same_bits(written, expected_write(pools, k, v, *places))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8], ids=["bfloat16", "int8"])
def test_paged_write_to_padded_pools(backend, dtype):
    pools, (k, v), places = poisoned(dtype, (L, P, K, C, 128)), make_tokens(N), make_places(N)
    written = write(pools, k, v, *places, **backend)
    assert_same_bits(written, expected_write(pools, k, v, *places), head_dim=D)


def test_paged_write_drops_tokens_out_of_range(backend, dtype):
    pools, (k, v) = poisoned(dtype), make_tokens(N)
    blocks = np.array([P, P + 1, -1, 2**30, -(2**31), 0, 0, 2**31 - 1], np.int32)
    offsets = np.array([0, 0, 0, 0, 0, C, -1, 3], np.int32)
    for layer in (0, L - 1):
        written = write(
            pools, k, v, np.resize(blocks, N), np.resize(offsets, N), layer=layer, **backend
        )
        assert_same_bits(written, pools)
    inside = np.arange(N, dtype=np.int32)
    for layer in (L, -1):
        written = write(pools, k, v, inside % P, inside % C, layer=layer, **backend)
        assert_same_bits(written, pools)


def test_paged_write_in_a_scan_over_layers(backend):
    pools, (k, v), places = poisoned(jnp.dtype(jnp.int8)), make_tokens(6), make_places(6)

    def body(pools, layer):
        sign = 1.0 - 2.0 * layer
        return run_write(pools, k * sign, v * sign, *places, layer=layer, **backend), None

    pools_then, _ = jax.jit(lambda pools: jax.lax.scan(body, pools, jnp.arange(L)))(pools)
    expected = expected_write(pools, k, v, *places, layer=0)
    assert_same_bits(pools_then, expected_write(expected, -k, -v, *places, layer=1))


def test_paged_write_and_copy_blocks_of_empty_arrays(backend):
    pools, (k, v), places = poisoned(jnp.dtype(jnp.float32)), make_tokens(0), make_places(0)
    assert_same_bits(run_write(pools, k, v, *places, layer=LAYER, **backend), pools)
    assert_same_bits(run_copy(pools, *places, **backend), pools)


@pytest.mark.parametrize("index_dtype", [np.uint8, np.int64])
def test_paged_write_takes_any_integer_dtype(backend, index_dtype):
    """Row indices of the pool exceed the range of the dtype of the block ids."""
    pools, (k, v) = poisoned(jnp.dtype(jnp.float32), (L, 200, K, C, D)), make_tokens(2)
    blocks, offsets = np.array([199, 150], index_dtype), np.array([3, 1], index_dtype)
    written = run_write(pools, k, v, blocks, offsets, layer=LAYER, **backend)
    assert_same_bits(written, expected_write(pools, k, v, blocks, offsets))


def test_paged_write_rounds_int8_to_the_nearest_level(backend):
    """The largest magnitude is 127, so the scale is 1. Ties are rounded to even."""
    numbers = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 0.50000006, -0.50000006, 63.5, 64.5,
         -126.5, -125.5, 126.49999, 0.0], np.float32
    )  # fmt: skip
    k = np.full((N, K, D), 127.0, np.float32)
    k[..., 1:] = np.resize(numbers, (N, K, D - 1))
    blocks, offsets = np.divmod(np.arange(N, dtype=np.int32), C)
    written = write(poisoned(jnp.dtype(jnp.int8)), k, 0 * k, blocks, offsets, **backend)
    pools = jax.tree.map(lambda pool: np.asarray(pool)[LAYER, blocks, :, offsets], written)
    np.testing.assert_array_equal(pools.k, np.rint(k))
    np.testing.assert_array_equal(pools.v, 0)
    np.testing.assert_array_equal([pools.k_scale, pools.v_scale], 1)


@pytest.mark.parametrize("dtype", QUANTISED, ids=lambda dtype: dtype.name)
def test_paged_write_quantises_each_token_and_head_separately(backend, dtype):
    k, v = make_tokens(N) * np.float32(10) ** np.arange(-10, 10)[:, None, None]
    blocks, offsets = np.divmod(np.arange(N, dtype=np.int32), C)
    pools = write(poisoned(dtype), k, v, blocks, offsets, **backend)
    for pool, scale, new in ((pools.k, pools.k_scale, k), (pools.v, pools.v_scale, v)):
        values = np.asarray(pool, np.float64)[LAYER, blocks, :, offsets]
        scale = np.asarray(scale, np.float64)[LAYER, blocks, :, offsets][..., None]
        np.testing.assert_array_equal(np.abs(values).max(-1), KVDtype.of(dtype).largest)
        # Half a level of int8. For fp8, half of the last of its 3 bits, or of 2**-9, its smallest
        # number.
        bound = scale / 2 if dtype == jnp.int8 else np.maximum(np.abs(new) / 16, scale / 1024)
        assert (np.abs(values * scale - new) <= bound * (1 + 1e-5)).all()


def ones(dtype=np.float32) -> tuple[Pools, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return pools of ones, two tokens of ones, and their places; the second is out of range."""
    pool = np.ones((L, P, K, C, D), dtype)
    places = np.array([3, P], np.int32), np.array([2, 0], np.int32)
    return Pools(pool, pool), np.ones((2, K, D), dtype), places


def without(array: np.ndarray, *place) -> np.ndarray:
    """Return a copy of an array with zeros at index `place`."""
    array = array.copy()
    array[place] = 0
    return array


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*(("xla", dtype) for dtype in FLOATING), ("triton", jnp.bfloat16)],
    ids=["xla-float32", "xla-float16", "xla-bfloat16", "triton-bfloat16"],
)
def test_paged_write_has_gradients(name, dtype):
    """XLA has separate code on CPUs for some dtypes, Triton has not: one dtype suffices there."""
    pools, new, places = ones(dtype)

    def loss(pools, k, v):
        pools = run_write(pools, k, v, *places, layer=LAYER, backend=name, **BACKENDS[name])
        return (2 * pools.k + 3 * pools.v).sum(dtype=jnp.float32)

    d_pools, d_k, d_v = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(pools, new, new)
    for d_pool, d_new, factor in ((d_pools.k, d_k, 2), (d_pools.v, d_v, 3)):
        scaled = (pools.k * factor).astype(dtype)
        np.testing.assert_array_equal(d_pool, without(scaled, LAYER, 3, slice(None), 2))
        np.testing.assert_array_equal(d_new, without((new * factor).astype(dtype), 1))


def test_paged_write_has_gradients_with_backend_none():
    pools, new, places = ones()
    d_k = jax.jit(jax.grad(lambda k: run_write(pools, k, new, *places, layer=0).k.sum()))(new)
    np.testing.assert_array_equal(d_k, without(new, 1))


@pytest.mark.parametrize("dtype", QUANTISED, ids=lambda dtype: dtype.name)
def test_paged_write_refuses_gradients_through_quantised_pools(backend, dtype):
    pools, (k, v), places = poisoned(dtype), make_tokens(2), make_places(2)

    def loss(k):
        return run_write(pools, k, v, *places, layer=LAYER, **backend).k_scale[LAYER].sum()

    with pytest.raises(NotImplementedError, match="paged_write: the pools must be floating"):
        jax.grad(loss)(k)


def test_copy_blocks_copies_all_layers(backend, dtype):
    rng = np.random.default_rng(0)
    pools = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), poisoned(dtype))
    sources = np.array([3, 0, P, 1, -1, 2**31 - 1, 3], np.int32)
    targets = np.array([1, 4, 2, P, 2, 2, -(2**31)], np.int32)
    copied = copy(pools, sources, targets, **backend)
    expected = jax.tree.map(np.copy, pools)
    for array in jax.tree.leaves(expected):
        array[:, [1, 4]] = array[:, [3, 0]]
    assert_same_bits(copied, expected)


def plain_copy(pools: Pools, sources, targets) -> Pools:
    """Copy the valid pairs one after another, in plain JAX."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if 0 <= source < P and 0 <= target < P:
            pools = jax.tree.map(lambda x, s=source, t=target: x.at[:, t].set(x[:, s]), pools)
    return pools


def test_copy_blocks_has_gradients(backend):
    """Some sources have several targets, and some pairs are dropped."""
    rng = np.random.default_rng(0)
    pools = Pools(*rng.normal(size=(2, L, P, K, C, D)).astype(np.float32))
    factors = Pools(*rng.normal(size=(2, L, P, K, C, D)).astype(np.float32))
    sources, targets = np.array([3, 0, P, 3, -1], np.int32), np.array([1, 4, 2, 2, 0], np.int32)

    def copied(pools):
        return run_copy(pools, sources, targets, **backend)

    def plain(pools):
        return plain_copy(pools, sources, targets)

    def loss(copy):
        return lambda pools: sum(
            jnp.sum(f * x**3) for f, x in zip(factors[:2], copy(pools)[:2], strict=True)
        )

    def curvature(copy):
        gradient = jax.grad(loss(copy))
        return jax.grad(lambda pools: sum(jnp.sum(x**2) for x in gradient(pools)[:2]))

    for derive in (lambda copy: jax.grad(loss(copy)), curvature):
        got, expected = jax.jit(derive(copied))(pools), jax.jit(derive(plain))(pools)
        for a, b in zip(got[:2], expected[:2], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    got, expected = (jax.jvp(copy, (pools,), (factors,))[1] for copy in (copied, plain))
    assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *QUANTISED], ids=lambda x: jnp.dtype(x).name)
def test_copy_blocks_has_gradients_for_any_dtype(backend, dtype):
    """int8 pools have no gradient, but their scales do."""
    pools = jax.tree.map(np.zeros_like, poisoned(jnp.dtype(dtype)))
    places = np.array([3], np.int32), np.array([1], np.int32)

    def loss(pools):
        last = run_copy(pools, *places, **backend)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(last))

    bars = jax.tree.leaves(jax.jit(jax.grad(loss, allow_int=True))(pools))
    for bar in (bar for bar in bars if bar.dtype != jax.dtypes.float0):
        expected = np.ones(bar.shape, np.float32)
        expected[:, 3], expected[:, 1] = 2, 0
        np.testing.assert_array_equal(bar.astype(np.float32), expected)


@pytest.mark.parametrize(
    ("name", "K", "C", "D"),
    [
        ("triton", 1, 1, 8),
        ("triton", 3, 16, 80),
        ("triton", 1, 128, 128),
        ("triton", 8, 16, 256),
        ("xla", 3, 16, 80),
    ],
)
def test_copy_blocks_any_shape(name, K, C, D):
    """Blocks have more and fewer words than a program instance copies at a time."""
    shape = (L, 3, K, C, D)
    pools = Pools(*np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32))
    copied = copy(pools, np.array([2]), np.array([0]), backend=name, **BACKENDS[name])
    expected = jax.tree.map(lambda x: x[:, [2, 1, 2]], pools)
    assert_same_bits(copied, expected)


def abstract_pools(dtype, K: int = 4) -> Pools:
    """Return the shapes of large pools, for programs that are compiled but not run."""
    pool = jax.ShapeDtypeStruct((4, 4096, K, 16, 64), dtype)
    has_scales = KVDtype.of(dtype).has_scales
    scale = jax.ShapeDtypeStruct(pool.shape[:4], jnp.float32) if has_scales else None
    return Pools(pool, pool, scale, scale)


def write_layers(pools: Pools, k, v, blocks, offsets, *, num_layers: int) -> Pools:
    for layer in range(num_layers):
        pools = run_write(pools, k, v, blocks, offsets, layer=layer)
    return pools


NEW = jax.ShapeDtypeStruct((16, 4, 64), jnp.float32)
PLACES = jax.ShapeDtypeStruct((16,), jnp.int32)


def nbytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(("dtype", "K"), [(jnp.float32, 4), (jnp.float16, 1), (jnp.int8, 4)])
def test_paged_write_updates_donated_pools_in_place(dtype, K):
    pools = abstract_pools(dtype, K)
    new = jax.ShapeDtypeStruct((16, K, 64), jnp.float32)
    write = jax.jit(functools.partial(write_layers, num_layers=2), donate_argnums=0)
    for lowered in (
        write.lower(pools, new, new, PLACES, PLACES),
        jax.jit(run_copy, donate_argnums=0).lower(pools, PLACES, PLACES),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == nbytes(pools)
        assert memory.temp_size_in_bytes < 0.01 * nbytes(pools.k)


@needs_compiler
@pytest.mark.parametrize(("dtype", "K"), [(jnp.bfloat16, 4), (jnp.float8_e4m3fn, 1)])
def test_paged_write_updates_donated_pools_in_place_by_the_kernel_for_cpus(dtype, K):
    assert sets_rows_in_place("cpu", dtype)
    test_paged_write_updates_donated_pools_in_place(dtype, K)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_paged_write_without_the_kernel_copies_pools_once_for_several_writes(dtype, monkeypatch):
    unavailable = library.LoadedKernel(None, "the test replaces it")
    monkeypatch.setattr(library, "load", lambda kernel: unavailable)
    assert not sets_rows_in_place("cpu", dtype)
    pools = abstract_pools(dtype)
    for num_layers in (1, 2):
        write = jax.jit(functools.partial(write_layers, num_layers=num_layers), donate_argnums=0)
        compiled = write.lower(pools, NEW, NEW, PLACES, PLACES).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2.01 * nbytes(pools.k)
        # The pools are cast to integers and back once, and never to a wider dtype.
        for wider in ("f16", "f32"):
            assert f" {wider}[{pools.k.size // 64},64]" not in compiled.as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_paged_write_on_other_platforms_scatters_without_casts(dtype):
    pools = abstract_pools(dtype)
    write = functools.partial(run_write, layer=0, backend="xla")
    traced = jax.jit(write).trace(pools, NEW, NEW, PLACES, PLACES)
    for platform in ("cpu", "cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        has_casts = "bitcast_convert" in text or "paged_jax_set_rows" in text
        assert has_casts == (platform == "cpu"), platform


POOL = np.zeros((L, P, K, C, D), np.float32)
BAD_WRITES = {
    "no layer": (dict(layer=None), "layer must be given for pools of 2 layers, got None"),
    "layer": (dict(layer=L), r"layer must be in 0\.\.1, got 2"),
    "negative layer": (dict(layer=-1), r"layer must be in 0\.\.1, got -1"),
    "head dim": (dict(k=np.zeros((2, K, D + 1))), "k must have D"),
    "heads": (dict(v=np.zeros((2, K + 1, D))), "v must have K"),
    "rank": (dict(k=np.zeros((2, K))), r"k must have shape \[N, K, D\]"),
    "integers": (dict(k=np.zeros((2, K, D), int)), "k must be floating point, got int"),
    "blocks": (dict(blocks=np.zeros(1, int)), "blocks must have N"),
    "offsets": (dict(offsets=np.zeros(2)), "offsets must be an integer array, got float"),
    "pool dtype": (dict(v_pool=POOL.astype(np.float16)), "v_pool must have the dtype of k_pool"),
    "no scales": (
        dict(k_pool=POOL.astype(np.int8), v_pool=POOL.astype(np.int8)),
        "k_scale must be given for a pool of int8",
    ),
    "scales": (dict(v_scale=POOL[..., 0]), "v_scale must be None for a pool of float32"),
    "backend": (dict(backend="cuda"), "backend must be None or one of"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_WRITES.values(), ids=BAD_WRITES)
def test_paged_write_refuses_wrong_arguments(changes, message):
    new, places = np.zeros((2, K, D), np.float32), np.zeros(2, np.int32)
    arguments = dict(
        k_pool=POOL, v_pool=POOL, k=new, v=new, blocks=places, offsets=places, layer=LAYER
    )
    with pytest.raises(ValueError, match=f"paged_write: {message}"):
        paged_write(**(arguments | changes))


def test_copy_blocks_refuses_wrong_arguments():
    pair = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="copy_blocks: targets must have N"):
        copy_blocks(POOL, POOL, pair, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="copy_blocks: v_pool must have P"):
        copy_blocks(POOL, POOL[:, 1:], pair, pair)
    with pytest.raises(ValueError, match="copy_blocks: sources must be an integer array"):
        copy_blocks(POOL, POOL, np.zeros(1), pair)


def test_paged_write_and_copy_blocks_refuse_explicit_axes():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Explicit,))
    pool = jax.device_put(POOL, NamedSharding(mesh, Spec(None, None, "heads")))
    new, places = np.zeros((2, K, D), np.float32), np.zeros(2, np.int32)
    message = "arrays must not be on a mesh with explicit axes"
    with pytest.raises(ValueError, match=f"paged_write: {message}"):
        paged_write(pool, pool, new, new, places, places, layer=LAYER)
    with pytest.raises(ValueError, match=f"copy_blocks: {message}"):
        copy_blocks(pool, pool, places, places)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a device for a kernel")
def test_paged_write_and_copy_blocks_name_the_platform_of_a_backend():
    new, places = np.zeros((2, K, D), np.float32), np.zeros(2, np.int32)
    message = "'triton' runs on gpu only, got a device of cpu"
    with pytest.raises(ValueError, match=f"paged_write: backend {message}"):
        paged_write(POOL, POOL, new, new, places, places, layer=LAYER, backend="triton")
    with pytest.raises(ValueError, match=f"copy_blocks: backend {message}"):
        copy_blocks(POOL, POOL, places, places, backend="triton")


def test_paged_write_refuses_more_rows_than_int32_counts():
    def write(P):
        pool = jax.ShapeDtypeStruct((15, P, 8, 16, 1), jnp.float32)
        new, places = jax.ShapeDtypeStruct((2, 8, 1), jnp.float32), PLACES.update(shape=(2,))
        write = functools.partial(run_write, layer=LAYER)
        jax.eval_shape(write, Pools(pool, pool), new, new, places, places)

    write(2**20)
    with pytest.raises(ValueError, match="must have at most 2147483631 rows"):
        write(2**21)
