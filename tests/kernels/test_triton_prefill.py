"""The Triton kernel of prompt chunks, in Pallas' interpreter against float64.

The contract suite runs it through the public op with tiles that hold most of its sequences. Here
tiles and steps are small, so that chunks span many of both.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.backend import AttentionArgs, Options
from paged_jax.kernels.triton.prefill import _cut_into_runs, prefill
from paged_jax.kernels.triton.tuning import PrefillParams
from tests.support.kernel_cases import Case
from tests.support.paged_batch import LAYER, OUT_OF_RANGE, PagedBatch, queries

FLOAT8 = jnp.float8_e4m3fn
SMALL = PrefillParams(query_rows=32, step_tokens=16, num_warps=4, num_stages=2)
SINKS = np.array([0.3, -1.0, 2.5, -np.inf, 4.0, -3.0], np.float32)


def attend(batch: PagedBatch, q, query_lens, *, params=SMALL, sinks=None, **options):
    """Run the kernel in the interpreter: ``(out, lse)``."""
    static: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, **options}
    pools = jax.tree.map(jnp.asarray, batch.pools)
    args = AttentionArgs(
        q, pools, batch.block_tables, batch.lengths, np.asarray(query_lens, np.int32), sinks, LAYER
    )
    is_gpu = jax.default_backend() == "gpu"
    out, lse = prefill(args, Options(**static), interpret=not is_gpu, params=params)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    return np.asarray(out), np.asarray(lse)


def check(batch: PagedBatch, q, query_lens, *, params=SMALL, rtol=0.0, atol=1e-5, **options):
    got = attend(batch, q, query_lens, params=params, **options)
    want = batch.expected_prefill(q, query_lens, **options)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=rtol, atol=atol, err_msg=name)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "negative-scale": {"scale": -0.3},
    "window-of-one": {"sliding_window": 1},
    "window-within-a-step": {"sliding_window": 9},
    "window-of-many-steps": {"sliding_window": 120},
    "cap": {"soft_cap": 2.0},
    "sinks": {"sinks": SINKS},
    "all": {"scale": 0.5, "sliding_window": 100, "soft_cap": 5.0, "sinks": SINKS},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_prefill_matches_float64(options) -> None:
    """Chunks alone, after context, of one token, shorter than a tile, longer, and none."""
    batch = PagedBatch.random([0, 1, 40, 200, 150, 16])
    check(batch, queries((6, 53, 6, 16)), [0, 1, 40, 53, 0, 7], **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("C", "K", "G", "D", "T"),
    [
        (8, 2, 3, 80, 11),
        (128, 1, 7, 16, 6),
        (1, 1, 1, 8, 3),
        (12, 1, 4, 32, 20),
        (16, 1, 12, 64, 5),
        (32, 3, 5, 128, 13),
        (64, 1, 8, 96, 9),
        (16, 2, 2, 256, 6),
    ],
)
def test_prefill_any_shape(C, K, G, D, T) -> None:
    """Blocks smaller and larger than a step, groups that do not divide a tile, masked lanes."""
    lengths = [0, 1, C + 1, 90]
    batch = PagedBatch.random(lengths, K=K, C=C, D=D)
    check(batch, queries((4, T, K * G, D)), [min(n, T) for n in lengths])


@pytest.mark.slow
@pytest.mark.parametrize(("D", "dtype"), [(64, np.float32), (80, jnp.int8)])
def test_prefill_reads_only_the_first_lanes_of_a_padded_pool(D, dtype) -> None:
    batch = PagedBatch.random([70, 9], D=D, lanes=128, dtype=dtype)
    check(batch, queries((2, 9, 4, D)), [9, 4])


@pytest.mark.slow
@pytest.mark.parametrize("params", [PrefillParams(128, 16, 8, 1), PrefillParams(16, 128, 4, 3)])
def test_prefill_any_tile(params) -> None:
    batch = PagedBatch.random([150, 33])
    check(batch, queries((2, 30, 6, 16)), [30, 21], params=params)


# Weights are rounded to the type of the values, and the result to that of the queries: half a unit
# in the last place of each.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_prefill_half_precision(dtype) -> None:
    batch = PagedBatch.random([100, 33], dtype=dtype)
    check(batch, queries((2, 20, 6, 16), dtype), [20, 9], rtol=2**-8, atol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_dtype", "dtype"),
    [
        (np.float32, FLOAT8),
        (jnp.bfloat16, jnp.int8),
        (np.float32, jnp.int8),
        (jnp.bfloat16, FLOAT8),
        (jnp.float16, jnp.int8),
        (jnp.float16, FLOAT8),
    ],
)
def test_prefill_quantised(q_dtype, dtype) -> None:
    batch = PagedBatch.random([100, 0, 33], dtype=dtype)
    tolerance: dict[str, Any] = {} if q_dtype == np.float32 else {"rtol": 2**-8, "atol": 2**-7}
    check(batch, queries((3, 20, 6, 16), q_dtype), [20, 0, 9], **tolerance)


@pytest.mark.slow
def test_prefill_of_a_wider_pool_uses_its_precision() -> None:
    batch = PagedBatch.random([50], dtype=np.float32)
    q = queries((1, 8, 6, 16), jnp.bfloat16)
    check(batch, q, [8], rtol=2**-8)


@pytest.mark.slow
def test_prefill_float16_queries_keep_small_quantised_values() -> None:
    """A weight times the scale of such values is no float16 number."""
    batch = PagedBatch.random([64], dtype=jnp.int8)
    shrink = np.float32(1e-6)
    assert batch.pools.v_scale is not None
    batch.pools = batch.pools._replace(v_scale=batch.pools.v_scale * shrink)
    batch.v = [v * shrink for v in batch.v]
    q = queries((1, 8, 6, 16), jnp.float16)
    out, _ = attend(batch, q, [8])
    want, _ = batch.expected_prefill(q, [8])
    # The result itself is float16: below its smallest normal number, in steps of 2**-24.
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2**-8, atol=2**-24)


@pytest.mark.slow
def test_prefill_does_not_read_before_the_window() -> None:
    """Blocks that no query of the chunk sees may have been given back."""
    window, length, T = 20, 200, 8
    batch = PagedBatch.random([length])
    q = queries((1, T, 6, 16))
    want = batch.expected_prefill(q, [T], sliding_window=window)
    first_seen = length - T + 1 - window
    freed = first_seen // 8
    batch.block_tables[0, :freed] = OUT_OF_RANGE
    for pool in batch.pools[:2]:
        pool[LAYER, batch.block_tables[0, freed], :, : first_seen % 8] = np.nan
    out, lse = attend(batch, q, [T], sliding_window=window)
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(lse, want[1], atol=1e-5)


@pytest.mark.slow
def test_prefill_rows_do_not_see_each_other() -> None:
    """Bitwise: alone or in a batch, and in a chunk of any padding."""
    batch = PagedBatch.random([130, 5, 64])
    q = queries((3, 20, 6, 16))
    out, lse = attend(batch, q, [20, 3, 11])
    alone = attend(batch.rows(np.array([2])), q[2:], [11])
    np.testing.assert_array_equal(out[2:], alone[0])
    np.testing.assert_array_equal(lse[2:], alone[1])
    q[2, 11:] = np.nan
    np.testing.assert_array_equal(out, attend(batch, q, [20, 3, 11])[0])


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40, 200])
def test_cut_into_runs_masks_what_it_must(window) -> None:
    N = 8
    for first, rows in itertools.product([0, 1, 6, 7, 8, 30, 63, 64, 100], [1, 2, 9, 40]):
        last = first + rows - 1
        runs = _cut_into_runs(jnp.int32(first), jnp.int32(last), N, window)
        steps = [
            (step, run.is_masked) for run in runs for step in range(int(run.begin), int(run.end))
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
