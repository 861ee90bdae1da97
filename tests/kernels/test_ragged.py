"""Tests of `ragged_paged_attention` on all backends, against float64 and against JAX's own op.

Programs are shared as in `test_attention.py`: batches of the same shapes have different values.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    dynamic_validate_inputs,
    ref_ragged_paged_attention,
)

from paged_jax.kernels import paged_prefill_attention, ragged_paged_attention
from paged_jax.kernels.mosaic_tpu import jax_kernels
from paged_jax.kernels.op import backends_of
from paged_jax.kernels.op_args import RaggedArgs, RaggedOptions
from paged_jax.kernels.pools import Pages
from paged_jax.kernels.ragged_chunks import cut_into_tiles
from paged_jax.kernels.xla.attention import QUERIES
from tests.support import oracles
from tests.support.compiler import needs_compiler
from tests.support.paged_batch import BACKENDS
from tests.support.ragged_batch import RaggedBatch, attend

# JAX's kernel for TPUs cannot be interpreted. Other tests check the arguments that it gets.
INTERPRETED = "mosaic_tpu"


def marked(name: str, *others: Any, is_slow: bool = False) -> Any:
    """Return a case of a backend, marked slow if it interprets a kernel, which compiles slowly."""
    marks = [pytest.mark.slow] if is_slow else []
    marks += [needs_compiler] if name == "cpu" else []
    return pytest.param(name, *others, marks=marks, id="-".join(map(str, (name, *others))))


NAMES = [name for name in BACKENDS if name != INTERPRETED]

# Queries and tokens of each sequence: single queries, chunks around the ends of pages and tiles, no
# queries, no tokens, and more queries than tokens.
LENGTHS = [(1, 1), (1, 200), (0, 7), (5, 18), (130, 150), (33, 33), (3, 2), (1, 0), (8, 8), (1, 9)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"sm_scale": 0.3, "sliding_window": 20, "soft_cap": 3.0, "k_scale": 0.5, "v_scale": 3.0},
}
SINKS = np.linspace(-2, 3, 6, dtype=np.float32)  # one for each query head of a batch


def test_backends_all_have_ragged_batches() -> None:
    """The simulator of the backend `mosaic_gpu` is slow, so it has a file of its own."""
    assert {*BACKENDS, "mosaic_gpu"} == set(backends_of("ragged"))


@pytest.mark.parametrize("name", [marked(name, is_slow=name == "triton") for name in NAMES])
def test_ragged_attention_matches_float64(name) -> None:
    batch = RaggedBatch.random(LENGTHS)
    got, want = batch.attend(**BACKENDS[name]), batch.expected()
    assert got.dtype == batch.q.dtype
    np.testing.assert_allclose(got, want, atol=1e-5)
    # Rows with fewer tokens than queries, and rows after the last sequence.
    assert not got[batch.cu_q_lens[6]].any() and not got[batch.num_rows :].any()


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_ragged_attention_of_a_batch_that_fills_all_rows(name) -> None:
    """Each chunk has a partly empty tile, so kernels need their maximum number of tiles."""
    lengths = [(2, 9), (2, 30), (6, 18)]
    batch = RaggedBatch.random(lengths, extra_rows=0, extra_sequences=0)
    np.testing.assert_allclose(batch.attend(**BACKENDS[name]), batch.expected(), atol=1e-5)


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_ragged_attention_with_all_options_returns_the_lse_of_float64(name) -> None:
    batch, options = RaggedBatch.random(LENGTHS), OPTIONS["all"] | {"sinks": SINKS}
    out, lse = batch.attend(**BACKENDS[name], **options, return_lse=True)
    want, want_lse = batch.expected_with_lse(**options)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)  # -inf in rows of no sequence
    assert lse.dtype == np.float32


@pytest.mark.parametrize("name", [marked("xla"), marked("cpu")])
def test_ragged_attention_takes_scales_as_arrays(name) -> None:
    """Traced factors, as Levanter passes them, give the result of numbers, and gradients."""
    batch = RaggedBatch.random(LENGTHS[:5])
    scales = {"sm_scale": 0.3, "k_scale": 0.5, "v_scale": 3.0}

    @jax.jit
    def objective(scales):
        out, lse = ragged_paged_attention(
            *batch.arrays, **scales, soft_cap=3.0, return_lse=True, backend=name
        )
        return jnp.sum(out[: batch.num_rows] ** 2), (out, lse)

    def expected(**scales):
        return batch.expected_with_lse(**scales, soft_cap=3.0)

    traced = {name: jnp.float32(x) for name, x in scales.items()}
    grads, (out, lse) = jax.grad(objective, has_aux=True)(traced)
    want, want_lse = expected(**scales)
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)
    for factor, grad in grads.items():
        step = 1e-4
        above, below = (
            (expected(**(scales | {factor: scales[factor] + sign * step}))[0] ** 2).sum()
            for sign in (1, -1)
        )
        np.testing.assert_allclose(grad, (above - below) / (2 * step), rtol=1e-4)


# Every dtype, and sizes that are not powers of two. Kernels have separate code for most of them.
SHAPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"q_dtype": jnp.bfloat16, "dtype": jnp.bfloat16, "C": 16, "D": 32},
    "int8": {"q_dtype": jnp.bfloat16, "dtype": jnp.int8, "C": 16, "D": 64, "K": 1, "G": 4},
    "fp8": {"q_dtype": jnp.bfloat16, "dtype": jnp.float8_e4m3fn, "K": 3, "G": 1},
    "float32 over int8": {"dtype": jnp.int8, "C": 32, "D": 80, "G": 2},
    "float16": {"q_dtype": jnp.float16, "dtype": jnp.float16, "C": 1, "D": 24, "G": 7},
    "e5m2": {"q_dtype": jnp.bfloat16, "dtype": jnp.float8_e5m2},
}
# Shapes for the backend `reference`, which has the same code for all of them.
FEW_SHAPES = ("float32 over int8", "e5m2")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        marked(name, shape, is_slow=name != "cpu")
        for name in NAMES
        for shape in SHAPES
        if shape in FEW_SHAPES or name != "reference"
        if (name, shape) not in {("triton", "e5m2"), ("cpu", "e5m2")}
    ],
)
def test_ragged_attention_of_any_shape(name, shape) -> None:
    batch = RaggedBatch.random([(1, 40), (9, 30), (2, 2), (1, 3)], **SHAPES[shape])
    options = {"sm_scale": 0.2, "k_scale": 0.25, "v_scale": 0.5}
    # Half a unit in the last place of the output, and of the softmax weights.
    unit = float(jnp.finfo(batch.q.dtype).eps)
    largest = np.abs(batch.expected(**options)).max()
    np.testing.assert_allclose(
        batch.attend(**BACKENDS[name], **options).astype(np.float64),
        batch.expected(**options),
        rtol=max(unit, 1e-5),
        atol=max(unit, 1e-5) * largest,
    )


# Batches of JAX's tests of its kernel (tests/pallas/tpu_ragged_paged_attention_test.py), but
# shorter and with fewer heads.
MIXED = [(5, 18), (1, 29), (20, 37)]
JAX_CASES: dict[str, dict[str, Any]] = {
    "mixed": {"lengths": MIXED},
    "all": {
        "lengths": MIXED, "sliding_window": 5, "soft_cap": 50.0, "k_scale": 0.5, "v_scale": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"),
    [marked(name, case) for case in JAX_CASES for name in ("cpu", "xla")],
)
def test_ragged_attention_matches_jax(name, case) -> None:
    options = dict(JAX_CASES[case])
    batch = RaggedBatch.random(options.pop("lengths"), extra_rows=0)
    got = batch.attend(**BACKENDS[name], **options)
    np.testing.assert_allclose(got, what_jax_says(case), atol=2e-5)


@functools.cache
def what_jax_says(case: str) -> Any:
    """Compute a case with JAX's reference implementation."""
    options = dict(JAX_CASES[case])
    batch = RaggedBatch.random(options.pop("lengths"), extra_rows=0)
    # It needs lengths in unused rows, and reads past the end of a table.
    batch.kv_lens[len(MIXED) :], batch.page_indices = 0, batch.page_indices % len(batch.kv_pages)
    arrays = [jnp.asarray(x) for x in batch.arrays]
    dynamic_validate_inputs(*arrays)
    return jax_reference(*arrays, **options)


