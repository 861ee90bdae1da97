"""Tests of the GPU kernels of the backend `mosaic_gpu`, in JAX's simulator of a GPU.

The simulator detects races between thread blocks, threads and bulk copies. It exists from jax
0.11.2 on; `test_aot_mosaic_gpu.py` compiles the kernels.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import gpu_device
from paged_jax.kernels.gpu_device import GpuInfo
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.mosaic_gpu import backend, flash_decode, launch
from paged_jax.kernels.op import choose_backend
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem
from tests.kernels.test_rope_write import check, make_new
from tests.kernels.test_triton_write import problem
from tests.kernels.test_writing import (
    assert_same_bits,
    copy,
    expected_write,
    make_places,
    make_tokens,
    poisoned,
    write,
)
from tests.support.paged_batch import PagedBatch, queries
from tests.support.processes import run_on_devices

needs_simulator = pytest.mark.skipif(
    launch.refusal(interpret=True) is not None, reason="this jax has no simulator of a GPU"
)


@functools.cache
def simulated() -> dict[str, Any]:
    """Return the arguments of an op that run it in the simulator."""
    simulator = launch.plgpu.InterpretGPUParams(detect_races=True)
    return {"backend": "mosaic_gpu", "interpret": simulator}


@pytest.fixture
def assert_no_races(capsys):
    """Return a function that checks that the simulator has printed no race.

    From jax 0.12 on, a race is also an error of the simulated call.
    """

    def check_output() -> None:
        assert "RACE DETECTED" not in capsys.readouterr().out

    return check_output


def quantise(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Quantise like `kv_dtypes.quantise`, in NumPy."""
    x, largest = x.astype(np.float32), KVDtype.of(dtype).largest
    scale = np.abs(x).max(-1) * np.float32(1 / largest)
    inverse = 1 / np.where(scale > 0, scale, np.float32(1))
    scaled = np.clip(x * inverse[..., None], -largest, largest)
    return (np.rint(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scale


@needs_simulator
@pytest.mark.parametrize(
    ("K", "C", "D", "num_tokens", "new_dtype", "dtype", "lanes"),
    [
        (3, 4, 8, 6, "float32", "bfloat16", None),
        (2, 4, 64, 5, "bfloat16", "bfloat16", None),
        (1, 2, 576, 4, "float32", "float16", None),
        (2, 8, 80, 5, "float16", "float32", 128),
        (3, 4, 64, 6, "bfloat16", "int8", None),
        (18, 2, 288, 4, "float16", "int8", 384),
        (1, 4, 96, 5, "float32", "float8_e4m3fn", 128),
    ],
)
def test_write_matches_numpy(K, C, D, num_tokens, new_dtype, dtype, lanes, assert_no_races) -> None:
    """One token has a block out of range."""
    num_blocks = num_tokens // C + 2
    pools = poisoned(jnp.dtype(dtype), (2, num_blocks, K, C, lanes or D))
    k, v = make_tokens(num_tokens, jnp.dtype(new_dtype), K, D)
    places = make_places(num_tokens, num_blocks, C)
    written = write(pools, k, v, *places, **simulated())
    expected = expected_write(pools, k, v, *places, quantise=quantise)
    assert_same_bits(written, expected, head_dim=D)
    assert_no_races()


@needs_simulator
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_write_of_latent_keys_and_of_no_layer(dtype) -> None:
    k, _ = make_tokens(3, jnp.bfloat16, 1, 320)
    places = make_places(3, 2, 4)
    both = poisoned(jnp.dtype(dtype), (2, 2, 1, 4, 320))
    pools = both._replace(v=None, v_scale=None)
    for layer in (1, 2):
        written = write(pools, k, None, *places, layer=layer, **simulated())
        expected = expected_write(both, k, k, *places, quantise=quantise) if layer == 1 else both
        assert_same_bits(written, expected._replace(v=None, v_scale=None))


@needs_simulator
@pytest.mark.parametrize(
    ("H", "K", "D", "new_dtype", "dtype", "has_norms"),
    [
        (8, 2, 64, "float32", "bfloat16", True),
        (3, 1, 128, "bfloat16", "float32", False),
        (2, 1, 256, "bfloat16", "bfloat16", True),
        (6, 6, 64, "bfloat16", "int8", True),
        (10, 2, 128, "float32", "float8_e4m3fn", False),
        (2, 1, 320, "bfloat16", "int8", True),
    ],
)
def test_rope_write_matches_float64(H, K, D, new_dtype, dtype, has_norms, assert_no_races) -> None:
    pools = poisoned(jnp.dtype(dtype), (2, 3, K, 4, D))
    new = make_new(5, H, K, D, jnp.dtype(new_dtype), has_norms=has_norms)
    check(pools, new, make_places(5, 3, 4), quantise=quantise, **simulated())
    assert_no_races()


@needs_simulator
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_copy_blocks_copies_all_layers(dtype, assert_no_races) -> None:
    """Pairs with a block out of range are ignored."""
    rng = np.random.default_rng(0)
    pools = jax.tree.map(
        lambda pool: rng.normal(size=pool.shape).astype(pool.dtype),
        poisoned(jnp.dtype(dtype), (2, 6, 3, 4, 16)),
    )
    copied = copy(pools, np.array([1, 9, 2, 4]), np.array([3, 2, 0, -1]), **simulated())
    expected = jax.tree.map(np.copy, pools)
    for pool in jax.tree.leaves(expected):
        pool[:, [3, 0]] = pool[:, [1, 2]]
    assert_same_bits(copied, expected)
    assert_no_races()


@needs_simulator
def test_gradient_of_a_write_is_the_gradient_in_plain_jax() -> None:
    pool, places = jnp.zeros((2, 2, 1, 4, 8)), make_places(3, 2, 4)
    k = jnp.asarray(make_tokens(3, K=1, D=8))[0]

    def loss(k, backend):
        return jnp.sum(write(Pools(pool, pool), k, k, *places, **backend).k[1] ** 2)

    got, want = (jax.grad(loss)(k, backend) for backend in (simulated(), {"backend": "xla"}))
    np.testing.assert_allclose(got, want)


# Each case has other code: one or two groups of columns, one or several pieces of a head, blocks
# that are smaller or larger than a step, heads that are cut into slices, and quantised pools.
DECODES = {
    "unsplit": {"lengths": [0, 1, 70], "G": 4, "num_parts": 0},
    "parts": {"lengths": [140, 5, 0], "num_parts": 3, "G": 3, "D": 128},
    "sinks": {"lengths": [70, 77], "num_parts": 2, "K": 2, "G": 12, "C": 8, "has_sinks": True,
              "options": {"soft_cap": 5.0, "scale": 0.3}},
    "window": {"lengths": [300, 17], "num_parts": 3, "C": 128, "has_sinks": True,
               "options": {"sliding_window": 100}},
    "wide": {"lengths": [70, 9], "num_parts": 2, "D": 256, "dtype": "float16"},
    "latent": {"lengths": [70, 9], "num_parts": 2, "G": 16, "D": 320, "value_dim": 256},
    "uneven pieces": {"lengths": [70, 9], "num_parts": 2, "G": 3, "D": 320},
    "int8": {"lengths": [300, 5, 0], "num_parts": 3, "D": 128, "pool_dtype": "int8"},
    "int8, sinks": {"lengths": [70, 300], "num_parts": 3, "K": 2, "G": 12, "C": 8, "D": 192,
                    "dtype": "float16", "has_sinks": True, "pool_dtype": "int8",
                    "options": {"soft_cap": 1e6, "scale": 0.3}},
    "int8, latent": {"lengths": [70, 9], "num_parts": 2, "G": 16, "D": 320, "value_dim": 256,
                     "pool_dtype": "int8"},
    "fp8, window": {"lengths": [300, 17], "num_parts": 3, "C": 256, "D": 64,
                    "pool_dtype": "float8_e4m3fn", "options": {"sliding_window": 100}},
    "fp8, wide": {"lengths": [70, 9], "num_parts": 0, "D": 256, "dtype": "float16",
                  "pool_dtype": "float8_e4m3fn"},
}  # fmt: skip


@needs_simulator
@pytest.mark.parametrize("name", DECODES)
def test_decode_matches_float64(name, monkeypatch, assert_no_races) -> None:
    """Unused blocks and tokens are NaN, and unused entries of tables are out of range."""
    case = {"K": 1, "G": 4, "C": 16, "D": 64, "dtype": "bfloat16", "options": {}} | DECODES[name]
    monkeypatch.setattr(flash_decode, "choose_num_parts", lambda *_: case["num_parts"])
    dtype, H = jnp.dtype(case["dtype"]), case["K"] * case["G"]
    options = dict(case["options"])
    if case.get("has_sinks"):
        options["sinks"] = np.linspace(-2, 4, H, dtype=np.float32)
    batch = PagedBatch.random(
        case["lengths"], K=case["K"], C=case["C"], D=case["D"], extra_width=1,
        dtype=jnp.dtype(case.get("pool_dtype", dtype)), value_dim=case.get("value_dim"),
    )  # fmt: skip
    q = queries((len(case["lengths"]), H, case["D"]), dtype)
    out, lse = batch.decode(q, **simulated(), **options)
    want_out, want_lse = batch.expected_decode(q.astype(np.float64), **options)
    assert out.dtype == dtype and lse.dtype == np.float32
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
    # The rounding of the result to half precision, and errors of float32.
    half_step = float(jnp.finfo(dtype).eps) / 2
    assert (np.abs(out - want_out) <= half_step * np.abs(want_out) * 1.001 + 2e-5).all()
    assert_no_races()


def test_compute_tanh_is_precise_everywhere() -> None:
    """The error is at most 3 units in the last place, also where tanh(x) is nearly x."""
    positive = np.concatenate([np.logspace(-30, 2, 4000), np.linspace(0.3, 0.7, 4000)])
    x = np.concatenate([positive, -positive, [0.0, np.inf, -np.inf]]).astype(np.float32)
    exact = np.tanh(x.astype(np.float64))
    got = np.asarray(launch.compute_tanh(jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(got, exact, rtol=3 * 2**-23, atol=0)


def decode_problem(**changes) -> Problem:
    sizes = {"B": 2, "K": 2, "H": 8, "C": 16, "D": 128, "M": 4} | changes
    q_dtype, pool_dtype = (jnp.dtype(sizes.pop(x, "bfloat16")) for x in ("q_dtype", "pool_dtype"))
    return Problem(
        op="decode", sizes=tuple(sizes.items()), q_dtype=q_dtype, pool_dtype=pool_dtype,
        has_sinks=False, options=Options(), lanes=sizes["D"], shares_values="U" in sizes,
    )  # fmt: skip


@needs_simulator
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"K": 1, "H": 128, "D": 576, "U": 512}, None),
        ({"pool_dtype": "int8"}, None),
        ({"q_dtype": "float16", "pool_dtype": "float8_e4m3fn"}, None),
        ({"q_dtype": "float32"}, "must be bfloat16 or float16"),
        ({"q_dtype": "float32", "pool_dtype": "int8"}, "must be bfloat16 or float16"),
        ({"pool_dtype": "float16"}, "pools of the same dtype, int8 or float8_e4m3fn"),
        ({"C": 12}, "the block size must be a power of two"),
        ({"C": 4}, "of at least 8, got 4"),
        ({"D": 80}, "keys and values must have a multiple of 64 elements"),
        ({"K": 1, "H": 71}, "71 query heads per KV head cannot be divided"),
    ],
)
def test_unsupported_attention_is_refused(changes, reason) -> None:
    refused = backend.refusal(decode_problem(**changes))
    assert refused is None if reason is None else reason in str(refused)


