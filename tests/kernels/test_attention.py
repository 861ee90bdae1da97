"""Tests of the attention ops on all backends, against float64 on the stored values of the pool.

Most of the time is spent on compilation, so tests share programs. Tests with the same backend and
options use batches with the shapes of `standard_batch` and different values. Decode and prefill are
in the same program, see `tests.support.paged_batch`.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from paged_jax.kernels import paged_attention, paged_prefill_attention
from paged_jax.kernels.op import backends_of
from tests.support.compiler import needs_compiler
from tests.support.covering import all_pairs, take_turns
from tests.support.paged_batch import (
    BACKENDS,
    LAYER,
    OUT_OF_RANGE,
    PagedBatch,
    lanes_for,
    queries,
)

IS_KERNEL = {"cpu": False, "reference": False, "xla": False, "triton": True, "mosaic_tpu": True}


def test_backends_are_all_tested() -> None:
    """The simulator of the backend `mosaic_gpu` is slow, so it has a file of its own."""
    for op in ("decode", "prefill"):
        assert {*BACKENDS, "mosaic_gpu"} == set(backends_of(op))


def slow_kernels(name: str, *others: Any, is_slow: bool = False, is_quick: bool = False) -> Any:
    """Return a case of a backend, marked slow if it interprets a kernel, which compiles slowly."""
    is_slow = is_slow or IS_KERNEL[name] and not is_quick
    marks = [pytest.mark.slow] if is_slow else []
    marks += [needs_compiler] if name == "cpu" else []
    return pytest.param(name, *others, marks=marks, id="-".join(map(str, (name, *others))))


@pytest.fixture(params=[slow_kernels(name) for name in BACKENDS])
def backend(request) -> dict:
    return BACKENDS[request.param]


def check(batch: PagedBatch, q, query_lens, backend, *, rtol=0.0, atol=1e-5, **options) -> None:
    """Check outputs and log-sum-exp of a decode with the first queries and a prefill with all."""
    got = batch.attend(q, query_lens, **backend, **options)
    want = batch.expected(q, query_lens, **options)
    assert got[0][0].dtype == got[1][0].dtype == q.dtype
    assert got[0][1].dtype == got[1][1].dtype == np.float32
    names = ("decode", "decode lse", "prefill", "prefill lse")
    for name, a, b in zip(names, (*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=rtol, atol=atol, err_msg=name)


SINKS = np.array([0.3, -1.0, 2.5, 0.0, 4.0, -3.0], np.float32)
# Each pair of window, cap and sinks occurs together, and each of them without the other.
OPTIONS = {
    "plain": {},
    "window-of-one": {"sliding_window": 1, "sinks": SINKS},
    "window": {"scale": 0.3, "sliding_window": 150, "soft_cap": 2.0},
    "cap": {"scale": 0.5, "soft_cap": 5.0, "sinks": SINKS},
}

# Lengths around the ends of blocks and tiles; the longest sequence fills its table. Chunks without
# context and after context, empty, of a single token, and longer than a tile of queries.
LENGTHS = [0, 1, 7, 8, 9, 200, 33, 129, 128, 150, 304]
QUERY_LENS = [0, 1, 3, 8, 0, 130, 33, 2, 1, 17, 130]


def standard_batch(backend: dict) -> PagedBatch:
    return PagedBatch.random(LENGTHS, extra_width=0, lanes=lanes_for(backend, 16))


def standard_queries() -> np.ndarray:
    return queries((len(LENGTHS), max(QUERY_LENS), 6, 16))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        slow_kernels(
            name,
            options,
            is_slow=name == "reference" and options != "plain",
            is_quick=options == "window",
        )
        for name, options in itertools.product(BACKENDS, OPTIONS)
    ],
)
def test_paged_attention_matches_float64(name, options) -> None:
    backend = BACKENDS[name]
    check(standard_batch(backend), standard_queries(), QUERY_LENS, backend, **OPTIONS[options])


@pytest.mark.parametrize(
    "name", [slow_kernels(name, is_quick=name == "triton") for name in BACKENDS]
)
def test_paged_attention_of_logits_far_below_zero_matches_float64(name) -> None:
    """Every second token has the largest logit, which is between -1e31 and -1e36."""
    backend, batch = BACKENDS[name], standard_batch(BACKENDS[name])
    q = np.full_like(standard_queries(), 2.0**40)
    sizes = 2.0 ** np.linspace(60, 76, len(LENGTHS)).round()
    for b, (k, size) in enumerate(zip(batch.k, sizes, strict=True)):
        places = np.arange(len(k))
        k[...] = -size * (1 + places % 2)[:, None, None]
        blocks = batch.block_tables[b, places // 8]
        batch.pools.k[LAYER, blocks, :, places % 8, :16] = k
    check(batch, q, QUERY_LENS, backend, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "soft_cap"),
    [
        slow_kernels(name, soft_cap, is_slow=name != "cpu" and (name, soft_cap) != ("xla", 1e6))
        for name, soft_cap in itertools.product(BACKENDS, (1e3, 1e5, 1e6, 1e7))
    ],
)
def test_paged_attention_with_a_large_soft_cap_matches_float64(name, soft_cap) -> None:
    """Such caps have hardly any effect. tanh must not cancel near 0."""
    backend = BACKENDS[name]
    check(standard_batch(backend), standard_queries(), QUERY_LENS, backend, soft_cap=soft_cap)


def test_paged_attention_rows_are_independent(backend) -> None:
    """Results are equal bit for bit in another order, with other values in the other rows."""
    batch, q, query_lens = standard_batch(backend), standard_queries(), np.array(QUERY_LENS)
    together = batch.attend(q, query_lens, **backend)
    backwards = np.arange(len(LENGTHS))[::-1]
    turned = batch.rows(backwards).attend(q[backwards], query_lens[backwards], **backend)
    others = np.arange(len(LENGTHS)) % 2 == 0  # the longest sequence and the longest chunk
    batch.lengths = np.where(others, np.minimum(batch.lengths, 3), batch.lengths)
    q[others], query_lens[others] = np.nan, 0
    without = batch.attend(q, query_lens, **backend)
    results = (jax.tree.leaves(result) for result in (together, turned, without))
    for a, b, c in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b[backwards])
        np.testing.assert_array_equal(a[~others], c[~others])


def test_paged_attention_blocks_may_be_shared(backend) -> None:
    batch, q = standard_batch(backend), standard_queries()
    batch.block_tables[3:5] = batch.block_tables[5]
    batch.lengths[3:5], q[3:5] = batch.lengths[5], q[5]
    (out, lse), _ = batch.attend(q, QUERY_LENS, **backend)
    for row in (3, 4):
        np.testing.assert_array_equal(out[row], out[5])
        np.testing.assert_array_equal(lse[row], lse[5])


def test_paged_attention_ignores_negative_entries(backend) -> None:
    batch = standard_batch(backend)
    batch.block_tables[batch.block_tables == OUT_OF_RANGE] = -7
    check(batch, standard_queries(), QUERY_LENS, backend)


def test_paged_attention_returns_nan_of_real_tokens(backend) -> None:
    """NaN in a real token must not become a finite output."""
    batch = standard_batch(backend)
    row = LENGTHS.index(304)
    batch.pools.k[LAYER, batch.block_tables[row, 20], :, 1] = np.nan
    for out, lse in batch.attend(standard_queries(), QUERY_LENS, **backend):
        assert np.isnan(out[row]).all() and np.isnan(lse[row]).all()
        assert np.isfinite(np.delete(out, row, axis=0)).all()
        assert not np.isnan(np.delete(lse, row, axis=0)).any()


def test_paged_attention_clips_lengths(backend) -> None:
    """Lengths exceed the table; numbers of queries exceed the chunk or the sequence."""
    whole, q = standard_batch(backend), standard_queries()
    want = whole.expected(q, [0, 1, 7, *QUERY_LENS[3:]])
    for length in (305, 2**31 - 1):
        batch = standard_batch(backend)
        batch.lengths[-1] = length
        got = batch.attend(q, [3, 4, 8, *QUERY_LENS[3:-1], 2**31 - 1], **backend)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("layer", [-1, 2])
def test_paged_attention_of_a_traced_layer_out_of_range(backend, layer) -> None:
    """The results equal the results of empty sequences."""
    batch = standard_batch(backend)
    options = OPTIONS["window-of-one"]
    (out, lse), (prefill_out, prefill_lse) = batch.attend(
        standard_queries(), QUERY_LENS, layer=layer, **backend, **options
    )
    assert not out.any() and not prefill_out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(SINKS, lse.shape))
    np.testing.assert_array_equal(prefill_lse, np.full(prefill_lse.shape, -np.inf))


@pytest.mark.parametrize("name", [slow_kernels(name) for name in BACKENDS if IS_KERNEL[name]])
def test_paged_attention_with_wide_tables(name) -> None:
    """Kernels split such contexts into parts. Each part counts, also if it contains NaN."""
    backend = BACKENDS[name]
    batch = PagedBatch.random([300, 300, 9], extra_width=500, lanes=lanes_for(backend, 16))
    q = queries((3, 2, 4, 16))
    check(batch, q, [2, 1, 0], backend)
    batch.pools.k[LAYER, batch.block_tables[0, 36], :, 1] = np.nan
    (out, lse), _ = batch.attend(q, [2, 1, 0], **backend)
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
    assert np.isfinite(out[1:]).all() and np.isfinite(lse[1:]).all()


# Each tuple has values with the same code path in a kernel. Cases take the values of a tuple in
# turn.
FACTORS = {
    "D": [(8,), (64, 32, 128, 256), (80, 96)],
    "dtypes": [
        (("float32", "float32"), ("float32", "bfloat16")),
        (("bfloat16", "bfloat16"), ("float16", "float16")),
        (("float32", "int8"), ("bfloat16", "int8")),
        (("bfloat16", "float8_e4m3fn"), ("float32", "float8_e4m3fn")),
    ],
    "C": [(8,), (16, 32, 64), (128,)],
    "G": [(4, 2, 8), (1,), (7, 3, 5, 12)],
    "K": [(1,), (2, 3)],
    "is_padded": [(False,), (True,)],
    "variant": [("plain",), ("all",)],
}


# On TPUs the last dimension is padded, and float16 is not supported.
TPU_FACTORS = FACTORS | {
    "D": [(80, 8, 64, 96, 32, 128), (256,)],
    "dtypes": [(("float32", "float32"), ("bfloat16", "bfloat16")), *FACTORS["dtypes"][2:]],
    "G": [(4, 2, 8, 3), (1,), (7, 5, 12)],
    "is_padded": [(True,)],
}


# Blocks with a single token are tested in the files of the GPU kernels.
XLA_FACTORS = FACTORS | {"C": [(1,), *FACTORS["C"]]}


def factors_of(name: str) -> dict[str, Any]:
    if not IS_KERNEL[name]:
        return XLA_FACTORS
    return TPU_FACTORS if name == "mosaic_tpu" else FACTORS


@functools.cache
def shapes(name: str) -> list[dict[str, Any]]:
    """Return rows of sizes, dtypes and variants for a backend.

    For kernels, every pair of code paths occurs. For the others each code path occurs, because in
    `reference` and `xla` only the tiles depend on the sizes.
    """
    return take_turns((all_pairs if IS_KERNEL[name] else all_once)(factors_of(name)))


def all_once(factors: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fewest rows that use every tuple of values."""
    num_rows = max(map(len, factors.values()))
    return [
        {name: ways[row % len(ways)] for name, ways in factors.items()} for row in range(num_rows)
    ]