def jax_reference(*arrays: Any, **options: Any) -> Any:
    """Call JAX's reference implementation in float32."""
    with jax.default_matmul_precision("highest"):
        return ref_ragged_paged_attention(*arrays, **options)


def test_ragged_attention_rows_are_independent() -> None:
    """Results are equal bit for bit in another order, with other values in unused rows."""
    batch = RaggedBatch.random(LENGTHS)
    before = batch.attend(backend="xla")
    batch.kv_lens[len(LENGTHS) :], batch.page_indices[len(LENGTHS) :] = 40, 1
    batch.cu_q_lens[len(LENGTHS) + 1 :], batch.q[batch.num_rows :] = 2**31 - 1, 3.0
    batch.kv_lens[0] = 0  # the first sequence is empty now
    after = batch.attend(backend="xla")
    np.testing.assert_array_equal(before[1:], after[1:])
    assert not after[0].any()


def test_ragged_attention_returns_nan_of_real_tokens() -> None:
    batch = RaggedBatch.random(LENGTHS)
    batch.kv_pages[batch.page_indices[3, 1], 1] = np.nan  # token 9 of a chunk of tokens 13 to 17
    rows = slice(*batch.cu_q_lens[3:5])
    out = batch.attend(backend="xla")
    assert np.isnan(out[rows]).all() and np.isfinite(np.delete(out, np.r_[rows], axis=0)).all()


