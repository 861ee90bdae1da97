"""Tests that every supported configuration can be lowered for GPU, TPU and CPU, on any machine.

Interpreted kernels may use operations that Pallas cannot lower. `test_aot_gpu.py` and
`test_aot_tpu.py` compile the lowered programs for fewer shapes.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from paged_jax.kernels import gpu_device
from paged_jax.kernels.mosaic_gpu import launch
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from tests.support.compiler import needs_compiler
from tests.support.covering import all_pairs, take_turns
from tests.support.decode_step import DecodeStep
from tests.support.kernel_cases import Case, lower
from tests.support.processes import run_on_devices

LANES = 128

# Values with the same code path in a kernel. Cases take the values of a kind in turn.
Kind = tuple[Any, ...]


def each(*values: Any) -> list[Kind]:
    """Return a kind with a single value for each value."""
    return [(value,) for value in values]


# Dtypes of queries or of what is written, and of pools. TPUs do not support float16.
DTYPES = each("bfloat16", "float32", "float16")
POOL_DTYPES = each("bfloat16", "float32", "int8", "float8_e4m3fn", "float16")
# Powers of two, sizes below the minimum of a matrix unit, and other sizes.
BLOCK_SIZES: list[Kind] = [(16, 8, 32, 64, 128), (1, 4), (12,)]
HEAD_DIMS: list[Kind] = [(128, 32, 64, 256), (8,), (20,), (80, 96)]
VARIANTS = {
    "plain": {},
    "window": {"sliding_window": 11},
    "cap": {"soft_cap": 5.0},
    "sinks": {"has_sinks": True},
    "all": {"sliding_window": 1000, "soft_cap": 5.0, "has_sinks": True},
}
ATTENTION: dict[Any, list[Kind]] = {
    "dtype": DTYPES,
    "pool_dtype": POOL_DTYPES,
    "C": BLOCK_SIZES,
    "D": HEAD_DIMS,
    "G": [(4, 2, 8), (1,), (3, 5, 7, 12)],
    "K": [(2, 8), (1,), (3,)],
    "variant": each(*VARIANTS),
    "is_padded": each(False, True),
    # Sequences, and blocks of each. Decode splits long sequences of small batches into parts.
    ("B", "M"): each((3, 6), (1, 1), (1, 700), (70, 700)),
}
# Registers have 8, 16 or 32 rows, which depends on the dtype, and 128 lanes.
ON_TPU: dict[Any, list[Kind]] = {
    "dtype": DTYPES[:2],
    "pool_dtype": POOL_DTYPES[:4],
    "C": [(16,), (8,), (32, 64, 128)],
    "D": [(128, 8, 20, 32, 64, 80, 96), (256,)],
    "is_padded": each(True),
}
CHUNKS: dict[Any, list[Kind]] = {"T": [(5, 3), (1,), (100, 300)]}
# Ragged batches have no scales, padding or sinks.
RAGGED: dict[Any, list[Kind]] = ATTENTION | {
    "T": [(5, 32), (1,)],
    "variant": each("plain", "window", "cap"),
    "is_padded": each(False),
    ("B", "M"): each((3, 6), (1, 1), (70, 700)),
}
# JAX's kernel needs pages that are not wider than the queries, and heads that fill registers.
RAGGED_ON_TPU: dict[Any, list[Kind]] = {
    "dtype": each("float32", "bfloat16"),
    "pool_dtype": each("bfloat16", "float8_e4m3fn"),
    "C": [(16, 8, 32, 64, 128)],
    "D": each(128),
    "K": [(2, 8), (4, 16)],
    "G": [(4, 2, 8), (1,)],
}
WRITING: dict[Any, list[Kind]] = {
    "dtype": DTYPES,
    "pool_dtype": POOL_DTYPES,
    "C": BLOCK_SIZES,
    "D": HEAD_DIMS,
    "K": [(2, 8), (1,), (3, 7)],
    "T": [(5, 3), (1,), (64,)],
    "is_padded": each(False, True),
}

# Additional factors of a write from a projection.
_PROJECTION: dict[Any, list[Kind]] = {
    "G": [(4, 2, 8), (1,), (3, 5, 7, 12)],
    "has_norms": each(False, True),
}
PROJECTED: dict[Any, list[Kind]] = WRITING | _PROJECTION
# XLA writes pools of other dtypes.
WRITING_ON_TPU: dict[Any, list[Kind]] = (
    WRITING | ON_TPU | {"dtype": DTYPES, "pool_dtype": each("float32", "bfloat16")}
)

# Names of kernels in a lowered program.
KERNEL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "@tpu_custom_call", "cpu": "@paged_jax_decode_"}
# Platform, backend, op, and factors.
SUPPORTED = [
    ("cuda", "triton", "decode", ATTENTION),
    ("cuda", "triton", "prefill", ATTENTION | CHUNKS),
    ("cuda", "triton", "ragged", RAGGED),
    ("cuda", "triton", "write", WRITING),
    ("cuda", "triton", "rope_write", PROJECTED),
    ("cuda", "triton", "copy_blocks", WRITING | {"dtype": each("float32")}),
    ("tpu", "mosaic_tpu", "decode", ATTENTION | ON_TPU),
    ("tpu", "mosaic_tpu", "prefill", ATTENTION | ON_TPU | CHUNKS),
    ("tpu", "mosaic_tpu", "ragged", RAGGED | RAGGED_ON_TPU),
    ("tpu", "mosaic_tpu", "write", WRITING_ON_TPU),
    ("tpu", "mosaic_tpu", "rope_write", WRITING_ON_TPU | _PROJECTION),
    ("cpu", "cpu", "decode", ATTENTION),
    ("cpu", "cpu", "ragged", RAGGED),
]
# The first rows of a covering array have most of the pairs.
NUM_QUICK = 6


def make_case(op: str, backend: str, row: Mapping[Any, Any]) -> Case:
    """Return the case of a row of factors."""
    lanes = row["D"]
    if row["is_padded"]:
        lanes = -(-row["D"] // LANES) * LANES
        if backend == "triton" and lanes == row["D"]:
            lanes += LANES
    names = ("dtype", "pool_dtype", "has_norms", *"CDGKT")
    sizes = {name: row[name] for name in names if name in row}
    if ("B", "M") in row:
        sizes["B"], sizes["M"] = row["B", "M"]
    variant = VARIANTS[row.get("variant", "plain")]
    return Case(op, backend, lanes=lanes, **sizes, **variant)


def supported(rows_of: Callable[[Mapping[Any, Any]], Iterable[Mapping[Any, Any]]]) -> list[Any]:
    """Return parameters (platform, case) for rows of the factors of each supported op."""
    parameters = []
    for platform, backend, op, factors in SUPPORTED:
        for index, row in enumerate(rows_of(factors)):
            case = make_case(op, backend, row)
            marks = [] if index < NUM_QUICK else [pytest.mark.slow]
            marks += [needs_compiler] if platform == "cpu" else []
            name = f"{platform} {case}"
            parameters.append(pytest.param(platform, case, id=name, marks=marks))
    return parameters


def all_kinds(factors: Mapping[Any, list[Kind]]) -> list[dict[Any, Any]]:
    """Return rows with every pair of kinds, and every value."""
    return take_turns(all_pairs(factors))


def all_sizes(factors: Mapping[Any, list[Kind]]) -> Iterator[Mapping[Any, Any]]:
    """Yield all combinations of pool dtype, block size and head dimension; others are random."""
    crossed = ("pool_dtype", "C", "D")
    factors = {name: list(itertools.chain(*kinds)) for name, kinds in factors.items()}
    others = {name: values for name, values in factors.items() if name not in crossed}
    # Random, because factors with the same number of values taken in turn would be correlated.
    draws = random.Random(0)
    for values in itertools.product(*(factors[name] for name in crossed)):
        drawn = {name: draws.choice(x) for name, x in others.items()}
        yield dict(zip(crossed, values, strict=True)) | drawn


def check_lowers_to_one_kernel(platform: str, case: Case) -> None:
    text = case.lower(platform).as_text()
    # On GPUs a ragged batch has a kernel for single queries and another for chunks.
    is_mixed = (case.op, platform) == ("ragged", "cuda")
    assert text.count(KERNEL[platform]) == 1 + is_mixed


@pytest.mark.parametrize("factors", [row[-1] for row in SUPPORTED])
def test_all_kinds_contains_every_value(factors) -> None:
    rows = all_kinds(factors)
    for name, kinds in factors.items():
        assert {row[name] for row in rows} == set(itertools.chain(*kinds))


@pytest.mark.parametrize(("platform", "case"), supported(all_kinds))
def test_op_lowers_to_one_kernel(platform, case) -> None:
    """Every pair of dtypes, kinds of sizes and variants occurs."""
    check_lowers_to_one_kernel(platform, case)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("platform", "case"), supported(all_sizes))
def test_op_lowers_to_one_kernel_in_any_combination(platform, case) -> None:
    check_lowers_to_one_kernel(platform, case)


# Op, queries per KV head, and other factors of calls of the backend `mosaic_gpu`.
MOSAIC_CALLS = [
    *itertools.product(("decode", "prefill", "ragged", "rope_write"), (1, 4, 12), ({},)),
    ("decode", 1, {"C": 8, "pool_dtype": "int8"}),
    ("decode", 4, {"dtype": "float16", "pool_dtype": "int8"}),
    ("decode", 4, {"dtype": "float16", "pool_dtype": "float8_e4m3fn"}),
    ("decode", 12, {"C": 256, "pool_dtype": "float8_e4m3fn"}),
    ("prefill", 1, {"C": 8, "pool_dtype": "int8"}),
    ("prefill", 4, {"dtype": "float16", "pool_dtype": "float8_e4m3fn"}),
    ("ragged", 4, {"C": 8, "pool_dtype": "int8"}),
    ("prefill", 12, {"C": 256, "pool_dtype": "float8_e4m3fn"}),
    ("ragged", 12, {"C": 256, "dtype": "float16", "pool_dtype": "float8_e4m3fn"}),
    # One query of each KV head, or all queries of a KV head, in boxes that fill tiles or not.
    ("rope_write", 8, {"K": 5}),
    ("rope_write", 12, {"K": 12, "pool_dtype": "int8"}),
    ("rope_write", 7, {"dtype": "float32", "pool_dtype": "float8_e4m3fn"}),
    ("write", 1, {"dtype": "float32"}),
    ("write", 1, {"K": 5, "pool_dtype": "int8"}),
    ("write", 1, {"dtype": "float32", "pool_dtype": "float8_e4m3fn"}),
    ("copy_blocks", 1, {"pool_dtype": "int8"}),
]
MOSAIC_HEADS = range(64, 577, 64)


@pytest.mark.skipif(
    launch.refusal(interpret=True) is not None, reason="this jax has no such kernels"
)
@pytest.mark.parametrize(
    ("op", "G", "changes", "heads"),
    # Three calls in turn have all heads.
    [(*call, MOSAIC_HEADS[index % 3 :: 3]) for index, call in enumerate(MOSAIC_CALLS)],
)
def test_mosaic_gpu_lowers_every_head_that_it_does_not_refuse(op, G, changes, heads) -> None:
    """With ``backend=None``, an error when JAX lowers the program would stop the user."""
    lowered = set()
    for D in heads:
        case = Case(op, "mosaic_gpu", D=D, G=G, **changes)
        try:
            program = case.lower("cuda").as_text()
        except NotImplementedError:
            continue
        assert "mosaic_gpu" in program
        lowered.add(D)
    assert {D for D in heads if D <= 256} <= lowered


@pytest.mark.parametrize("M", [1, 700])
def test_decode_of_one_sequence_is_split_if_its_table_is_long(M) -> None:
    text = Case("decode", "triton", B=1, M=M).lower("cuda").as_text()
    # The counters of the parts are zeros that the kernel updates in place.
    assert ("output_operand_alias<" in text) == (M > 1)


@pytest.mark.parametrize(
    "op", ["decode", "prefill", "ragged", "write", "rope_write", "copy_blocks"]
)
@pytest.mark.parametrize("platform", [pytest.param("cpu", marks=needs_compiler), "cuda", "tpu"])
def test_backend_none_lowers_to_the_kernel_of_the_platform(platform, op) -> None:
    case = Case(op)
    text = case.lower(platform).as_text()
    kernels = {name for name, call in KERNEL.items() if call in text}
    assert kernels == {name for name, _, known, _ in SUPPORTED if (name, known) == (platform, op)}


@pytest.mark.parametrize(
    ("platform", "case"),
    [
        pytest.param("cuda", Case("decode", D=320), id="cuda wide head"),
        pytest.param("tpu", Case("decode", D=64), id="tpu lanes not padded"),
        pytest.param("tpu", Case("decode", dtype="float16"), id="tpu float16"),
        pytest.param("tpu", Case("prefill", D=64), id="tpu prefill, lanes not padded"),
        pytest.param("cpu", Case("decode", D=520), id="cpu wide head"),
    ],
)
def test_backend_none_lowers_what_kernels_do_not_support(platform, case) -> None:
    assert KERNEL[platform] not in case.lower(platform).as_text()


@pytest.mark.parametrize(
    ("kind", "is_kernel"), [("TPU v3", False), ("TPU v4", False), ("TPU v5", True), ("TPU7x", True)]
)
def test_backend_none_is_xla_on_tpus_without_a_gather_over_sublanes(kind, is_kernel) -> None:
    """Mosaic says "Sublane gather not supported by this TPU generation" for v4."""
    case, tpu = Case("decode", D=128), AbstractDevice(kind, 1, "tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=tpu)):
        assert (KERNEL["tpu"] in case.lower("tpu").as_text()) == is_kernel


T4 = gpu_device.GpuInfo("Tesla T4", 40, (7, 5))


@pytest.mark.parametrize(
    "op", ["decode", "prefill", "ragged", "write", "rope_write", "copy_blocks"]
)
def test_backend_none_is_xla_on_gpus_that_triton_does_not_support(op) -> None:
    """XLA says "Triton support is only enabled for Ampere GPUs (compute capability 8.0) and up"."""
    case = Case(op, B=7, T=3, P=13)
    assert KERNEL["cuda"] not in case.lower("cuda", gpu=T4).as_text()
    with pytest.raises(NotImplementedError, match=r"8\.0 and later only, and Tesla T4 has 7\.5"):
        Case(op, "triton").lower("cuda", gpu=T4)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    "op", ["decode", "prefill", "ragged", "write", "rope_write", "copy_blocks"]
)
def test_kernels_lower_for_an_unknown_gpu(op) -> None:
    """Since 0.11 JAX needs to know the GPU. The sizes are unique, because traces are cached."""
    case = Case(op, "triton", B=5, T=7, P=11)
    lowered = jax.jit(case.function()).trace(*case.shapes()).lower(lowering_platforms=("cuda",))
    assert KERNEL["cuda"] in lowered.as_text()


# Simulates a future version of JAX without Pallas' Triton backend.
WITHOUT_TRITON = """
import sys

