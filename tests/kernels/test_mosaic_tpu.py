"""Tests of the TPU kernels, in addition to the tests of all backends in `test_attention.py`.

Pallas' plain interpreter copies immediately, so a missing wait has no effect. Its TPU interpreter
simulates the memories of a TPU: in "on_wait" mode a copy happens when the kernel waits for it, in
"eager" mode when it starts, with detection of races. A race is only printed, and waiting for a copy
that was never started hangs, so both modes run in another process with a deadline.
"""

import dataclasses
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from paged_jax.kernels import choose_backend
from paged_jax.kernels.mosaic_tpu import recurrent
from paged_jax.kernels.mosaic_tpu.attention import refusal
from paged_jax.kernels.mosaic_tpu.kernel import choose_tiling
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.state_rows import ConvolutionStep, RecurrentStep, StateRows
from paged_jax.kernels.xla import recurrent as plain
from tests.support import ROOT
from tests.support.kernel_cases import Case, lower
from tests.support.paged_batch import LAYER, PagedBatch, queries

FAST = True
INTERPRETERS = {
    "on_wait": pltpu.InterpretParams(),
    "eager": pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
}
DEADLINE = 600  # seconds

# With 8 heads of 256 lanes and groups of 17 queries, a tile has 128 keys and 16 query tokens. With
# more than 16 rows the loop over heads is not unrolled, so it compiles faster.
GROUP = 17
WIDE = {"K": 8, "C": 16, "D": 136, "lanes": 256}
LENGTHS = [0, 300, 1, 0, 129, 0]
QUERY_LENS = [0, 40, 1, 0, 2, 0]

SINKS = np.linspace(-2, 3, 8 * GROUP).astype(np.float32)
OPTIONS = {
    "window": {"sliding_window": 140},
    "all": {"sliding_window": 50, "soft_cap": 5.0, "sinks": SINKS},
}


def check_close(got, want, **tolerance) -> None:
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, err_msg=name, **tolerance)


def check_decode(batch: PagedBatch, interpret: Any, **options) -> None:
    q = queries((len(batch.lengths), batch.pools.k.shape[2] * GROUP, batch.k[0].shape[-1]))
    got = batch.decode(q, backend="mosaic_tpu", interpret=interpret, **options)
    check_close(got, batch.expected_decode(q, **options), rtol=0, atol=1e-5)


def check_prefill(batch: PagedBatch, interpret: Any, query_lens=QUERY_LENS, **options) -> None:
    heads = batch.pools.k.shape[2] * GROUP
    q = queries((len(batch.lengths), max(query_lens) + 1, heads, batch.k[0].shape[-1]))
    got = batch.prefill(q, query_lens, backend="mosaic_tpu", interpret=interpret, **options)
    check_close(got, batch.expected_prefill(q, query_lens, **options), rtol=0, atol=1e-5)


def check_both(batch: PagedBatch, query_lens=QUERY_LENS, **options) -> None:
    """Decode and prefill in one program."""
    heads, D = batch.pools.k.shape[2] * GROUP, batch.k[0].shape[-1]
    q = queries((len(batch.lengths), max(query_lens) + 1, heads, D))
    got = batch.attend(q, query_lens, backend="mosaic_tpu", interpret=FAST, **options)
    for a, b in zip(got, batch.expected(q, query_lens, **options), strict=True):
        check_close(a, b, rtol=0, atol=1e-5)


def check_core_set(interpret: Any) -> None:
    """Check several tiles of keys and queries, empty sequences at any place, and options."""
    batch = PagedBatch.random(LENGTHS, **WIDE)
    check_decode(batch, interpret)
    check_prefill(batch, interpret, **OPTIONS["all"])
    check_decode(PagedBatch.random(LENGTHS, dtype=jnp.int8, **WIDE), interpret, **OPTIONS["window"])
    check_decode(PagedBatch.random([0], lanes=128), interpret)


def test_choose_tiling_gives_the_core_set_several_tiles() -> None:
    batch = PagedBatch.random(LENGTHS, **WIDE)
    tiling = choose_tiling(max(QUERY_LENS) + 1, GROUP, batch.block_tables.shape[1], batch.pools.k)
    assert (tiling.keys, tiling.queries, tiling.num_query_tiles) == (128, 16, 3)


