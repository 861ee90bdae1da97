"""The C++ kernels for CPUs: matmuls, exact batch invariance, choice of the backend, processes."""

import dataclasses
import functools
import pickle
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

from paged_jax.kernels import choose_backend, load_cpu_kernels, paged_attention
from paged_jax.kernels.linear import Stack, Weight, linear
from paged_jax.kernels.native import library
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.rows import pool_of_zeros
from paged_jax.models.codecs.dtype_formats import quantise
from tests.support.compiler import needs_compiler
from tests.support.paged_batch import LAYER, PagedBatch, queries
from tests.support.processes import run_on_devices

pytestmark = needs_compiler

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
F16, INT8 = jnp.dtype(jnp.float16), jnp.dtype(jnp.int8)
FP8 = jnp.dtype(jnp.float8_e4m3fn)
LINEAR = jax.jit(linear, static_argnames="backend")


def weights_and_rows(out_features: int, inputs: int, num_rows: int, dtype=F32):
    rng = np.random.default_rng(out_features + inputs)
    w = rng.normal(size=(out_features, inputs)).astype(np.float32)
    rows = rng.normal(size=(num_rows, inputs)).astype(np.float32)
    if dtype == INT8:
        return Weight(*map(jnp.asarray, quantise(w)[:2])), rows
    return jnp.asarray(w, dtype), rows


def kernel_name(dtype) -> str:
    return "paged_jax_quantised_linear_int8" if dtype == INT8 else "paged_jax_linear"


def as_float64(w) -> np.ndarray:
    if isinstance(w, Weight) and w.scales is None:
        w = w.values
    if isinstance(w, Weight):
        return np.asarray(w.values, np.float64) * np.asarray(w.scales, np.float64)
    return np.asarray(w, np.float64)


# Inputs that fill whole vector steps, less than a step, or a step and a number more. Numbers of
# weight rows that are no multiple of a block or of a part of the work.
SHAPES = [(1, 1), (7, 5), (33, 65), (130, 96), (13, 1031), (2003, 64)]


@pytest.mark.parametrize("dtype", [F32, BF16, F16, INT8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_matches_float64_and_does_not_depend_on_other_rows(shape, dtype) -> None:
    """The result of a row has the same bits in batches of any size."""
    w, x = weights_and_rows(*shape, 64, dtype)
    together = np.asarray(LINEAR(x, w))
    rounded = x.astype(dtype) if dtype == BF16 else x
    exact = np.asarray(rounded, np.float64) @ as_float64(w).T
    scale = np.abs(x.astype(np.float64)) @ np.abs(as_float64(w)).T
    # A few units in the last place of float32, relative to the terms of the sum.
    assert (np.abs(together - exact) <= 1e-6 * scale).all()
    for num_rows in (1, 2, 5, 6, 7, 13, 18):
        np.testing.assert_array_equal(LINEAR(x[-num_rows:], w), together[-num_rows:])
    assert kernel_name(dtype) in LINEAR.lower(x, w).as_text()


def test_linear_rounds_to_bfloat16_like_jax() -> None:
    """Ties, numbers just above a tie, overflow to infinity, infinity and NaN."""
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF]
    values = np.resize(np.array(bits, np.uint32), 48).view(np.float32)
    got = LINEAR(np.diag(values), jnp.eye(48, dtype=BF16))
    np.testing.assert_array_equal(np.diagonal(got), values.astype(BF16).astype(np.float32))


def test_linear_reads_nothing_past_the_end_of_a_row() -> None:
    """Each row ends within a vector of the processor, and the next row follows in memory."""
    w, x = weights_and_rows(5, 37, 3)
    expected = np.asarray(LINEAR(x, w))
    w = w.at[3].set(jnp.nan)
    got = np.asarray(LINEAR(x, w))
    np.testing.assert_array_equal(np.delete(got, 3, axis=1), np.delete(expected, 3, axis=1))
    assert np.isnan(got[:, 3]).all()


def test_linear_skips_rows_of_zeros() -> None:
    """Their results would be NaN if they were multiplied by the weights."""
    w, x = weights_and_rows(9, 40, 12)
    w = w.at[3].set(jnp.nan)
    is_zero = np.isin(np.arange(12), [0, 5, 6, 11])
    got = np.asarray(LINEAR(np.where(is_zero[:, None], np.float32(0), x), w))
    np.testing.assert_array_equal(got[is_zero], 0)
    np.testing.assert_array_equal(got[~is_zero], LINEAR(x[~is_zero], w))
    np.testing.assert_array_equal(LINEAR(np.zeros_like(x), w), 0)


def test_linear_uses_xla_for_no_rows_or_backend_xla() -> None:
    w, x = weights_and_rows(8, 16, 4)
    calls = [
        LINEAR.lower(x, w, backend="xla"),
        LINEAR.lower(x[:0], w),
    ]
    assert not any("custom_call" in call.as_text() for call in calls)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, INT8], ids=str)
