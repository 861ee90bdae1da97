"""Races in the TPU kernels, found by Pallas' TPU interpreter on small arrays.

The interpreter simulates the memories of a TPU, in which new buffers contain NaN. In "eager" mode a
copy happens when it starts, and the interpreter reports each access that no wait orders with it. In
"on_wait" mode a copy happens when the kernel waits for it, so data that are used too early are NaN.
`test_mosaic_tpu.py` has a larger test in a separate process.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from paged_jax.kernels.mosaic_tpu import attention as tpu_attention
from paged_jax.kernels.mosaic_tpu import kernel, recurrent
from paged_jax.kernels.mosaic_tpu import write as tpu_write
from paged_jax.kernels.op_args import AttentionArgs, Options, WriteArgs
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.xla import recurrent as plain
from paged_jax.kernels.xla import writes
from tests.kernels.test_mosaic_tpu import make_step
from tests.support.paged_batch import LAYER, PagedBatch, queries

EAGER = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
if hasattr(EAGER, "on_race"):  # jax 0.12 raises an error by default, and logs warnings
    EAGER = dataclasses.replace(EAGER, on_race="warn")
ON_WAIT = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
# What the interpreter prints or logs about accesses without order, and about copies without a wait.
MESSAGES = "RACE DETECTED", "has non-zero count"


def attend(interpret: Any, monkeypatch) -> tuple[np.ndarray, np.ndarray]:
    """Decode with int8 pools: keys, values and both scales are copied, each to two buffers.

    A tile has 128 tokens, so the sequences of the three grid steps have one, three and no tile.
    """
    monkeypatch.setattr(kernel, "_TILE_BYTES", 128 * 128)
    batch = PagedBatch.random([9, 300, 0], K=1, C=64, D=8, lanes=128, dtype=jnp.int8)
    q = queries((3, 2, 8))
    tiling = kernel.choose_tiling(1, 2, batch.block_tables.shape[1], batch.pools.k)
    assert tiling.keys == 128
    arrays = jax.tree.map(jnp.asarray, (q, batch.pools, batch.block_tables, batch.lengths))
    args = AttentionArgs(*arrays, None, None, jnp.int32(LAYER))
    options = Options(scale=0.4)
    run = jax.jit(lambda args: tpu_attention.attend.__wrapped__(args, options, interpret))
    out, _ = run(args)
    return np.asarray(out), batch.expected_decode(q, scale=0.4)[0]


def advance(op: str, interpret: Any, monkeypatch) -> tuple[np.ndarray, np.ndarray]:
    """Advance seven rows in two blocks of heads, which write their states from two buffers."""
    D, U = (8, 128) if op == "delta" else (128, 8)
    monkeypatch.setattr(recurrent, "_BLOCK_BYTES", 4 * D * U)
    step = make_step(op, 2, 1, D, U)
    assert recurrent.heads_per_block(2, 1, 4 * D * U) == 1
    got = jax.jit(lambda step: recurrent.advance_rows.__wrapped__(step, interpret))(step)
    return tuple(
        np.concatenate([np.asarray(x).reshape(-1) for x in each])
        for each in (got, plain.advance_rows(step))
    )


def write(interpret: Any, monkeypatch) -> tuple[np.ndarray, np.ndarray]:
    """Write tokens of a prompt in two grid steps, which share tiles, and drop two of them."""
    monkeypatch.setattr(tpu_write, "_STEP_TOKENS", 8)
    rng = np.random.default_rng(4)
    k_pool, v_pool = jnp.asarray(rng.normal(size=(2, 2, 3, 2, 16, 128)), jnp.bfloat16)
    k, v = jnp.asarray(rng.normal(size=(2, 14, 2, 128)), jnp.float32)
    places = np.arange(5, 19)
    blocks = jnp.asarray(np.where(places % 7 == 3, 9, places // 16), jnp.int32)
    offsets = jnp.asarray(places % 16, jnp.int32)
    args = WriteArgs(Pools(k_pool, v_pool, None, None), k, v, blocks, offsets, jnp.int32(1))
    got = jax.jit(lambda args: tpu_write.write.__wrapped__(args, interpret))(args)
    return tuple(np.stack([np.asarray(x) for x in each[:2]]) for each in (got, writes.write(args)))


KERNELS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "attention": attend,
    "write": write,
    "delta": lambda *args: advance("delta", *args),
    "state_space": lambda *args: advance("state_space", *args),
}


@pytest.mark.parametrize(
    "name", ["attention", "write", "state_space", pytest.param("delta", marks=pytest.mark.slow)]
)
def test_kernels_have_no_races(name, monkeypatch, capsys, caplog) -> None:
    got, want = KERNELS[name](EAGER, monkeypatch)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)  # NaN at the same places
    printed = capsys.readouterr().out + caplog.text
    assert not any(message in printed for message in MESSAGES), printed


def leave_out_waits(monkeypatch) -> None:
    """Let the kernels start their copies, and never wait for them."""
    make_async_copy = pltpu.make_async_copy

    class Copy:
        def __init__(self, *args: Any):
            self.copy = make_async_copy(*args)

        def start(self) -> None:
            self.copy.start()

        def wait(self) -> None:
            pass

    monkeypatch.setattr(pltpu, "make_async_copy", Copy)


@pytest.mark.parametrize("name", [pytest.param("attention", marks=pytest.mark.slow), "state_space"])
def test_the_interpreter_finds_missing_waits(name, monkeypatch, capsys, caplog) -> None:
    """The test above would find such a kernel, and "on_wait" gives wrong results."""
    leave_out_waits(monkeypatch)
    KERNELS[name](EAGER, monkeypatch)
    printed = capsys.readouterr().out + caplog.text
    assert all(message in printed for message in MESSAGES)


@pytest.mark.parametrize("name", ["write", pytest.param("attention", marks=pytest.mark.slow)])
def test_results_need_the_waits(name, monkeypatch) -> None:
    """Pending copies happen at a wait, the last one first."""
    got, want = KERNELS[name](ON_WAIT, monkeypatch)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    leave_out_waits(monkeypatch)
    got, want = KERNELS[name](ON_WAIT, monkeypatch)
    assert not np.allclose(got, want, rtol=0, atol=1e-2)