@pytest.mark.slow
def test_attention_of_several_tiles_matches_float64() -> None:
    check_both(PagedBatch.random(LENGTHS, **WIDE), **OPTIONS["all"])


@pytest.mark.slow
def test_attention_of_quantised_tiles_matches_float64() -> None:
    check_both(PagedBatch.random(LENGTHS, dtype=jnp.int8, **WIDE), soft_cap=5.0, sinks=SINKS)


# Rows 0, 2 and 4 read the same state, which row 0 overwrites. Row 1 starts from zeros, and row 3
# writes nothing. Row 5 is padding, and row 6 writes a new entry.
NUM_STATES, STATE_LAYER = 7, 1
SOURCES = np.array([3, 7, 3, 5, 3, 7, 6], np.int32)
ENTRIES = np.array([3, 0, 1, 9, 2, -1, 4], np.int32)


def make_step(op: str, K: int, G: int, D: int, U: int) -> Any:
    """Return a step with random arrays. Entries that no row may read are NaN."""
    rng, B = np.random.default_rng(0), len(SOURCES)

    def random(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    shape = (D, U) if op == "delta" else (U, D)
    pool = random(2, NUM_STATES, K * G, *shape).at[0].set(jnp.nan)
    pool = pool.at[STATE_LAYER, jnp.array([0, 1, 2, 4])].set(jnp.nan)
    layer = jnp.int32(STATE_LAYER)
    rows = StateRows(pool, layer, jnp.asarray(SOURCES), jnp.asarray(ENTRIES))
    q, k = random(B, K, D) / D**0.5, random(B, K, D) / D**0.5
    decay = -abs(random(B, K, G))
    if op == "state_space":
        return RecurrentStep(rows, q, k, random(B, K, G, U), decay[..., None], None)
    return RecurrentStep(rows, q, k, random(B, K, G, U), decay[..., None], abs(random(B, K, G)))


def check_step(step: Any, interpret: Any) -> None:
    """Compare with plain JAX, which `test_state_rows` compares with float64 recurrences."""
    got, want = recurrent.advance_rows(step, interpret), plain.advance_rows(step)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-5)  # NaN at the same places


@pytest.mark.parametrize("op, K, G", [("delta", 4, 2), ("delta", 2, 6), ("state_space", 3, 2)])
def test_states_are_advanced_in_blocks_of_heads(monkeypatch, op, K, G) -> None:
    """A block of at most four heads has whole groups of heads, or a part of a group."""
    D, U = (8, 128) if op == "delta" else (128, 8)
    monkeypatch.setattr(recurrent, "_BLOCK_BYTES", 4 * 4 * D * U)
    assert recurrent.heads_per_block(K, G, 4 * D * U) == {8: 4, 12: 3, 6: 2}[K * G]
    check_step(make_step(op, K, G, D, U), FAST)


def test_no_row_writes_a_state() -> None:
    step = make_step("delta", 1, 1, 8, 128)
    for sources in (SOURCES, np.full_like(SOURCES, NUM_STATES)):
        entries = jnp.full_like(step.rows.entries, NUM_STATES)
        rows = dataclasses.replace(step.rows, sources=jnp.asarray(sources), entries=entries)
        check_step(step._replace(rows=rows), FAST)


def test_other_states_are_left_to_xla() -> None:
    step = make_step("delta", 1, 1, 8, 128)

    def why_not(D: int, U: int, dtype: Any = jnp.float32) -> str:
        pool: Any = jax.ShapeDtypeStruct((1, 1, 1, D, U), dtype)
        return (
            recurrent.refusal(step._replace(rows=dataclasses.replace(step.rows, pool=pool)))
            or "none"
        )

    assert why_not(96, 192) == "none"
    assert "float32, got bfloat16" in why_not(96, 128, jnp.bfloat16)
    assert "got 12 and 128" in why_not(12, 128) and "got 128 and 64" in why_not(128, 64)
    assert "at most 2097152 bytes, got 4194304" in why_not(1024, 1024)
    convolution = ConvolutionStep(step.rows, step.q, step.k, None, step.rows.entries)
    assert "convolutions" in (recurrent.refusal(convolution) or "")


