"""Tests of attention to prompts in the backend `mosaic_gpu`, in JAX's simulator of a GPU.

`test_mosaic_gpu.py` tests the other kernels. These kernels have three warpgroups that wait for each
other, and the simulator needs a thread of XLA's pool for each. Machines with two cores have fewer,
so the cases run in one process with more simulated devices, and thus more threads.
"""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import gpu_device
from paged_jax.kernels.gpu_device import GpuInfo
from paged_jax.kernels.mosaic_gpu import backend, launch
from paged_jax.kernels.mosaic_gpu.query_tiles import PrefillSizes
from paged_jax.kernels.op import backend_for
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.problem import Problem
from tests.support.aot_cases import asked_for
from tests.support.paged_batch import PagedBatch, queries
from tests.support.processes import run_on_devices
from tests.support.ragged_batch import RaggedBatch

needs_simulator = pytest.mark.skipif(
    launch.refusal(interpret=True) is not None, reason="this jax has no simulator of a GPU"
)

# Each case has other code: one or more query heads in a tile, tiles that two warpgroups share in
# another place, and blocks that are smaller and larger than a step. Chunks are empty, or have
# context, several tiles and several steps.
PREFILLS: dict[str, dict[str, Any]] = {
    "chunks": {"lengths": [70, 0, 40], "query_lens": [70, 0, 9]},
    "sinks": {"lengths": [400, 20], "query_lens": [50, 9], "G": 3, "D": 128, "C": 32,
              "has_sinks": True, "dtype": "float16", "options": {"scale": -0.1}},
    "window": {"lengths": [500], "query_lens": [70], "G": 1, "C": 8,
               "options": {"sliding_window": 150, "soft_cap": 5.0}},
    "wide": {"lengths": [200], "query_lens": [20], "K": 2, "G": 8, "D": 256, "C": 128},
    "narrow window": {"lengths": [140], "query_lens": [30], "G": 5,
                      "options": {"sliding_window": 7}},
}  # fmt: skip
NARROW: dict[str, dict[str, Any]] = {
    "int8": {"lengths": [300, 0, 40], "query_lens": [70, 0, 9], "D": 128, "pool_dtype": "int8"},
    "int8, sinks": {"lengths": [200, 20], "query_lens": [50, 9], "G": 3, "C": 32,
                    "dtype": "float16", "has_sinks": True, "pool_dtype": "int8",
                    "options": {"scale": -0.1}},
    "fp8, window": {"lengths": [500], "query_lens": [70], "G": 1, "C": 8,
                    "pool_dtype": "float8_e4m3fn",
                    "options": {"sliding_window": 150, "soft_cap": 5.0}},
    "fp8, wide": {"lengths": [200], "query_lens": [20], "K": 2, "G": 8, "D": 256, "C": 128,
                  "pool_dtype": "float8_e4m3fn"},
    "int8, three pieces": {"lengths": [400], "query_lens": [30], "G": 2, "D": 192, "C": 256,
                           "pool_dtype": "int8"},
}  # fmt: skip
# Values that both warpgroups share, or that each computes for its own rows.
LATENT: dict[str, dict[str, Any]] = {
    "latent": {"lengths": [150, 0, 20], "query_lens": [20, 0, 9], "G": 16, "D": 576,
               "value_dim": 512},
    "latent, window": {"lengths": [200], "query_lens": [20], "G": 5, "D": 448, "C": 128,
                       "value_dim": 384, "dtype": "float16", "has_sinks": True,
                       "options": {"sliding_window": 70, "soft_cap": 5.0}},
    "latent, 256": {"lengths": [90, 40], "query_lens": [70, 3], "G": 2, "D": 320, "C": 8,
                    "value_dim": 256},
}  # fmt: skip
RAGGED: dict[str, dict[str, Any]] = {
    "ragged": {"lengths": [(40, 60), (1, 30), (7, 7), (33, 200)], "G": 4,
               "options": {"k_scale": 0.5, "v_scale": 1.5}},
    "ragged, window": {"lengths": [(5, 170), (50, 50)], "G": 2, "C": 16,
                       "options": {"sliding_window": 40, "soft_cap": 1e6}},
    "ragged, int8": {"lengths": [(40, 60), (1, 130), (33, 200)], "G": 4, "D": 128,
                     "pool_dtype": "int8", "options": {"k_scale": 0.03, "v_scale": 0.04}},
    "ragged, fp8": {"lengths": [(1, 170), (50, 50)], "G": 3, "C": 64, "dtype": "float16",
                    "pool_dtype": "float8_e4m3fn", "options": {"sliding_window": 40}},
    "ragged, latent": {"lengths": [(20, 90), (1, 30), (9, 9)], "G": 16, "D": 576,
                       "value_dim": 512, "options": {"sliding_window": 40, "v_scale": 1.5}},
}  # fmt: skip
CASES = PREFILLS | NARROW | LATENT | RAGGED