@pytest.mark.parametrize("num_seqs", [0, -3, 5])
def test_ragged_attention_of_few_sequences(num_seqs) -> None:
    batch = RaggedBatch.random(LENGTHS)
    batch.num_seqs[0] = num_seqs
    out, want = batch.attend(backend="xla"), RaggedBatch.random(LENGTHS).attend(backend="xla")
    end = batch.cu_q_lens[max(num_seqs, 0)]
    np.testing.assert_array_equal(out[:end], want[:end])
    assert not out[end:].any()


@pytest.mark.parametrize(("N", "S", "M"), [(0, 2, 3), (4, 0, 3), (4, 2, 0)])
def test_ragged_attention_of_empty_arrays(N, S, M) -> None:
    q, pages = np.ones((N, 4, 16), np.float32), np.ones((3, 8, 4, 16), np.float32)
    ints = np.zeros(S, np.int32), np.zeros((S, M), np.int32), np.zeros(S + 1, np.int32)
    out = ragged_paged_attention(q, pages, *ints, np.zeros(1, np.int32))
    np.testing.assert_array_equal(out, np.zeros_like(q))


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [marked("xla"), marked("cpu")])
def test_ragged_attention_copies_no_pages(name, dtype) -> None:
    shapes = RaggedBatch.random(LENGTHS, dtype=dtype).arrays
    pages = jax.ShapeDtypeStruct((400_000, *shapes[1].shape[1:]), shapes[1].dtype)
    program = attend.lower(shapes[0], pages, *shapes[2:], backend=name).compile()
    pages_bytes = pages.size * pages.dtype.itemsize
    assert program.memory_analysis().temp_size_in_bytes < 0.01 * pages_bytes


@pytest.mark.parametrize("options", OPTIONS)
def test_ragged_attention_gradients_match_float64(options) -> None:
    check_gradients(RaggedBatch.random(LENGTHS), {"sm_scale": 0.2} | OPTIONS[options])