def test_linear_takes_any_number_of_rows(dtype) -> None:
    w, x = weights_and_rows(8, 40, 600, dtype)
    x = x.astype(BF16).astype(F32)
    assert kernel_name(dtype) in LINEAR.lower(x, w).as_text()
    np.testing.assert_allclose(LINEAR(x, w), x @ as_float64(w).T, rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(LINEAR(x, w)[570:], LINEAR(x[570:], w))


@pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=str)
def test_linear_reads_weights_from_the_stack_of_all_layers(dtype) -> None:
    """Results are the same bits as without a stack, no weight is copied, gradients are right."""
    alone, rows = zip(*(weights_and_rows(40, 56, 3, dtype) for _ in range(2)), strict=True)
    weights = [w if isinstance(w, Weight) else Weight(w) for w in alone]
    weights[1] = jax.tree.map(lambda x: (x * 0.5).astype(x.dtype), weights[1])
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), *weights)

    def chain(x, stack):
        def body(x, part_and_layer):
            part, layer = part_and_layer
            whole = jax.lax.stop_gradient(Stack(stack.arrays, layer))
            y = linear(x, dataclasses.replace(part, stack=whole))
            return jnp.tanh(jnp.pad(y, ((0, 0), (0, 16)))), y

        return jax.lax.scan(body, x, (stack, jnp.arange(2)))[1]

    compiled = jax.jit(chain).lower(rows[0], stack).compile()
    got = compiled(rows[0], stack)
    np.testing.assert_array_equal(got[0], LINEAR(rows[0], weights[0]))
    x = np.asarray(jnp.tanh(np.pad(got[0], ((0, 0), (0, 16)))))
    if dtype == BF16:
        x = np.asarray(x.astype(BF16))  # as the kernel does
    np.testing.assert_allclose(
        got[1], x.astype(np.float64) @ as_float64(weights[1]).T, rtol=1e-5, atol=1e-5
    )
    assert compiled.memory_analysis().temp_size_in_bytes < weights[0].values.nbytes
    if dtype == F32:
        slope = jax.grad(lambda stack: sum((y**2).sum() for y in chain(rows[0], stack)))(stack)
        # The same gradients in float64, by the chain rule.
        w, u = (as_float64(each) for each in weights)
        y = rows[0].astype(np.float64) @ w.T
        h = np.tanh(np.pad(y, ((0, 0), (0, 16))))
        z = h @ u.T
        dy = 2 * y + (2 * z @ u * (1 - h**2))[:, : y.shape[1]]
        want = np.stack([dy.T @ rows[0], 2 * z.T @ h])
        np.testing.assert_allclose(slope.values, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_linear_converts_every_float16_number() -> None:
    """All 65,536 bit patterns, including subnormal numbers, infinities and NaN."""
    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 64)
    one = np.zeros((64, 64), np.float32)
    np.fill_diagonal(one, 1)
    w = np.where(np.isfinite(numbers), numbers, 0)
    np.testing.assert_array_equal(LINEAR(one, jnp.asarray(w)).T, w.astype(np.float32))
    with np.errstate(invalid="ignore"):
        sums = numbers.astype(np.float32) @ np.ones(64, np.float32)
    got = LINEAR(np.ones((1, 64), np.float32), jnp.asarray(numbers))[0]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(sums))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_linear_has_the_gradients_of_xla(dtype) -> None:
    w, x = weights_and_rows(6, 24, 4, dtype)

    def loss(x, w, backend):
        return (linear(x, w, backend=backend) ** 2).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    forward = jax.jit(lambda x, w: jax.jvp(lambda x: linear(x, w), (x,), (x,)))(x, w)
    np.testing.assert_allclose(*forward, rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients(x, w, None), gradients(x, w, "xla"), strict=True):
        assert got.dtype == want.dtype
        rtol = 2**-7 if dtype == BF16 else 1e-5
        np.testing.assert_allclose(
            got.astype(jnp.float32), want.astype(jnp.float32), rtol=rtol, atol=rtol
        )