def run_case(name: str) -> None:
    """Compare a case with float64. Unused tokens are NaN, and unused table entries out of range."""
    case = {"K": 1, "G": 4, "C": 16, "D": 64, "dtype": "bfloat16", "options": {}} | CASES[name]
    dtype, K, H, D = jnp.dtype(case["dtype"]), case["K"], case["K"] * case["G"], case["D"]
    pool_dtype = jnp.dtype(case.get("pool_dtype", dtype))
    simulator = launch.plgpu.InterpretGPUParams(detect_races=True)
    simulated = {"backend": "mosaic_gpu", "interpret": simulator}
    options = dict(case["options"])
    if name in RAGGED:
        batch = RaggedBatch.random(
            case["lengths"], K=K, G=case["G"], C=case["C"], D=D, q_dtype=dtype, dtype=pool_dtype,
            value_dim=case.get("value_dim"),
        )  # fmt: skip
        options["sm_scale"] = D**-0.5
        got = batch.attend(**simulated, **options, return_lse=True)
        want = batch.expected_with_lse(**options)
    else:
        lens = case["query_lens"]
        paged = PagedBatch.random(
            case["lengths"], K=K, C=case["C"], D=D, dtype=pool_dtype, extra_width=1,
            value_dim=case.get("value_dim"),
        )  # fmt: skip
        q = queries((len(lens), max(lens), H, D), dtype)
        for row, num_queries in enumerate(lens):
            q[row, num_queries:] = np.nan
        if case.get("has_sinks"):
            options["sinks"] = np.linspace(-2, 4, H, dtype=np.float32)
        got = paged.prefill(q, lens, **simulated, **options)
        want = paged.expected_prefill(q, lens, **options)
    assert got[0].dtype == dtype and got[1].dtype == np.float32
    # The weights and the result are rounded to half precision, the log-sum-exp is not. Weights of
    # 8-bit values are rounded to bfloat16.
    is_narrow = pool_dtype != dtype
    unit = float(jnp.finfo(jnp.bfloat16 if is_narrow else dtype).eps) / 2
    np.testing.assert_allclose(got[0].astype(np.float64), want[0], rtol=unit, atol=2 * unit)
    np.testing.assert_allclose(got[1], want[1], atol=5e-6)