class WithoutTriton:
    def find_spec(self, name, path=None, target=None):
        if name.endswith("pallas.triton") and name.startswith("jax"):
            raise ImportError(name)

sys.meta_path.insert(0, WithoutTriton())
import paged_jax
from tests.support.kernel_cases import Case

print("triton" in Case("decode").lower("cuda").as_text())
print("triton" in Case("copy_blocks").lower("cuda").as_text())
try:
    Case("decode", "triton").function()
except NotImplementedError as error:
    print(error)
"""


def test_backend_none_is_xla_without_triton_in_jax() -> None:
    [decode, copy_blocks, refused] = run_on_devices(WITHOUT_TRITON, num_devices=1).splitlines()
    assert (decode, copy_blocks) == ("False", "False")
    assert refused.endswith("has no Triton backend of Pallas")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_decode_step_lowers_to_the_kernels_of_the_platform(platform) -> None:
    assert KERNEL[platform] in _small_step().lower(platform).as_text()


@pytest.mark.parametrize(
    ("backend", "is_kernel"), [(None, True), ("reference", True), ("xla", False)]
)
def test_prefill_writes_with_the_requested_backend(backend, is_kernel) -> None:
    """If the backend has no writes, the best backend of the platform writes."""
    step = _small_step()

    def prefill(model, cache, token_ids, slots):
        return Decoder.prefill(model, cache, token_ids, slots, slots, backend=backend)

    model, cache, slots, _ = step.shapes()
    token_ids = jax.ShapeDtypeStruct((*slots.shape, 8), slots.dtype)
    program = lower(prefill, model, cache, token_ids, slots, platform="cuda").as_text()
    assert ("paged_rope_write" in program) == is_kernel


def _small_step() -> DecodeStep:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
    )
    return DecodeStep(config, pool_gigabytes=1, batch=2, max_blocks_per_slot=4)
