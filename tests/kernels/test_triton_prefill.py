"""Tests of the GPU prefill kernel in the interpreter, against float64.

`test_attention.py` runs it with tiles that are larger than most of the sequences. Here tiles and
steps are small, so that chunks have many of them.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.triton.prefill import _separate_masked_steps, prefill
from paged_jax.kernels.triton.tuning import PrefillParams
from tests.support.kernel_cases import Case
from tests.support.paged_batch import LAYER, OUT_OF_RANGE, PagedBatch, queries

FLOAT8 = jnp.float8_e4m3fn
SMALL = PrefillParams(query_rows=32, step_tokens=16, num_warps=4, num_stages=2)
SINKS = np.array([0.3, -1.0, 2.5, -np.inf, 4.0, -3.0], np.float32)


INTERPRET = jax.default_backend() != "gpu"
PROGRAM = jax.jit(prefill, static_argnames=("options", "interpret", "params"))


def attend(batch: PagedBatch, q, query_lens, *, params=SMALL, sinks=None, **options):
    """Run the kernel in the interpreter and return ``(out, lse)``."""
    args = AttentionArgs(
        q, batch.pools, batch.block_tables, batch.lengths, np.asarray(query_lens, np.int32), sinks,
        np.int32(LAYER),
    )  # fmt: skip
    options = {"scale": q.shape[-1] ** -0.5} | options
    out, lse = PROGRAM(args, options=Options(**options), interpret=INTERPRET, params=params)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    return np.asarray(out), np.asarray(lse)


def check(batch: PagedBatch, q, query_lens, *, params=SMALL, rtol=0.0, atol=1e-5, **options):
    slid = batch.slid(options.get("sliding_window"), query_lens)
    got = attend(slid, q, query_lens, params=params, **options)
    want = batch.expected_prefill(q, query_lens, **options)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=rtol, atol=atol, err_msg=name)


WINDOW_WITHIN_A_STEP: dict[str, Any] = {"sliding_window": 9, "scale": -0.3}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window-within-a-step": WINDOW_WITHIN_A_STEP,
    "cap": {"soft_cap": 2.0, "sinks": SINKS},
    "window-of-many-steps": {"scale": 0.5, "sliding_window": 100, "sinks": SINKS},
}
# Chunks without and after context: empty, with a single token, shorter and longer than a tile.
LENGTHS, QUERY_LENS = [0, 1, 40, 200, 150, 16], [0, 1, 40, 53, 0, 7]


def standard() -> tuple[PagedBatch, np.ndarray, list[int]]:
    """Return a batch, queries and chunk lengths. Tests with the same options share a program."""
    return PagedBatch.random(LENGTHS), queries((6, 53, 6, 16)), QUERY_LENS


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_prefill_matches_float64(options) -> None:
    check(*standard(), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("C", "K", "G", "D", "T", "lanes"),
    [(1, 1, 1, 8, 3, None), (12, 1, 4, 20, 20, 128), (128, 2, 7, 16, 6, None)],
)
def test_prefill_any_shape(C, K, G, D, T, lanes) -> None:
    """Blocks are smaller and larger than a step. `test_attention.py` has the sizes in between."""
    lengths = [0, 1, C + 1, 90]
    batch = PagedBatch.random(lengths, K=K, C=C, D=D, lanes=lanes)
    check(batch, queries((4, T, K * G, D)), [min(n, T) for n in lengths])


@pytest.mark.slow
def test_prefill_reads_only_the_first_lanes_of_a_padded_pool() -> None:
    batch = PagedBatch.random([70, 9], D=80, lanes=128, dtype=jnp.int8)
    check(batch, queries((2, 9, 4, 80)), [9, 4])


@pytest.mark.slow
@pytest.mark.parametrize("params", [PrefillParams(128, 16, 8, 1), PrefillParams(16, 128, 4, 3)])
def test_prefill_any_tile(params) -> None:
    batch = PagedBatch.random([150, 33])
    check(batch, queries((2, 30, 6, 16)), [30, 21], params=params)


# Weights and outputs are rounded to the dtype of the queries, by half a unit in the last place
# each. `test_attention.py` has the other dtypes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "q_dtype", "exponents"),
    [
        (jnp.int8, jnp.float16, [0] * 6),
        (FLOAT8, jnp.float16, [0] * 6),
        # The queries exceed the range of float16, the dtype of the matmuls.
        (jnp.int8, jnp.bfloat16, [-70, -30, -10, 0, 4, 17]),
    ],
)
def test_prefill_of_half_precision_queries_over_quantised_pools(dtype, q_dtype, exponents) -> None:
    batch = PagedBatch.random([64, 0, 33], dtype=dtype)
    q = (queries((3, 8, 6, 16)) * 2.0 ** np.array(exponents)[:, None]).astype(q_dtype)
    got = attend(batch, q, [8, 0, 5])
    want = batch.expected_prefill(q, [8, 0, 5])
    for a, b, tolerance in zip(got, want, ((2**-8, 2**-7), (1e-6, 1e-5)), strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, *tolerance)


def test_prefill_with_all_options_over_a_quantised_pool() -> None:
    """A fast test with larger tolerances of all that the slower tests check separately."""
    batch = PagedBatch.random([0, 33, 200], dtype=jnp.int8, extra_width=0)
    batch.lengths[2] = 2**31 - 1  # more than its table holds
    q = (8 * queries((3, 53, 6, 16))).astype(jnp.bfloat16)
    options: dict[str, Any] = {"scale": 0.5, "soft_cap": 5.0, "sliding_window": 40, "sinks": SINKS}
    got = attend(batch, q, [0, 33, 53], **options)
    want = batch.expected_prefill(q, [0, 33, 53], **options)
    for a, b, tolerance in zip(got, want, ((2**-8, 2**-7), (1e-6, 1e-5)), strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, *tolerance)


@pytest.mark.slow
def test_prefill_of_a_float32_pool_uses_its_precision() -> None:
    batch = PagedBatch.random([50], dtype=np.float32)
    q = queries((1, 8, 6, 16), jnp.bfloat16)
    check(batch, q, [8], rtol=2**-8)


@pytest.mark.slow
def test_prefill_of_float16_queries_keeps_small_quantised_values() -> None:
    """A weight times the scale of such values is too small for float16."""
    batch = PagedBatch.random([64, 0, 33], dtype=jnp.int8)
    shrink = np.float32(1e-6)
    assert batch.pools.v_scale is not None
    batch.pools = batch.pools._replace(v_scale=batch.pools.v_scale * shrink)
    batch.v = [v * shrink for v in batch.v]
    q = queries((3, 8, 6, 16), jnp.float16)
    out, _ = attend(batch, q, [8, 0, 5])
    want, _ = batch.expected_prefill(q, [8, 0, 5])
    # The output is float16. Subnormal numbers have steps of 2**-24.
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2**-8, atol=2**-24)


@pytest.mark.slow
def test_prefill_does_not_read_before_the_window() -> None:
    """Blocks that no query of the chunk sees may have been freed."""
    batch, q, query_lens = standard()
    row = LENGTHS.index(200)
    first_seen = 200 - query_lens[row] + 1 - WINDOW_WITHIN_A_STEP["sliding_window"]
    freed = first_seen // 8
    for pool in batch.pools[:2]:
        pool[LAYER, batch.block_tables[row, freed], :, : first_seen % 8] = np.nan
    batch.block_tables[row, :freed] = OUT_OF_RANGE
    check(batch, q, query_lens, **WINDOW_WITHIN_A_STEP)


@pytest.mark.slow
def test_prefill_rows_are_independent() -> None:
    """Results are equal bit for bit alone and in a batch, and with NaN in the padding."""
    batch, q, query_lens = standard()
    out, lse = attend(batch, q, query_lens)
    alone = attend(batch.rows(np.array([3])), q[3:4], [53])
    np.testing.assert_array_equal(out[3:4], alone[0])
    np.testing.assert_array_equal(lse[3:4], alone[1])
    q[2, 40:] = q[5, 7:] = np.nan
    np.testing.assert_array_equal(out, attend(batch, q, query_lens)[0])


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40, 200])
def test_separate_masked_steps_masks_only_the_necessary_steps(window) -> None:
    N = 8
    for first, rows in itertools.product([0, 1, 6, 7, 8, 30, 63, 64, 100], [1, 2, 9, 40]):
        last = first + rows - 1
        ranges = _separate_masked_steps(jnp.int32(first), jnp.int32(last), N, window)
        steps = [
            (step, each.is_masked)
            for each in ranges
            for step in range(int(each.begin), int(each.end))
        ]
        begin = 0 if window is None else max(first - window + 1, 0)
        assert [step for step, _ in steps] == list(range(begin // N, last // N + 1))
        all_begin = 0 if window is None else max(last - window + 1, 0)
        full = [step for step, _ in steps if step * N >= all_begin and (step + 1) * N <= first + 1]
        unmasked = [step for step, is_masked in steps if not is_masked]
        assert unmasked == (full if len(full) >= 4 else [])


def test_prefill_is_traced_once_for_all_layers() -> None:
    case = Case("prefill", T=5, K=2, D=16, P=8, M=2, dtype="float32")
    args = case.shapes()

    def model(args):
        q = args.q
        for offset in range(3):
            q, _ = prefill(args._replace(q=q, layer=args.layer + offset), Options(scale=0.25))
        return q

    assert str(jax.make_jaxpr(model)(args)).count("pallas_call[") == 1
