"""Tests of `paged_rope_write` on all backends, against NumPy in float64.

Unused places of the pools are NaN, or 77 in int8 pools, so that wrong reads and writes are visible.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from paged_jax.kernels.kv_dtypes import QUANTISED, KVDtype
from paged_jax.kernels.norm_rope import rms_norm, rotate
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.writing import paged_rope_write, paged_write
from tests.kernels.test_writing import (
    BACKENDS,
    BAD_WRITES,
    DTYPES,
    QUANTISE,
    assert_same_bits,
    expected_write,
    make_places,
    poisoned,
    scales_of,
)

L, P, H, K, C, D = 2, 5, 4, 2, 4, 8
LAYER, EPS = 1, 1e-3
# The number of places in the pool. Tests with the same dtype share a program.
N = P * C


@pytest.fixture(params=BACKENDS)
def backend(request) -> dict:
    """Keyword arguments of a backend that runs on any platform."""
    return {"backend": request.param} | BACKENDS[request.param]


@pytest.fixture(params=DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def dtype(request):
    return jnp.dtype(request.param)


class New(NamedTuple):
    """Projection and rotations of some tokens, and weights of norms."""

    qkv: Any
    cos: Any
    sin: Any
    q_norm: Any = None
    k_norm: Any = None


def make_new(N=N, H=H, K=K, D=D, dtype: Any = np.float32, *, has_norms: bool = False) -> New:
    rng = np.random.default_rng(0)
    qkv = rng.normal(size=(N, K, H // K + 2, D)).astype(dtype)
    angles = rng.uniform(-4, 4, size=(N, D // 2))
    norms = rng.normal(1, 0.5, size=(2, D)).astype(jnp.bfloat16) if has_norms else ()
    return New(qkv, *(f(angles).astype(np.float32) for f in (np.cos, np.sin)), *norms)


def run(pools: Pools, new: New, blocks, offsets, **options) -> tuple[jax.Array, Pools]:
    return paged_rope_write(
        pools.k, pools.v, new.qkv, new.cos, new.sin, blocks, offsets,
        q_norm=new.q_norm, k_norm=new.k_norm, norm_eps=EPS, **scales_of(pools), **options,
    )  # fmt: skip


PROGRAM = jax.jit(run, static_argnames=("backend", "interpret"))


def rope_write(pools: Pools, new: New, places, *, layer: int = LAYER, **backend):
    """Call `run` in a program that calls with the same shapes share, for any layer."""
    return PROGRAM(pools, new, *places, layer=np.int32(layer), **backend)


def ungrouped(qkv) -> list[Any]:
    """Return the heads of queries, keys and values of a projection."""
    kv_heads = range(qkv.shape[1])
    queries = jnp.concatenate([qkv[:, kv_head, :-2] for kv_head in kv_heads], axis=1)
    return [queries, *(jnp.stack([qkv[:, i, j] for i in kv_heads], axis=1) for j in (-2, -1))]


def split(new: New) -> list[np.ndarray]:
    """Return q, k and v in float64, normalised and rotated."""
    half = new.cos.shape[1]
    heads = [np.asarray(x, np.float64) for x in ungrouped(np.asarray(new.qkv))]
    cos, sin = (x[:, None].astype(np.float64) for x in (new.cos, new.sin))
    for i, norm in enumerate((new.q_norm, new.k_norm)):
        x = heads[i]
        if norm is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm.astype(np.float64)
        first, second = x[..., :half], x[..., half:]
        heads[i] = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return heads


def assert_close(got, expected: np.ndarray) -> None:
    """Check equality up to float32 errors of a few operations and the rounding of `got`."""
    half_step = float(jnp.finfo(got.dtype).eps) / 2
    tolerance = half_step * np.abs(expected) + 3e-6 * (1 + np.abs(expected))
    assert (np.abs(np.asarray(got, np.float64) - expected) <= tolerance).all()


def check(pools: Pools, new: New, places, *, quantise=QUANTISE, **backend) -> None:
    """Run the op and check all of its results."""
    (L, P, _, C, _), D, dtype = pools.k.shape, new.qkv.shape[-1], pools.k.dtype
    blocks, offsets = places
    q, written = rope_write(pools, new, places, **backend)
    expected_q, expected_k, v = split(new)
    assert q.dtype == KVDtype.of(dtype).query_dtype
    assert_close(q, expected_q)

    is_kept = (blocks >= 0) & (blocks < P)
    block, offset = blocks[is_kept], offsets[is_kept]
    keys = np.asarray(written.k)[LAYER, block, :, offset, :D]
    if KVDtype.of(dtype).has_scales:
        scale = np.asarray(written.k_scale, np.float64)[LAYER, block, :, offset][..., None]
        error = np.abs(keys.astype(np.float64) * scale - expected_k[is_kept])
        # Half a level of int8. For fp8, half of the last of its 3 bits, or of its smallest number.
        fp8 = np.maximum(np.abs(expected_k[is_kept]) / 16, scale / 1024)
        assert (error <= (scale / 2 if dtype == jnp.int8 else fp8) + 3e-6).all()
        assert (np.abs(keys.astype(np.float64)).max(-1) == KVDtype.of(dtype).largest).all()
    else:
        assert_close(keys, expected_k[is_kept])

    # Values have the bits that `paged_write` gives. Other places of the pools are unchanged.
    exact_v = expected_write(
        pools, 0 * expected_k, np.asarray(new.qkv)[:, :, -1], *places, quantise=quantise
    )
    for got, expected in ((written.v, exact_v.v), (written.v_scale, exact_v.v_scale)):
        if got is not None:
            assert_same_bits(Pools(got, got), Pools(expected, expected), head_dim=D)
    around = np.ones((L, P, C), bool)
    around[LAYER, block, offset] = False
    for got, before in ((written.k, pools.k), (written.k_scale, pools.k_scale)):
        if got is not None:
            got, before = (np.moveaxis(np.asarray(x), 3, 2)[around] for x in (got, before))
            assert got.tobytes() == before.tobytes()


def test_paged_rope_write_matches_numpy(backend, dtype):
    check(poisoned(dtype, (L, P, K, C, D)), make_new(), make_places(N), **backend)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
def test_paged_rope_write_normalises_queries_and_keys(backend, dtype):
    pools = poisoned(jnp.dtype(dtype), (L, P, K, C, D))
    check(pools, make_new(has_norms=True), make_places(N), **backend)


SHAPES = [
    # num_tokens, H, K, C, D, type of the projection, type of the pools, lanes, norms
    (1, 32, 8, 16, 128, jnp.float32, jnp.bfloat16, 128, False),
    (33, 9, 3, 8, 64, jnp.bfloat16, jnp.int8, 64, True),
    (20, 5, 5, 2, 80, jnp.float32, jnp.float8_e4m3fn, 128, True),
    (19, 3, 1, 12, 256, jnp.bfloat16, jnp.float32, 256, True),
    (70, 2, 2, 1, 128, jnp.float16, jnp.int8, 128, False),
    (7, 7, 1, 128, 10, jnp.float32, jnp.bfloat16, 128, True),
]


@pytest.mark.parametrize(
    ("name", *"NHKCD", "dtype", "pool_dtype", "lanes", "has_norms"),
    [*(("triton", *shape) for shape in SHAPES), *(("xla", *shape) for shape in SHAPES[1:3])],
)
def test_paged_rope_write_any_shape(name, N, H, K, C, D, dtype, pool_dtype, lanes, has_norms):
    """The kernel has tiles of tokens and lanes, XLA has none."""
    num_blocks = N // C + 2
    pools = poisoned(jnp.dtype(pool_dtype), (L, num_blocks, K, C, lanes))
    new = make_new(N, H, K, D, dtype, has_norms=has_norms)
    places = make_places(N, num_blocks, C)
    check(pools, new, places, backend=name, **BACKENDS[name])


def test_paged_rope_write_rounds_like_paged_write(backend, dtype):
    """With angles of 0, results are equal to `paged_write` bit for bit."""
    new, pools, places = make_new(), poisoned(dtype, (L, P, K, C, D)), make_places(N)
    new = new._replace(cos=np.ones_like(new.cos), sin=np.zeros_like(new.sin))
    q, written = rope_write(pools, new, places, **backend)
    wanted, k, v = (np.asarray(x) for x in ungrouped(new.qkv))
    assert_same_bits(written, expected_write(pools, k, v, *places))
    np.testing.assert_array_equal(q, wanted.astype(KVDtype.of(dtype).query_dtype))


@jax.jit
def one_by_one(pools: Pools, new: New, blocks, offsets) -> tuple[jax.Array, Pools]:
    """Compute the op with other functions of this package."""
    q, k, v = ungrouped(new.qkv)
    q = rms_norm(q, new.q_norm, EPS, num_heads=H)
    k = rms_norm(k, new.k_norm, EPS, num_heads=K)
    q, k = (rotate(x, new.cos, new.sin) for x in (q, k))
    written = paged_write(
        pools.k, pools.v, k, v, blocks, offsets, layer=LAYER, **scales_of(pools), backend="xla"
    )
    return q.astype(KVDtype.of(pools.k.dtype).query_dtype), written


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
def test_paged_rope_write_by_xla_equals_separate_ops(dtype):
    pools = poisoned(jnp.dtype(dtype), (L, P, K, C, D))
    new, places = make_new(has_norms=True), make_places(N)
    got, expected = rope_write(pools, new, places, backend="xla"), one_by_one(pools, new, *places)
    np.testing.assert_array_equal(got[0], expected[0])
    assert_same_bits(got[1], expected[1])


def test_paged_rope_write_drops_tokens_out_of_range(backend):
    """Keys and values are dropped, but the op returns the queries of all tokens."""
    pools, new = poisoned(jnp.dtype(jnp.int8), (L, P, K, C, D)), make_new()
    blocks = np.array([P, P + 1, -1, 2**30, -(2**31), 0, 0, 2**31 - 1], np.int32)
    offsets = np.array([0, 0, 0, 0, 0, C, -1, 3], np.int32)
    for layer, places in {
        0: (np.resize(blocks, N), np.resize(offsets, N)),
        L - 1: (np.resize(blocks, N), np.resize(offsets, N)),
        L: (np.arange(N, dtype=np.int32) % P, np.arange(N, dtype=np.int32) % C),
        -1: (np.arange(N, dtype=np.int32) % P, np.arange(N, dtype=np.int32) % C),
    }.items():
        q, written = rope_write(pools, new, places, layer=layer, **backend)
        assert_same_bits(written, pools)
        assert_close(q, split(new)[0])


def test_paged_rope_write_in_a_scan_over_layers(backend):
    pools, new = poisoned(jnp.dtype(jnp.int8), (L, P, K, C, D)), make_new(6)
    places = make_places(6)

    def body(pools, layer):
        scaled = new._replace(qkv=new.qkv * (1.0 - 2.0 * layer))
        return run(pools, scaled, *places, layer=layer, **backend)[::-1]

    written, q = jax.jit(lambda pools: jax.lax.scan(body, pools, jnp.arange(L)))(pools)
    np.testing.assert_array_equal(q[0], -q[1])
    values = new.qkv[:, :, -1]
    expected = expected_write(pools, 0 * values, values, *places, layer=0)
    expected = expected_write(expected, 0 * values, -values, *places, layer=1)
    assert_same_bits(Pools(written.v, written.v), Pools(expected.v, expected.v))


def test_paged_rope_write_of_no_tokens(backend):
    pools, new = poisoned(jnp.dtype(jnp.int8), (L, P, K, C, D)), make_new(0)
    q, written = run(pools, new, *make_places(0), layer=LAYER, **backend)
    assert q.shape == (0, H, D) and q.dtype == jnp.bfloat16
    assert_same_bits(written, pools)


def test_paged_rope_write_has_the_gradients_of_separate_ops(backend):
    """The gradients in projection, rotations, norms and pools equal gradients of `one_by_one`."""
    pools = Pools(*np.random.default_rng(1).normal(size=(2, L, P, K, C, D)).astype(np.float32))
    new, places = make_new(6, has_norms=True), make_places(6)

    def loss(op, pools, new):
        q, written = op(pools, new, *places)
        return (q**2).sum() + (written.k**3).sum() + jnp.sin(written.v).sum()

    op = functools.partial(run, layer=LAYER, **backend)
    got = jax.jit(jax.grad(functools.partial(loss, op), argnums=(0, 1)))(pools, new)
    expected = jax.jit(jax.grad(functools.partial(loss, one_by_one), argnums=(0, 1)))(pools, new)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", QUANTISED, ids=lambda dtype: dtype.name)
def test_paged_rope_write_refuses_gradients_through_quantised_pools(backend, dtype):
    pools, new = poisoned(dtype, (L, P, K, C, D)), make_new(2)

    def loss(qkv):
        return run(pools, new._replace(qkv=qkv), *make_places(2), layer=LAYER, **backend)[0].sum()

    with pytest.raises(NotImplementedError, match="paged_rope_write: the pools must be floating"):
        jax.grad(loss)(new.qkv)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
def test_paged_rope_write_updates_donated_pools_in_place(dtype):
    """Two layers write to large pools. The program is compiled, but not run."""
    pool = jax.ShapeDtypeStruct((4, 4096, K, 16, D), dtype)
    has_scales = KVDtype.of(dtype).has_scales
    scale = jax.ShapeDtypeStruct(pool.shape[:4], jnp.float32) if has_scales else None
    pools = Pools(pool, pool, scale, scale)

    def two_layers(pools, new, blocks, offsets):
        q, pools = run(pools, new, blocks, offsets, layer=0)
        again, pools = run(pools, new._replace(sin=-new.sin), blocks, offsets, layer=1)
        return q + again, pools

    compiled = jax.jit(two_layers, donate_argnums=0).lower(pools, make_new(), *make_places(N))
    memory = compiled.compile().memory_analysis()
    num_bytes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(pools)]
    assert memory.alias_size_in_bytes == sum(num_bytes)
    assert memory.temp_size_in_bytes < 0.02 * num_bytes[0]


POOL = np.zeros((L, P, K, C, D), np.float32)
QKV, ANGLES = np.zeros((2, K, H // K + 2, D), np.float32), np.zeros((2, D // 2), np.float32)
BAD = {
    **{name: BAD_WRITES[name] for name in ("no layer", "layer", "blocks", "offsets", "backend")},
    "rank": (dict(qkv=QKV[0]), r"qkv must have shape \[N, K, G \+ 2, D\]"),
    "no queries": (dict(qkv=QKV[:, :, :2]), r"qkv must have shape \[N, K, G \+ 2, D\]"),
    "KV heads": (dict(qkv=QKV[:, :1]), "k_pool must have K"),
    "head dim": (dict(qkv=QKV[..., :4]), "k_pool must have D"),
    "integers": (dict(qkv=QKV.astype(int)), "qkv must be floating point, got int"),
    "cos": (dict(cos=ANGLES[:, :2]), r"cos must be f32 \[N, D / 2\] = \[2, 4\], got"),
    "sin": (dict(sin=ANGLES.astype(jnp.bfloat16)), r"sin must be f32 .* got bfloat16 \[2, 4\]"),
    "norm": (dict(q_norm=np.ones(D), k_norm=np.ones(4)), "k_norm must have D"),
    "one norm": (dict(q_norm=np.ones(D)), "q_norm and k_norm must both be given, or neither"),
    "odd head": (
        dict(qkv=QKV[..., :7], k_pool=POOL[..., :7], v_pool=POOL[..., :7]),
        r"D \(head dimension\) must be even, got 7",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_paged_rope_write_refuses_wrong_arguments(changes, message):
    places = np.zeros(2, np.int32)
    arguments = dict(
        k_pool=POOL, v_pool=POOL, qkv=QKV, cos=ANGLES, sin=ANGLES, blocks=places, offsets=places,
        layer=LAYER,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"paged_rope_write: {message}"):
        paged_rope_write(**(arguments | changes))


def test_paged_rope_write_refuses_explicit_axes():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Explicit,))
    pool = jax.device_put(POOL, NamedSharding(mesh, Spec(None, None, "heads")))
    with pytest.raises(ValueError, match="paged_rope_write: arrays must not be on a mesh with"):
        run(Pools(pool, pool), make_new(2), *make_places(2), layer=LAYER)


def test_paged_rope_write_of_odd_halves_in_quantised_pools_uses_xla():
    pools, new = poisoned(jnp.dtype(jnp.int8), (L, P, K, C, 10)), make_new(3, D=10)
    with pytest.raises(
        NotImplementedError, match="triton does not support the call: half a head must have an"
    ):
        run(pools, new, *make_places(3), layer=LAYER, backend="triton", interpret=True)
    check(pools, new, make_places(3))