def test_linear_under_vmap() -> None:
    w, x = weights_and_rows(6, 24, 8)
    mapped = jax.jit(jax.vmap(linear, in_axes=(0, None)))(x.reshape(2, 4, 24), w)
    np.testing.assert_allclose(mapped.reshape(8, 6), LINEAR(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", library.ELEMENTS, ids=str)
def test_decode_of_a_sequence_does_not_depend_on_the_batch(dtype) -> None:
    """The same bits alone and in a batch, also for contexts of several segments."""
    lengths = [600, 256, 257, 0, 33, 1]
    batch = PagedBatch.random(lengths, dtype=dtype)
    q = queries((len(lengths), 6, 16))
    options = {"sliding_window": 400} if dtype == BF16 else {}
    together = batch.decode(q, backend="cpu", **options)
    for b in range(len(lengths)):
        alone = batch.rows(np.array([b])).decode(q[b : b + 1], backend="cpu", **options)
        for a, others in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a[0], others[b])


@pytest.mark.parametrize(
    ("dtype", "q_dtype", "options"),
    [
        (F32, F32, {}),
        (INT8, F32, {"sliding_window": 33}),
        (BF16, BF16, {"sliding_window": 33}),
        (INT8, BF16, {}),
    ],
    ids=str,
)
def test_prefill_of_a_sequence_does_not_depend_on_the_batch_or_chunks(
    dtype, q_dtype, options
) -> None:
    """The same bits alone and in a batch, in one chunk and in several."""
    lengths, num_queries = [150, 64, 33, 0, 1], [70, 64, 1, 0, 1]
    batch = PagedBatch.random(lengths, dtype=dtype)
    q = queries((len(lengths), 70, 6, 16), q_dtype)
    run = functools.partial(PagedBatch.prefill, backend="cpu", **options)
    together = run(batch, q, num_queries)
    alone = run(batch.rows(np.array([1])), q[1:2], [64])
    for a, others in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a[0, :64], others[1, :64])
    shorter = dataclasses.replace(batch.rows(np.array([0])), lengths=np.array([127], np.int32))
    for a, whole in zip(run(shorter, q[:1], [47]), together, strict=True):
        np.testing.assert_array_equal(a[0, :47], whole[0, :47])
        assert np.isfinite(whole[0]).all()


def test_prefill_of_a_chunk_in_several_rows() -> None:
    """A chunk may take several rows of the batch, next to rows of other sequences."""
    batch = PagedBatch.random([60, 60])
    q = queries((1, 60, 6, 16))
    rows, lengths = [1, 0, 0, 0, 0, 0, 1, 1], [20, 28, 36, 44, 60, 57, 60, 60]
    num_queries = [8, 8, 8, 8, 8, 5, 8, 0]
    several = dataclasses.replace(batch.rows(np.array(rows)), lengths=np.array(lengths, np.int32))
    chunks = np.zeros((len(rows), 8, 6, 16), np.float32)
    for b, (length, count) in enumerate(zip(lengths, num_queries, strict=True)):
        chunks[b, :count] = q[0, length - count : length]
    results = several.prefill(chunks, num_queries, backend="cpu")
    whole = [batch.rows(np.array([row])).prefill(q, [60], backend="cpu") for row in (0, 1)]
    for b, (row, length, count) in enumerate(zip(rows, lengths, num_queries, strict=True)):
        for got, want in zip(results, whole[row], strict=True):
            np.testing.assert_array_equal(got[b, :count], want[0, length - count : length])