@pytest.mark.slow
def test_kernels_wait_for_their_copies() -> None:
    run = subprocess.run(
        [sys.executable, "-m", __name__],
        timeout=DEADLINE,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert "RACE DETECTED" not in run.stdout + run.stderr


@pytest.mark.slow
def test_attention_with_empty_first_or_last_sequences() -> None:
    """A launch with a single, empty sequence is in `check_core_set`."""
    check_decode(PagedBatch.random([16], lanes=128), FAST)
    batch = PagedBatch.random([40, 16, 24], lanes=128)
    for lengths in ([0, 0, 0], [40, 0, 0], [0, 0, 24], [0, 16, 0]):
        batch.lengths = np.array(lengths, np.int32)
        check_decode(batch, FAST)


@pytest.mark.slow
def test_attention_does_not_read_before_the_window() -> None:
    """Blocks before the window may be freed, and the first part of a block may be overwritten."""
    batch = PagedBatch.random([300, 90], **WIDE)
    for b, first in ((0, 300 - 70), (1, 90 - 70)):
        batch.block_tables[b, : first // 16] = -1
        for pool in (batch.pools.k, batch.pools.v):
            pool[LAYER, batch.block_tables[b, first // 16], :, : first % 16] = np.nan
    check_both(batch, query_lens=[1, 1], sliding_window=70)


@pytest.mark.slow
def test_attention_splits_tables_larger_than_scalar_memory() -> None:
    batch = PagedBatch.random([20, 0, 33], lanes=128, extra_width=100_000)
    check_decode(batch, FAST)


@pytest.mark.slow
def test_attention_does_not_round_weights_to_bfloat16() -> None:
    """The only error is the rounding of the output: half a unit in the last place."""
    batch = PagedBatch.random([700, 300], D=128, dtype=jnp.bfloat16)
    q = queries((2, 4, 128), jnp.bfloat16)
    got = batch.decode(q, backend="mosaic_tpu", interpret=FAST)
    check_close(got, batch.expected_decode(q), rtol=2**-8, atol=1e-5)


PROBLEM = Problem(
    op="decode",
    sizes=(("C", 16), ("M", 8)),
    q_dtype=jnp.dtype(jnp.bfloat16),
    pool_dtype=jnp.dtype(jnp.bfloat16),
    has_sinks=False,
    options=Options(),
    lanes=128,
)
REFUSED = {
    "lanes": ({"lanes": 80}, "last dimension of 80 at every call; .* last dimension of 128, a"),
    "block size": ({"sizes": (("C", 4), ("M", 8))}, "power of two of at least 8, got 4"),
    "block size 24": ({"sizes": (("C", 24), ("M", 8))}, "power of two of at least 8, got 24"),
    "table": ({"sizes": (("C", 16), ("M", 10**6))}, "scalar memory, 253952 entries, got 1000000"),
    "queries": ({"q_dtype": jnp.dtype(jnp.float16)}, "bfloat16 or float32, got float16"),
    "pools": ({"pool_dtype": jnp.dtype(jnp.float16)}, "int8 or float8_e4m3fn, got float16"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_says_why(change, message) -> None:
    assert refusal(PROBLEM) is None
    why_not = refusal(dataclasses.replace(PROBLEM, **change))
    assert why_not is not None and re.search(message, why_not), why_not


def test_choose_backend_names_an_unsupported_tpu() -> None:
    old = AbstractDevice("TPU v4", 1, "tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=old)):
        name, why = choose_backend(PROBLEM, "tpu")
    assert name == "xla" and "TPU v5e and later, and this is a TPU v4" in why
    assert choose_backend(PROBLEM, "tpu").backend == "mosaic_tpu"


def test_attention_with_an_unpadded_pool_says_what_to_do() -> None:
    batch = PagedBatch.random([5], D=80)
    with pytest.raises(NotImplementedError, match="mosaic_tpu .* cache with a last dim"):
        check_decode(batch, FAST)


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_attention_lowers_to_one_kernel(op) -> None:
    case = Case(op, backend="mosaic_tpu")
    lowered = lower(case.function(), *case.shapes(), platform="tpu")
    assert lowered.as_text().count("@tpu_custom_call") == 1


if __name__ == "__main__":
    for interpreter in INTERPRETERS.values():
        check_core_set(interpreter)
        # Two blocks of heads.
        check_step(make_step("state_space", 34, 1, 128, 8), interpreter)