PROGRAM = """
import json, sys
from tests.kernels.test_mosaic_gpu_prefill import run_case

failures = {}
for name in sys.argv[1:]:
    try:
        run_case(name)
    except Exception as error:
        failures[name] = repr(error)
print()
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest) -> str:
    """Output of one process that runs the selected cases."""
    return run_on_devices(PROGRAM, *sorted(asked_for(request, "name")), num_devices=8)


@needs_simulator
@pytest.mark.parametrize("name", CASES)
def test_prompts_match_float64_without_a_race(name, output) -> None:
    assert "RACE DETECTED" not in output
    failures = json.loads(output.splitlines()[-1])
    assert name not in failures, failures[name]


@pytest.mark.parametrize(
    ("T", "G", "sizes", "heads", "tokens"),
    [
        (2048, 4, {}, 4, 32),
        (2048, 1, {}, 1, 128),
        # Slices of 4 of 12 heads fill the tile, slices of 6 would not.
        (2048, 12, {}, 4, 32),
        # Short chunks, such as drafts: few tiles with more heads.
        (5, 7, {}, 7, 16),
        # A prime number of heads.
        (2048, 71, {}, 1, 128),
        # Tiles of 64 rows.
        (512, 128, {"D": 576, "shared": 512}, 8, 8),
        (512, 20, {"D": 576, "shared": 512}, 4, 16),
    ],
)
def test_tiles_are_as_few_as_possible(T, G, sizes, heads, tokens) -> None:
    sizes = PrefillSizes.choose(T, G, 16, **{"D": 128} | sizes)
    assert (sizes.slice_size, sizes.tile_tokens) == (heads, tokens)
    rows = [row for *_, group, first, size in sizes.boxes
            for row in range(64 * group + first, 64 * group + first + size)]  # fmt: skip
    assert rows == list(range(heads * tokens))


def prompt(op: Any = "prefill", *, q_dtype="bfloat16", pool_dtype="bfloat16", **changes) -> Problem:
    sizes = {"B": 2, "T": 64, "N": 64, "K": 2, "H": 8, "C": 16, "D": 128, "M": 4} | changes
    return Problem(
        op=op, sizes=tuple(sizes.items()), q_dtype=jnp.dtype(q_dtype),
        pool_dtype=jnp.dtype(pool_dtype), has_sinks=False, options=Options(), lanes=sizes["D"],
        shares_values="U" in sizes,
    )  # fmt: skip


@needs_simulator
@pytest.mark.parametrize("op", ["prefill", "ragged"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"H": 142}, None),
        ({"pool_dtype": "int8"}, None),
        ({"q_dtype": "float16", "pool_dtype": "float8_e4m3fn"}, None),
        ({"pool_dtype": "float16"}, "pools of the same dtype, int8 or float8_e4m3fn"),
        ({"q_dtype": "float32"}, "queries must be bfloat16 or float16"),
        ({"q_dtype": "float32", "pool_dtype": "int8"}, "queries must be bfloat16 or float16"),
        ({"C": 12}, "the block size must be a power of two"),
        ({"D": 80}, "must be a multiple of 64 up to 256"),
        ({"D": 320}, "must be a multiple of 64 up to 256"),
        ({"K": 1, "D": 128, "U": 64}, None),
        ({"K": 1, "H": 128, "D": 576, "U": 512}, None),
        ({"K": 1, "D": 576, "U": 512, "pool_dtype": "int8"}, "must have 16-bit elements, got int8"),
        ({"K": 1, "D": 576, "U": 320}, "values a multiple of 128, got 576 and 320"),
        ({"K": 1, "D": 640, "U": 512}, "that fit shared memory"),
    ],
)
def test_unsupported_prompts_are_refused(op, changes, reason) -> None:
    refused = backend.refusal(prompt(op, **changes))
    if reason is None and op == "ragged" and changes.get("H") == 142:
        reason = "71 query heads per KV head cannot be divided"  # by the kernel for single queries
    assert refused is None if reason is None else reason in str(refused)


@needs_simulator
@pytest.mark.parametrize("op", ["prefill", "ragged"])
def test_prompts_need_compute_capability_9(op) -> None:
    """Models attend to prompts on another backend on a B200."""
    with gpu_device.assume(GpuInfo("NVIDIA B200", 148, (10, 0))):
        assert "compute capability 9.0, and the GPU has 10.0" in str(backend.refusal(prompt(op)))
        assert backend_for(op, "mosaic_gpu") is None
        assert backend_for("decode", "mosaic_gpu") == "mosaic_gpu"
    with gpu_device.assume(GpuInfo("NVIDIA H200", 132, (9, 0))):
        assert backend_for(op, "mosaic_gpu") == "mosaic_gpu"