@pytest.mark.parametrize("name", BACKENDS)
def test_shapes_contain_every_size_and_dtype(name) -> None:
    """For kernels every value occurs, for the others a value of every tuple."""
    for factor, ways in factors_of(name).items():
        values = {row[factor] for row in shapes(name)}
        assert all(values & set(way) for way in ways), factor
        assert not IS_KERNEL[name] or values == set(itertools.chain(*ways)), factor


@pytest.mark.parametrize(
    ("name", "index"),
    [
        slow_kernels(name, index, is_slow=index > 5)
        for name in BACKENDS
        for index in range(len(shapes(name)))
    ],
)
def test_paged_attention_any_shape(name, index) -> None:
    row, backend = shapes(name)[index], BACKENDS[name]
    C, D, K, H = row["C"], row["D"], row["K"], row["K"] * row["G"]
    q_dtype, dtype = map(jnp.dtype, row["dtypes"])
    lengths = [0, 1, C - 1, C, C + 1, 70]
    lanes = -(-D // 128) * 128 if row["is_padded"] else lanes_for(backend, D)
    batch = PagedBatch.random(lengths, K=K, C=C, D=D, dtype=dtype, lanes=lanes)
    options: dict[str, Any] = {}
    if row["variant"] == "all":
        sinks = np.linspace(-2, 2, H).astype(np.float32)
        options = {"sliding_window": 20, "soft_cap": 5.0, "sinks": sinks}
    # Stored values are exact. The output, and the softmax weights in kernels with matrix units, are
    # rounded to the dtype of the queries, which adds half a unit in the last place each.
    if q_dtype != jnp.float32:
        options |= {"rtol": 2**-8, "atol": 2**-7 if dtype.itemsize == 1 else 2**-8}
    q = queries((len(lengths), 6, H, D), q_dtype)
    check(batch, q, [min(n, 5) for n in lengths], backend, **options)


def test_paged_attention_of_a_large_batch() -> None:
    """In `xla`, groups of sequences share a loop step, longest first. Kernels have no groups."""
    lengths = np.random.default_rng(3).integers(0, 90, 64)
    lengths[[5, 50]] = 0, 3000
    batch, q = PagedBatch.random(lengths), queries((64, 4, 16))
    for got, want in zip(batch.decode(q, backend="xla"), batch.expected_decode(q), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("num_sequences", [0, 2])
@pytest.mark.parametrize("width", [0, 3])
def test_paged_attention_of_empty_arrays(backend, num_sequences, width) -> None:
    """There are no sequences, no table entries, or no queries in the chunks."""
    pool = np.ones((1, 4, 2, 8, lanes_for(backend, 16)), np.float32)
    tables = np.zeros((num_sequences, width), np.int32)
    lengths = np.zeros(num_sequences, np.int32)
    sinks = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    options = dict(sinks=sinks, return_lse=True, **backend)
    q = queries((num_sequences, 2, 4, 16))
    if num_sequences and width:  # the standard batch has empty sequences with table entries
        q = q[:, :0]
    else:
        out, lse = paged_attention(q[:, 0], pool, pool, tables, lengths, **options)
        np.testing.assert_array_equal(out, np.zeros_like(q[:, 0]))
        np.testing.assert_array_equal(lse, np.broadcast_to(sinks, lse.shape))
    out, lse = paged_prefill_attention(q, pool, pool, tables, lengths, lengths, **options)
    np.testing.assert_array_equal(out, np.zeros_like(q))
    np.testing.assert_array_equal(lse, np.full(q.shape[:3], -np.inf))


# Settings of JAX that must not change a dtype or a value.
SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "strict-promotion": lambda: jax.numpy_dtype_promotion("strict"),
}


@pytest.mark.parametrize(
    ("options", "setting", "pool_dtype"),
    [
        tuple(row.values())
        for row in all_pairs(
            {"options": OPTIONS, "setting": SETTINGS, "pool_dtype": ["bfloat16", "int8"]}
        )
    ],
)
def test_paged_attention_has_the_same_dtypes_under_settings_of_jax(
    options, setting, pool_dtype
) -> None:
    """The branches of all platforms are traced, including the kernels."""
    batch = PagedBatch.random([0, 9, 20], dtype=jnp.dtype(pool_dtype), lanes=128)
    q, query_lens = queries((3, 4, 6, 16)), np.array([0, 4, 3], np.int32)
    pools, arrays = batch.pools, (batch.block_tables, batch.lengths)
    shared = {"k_scale": pools.k_scale, "v_scale": pools.v_scale, **OPTIONS[options]}

    def both(q, k, v, tables, lengths, query_lens, layer):
        keywords = {"layer": layer, "return_lse": True, **shared}
        return (
            paged_attention(q[:, 0], k, v, tables, lengths, **keywords),
            paged_prefill_attention(q, k, v, tables, lengths, query_lens, **keywords),
        )

    with SETTINGS[setting]():
        results = jax.eval_shape(both, q, pools.k, pools.v, *arrays, query_lens, np.int32(LAYER))
    assert {x.dtype for x in jax.tree.leaves(results)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", [slow_kernels("triton"), slow_kernels("mosaic_tpu"), "None"])
def test_paged_attention_has_the_same_values_under_x64(name) -> None:
    """Sinks have half precision. With backend None the branches of all platforms are traced.

    Strict promotion is not tested here, because it raises an error or does nothing.
    """
    backend = BACKENDS.get(name, {})
    batch = PagedBatch.random([9, 20], lanes=lanes_for(backend or BACKENDS["xla"], 16))
    options = {"sliding_window": 11, "soft_cap": 5.0, "sinks": SINKS.astype(jnp.bfloat16)}
    with SETTINGS["x64"]():
        check(batch, queries((2, 3, 6, 16)), [3, 2], backend, **options)


def test_paged_attention_options_may_be_numpy_or_jax_scalars() -> None:
    batch, q = PagedBatch.random([9, 20]), queries((2, 4, 16))
    arrays = q, batch.pools.k, batch.pools.v, batch.block_tables, batch.lengths
    names = ("scale", "sliding_window", "soft_cap")
    attend = functools.partial(paged_attention, *arrays, layer=LAYER, backend="reference")
    wanted = str(jax.make_jaxpr(lambda: attend(**dict.fromkeys(names, 3)))())
    for three in (np.int64(3), jnp.int32(3)):
        given = jax.make_jaxpr(functools.partial(attend, **dict.fromkeys(names, three)))()
        assert str(given) == wanted
    for name in names:
        message = rf"paged_attention: {name} must be static, got a traced int32\[\]\."
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda value, name=name: attend(**{name: value}))(jnp.int32(3))


def test_paged_attention_refuses_explicit_axes() -> None:
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Explicit,))
    batch = PagedBatch.random([9, 20])
    arrays = batch.pools.k, batch.pools.v, batch.block_tables, batch.lengths
    q = jax.device_put(queries((2, 4, 16)), NamedSharding(mesh, P(None, "heads")))
    message = r"arrays must not be on a mesh with explicit axes, got .* jax\.shard_map\("
    with pytest.raises(ValueError, match="paged_attention: " + message):
        paged_attention(q, *arrays, layer=LAYER)
    with pytest.raises(ValueError, match="paged_prefill_attention: " + message):
        jax.jit(lambda q: paged_prefill_attention(q[:, None], *arrays, batch.lengths, layer=LAYER))(
            q
        )


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a device for a kernel")
def test_paged_attention_names_the_platform_of_a_backend() -> None:
    batch, q = PagedBatch.random([9, 20]), queries((2, 4, 16))
    arrays = batch.pools.k, batch.pools.v, batch.block_tables, batch.lengths
    message = "'triton' runs on gpu only, got a device of cpu. .* backend=None .* interpret=True"
    options = {"layer": LAYER, "backend": "triton"}
    with pytest.raises(ValueError, match=message):
        paged_attention(q, *arrays, **options)
    with pytest.raises(ValueError, match=message):
        paged_prefill_attention(q[:, None], *arrays, np.ones(2, np.int32), **options)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_paged_attention_tables_may_be_narrow(dtype) -> None:
    """Row indices of the pool exceed the range of the table's dtype.

    `paged_attention` converts the tables to int32 for all backends.
    """
    batch = PagedBatch.random([900, 700], K=4, D=8)
    batch.block_tables[batch.block_tables == OUT_OF_RANGE] = 255
    batch.block_tables = batch.block_tables.astype(dtype)
    q = queries((2, 8, 8))
    for got, want in zip(batch.decode(q, backend="xla"), batch.expected_decode(q), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_paged_attention_memory_does_not_depend_on_the_table() -> None:
    """A table of 100 times the width must not make the compiled program gather more at a time."""
    costs = []
    for extra_width in (64, 6400):
        batch = PagedBatch.random([9, 20], extra_width=extra_width)

        def attend(q, tables, batch=batch):
            pools = batch.pools
            return paged_attention(q, pools.k, pools.v, tables, batch.lengths, layer=LAYER)

        compiled = jax.jit(attend).lower(queries((2, 2, 16)), batch.block_tables).compile()
        costs.append(compiled.memory_analysis().temp_size_in_bytes)
    table_bytes = 2 * 6400 * 4
    assert costs[1] - costs[0] <= 2 * table_bytes


SCALE = np.ones((2, 4, 2, 8), np.float32)
BAD_CALLS = {
    "rank": ({"q": np.zeros((2, 4))}, r"q must have shape \[B, H, D\]"),
    "batch": ({"block_tables": np.zeros((3, 4), np.int32)}, "block_tables must have B"),
    "head dim": ({"q": np.zeros((2, 4, 8), np.float32)}, "must have D"),
    "heads": ({"q": np.zeros((2, 3, 16), np.float32)}, "multiple of the 2 KV heads of the pools"),
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
    "no layer": ({"layer": None}, "layer must be given for pools of 2 layers, got None"),
    "layer": ({"layer": 2}, r"layer must be in 0\.\.1, got 2"),
    "window": ({"sliding_window": 0}, "sliding_window must be an integer, at least 1"),
    "cap": ({"soft_cap": -1.0}, "soft_cap must be positive"),
    "scale": ({"scale": float("nan")}, "scale must be finite"),
    "backend": (
        {"backend": "cuda"},
        "backend must be None or one of 'cpu', 'mosaic_tpu', 'reference', 'triton', "
        "('mosaic_gpu', )?'xla', got 'cuda'",
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
def test_paged_attention_refuses_wrong_arguments(change, message) -> None:
    pool = np.zeros((2, 4, 2, 8, 16), np.float32)
    arguments = {
        "q": np.zeros((2, 4, 16), np.float32),
        "k_pool": pool,
        "v_pool": pool,
        "block_tables": np.zeros((2, 4), np.int32),
        "context_lens": np.ones(2, np.int32),
        "layer": LAYER,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | change))
    with pytest.raises(ValueError, match=message.replace(r"\[B, H, D\]", r"\[B, T, H, D\]")):
        prefill = arguments | change
        prefill["q"] = prefill["q"][:, None]
        paged_prefill_attention(**prefill, query_lens=np.ones(2, np.int32))