@pytest.mark.parametrize(
    ("dtype", "D", "value_dim", "options"),
    [
        (BF16, 64, None, {}),
        (BF16, 33, None, {"sliding_window": 20, "soft_cap": 2.0}),
        (INT8, 40, None, {"soft_cap": 5.0}),
        (FP8, 80, None, {"sliding_window": 7}),
        (BF16, 72, 48, {}),
    ],
    ids=str,
)
def test_prefill_with_bfloat16_queries(dtype, D, value_dim, options) -> None:
    """Weights of the softmax are rounded to bfloat16; nothing else is."""
    heads = {"K": 1, "value_dim": value_dim} if value_dim else {"K": 2}
    batch = PagedBatch.random([150, 41, 0, 3], dtype=dtype, D=D, **heads)
    q, lens = queries((4, 70, 6, D), BF16), [70, 41, 0, 2]
    sinks = np.array([0.5, -np.inf, 2.0, 0.0, 1.0, -1.0], np.float32)
    exact = functools.partial(batch.expected_prefill, q, lens, sinks=sinks, **options)
    got, want = batch.prefill(q, lens, backend="cpu", sinks=sinks, **options), exact()
    values = np.abs(np.asarray(want[0], np.float64)).max()
    np.testing.assert_allclose(got[0].astype(np.float64), want[0], atol=values * 2**-8)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)


def test_prefill_with_more_heads_than_rows_in_a_part() -> None:
    batch, q = PagedBatch.random([9, 40], K=1), queries((2, 12, 70, 16))
    got, want = batch.prefill(q, [9, 12], backend="cpu"), batch.expected_prefill(q, [9, 12])
    for a, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(a, exact, rtol=1e-5, atol=1e-5)


def test_decode_has_the_gradients_of_xla() -> None:
    batch, q = PagedBatch.random([9, 20, 0]), queries((3, 4, 16))
    arrays = batch.pools.k, batch.pools.v, batch.block_tables, batch.lengths
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)

    def loss(q, sinks, backend):
        options = {"layer": LAYER, "soft_cap": 3.0, "backend": backend}
        return (paged_attention(q, *arrays, sinks=sinks, **options) ** 2).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    for got, want in zip(gradients(q, sinks, "cpu"), gradients(q, sinks, "xla"), strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def problem(**changes) -> Problem:
    fields = {
        "op": "decode",
        "sizes": tuple({"B": 2, "H": 4, "K": 2, "D": 64, "C": 16}.items()),
        "q_dtype": F32,
        "pool_dtype": F32,
        "has_sinks": False,
        "options": Options(),
        "lanes": 64,
    }
    return Problem(**fields | changes)


def test_choose_backend_gives_reasons() -> None:
    assert choose_backend(problem(), "cpu").backend == "cpu"
    assert choose_backend(problem(op="prefill"), "cpu").backend == "cpu"
    choice = choose_backend(problem(op="write"), "cpu")
    assert choice == ("xla", "cpu leaves write to XLA")
    wide = problem(sizes=(("D", 640),))
    reason = "cpu does not support the call: values must have at most 512 elements, got 640"
    assert choose_backend(wide, "cpu") == ("xla", reason)


def test_backend_none_uses_the_kernel_in_programs_for_cpus() -> None:
    batch, q = PagedBatch.random([9, 20]), queries((2, 4, 16))
    arrays = batch.pools.k, batch.pools.v, batch.block_tables, batch.lengths
    traced = jax.jit(lambda q: paged_attention(q, *arrays, layer=LAYER)).trace(q)
    for platform, is_called in {"cpu": True, "cuda": False}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("paged_jax_decode_float32" in text) == is_called


def test_exported_programs_run_without_kernels() -> None:
    w, x = weights_and_rows(3, 28, 2)
    exported = jax.export.export(jax.jit(lambda x, w: linear(x, w)))(x, w)
    assert "custom_call" not in exported.mlir_module()
    np.testing.assert_allclose(exported.call(x, w), LINEAR(x, w), rtol=1e-5, atol=1e-5)


def test_load_cpu_kernels_lets_another_process_run_an_executable(tmp_path) -> None:
    q, k = jnp.ones((2, 2, 16)), jnp.ones((1, 3, 1, 8, 16))
    arrays = q, k, k, jnp.array([[0], [1]]), jnp.array([4, 5])
    saved = serialize_executable.serialize(jax.jit(paged_attention).lower(*arrays).compile())
    assert b"paged_jax_decode_float32" in saved[0]
    (tmp_path / "saved").write_bytes(pickle.dumps((saved, arrays)))
    program = """
        import pickle, sys
        from jax.experimental.serialize_executable import deserialize_and_load
        from paged_jax.kernels import load_cpu_kernels
        with open(sys.argv[1], "rb") as file:
            saved, arrays = pickle.load(file)
        load_cpu_kernels(saved[0])
        print(deserialize_and_load(*saved)(*arrays).sum())
    """
    printed = run_on_devices(textwrap.dedent(program), tmp_path / "saved", num_devices=1)
    assert printed.split() == ["64.0"]
    load_cpu_kernels(b"none")
    with pytest.raises(ValueError, match="load_cpu_kernels: program must only call kernels of"):
        load_cpu_kernels(b"paged_jax_decode_float32_0123456789abcdef")


def test_kernels_can_be_called_by_several_threads() -> None:
    """Each thread makes its own calls and gets its own results."""
    batch = PagedBatch.random([300, 40, 0, 7], K=2, D=64)
    w, x = weights_and_rows(700, 300, 8)
    q = queries((4, 6, 64))
    attend = functools.partial(batch.decode, backend="cpu")
    expected = attend(q)[0], np.asarray(LINEAR(x, w))

    def run(seed: int) -> bool:
        order = np.random.default_rng(seed).permutation(4)
        rows = batch.rows(order)
        for _ in range(40):
            same = np.array_equal(rows.decode(q[order], backend="cpu")[0], expected[0][order])
            same &= np.array_equal(LINEAR(x[seed:], w), expected[1][seed:])
            if not same:
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(4)))