def test_ragged_attention_gradients_of_a_batch_that_fills_all_rows() -> None:
    """Three sequences in 11 rows need 11 // 4 + 3 tiles of 4 queries, which is the maximum."""
    lengths = [(1, 9), (1, 30), (9, 18)]
    batch = RaggedBatch.random(lengths, extra_rows=0, extra_sequences=0)
    assert batch.num_rows == len(batch.q) and len(batch.kv_lens) == len(lengths)
    check_gradients(batch, {"sm_scale": 0.2})


def check_gradients(batch: RaggedBatch, options: dict[str, Any]) -> None:
    """Compare the gradients in queries, pages and sinks with float64."""
    rng, is_row = np.random.default_rng(7), np.isfinite(batch.expected_with_lse()[1])
    bar, all_lse_bars = (
        rng.normal(size=x).astype(np.float32) for x in (batch.q.shape, is_row.shape)
    )

    def objective(q, pages, sinks):
        out, lse = ragged_paged_attention(
            q, pages, *batch.arrays[2:], sinks=sinks, return_lse=True, backend="xla", **options
        )
        return jnp.sum(out * bar) + jnp.sum(jnp.where(is_row, lse, 0) * all_lse_bars)

    gradients = jax.jit(jax.grad(objective, (0, 1, 2)))
    q_bar, pages_bar, sinks_bar = gradients(*batch.arrays[:2], SINKS)
    want_q, want_pages = np.zeros(q_bar.shape), np.zeros(pages_bar.shape)
    want_sinks = np.zeros(sinks_bar.shape)
    k_scale, v_scale = options.pop("k_scale", 1.0), options.pop("v_scale", 1.0)
    scale, C = options.pop("sm_scale"), pages_bar.shape[1]
    for s in range(int(batch.num_seqs[0])):
        rows, k, v = batch.sequence(s)
        want_q[rows], k_bar, v_bar, s_bar = oracles.attention_gradients(
            batch.q[rows], k * k_scale, v * v_scale, bar[rows], all_lse_bars[rows], scale=scale,
            sinks=SINKS, **options,
        )  # fmt: skip
        want_sinks += s_bar
        places = np.arange(len(k))
        place = batch.page_indices[s, places // C], places % C
        want_pages[*place, 0::2], want_pages[*place, 1::2] = k_bar * k_scale, v_bar * v_scale
    np.testing.assert_allclose(q_bar, want_q, atol=2e-5)
    np.testing.assert_allclose(pages_bar, want_pages, atol=2e-5)
    np.testing.assert_allclose(sinks_bar, want_sinks, atol=1e-4)


@pytest.mark.parametrize("num_queries", [1, 4, 16])
def test_cut_into_tiles_contains_each_query_once(num_queries) -> None:
    """Gradients are scattered to these rows. A row in two tiles would get an arbitrary value."""
    batch = RaggedBatch.random(LENGTHS)
    q, pages, *rest, num_seqs = map(jnp.asarray, batch.arrays)
    kv_lens, tables, ends = rest
    # As in the op, rows past the number of sequences have no tokens and no queries.
    index = np.arange(len(kv_lens) + 1)
    args = RaggedArgs(
        q=q,
        pages=Pages(pages),
        block_tables=tables,
        context_lens=jnp.where(index[:-1] < len(LENGTHS), kv_lens, 0),
        cu_query_lens=ends[np.minimum(index, len(LENGTHS))],
        num_sequences=num_seqs,
    )
    tiles, rows = cut_into_tiles(args, num_queries)
    expected = [row for s in range(len(LENGTHS)) for row in np.arange(len(q))[batch.sequence(s)[0]]]
    rows = np.asarray(rows)
    assert rows[rows < len(q)].tolist() == expected
    assert (rows[rows >= len(q)] == len(q)).all()
    np.testing.assert_array_equal((rows < len(q)).sum(axis=1), tiles.query_lens)


def test_ragged_attention_refuses_a_gradient_in_quantised_pages() -> None:
    q, pages, *rest = RaggedBatch.random(LENGTHS, dtype=jnp.float8_e4m3fn).arrays

    def objective(q, pages):
        return jnp.sum(ragged_paged_attention(q, pages, *rest, backend="xla"))

    message = "kv_pages must have elements of 16 bits or more .*, got float8_e4m3fn"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.grad(objective, 1), q, pages)
    jax.eval_shape(jax.grad(objective), q, pages)