def new_in(pool_dtype: str, **sizes: int) -> Problem:
    """Return a write of new tokens in bfloat16."""
    return dataclasses.replace(problem(pool_dtype, **sizes), q_dtype=jnp.dtype("bfloat16"))


@needs_simulator
@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (
            problem("float64"),
            "keys and values must be bfloat16, float16, float32, and pools one of these, int8",
        ),
        (problem("float8_e5m2"), "got float8_e5m2"),
        (new_in("int8", D=80), "rows to quantise must have a multiple of 32 elements, got 80"),
        (problem("bfloat16", D=20), "rows must have a multiple of 16 bytes"),
        (
            problem("bfloat16", K=256, D=128),
            "the heads of a token, 256 of 128 elements, do not fit",
        ),
        (problem("bfloat16", "rope_write", D=80, H=4), "half a head must have a multiple of 32"),
        (problem("bfloat16", "rope_write", D=256, H=512), "do not fit shared memory"),
        (problem("int8", "copy_blocks", K=1, C=1, D=24), "blocks must have a multiple of 16 bytes"),
    ],
)
def test_unsupported_updates_are_refused(refused, reason) -> None:
    assert reason in str(backend.refusal(refused))


@needs_simulator
@pytest.mark.parametrize(
    ("gpu", "capability", "is_supported"),
    [
        ("NVIDIA H200", (9, 0), True),
        ("NVIDIA B200", (10, 0), True),
        ("NVIDIA A100", (8, 0), False),
        ("NVIDIA RTX PRO 6000", (12, 0), False),
    ],
)
def test_gpus_without_the_kernels_are_refused(gpu, capability, is_supported) -> None:
    with gpu_device.assume(GpuInfo(gpu, 100, capability)):
        why_not = backend.refusal(problem("bfloat16"))
    assert (why_not is None) == is_supported
    assert is_supported or f"{gpu} has {capability[0]}.{capability[1]}" in str(why_not)


