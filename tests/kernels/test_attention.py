"""One contract for all attention backends, against float64 on the values that the pool holds.

Kernels for GPUs and TPUs run on them where there are any, else in Pallas' interpreter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from paged_jax.kernels import merge_attention, paged_attention, paged_prefill_attention
from paged_jax.kernels.dispatch import backends_of
from tests.support.paged_batch import LAYER, OUT_OF_RANGE, PagedBatch, queries

# Each backend, and what it needs to run here.
BACKENDS = {
    "reference": {"backend": "reference"},
    "xla": {"backend": "xla"},
    "triton": {"backend": "triton", "interpret": jax.default_backend() != "gpu"},
    "mosaic_tpu": {"backend": "mosaic_tpu", "interpret": jax.default_backend() != "tpu"},
}

FLOAT8 = jnp.float8_e4m3fn


def test_every_backend_is_tested() -> None:
    assert set(BACKENDS) == set(backends_of("decode")) == set(backends_of("prefill"))


# Interpreting a kernel takes seconds. The quick suite has `test_kernels_match_float64`.
@pytest.fixture(
    params=[
        "reference",
        "xla",
        pytest.param("triton", marks=pytest.mark.slow),
        pytest.param("mosaic_tpu", marks=pytest.mark.slow),
    ]
)
def backend(request) -> dict:
    return BACKENDS[request.param]


def check_decode(batch: PagedBatch, q, backend, *, rtol=0.0, atol=1e-5, **options) -> None:
    got, want = batch.decode(q, **backend, **options), batch.expected_decode(q, **options)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=rtol, atol=atol, err_msg=name)


def check_prefill(batch, q, query_lens, backend, *, rtol=0.0, atol=1e-5, **options) -> None:
    got = batch.prefill(q, query_lens, **backend, **options)
    want = batch.expected_prefill(q, query_lens, **options)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=rtol, atol=atol, err_msg=name)


def lanes_for(backend: dict, D: int) -> int:
    """TPU kernels take pools whose last axis is padded to whole registers."""
    return -(-D // 128) * 128 if backend["backend"] == "mosaic_tpu" else D


SINKS = np.array([0.3, -1.0, 2.5, 0.0, 4.0, -3.0], np.float32)
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 11},
    "window-of-one": {"sliding_window": 1},
    "cap": {"soft_cap": 2.0},
    "sinks": {"sinks": SINKS},
    "all": {"scale": 0.5, "sliding_window": 150, "soft_cap": 5.0, "sinks": SINKS},
}


@pytest.mark.parametrize("name", ["triton", "mosaic_tpu"])
def test_kernels_match_float64(name) -> None:
    batch = PagedBatch.random([0, 7, 8, 200], lanes=lanes_for(BACKENDS[name], 16))
    check_decode(batch, queries((4, 6, 16)), BACKENDS[name], **OPTIONS["all"])
    check_prefill(batch, queries((4, 9, 6, 16)), [0, 7, 3, 9], BACKENDS[name], **OPTIONS["all"])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_paged_attention_matches_float64(backend, options) -> None:
    batch = PagedBatch.random(
        [0, 1, 7, 8, 9, 200, 33, 129, 128, 127, 300], lanes=lanes_for(backend, 16)
    )
    check_decode(batch, queries((11, 6, 16)), backend, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_paged_prefill_attention_matches_float64(backend, options) -> None:
    batch = PagedBatch.random([0, 1, 8, 40, 200, 150], lanes=lanes_for(backend, 16))
    query_lens = [0, 1, 3, 40, 130, 0]
    check_prefill(batch, queries((6, 130, 6, 16)), query_lens, backend, **options)


# Letters C, K, G, D. Every size of the contract occurs, small with large.
SHAPES = [
    (8, 1, 8, 80),
    (8, 2, 12, 8),
    (16, 3, 5, 32),
    (16, 2, 1, 128),
    (32, 2, 2, 128),
    (32, 1, 3, 64),
    (64, 1, 7, 96),
    (128, 2, 4, 256),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_attention_any_shape(backend, shape) -> None:
    check_shape(backend, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("D", [8, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("C", [8, 16, 32, 64, 128])
def test_paged_attention_every_shape(backend, C, D) -> None:
    """All of C x D, with groups in turn."""
    groups = (1, 2, 3, 4, 5, 7, 8, 12)
    check_shape(backend, C, 1, groups[(C.bit_length() * 3 + D // 8) % len(groups)], D)


def check_shape(backend, C, K, G, D) -> None:
    lengths = [0, 1, C - 1, C, C + 1, 70]
    batch = PagedBatch.random(lengths, K=K, C=C, D=D, lanes=lanes_for(backend, D))
    check_decode(batch, queries((len(lengths), K * G, D)), backend)
    query_lens = [min(n, 5) for n in lengths]
    check_prefill(batch, queries((len(lengths), 6, K * G, D)), query_lens, backend)


@pytest.mark.parametrize("C", [1, 4])
@pytest.mark.parametrize(
    "name", ["reference", "xla", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_paged_attention_small_blocks(name, C) -> None:
    batch = PagedBatch.random([0, 1, 3, 17], C=C)
    check_decode(batch, queries((4, 6, 16)), BACKENDS[name])


@pytest.mark.slow
def test_paged_attention_large_batch(backend) -> None:
    lengths = np.random.default_rng(3).integers(0, 90, 64)
    lengths[[5, 50]] = 0, 3000
    batch = PagedBatch.random(lengths, lanes=lanes_for(backend, 16))
    check_decode(batch, queries((64, 4, 16)), backend)


@pytest.mark.parametrize("extra_width", [0, 1, 40])
def test_paged_attention_any_table_width(backend, extra_width) -> None:
    batch = PagedBatch.random([17, 3, 40], extra_width=extra_width, lanes=lanes_for(backend, 16))
    check_decode(batch, queries((3, 2, 16)), backend)
    check_prefill(batch, queries((3, 5, 2, 16)), [5, 2, 0], backend)


def test_paged_attention_lanes_may_be_padded(backend) -> None:
    batch = PagedBatch.random([17, 0, 40], D=64, lanes=128)
    check_decode(batch, queries((3, 4, 64)), backend)
    check_prefill(batch, queries((3, 5, 4, 64)), [5, 0, 5], backend)


def test_paged_attention_negative_entries_are_not_read(backend) -> None:
    batch = PagedBatch.random([17, 3], lanes=lanes_for(backend, 16))
    batch.block_tables[batch.block_tables == OUT_OF_RANGE] = -7
    check_decode(batch, queries((2, 2, 16)), backend)
    check_prefill(batch, queries((2, 3, 2, 16)), [3, 3], backend)


def test_paged_attention_blocks_may_be_shared(backend) -> None:
    batch = PagedBatch.random([24, 24], lanes=lanes_for(backend, 16))
    batch.block_tables[1] = batch.block_tables[0]
    out, _ = batch.decode(np.repeat(queries((1, 2, 16)), 2, axis=0), **backend)
    np.testing.assert_array_equal(out[0], out[1])


# Stored values are exact; the result, and in kernels with matrix units the softmax weights, are
# rounded to bfloat16: half a unit in the last place of each.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_paged_attention_half_precision(backend, dtype) -> None:
    batch = PagedBatch.random([5, 130, 64], dtype=dtype, lanes=lanes_for(backend, 16))
    q = queries((3, 4, 16), dtype)
    if backend["backend"] == "mosaic_tpu" and dtype == jnp.float16:
        with pytest.raises(NotImplementedError, match="must be bfloat16 or float32, got float16"):
            batch.decode(q, **backend)
        return
    out, lse = batch.decode(q, **backend)
    assert out.dtype == dtype and lse.dtype == np.float32
    check_decode(batch, q, backend, rtol=2**-8, atol=2**-8)
    q = queries((3, 4, 4, 16), dtype)
    check_prefill(batch, q, [4, 3, 4], backend, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("q_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.int8, FLOAT8])
def test_paged_attention_quantised(backend, dtype, q_dtype) -> None:
    batch = PagedBatch.random([5, 130, 0, 64], dtype=dtype, lanes=lanes_for(backend, 16))
    tolerance = {} if q_dtype == jnp.float32 else {"rtol": 2**-8, "atol": 2**-7}
    check_decode(batch, queries((4, 4, 16), q_dtype), backend, **tolerance)
    check_decode(batch, queries((4, 6, 16), q_dtype), backend, **tolerance, **OPTIONS["all"])
    q = queries((4, 6, 4, 16), q_dtype)
    check_prefill(batch, q, [5, 6, 0, 3], backend, **tolerance)


@pytest.mark.parametrize("num_sequences", [0, 2])
@pytest.mark.parametrize("width", [0, 3])
def test_paged_attention_of_nothing(backend, num_sequences, width) -> None:
    """No sequences, no blocks in the tables, or no queries in the chunks."""
    pool = np.ones((1, 4, 2, 8, lanes_for(backend, 16)), np.float32)
    tables = np.zeros((num_sequences, width), np.int32)
    lengths = np.zeros(num_sequences, np.int32)
    sinks = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    q = queries((num_sequences, 4, 16))
    out, lse = paged_attention(
        q, pool, pool, tables, lengths, sinks=sinks, return_lse=True, **backend
    )
    np.testing.assert_array_equal(out, np.zeros_like(q))
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, q.shape[:2]))
    for T in (0, 2):
        q = queries((num_sequences, T, 4, 16))
        out, lse = paged_prefill_attention(
            q, pool, pool, tables, lengths, lengths, sinks=sinks, return_lse=True, **backend
        )
        np.testing.assert_array_equal(out, np.zeros_like(q))
        np.testing.assert_array_equal(lse, np.full(q.shape[:3], -np.inf))


def test_paged_attention_shows_nan_of_real_tokens(backend) -> None:
    """What is wrong must not come out as a number, however the context is divided."""
    batch = PagedBatch.random([300, 300], extra_width=500, lanes=lanes_for(backend, 16))
    last = batch.block_tables[0, 36]
    batch.pools.k[LAYER, last, :, 1] = np.nan
    out, lse = batch.decode(queries((2, 4, 16)), **backend)
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
    assert np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()


def test_paged_attention_sinks_in_half_precision() -> None:
    """With every branch traced that the platforms may choose."""
    batch = PagedBatch.random([9, 20])
    q, sinks = queries((2, 6, 16)), SINKS.astype(jnp.bfloat16)
    check_decode(batch, q, {}, sinks=sinks)
    check_prefill(batch, q[:, None], [1, 1], {}, sinks=sinks)


# What a user may have set, and what must then change neither a type nor a value.
SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "strict-promotion": lambda: jax.numpy_dtype_promotion("strict"),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["xla", "triton", "mosaic_tpu"])
def test_paged_attention_under_settings_of_jax(name, setting) -> None:
    batch = PagedBatch.random([9, 20], lanes=lanes_for(BACKENDS[name], 16))
    options = {} if name == "xla" else BACKENDS[name]
    with SETTINGS[setting]():
        check_decode(batch, queries((2, 6, 16)), options, **OPTIONS["all"])
        check_prefill(batch, queries((2, 3, 6, 16)), [3, 2], options, **OPTIONS["all"])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", ["plain", "window", "cap", "sinks"])
def test_paged_attention_jitted_under_settings_of_jax(options, setting) -> None:
    """With the branches of all platforms traced, and pools narrower than the queries."""
    batch = PagedBatch.random([0, 9, 20], dtype=jnp.bfloat16)
    tables, lengths = batch.block_tables, batch.lengths
    q, query_lens = queries((3, 4, 6, 16)), np.array([0, 4, 3], np.int32)

    def both(q, pools):
        shared = {"layer": LAYER, "return_lse": True, **OPTIONS[options]}
        return (
            paged_attention(q[:, 0], pools.k, pools.v, tables, lengths, **shared),
            paged_prefill_attention(q, pools.k, pools.v, tables, lengths, query_lens, **shared),
        )

    with SETTINGS[setting]():
        decoded, prefilled = jax.jit(both)(q, batch.pools)
    assert all(x.dtype == jnp.float32 for x in (*decoded, *prefilled))
    wanted = batch.expected_decode(q[:, 0], **OPTIONS[options])
    wanted += batch.expected_prefill(q, query_lens, **OPTIONS[options])
    for got, want in zip((*decoded, *prefilled), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_paged_attention_is_the_same_twice(backend) -> None:
    batch = PagedBatch.random([300, 5, 90], lanes=lanes_for(backend, 16))
    q = queries((3, 4, 16))
    first, second = (batch.decode(q, **backend) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_paged_attention_rows_do_not_see_each_other(backend, op) -> None:
    """Bitwise, where they lie in the batch; to rounding, how many there are.

    Each batch size is a program of its own, and may order the sums of a product differently.
    """
    lengths = [300, 0, 5, 129, 64, 64, 17, 250, 1, 90, 31]
    batch = PagedBatch.random(lengths, lanes=lanes_for(backend, 16))
    q = queries((len(lengths), 3, 4, 16))
    query_lens = np.minimum(lengths, 3)

    def run(rows):
        if op == "decode":
            return batch.rows(rows).decode(q[rows, 0], **backend)[0]
        return batch.rows(rows).prefill(q[rows], query_lens[rows], **backend)[0]

    together = run(np.arange(len(lengths)))
    backwards = run(np.arange(len(lengths))[::-1])
    np.testing.assert_array_equal(together, backwards[::-1])
    half = run(np.arange(0, len(lengths), 2))
    np.testing.assert_allclose(together[::2], half, atol=1e-6)


def test_paged_attention_row_ignores_the_length_of_others(backend) -> None:
    batch = PagedBatch.random([300, 40, 90], lanes=lanes_for(backend, 16))
    q = queries((3, 4, 16))
    before, _ = batch.decode(q, **backend)
    batch.lengths = np.array([1, 40, 7], np.int32)
    after, _ = batch.decode(q, **backend)
    np.testing.assert_array_equal(before[1], after[1])


def test_paged_attention_layer_may_be_traced(backend) -> None:
    batch = PagedBatch.random([9, 20], lanes=lanes_for(backend, 16))
    q = queries((2, 2, 16))

    def attend(layer):
        return paged_attention(
            q, batch.pools.k, batch.pools.v, batch.block_tables, batch.lengths,
            layer=layer, **backend,
        )  # fmt: skip

    want, _ = batch.expected_decode(q)
    np.testing.assert_allclose(jax.jit(attend)(jnp.int32(LAYER)), want, atol=1e-5)


def test_paged_attention_cuts_lengths_to_what_there_can_be(backend) -> None:
    """More tokens than the table holds, and more queries than the chunk or the sequence."""
    batch = PagedBatch.random([24, 3, 24], extra_width=0, lanes=lanes_for(backend, 16))
    batch.lengths = np.array([25, 3, 2**31 - 1], np.int32)
    q = queries((3, 5, 4, 16))
    check_decode(batch, q[:, 0], backend)
    check_decode(batch, q[:, 0], backend, sliding_window=9)
    got = batch.prefill(q, [7, 4, 5], **backend)
    for a, b in zip(got, batch.expected_prefill(q, [5, 3, 5]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("layer", [-1, 2])
def test_paged_attention_in_a_traced_layer_that_is_none(backend, layer) -> None:
    """As if all sequences were empty."""
    batch = PagedBatch.random([9, 20], lanes=lanes_for(backend, 16))
    pools, tables, lens = batch.pools[:2], batch.block_tables, batch.lengths
    q, sinks = queries((2, 3, 6, 16)), jnp.asarray(SINKS)

    @jax.jit
    def attend(layer):
        options = dict(layer=layer, sinks=sinks, return_lse=True, **backend)
        decoded = paged_attention(q[:, 0], *pools, tables, lens, **options)
        return decoded, paged_prefill_attention(q, *pools, tables, lens, lens, **options)

    (out, lse), (prefill_out, prefill_lse) = attend(jnp.int32(layer))
    assert not out.any() and not prefill_out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(SINKS, lse.shape))
    np.testing.assert_array_equal(prefill_lse, np.full(prefill_lse.shape, -np.inf))


@pytest.mark.parametrize("name", ["scale", "sliding_window", "soft_cap"])
def test_paged_attention_options_are_static_numbers_of_any_type(name) -> None:
    batch, q = PagedBatch.random([9, 20]), queries((2, 4, 16))
    out, _ = batch.decode(q, backend="reference", **{name: 3})
    for three in (np.int64(3), jnp.int32(3)):
        same, _ = batch.decode(q, backend="reference", **{name: three})
        np.testing.assert_array_equal(same, out)

    @jax.jit
    def attend(value):
        return paged_attention(
            q, *batch.pools[:2], batch.block_tables, batch.lengths, **{name: value}
        )

    message = rf"paged_attention: {name} must be static, got a traced int32\[\]\."
    with pytest.raises(ValueError, match=message):
        attend(jnp.int32(3))


def test_paged_attention_refuses_explicit_axes() -> None:
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Explicit,))
    batch = PagedBatch.random([9, 20])
    q = jax.device_put(queries((2, 4, 16)), NamedSharding(mesh, P(None, "heads")))
    message = r"arrays must not be on a mesh with explicit axes, got .* jax\.shard_map\("
    with pytest.raises(ValueError, match="paged_attention: " + message):
        batch.decode(q)
    with pytest.raises(ValueError, match="paged_prefill_attention: " + message):
        jax.jit(lambda q: batch.prefill(q[:, None], [1, 1]))(q)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a device for a kernel")
def test_paged_attention_names_the_device_that_a_kernel_needs() -> None:
    batch, q = PagedBatch.random([9, 20]), queries((2, 4, 16))
    message = "'triton' runs on gpu only, got a device of cpu. .* backend=None .* interpret=True"
    with pytest.raises(ValueError, match=message):
        batch.decode(q, backend="triton")
    with pytest.raises(ValueError, match=message):
        batch.prefill(q[:, None], [1, 1], backend="triton")


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16])
def test_paged_attention_tables_may_be_narrow(backend, dtype) -> None:
    """Row numbers of the pool are larger than the block ids that they are made from."""
    batch = PagedBatch.random([900, 700], K=4, D=8, lanes=lanes_for(backend, 8))
    batch.block_tables[batch.block_tables == OUT_OF_RANGE] = 255
    batch.block_tables = batch.block_tables.astype(dtype)
    check_decode(batch, queries((2, 8, 8)), backend)


def test_paged_attention_cost_follows_the_tokens() -> None:
    """Counted, not timed: the loop makes one step per tile that holds tokens.

    A table of 100 times the width must not make the compiled program gather more at a time.
    """
    costs = []
    for extra_width in (64, 6400):
        batch = PagedBatch.random([9, 20], extra_width=extra_width)
        compiled = (
            jax.jit(lambda q, t, b=batch: paged_attention(q, b.pools.k, b.pools.v, t, b.lengths))
            .lower(queries((2, 2, 16)), batch.block_tables)
            .compile()
        )
        costs.append(compiled.memory_analysis().temp_size_in_bytes)
    table_bytes = 2 * 6400 * 4
    assert costs[1] - costs[0] <= 2 * table_bytes


def test_merge_attention_of_a_shared_prefix(backend) -> None:
    """Two sequences read 24 shared tokens once, as one row of queries, then each its own."""
    prefix = PagedBatch.random([24], lanes=lanes_for(backend, 16))
    rest = PagedBatch.random([9, 0], lanes=lanes_for(backend, 16), seed=5)
    q = queries((2, 4, 16))
    shared = prefix.rows(np.array([0, 0]))
    out, lse = merge_attention(*shared.decode(q, **backend), *rest.decode(q, **backend))

    whole = PagedBatch.random([33, 24], lanes=lanes_for(backend, 16))
    whole.k = [np.concatenate([prefix.k[0], k]) for k in rest.k]
    whole.v = [np.concatenate([prefix.v[0], v]) for v in rest.v]
    want_out, want_lse = whole.expected_decode(q)
    np.testing.assert_allclose(out, want_out, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_merge_attention_of_nothing_is_nothing() -> None:
    nothing = jnp.zeros((1, 4)), jnp.full(1, -jnp.inf)
    out, lse = merge_attention(*nothing, *nothing)
    assert out.tolist() == [[0, 0, 0, 0]] and lse.tolist() == [-np.inf]
    out, lse = merge_attention(*nothing, jnp.ones((1, 4)), jnp.array([2.0]))
    assert out.tolist() == [[1, 1, 1, 1]] and lse.tolist() == [2]


def test_merge_attention_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"shapes \[..., D\], \[...\]"):
        merge_attention(jnp.ones((2, 4)), jnp.ones(3), jnp.ones((2, 4)), jnp.ones(3))


SCALE = np.ones((2, 4, 2, 8), np.float32)
BAD_CALLS = {
    "rank": ({"q": np.zeros((2, 4))}, r"q must have shape \[B, H, D\]"),
    "batch": ({"block_tables": np.zeros((3, 4), np.int32)}, "block_tables must have B"),
    "head dim": ({"q": np.zeros((2, 4, 8), np.float32)}, "must have D"),
    "heads": ({"q": np.zeros((2, 3, 16), np.float32)}, "multiple of the pool's 2 KV heads"),
    "q dtype": ({"q": np.zeros((2, 4, 16), np.int32)}, "q must be floating point"),
    "table dtype": ({"block_tables": np.zeros((2, 4), np.float32)}, "integer array"),
    "pool dtype": (
        {name: np.zeros((2, 4, 2, 8, 16), np.int16) for name in ("k_pool", "v_pool")},
        "k_pool must be floating point, int8 or float8_e4m3fn, got int16",
    ),
    "pools differ": ({"v_pool": np.zeros((2, 4, 2, 8, 16), np.float16)}, "dtype of k_pool"),
    "scale missing": (
        {name: np.zeros((2, 4, 2, 8, 16), np.int8) for name in ("k_pool", "v_pool")},
        r"k_scale must be given .* f32 \[2, 4, 2, 8\]",
    ),
    "scale superfluous": ({"v_scale": SCALE}, "v_scale must be None for a pool of float32"),
    "scale shape": ({"k_scale": SCALE[:, :3]}, "k_scale must have P"),
    "sinks": ({"sinks": np.zeros(3, np.float32)}, "sinks must have H"),
    "layer": ({"layer": 2}, r"layer must be in 0\.\.1, got 2"),
    "window": ({"sliding_window": 0}, "sliding_window must be an integer, at least 1"),
    "cap": ({"soft_cap": -1.0}, "soft_cap must be positive"),
    "scale": ({"scale": float("nan")}, "scale must be finite"),
    "backend": (
        {"backend": "cuda"},
        "backend must be None or one of 'mosaic_tpu', 'reference', 'triton', 'xla', got 'cuda'",
    ),
    "interpret": ({"interpret": True}, "interpret needs a backend"),
    "interpret xla": ({"interpret": True, "backend": "xla"}, "interpret needs a backend"),
    "layer type": ({"layer": np.int64(7)}, r"layer must be in 0\.\.1, got 7"),
    "layer rank": ({"layer": np.zeros(1, np.int32)}, "layer must be one integer"),
    "window type": ({"sliding_window": 4.0}, "sliding_window must be an integer or None, got 4.0"),
    "scale type": ({"scale": "auto"}, "scale must be a number or None, got 'auto'"),
    "no lengths": ({"context_lens": None}, r"context_lens .* None\. .* jnp.full\(B, M \* C\)"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_paged_attention_refuses(change, message) -> None:
    pool = np.zeros((2, 4, 2, 8, 16), np.float32)
    arguments = {
        "q": np.zeros((2, 4, 16), np.float32),
        "k_pool": pool,
        "v_pool": pool,
        "block_tables": np.zeros((2, 4), np.int32),
        "context_lens": np.ones(2, np.int32),
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | change))
    with pytest.raises(ValueError, match=message.replace(r"\[B, H, D\]", r"\[B, T, H, D\]")):
        prefill = arguments | change
        prefill["q"] = prefill["q"][:, None]
        paged_prefill_attention(**prefill, query_lens=np.ones(2, np.int32))