# Runs on two CPU devices of JAX, with a single core for both.
_ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from paged_jax.kernels.linear import linear
from tests.support.paged_batch import PagedBatch, queries
import jax.numpy as jnp

mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,))
rng = np.random.default_rng(0)
x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 48), (64, 48)))

def product(x, w):
    return jnp.tanh(linear(x, w))

def check(function, w):
    lowered = function.lower(x, w)
    np.testing.assert_allclose(lowered.compile()(x, w), np.tanh(x @ w.T), atol=1e-5)
    print("paged_jax_linear" in lowered.as_text())

check(jax.jit(product), w)
check(jax.jit(jax.shard_map(
    product, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(None, "x"), check_vma=False)), w)
check(jax.jit(product, in_shardings=(None, NamedSharding(mesh, P("x")))), w)
batch, q = PagedBatch.random([700, 3, 40]), queries((3, 4, 16))
for got, want in zip(batch.decode(q, backend="cpu"), batch.expected_decode(q)):
    np.testing.assert_allclose(got, want, atol=1e-5)
"""


@pytest.mark.slow
def test_kernels_on_one_core_and_on_several_devices(monkeypatch, tmp_path) -> None:
    """XLA replaces the kernel in programs that it partitions. The second run uses JAX's cache."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    for _ in range(2):
        assert run_on_devices(_ON_ONE_CORE, num_devices=2).split() == ["True", "True", "False"]
        assert list(tmp_path.iterdir()), "compiled programs are kept"


@pytest.mark.parametrize("dtype", [F32, BF16, FP8], ids=str)
def test_pools_of_zeros_take_no_memory_until_they_are_used(dtype) -> None:
    make = jax.jit(functools.partial(pool_of_zeros, (7, 8 << 20), dtype))
    assert "paged_jax_zeros" in make.lower().as_text()
    make().block_until_ready()

    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = resident_pages()
    pool = make().block_until_ready()
    assert (resident_pages() - before) * 4096 < pool.nbytes / 8
    assert not np.asarray(pool).view(np.uint8).any()


def test_small_pools_of_zeros_need_no_kernel() -> None:
    make = jax.jit(functools.partial(pool_of_zeros, (1 << 20, 1), F32))
    assert "custom_call" in make.lower().as_text()
    make = jax.jit(functools.partial(pool_of_zeros, ((1 << 20) - 1, 1), F32))
    assert "custom_call" not in make.lower().as_text()