def test_triton_is_preferred_to_mosaic_gpu() -> None:
    assert choose_backend(problem("bfloat16"), "cuda").backend == "triton"


def test_jax_without_mosaic_gpu_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(launch, "plgpu", None)
    assert "jax 0.11.2 or later" in str(backend.refusal(problem("bfloat16")))


# Simulates a future version of JAX without Pallas' Triton backend.
WITHOUT_TRITON = """
import sys

class WithoutTriton:
    def find_spec(self, name, path=None, target=None):
        if name == "jax.experimental.pallas.triton":
            raise ImportError(name)

sys.meta_path.insert(0, WithoutTriton())
import paged_jax
from tests.support.gpus import GPUS
from tests.support.kernel_cases import Case

CASES = [
    Case(op, pool_dtype=pool_dtype)
    for op in ("decode", "write", "rope_write", "copy_blocks", "prefill")
    for pool_dtype in ("bfloat16", "int8")
]
for gpu in ("h200", "b200", "a100"):
    for case in (*CASES, Case("prefill", K=1, G=16, D=576, U=512)):
        text = case.lower("cuda", gpu=GPUS[gpu].device).as_text()
        print(gpu, case.op, case.pool_dtype or "latent", "mosaic_gpu" in text)
"""


@needs_simulator
def test_backend_none_is_mosaic_gpu_without_triton_in_jax() -> None:
    """Prompts on a B200, and GPUs of other compute capabilities, use XLA."""
    lines = [line.split() for line in run_on_devices(WITHOUT_TRITON, 1).splitlines()]
    assert len(lines) == 33
    for gpu, op, pool_dtype, is_kernel in lines:
        has_kernel = gpu == "h200" or (gpu == "b200" and op != "prefill")
        assert (is_kernel == "True") == has_kernel, (gpu, op, pool_dtype)
