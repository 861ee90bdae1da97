"""Every supported configuration is lowered for GPU and TPU, whatever machine this is.

Interpret mode hides what the lowering of Pallas refuses. What comes out here is compiled in
`test_aot_gpu.py` and `test_aot_tpu.py`, at fewer shapes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import pytest

from paged_jax.models.config import LlamaConfig
from paged_jax.models.llama import Llama
from tests.support.decode_step import DecodeStep
from tests.support.kernel_cases import Case, lower

LANES = 128

# dtype, pool_dtype
DTYPES = [
    ("bfloat16", None),
    ("float16", None),
    ("float32", None),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "int8"),
]
BLOCK_SIZES = [8, 16, 32, 64, 128]
HEAD_DIMS = [8, 32, 64, 80, 96, 128, 256]
GROUPS = [1, 2, 3, 4, 5, 7, 8, 12]
VARIANTS = [
    {},
    {"sliding_window": 11},
    {"soft_cap": 5.0},
    {"has_sinks": True},
    {"sliding_window": 11, "soft_cap": 5.0, "has_sinks": True},
]

# What a Pallas kernel is called in a lowered program.
KERNEL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
SUPPORTED = [
    ("cuda", "triton", "decode"),
    ("cuda", "triton", "prefill"),
    ("cuda", "triton", "write"),
    ("cuda", "triton", "copy_blocks"),
    ("tpu", "mosaic_tpu", "decode"),
    ("tpu", "mosaic_tpu", "prefill"),
]


def with_dtypes(case: Case, dtypes: tuple[str, str | None]) -> Case:
    return dataclasses.replace(case, dtype=dtypes[0], pool_dtype=dtypes[1])


def one_change_each(op: str) -> Iterator[Case]:
    """A case as it is, then with each other value of each of its sizes, types and variants."""
    case = Case(op)
    yield from (with_dtypes(case, dtypes) for dtypes in DTYPES)
    yield from (dataclasses.replace(case, C=C) for C in BLOCK_SIZES)
    yield from (dataclasses.replace(case, D=D) for D in HEAD_DIMS)
    if op in ("decode", "prefill"):
        yield from (dataclasses.replace(case, G=G) for G in GROUPS)
        yield from (dataclasses.replace(case, **variant) for variant in VARIANTS)
        yield dataclasses.replace(case, B=1, T=1, M=1)
        yield dataclasses.replace(case, B=70, T=300, M=700)


def all_changes(op: str) -> Iterator[Case]:
    """Each combination of types, block size and head dimension; groups and variants in turn."""
    groups, variants = itertools.cycle(GROUPS), itertools.cycle(VARIANTS)
    for dtypes, C, D in itertools.product(DTYPES, BLOCK_SIZES, HEAD_DIMS):
        case = with_dtypes(Case(op, C=C, D=D, G=next(groups)), dtypes)
        attends = op in ("decode", "prefill")
        yield dataclasses.replace(case, **next(variants)) if attends else case


def supported(make_cases: Callable[[str], Iterable[Case]]) -> list[Any]:
    """The cases of every supported op, each once, with the platform to lower it for."""
    parameters = {}
    for platform, backend, op in SUPPORTED:
        for case in make_cases(op):
            if platform == "tpu" and case.dtype == "float16":
                continue  # which TPUs do not multiply
            lanes = -(-case.D // LANES) * LANES if platform == "tpu" else None
            case = dataclasses.replace(case, backend=backend, lanes=lanes)
            parameters[f"{platform} {case}"] = platform, case
    return [pytest.param(*values, id=name) for name, values in parameters.items()]


def lowers_to_kernel(function: Callable[..., Any], shapes: Any, platform: str) -> bool:
    return KERNEL[platform] in lower(function, *shapes, platform=platform).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "case"), supported(one_change_each))
def test_op_lowers(platform, case) -> None:
    assert lowers_to_kernel(case.function(), case.shapes(), platform)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "case"), supported(all_changes))
def test_op_lowers_with_all_changes(platform, case) -> None:
    assert lowers_to_kernel(case.function(), case.shapes(), platform)


@pytest.mark.parametrize("op", ["decode", "prefill", "write", "copy_blocks"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_backend_none_lowers_to_the_kernel_of_the_platform(platform, op) -> None:
    case = Case(op)
    text = lower(case.function(), *case.shapes(), platform=platform).as_text()
    kernels = {name for name, call in KERNEL.items() if call in text}
    assert kernels == {name for name, _, known in SUPPORTED if (name, known) == (platform, op)}


@pytest.mark.parametrize(
    ("platform", "case"),
    [
        pytest.param("cuda", Case("decode", D=320), id="cuda wide head"),
        pytest.param("tpu", Case("decode", D=64), id="tpu lanes not padded"),
        pytest.param("tpu", Case("decode", dtype="float16"), id="tpu float16"),
        pytest.param("tpu", Case("prefill", D=64), id="tpu prefill, lanes not padded"),
    ],
)
def test_backend_none_lowers_what_kernels_refuse(platform, case) -> None:
    assert not lowers_to_kernel(case.function(), case.shapes(), platform)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_decode_step_lowers_to_the_kernels_of_the_platform(platform) -> None:
    step = _small_step()
    assert lowers_to_kernel(step.function(), step.shapes(), platform)


@pytest.mark.parametrize(
    ("backend", "is_kernel"), [(None, True), ("reference", True), ("xla", False)]
)
def test_a_model_writes_with_the_backend_that_is_asked_for(backend, is_kernel) -> None:
    """Or, where that one does not write, with the platform's."""
    step = _small_step()

    def prefill(model, cache, token_ids, slots):
        return Llama.prefill(model, cache, token_ids, slots, slots, backend=backend)

    model, cache, slots, _ = step.shapes()
    token_ids = jax.ShapeDtypeStruct((*slots.shape, 8), slots.dtype)
    program = lower(prefill, model, cache, token_ids, slots, platform="cuda").as_text()
    assert ("paged_write" in program) == is_kernel


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