@pytest.mark.parametrize("options", OPTIONS)
def test_ragged_attention_on_tpu_passes_equivalent_arguments_to_jax(monkeypatch, options) -> None:
    """JAX's reference implementation replaces its kernel, and checks for arguments that hang it."""

    def definition(q, pages, kv_lens, page_indices, cu_q_lens, num_seqs, **options):
        del options["vmem_limit_bytes"]
        tiles = {name: options.pop(name) for name in list(options) if "_per_block" in name}
        arrays = q, pages, kv_lens, page_indices % len(pages), cu_q_lens, num_seqs
        dynamic_validate_inputs(*arrays, **tiles)
        count = int(num_seqs[0])
        assert (kv_lens[:count] > 0).all() and cu_q_lens[count] > cu_q_lens[count - 1]
        out = jax_reference(*arrays, **options)
        return jnp.full_like(q, jnp.nan).at[: len(out)].set(out)

    monkeypatch.setattr(
        jax_kernels, "jax_attention", SimpleNamespace(ragged_paged_attention=definition)
    )
    # After the last queries come a sequence without queries, and unused rows.
    batch = RaggedBatch.random([(1, 1), (1, 20), (0, 7), (5, 18), (0, 0), (9, 9), (0, 4)])
    options = OPTIONS[options]
    args = RaggedArgs(
        q=jnp.asarray(batch.q),
        pages=Pages(jnp.asarray(batch.kv_pages)),
        block_tables=jnp.asarray(batch.page_indices),
        context_lens=jnp.array([1, 20, 7, 18, 0, 9, 4, 0, 0]),
        cu_query_lens=jnp.asarray(np.append(batch.cu_q_lens[:8], [batch.num_rows] * 2)),
        num_sequences=jnp.array([7]),
    )
    ours = RaggedOptions(
        scale=options.get("sm_scale", 1.0) * options.get("k_scale", 1.0),
        sliding_window=options.get("sliding_window"),
        soft_cap=options.get("soft_cap"),
        value_scale=options.get("v_scale", 1.0),
    )
    with jax.disable_jit():
        out, _ = jax_kernels.attend_ragged(args, ours)
        nothing, _ = jax_kernels.attend_ragged(
            args._replace(cu_query_lens=jnp.zeros(10, jnp.int32)), ours
        )
    np.testing.assert_allclose(out, batch.expected(**options), atol=1e-5)
    assert not nothing.any()


PAGES = np.zeros((3, 8, 4, 16), np.float32)
BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"kv_pages": PAGES[0]}, r"kv_pages must have shape \[P, C, 2 \* K, D\]"),
    "odd": ({"kv_pages": PAGES[:, :, :3]}, r"alternating keys and values, got \[3, 8, 3, 16\]"),
    "heads": ({"q": np.zeros((5, 3, 16), np.float32)}, "a multiple of the 2 KV heads"),
    "head dim": ({"kv_pages": PAGES[..., :8]}, "kv_pages must have D"),
    "type": ({"kv_pages": PAGES.astype(np.int16)}, "kv_pages must be floating point, int8"),
    "q type": ({"q": np.zeros((5, 4, 16), np.int32)}, "q must be floating point, got int32"),
    "rows": ({"cu_q_lens": np.zeros(2, np.int32)}, r"cu_q_lens must have shape \[3\]"),
    "number": ({"num_seqs": np.ones(2, np.int32)}, r"num_seqs must have shape \[1\], got \[2\]"),
    "lengths": ({"kv_lens": np.zeros(2, np.float32)}, "kv_lens must be an integer array"),
    "missing": ({"kv_lens": None}, "kv_lens must be an array, got None"),
    "window": ({"sliding_window": 0}, "sliding_window must be an integer, at least 1"),
    "cap": ({"soft_cap": 0.0}, "soft_cap must be positive or None"),
    "scale": ({"v_scale": float("inf")}, "v_scale must be finite"),
    "scales": ({"sm_scale": jnp.ones(2)}, r"sm_scale must be one number, got float32 \[2\]"),
    "no scale": ({"sm_scale": None}, r"sm_scale must be a number, got None. Pass D \*\* -0.5"),
    "sinks": ({"sinks": np.zeros(2, np.float32)}, "sinks must have H"),
    "sinks type": ({"sinks": np.zeros(4, np.int32)}, "sinks must be floating point"),
    "backend": ({"backend": "cuda"}, "backend must be None or one of 'cpu', 'mosaic_tpu'"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_ragged_attention_refuses_wrong_arguments(change, message) -> None:
    arguments = {
        "q": np.zeros((5, 4, 16), np.float32),
        "kv_pages": PAGES,
        "kv_lens": np.ones(2, np.int32),
        "page_indices": np.zeros((2, 3), np.int32),
        "cu_q_lens": np.arange(3, dtype=np.int32),
        "num_seqs": np.array([2], np.int32),
    }
    with pytest.raises(ValueError, match=f"ragged_paged_attention: .*{message}"):
        ragged_paged_attention(**(arguments | change))


TPU = {"D": 128, "q_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"D": 64}, "the head dimension must be 128, got 64"),
        ({"dtype": jnp.float32}, "pages of float32 would be rounded to bfloat16"),
        ({"dtype": jnp.int8}, "pages must be .* got int8"),
        ({"K": 3}, "keys and values of 3 heads do not fill registers of bfloat16"),
    ],
)
def test_ragged_attention_on_tpu_refuses_what_jax_does_not_support(sizes, reason) -> None:
    batch = RaggedBatch.random([(1, 3)], **(TPU | sizes))
    with pytest.raises(
        NotImplementedError, match=f"mosaic_tpu does not support the call: {reason}"
    ):
        ragged_paged_attention(*batch.arrays, backend="mosaic_tpu")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_lse": True}, "JAX's kernel does not return the log-sum-exp"),
        ({"sinks": SINKS}, "JAX's kernel has no attention sinks"),
    ],
)
def test_ragged_attention_on_tpu_refuses_sinks_and_lse(options, reason) -> None:
    batch = RaggedBatch.random([(1, 3)], **TPU)
    with pytest.raises(
        NotImplementedError, match=f"mosaic_tpu does not support the call: {reason}"
    ):
        ragged_paged_attention(*batch.arrays, backend="mosaic_tpu", **options)


@pytest.mark.parametrize("setting", ["x64", "strict"])
def test_ragged_attention_has_the_same_dtype_under_settings_of_jax(setting) -> None:
    """The branches of all platforms are traced."""
    batch = RaggedBatch.random([(1, 3), (4, 9)], D=128)
    x64 = jax.enable_x64(True) if setting == "x64" else jax.numpy_dtype_promotion("strict")
    with x64:
        out = jax.eval_shape(lambda *x: ragged_paged_attention(*x, v_scale=2.0), *batch.arrays)
    assert out.dtype == jnp.float32


def test_xla_clears_the_padding_after_the_chunks_of_a_prefill() -> None:
    """The last tile of a chunk of QUERIES + 2 tokens reaches into the rows of the next chunk."""
    T, lens = QUERIES + 2, np.array([QUERIES + 2, 1, 0, QUERIES + 1], np.int32)
    random = np.random.default_rng(0)
    q = random.normal(size=(4, T, 4, 8)).astype(np.float32)
    k, v = random.normal(size=(2, 1, 4 * 9, 2, 16, 8)).astype(np.float32)
    tables = random.permutation(4 * 9).reshape(4, 9).astype(np.int32)
    arrays = q, k, v, tables, lens + np.array([0, 5, 9, 3], np.int32), lens
    got, want = (
        paged_prefill_attention(*arrays, return_lse=True, backend=backend)
        for backend in ("xla", "reference")
    )
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)
