"""The usual calls compiled for the TPU generations that `test_aot_tpu` does not cover."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.aot_cases import TPU_OTHERS, asked_for, compiled, exactly, run_script
from tests.support.kernel_cases import Case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='no compiler for TPUs: install the extra "aot"',
)


def pairs(op: str, generations: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the generations and case names of an op; ``"step"`` stands for whole models."""
    return [
        (generation, name)
        for generation in generations
        for name, case in TPU_OTHERS[generation].items()
        if op == (case.op if isinstance(case, Case) else "step")
    ]


@pytest.fixture(scope="module")
def compilations(request) -> dict[str, Any]:
    """Results of the script by generation. Two generations are compiled for at the same time."""
    generations = asked_for(request, "generation")

    def compile_for(generation: str) -> dict[str, Any]:
        return run_script("aot_tpu", generation, *exactly(TPU_OTHERS[generation]))

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(generations, threads.map(compile_for, generations), strict=True))


def query_bytes(case: Case) -> int:
    """Return the bytes of bfloat16 queries and outputs. A compiler may change their layout."""
    return 4 * case.B * case.T * case.K * case.G * case.D


@pytest.mark.parametrize(
    ("generation", "name"),
    [pair for op in ("decode", "prefill") for pair in pairs(op, ("v5p", "7x"))],
)
def test_attention_compiles_for_other_tpus(compilations, generation, name) -> None:
    program, case = compiled(compilations[generation], name), TPU_OTHERS[generation][name]
    assert program["kernels"] == 1 and program["multiplied_types"] == ["bf16"]
    assert isinstance(case, Case)
    assert program["temporary_bytes"] < 0.01 * case.pool_bytes + query_bytes(case)


@pytest.mark.parametrize(("generation", "name"), pairs("ragged", ("v5p", "7x")))
def test_ragged_batch_compiles_for_other_tpus(compilations, generation, name) -> None:
    program, case = compiled(compilations[generation], name), TPU_OTHERS[generation][name]
    assert isinstance(case, Case) and program["kernels"] == 1
    assert program["temporary_bytes"] < 0.01 * case.pool_bytes + query_bytes(case)


@pytest.mark.parametrize(("generation", "name"), pairs("write", ("v4", "v5p", "7x")))
def test_write_is_in_place_on_other_tpus(compilations, generation, name) -> None:
    program, case = compiled(compilations[generation], name), TPU_OTHERS[generation][name]
    assert isinstance(case, Case) and program["aliased_bytes"] == case.pool_bytes
    assert program["temporary_bytes"] < 0.01 * case.pool_bytes


@pytest.mark.parametrize(("generation", "name"), pairs("step", ("v5p", "7x")))
def test_step_copies_neither_pool_nor_weights_on_other_tpus(compilations, generation, name) -> None:
    program = compiled(compilations[generation], name)
    assert program["aliased_bytes"] > 0.99 * 8 * 10**9
    # The weights of four layers alone take 400 MB.
    assert program["temporary_bytes"] < 40 * 10**6


@pytest.mark.parametrize(
    ("generation", "name"), [pair for op in ("decode", "prefill") for pair in pairs(op, ("v4",))]
)
def test_attention_is_left_to_xla_on_tpu_v4(compilations, generation, name) -> None:
    assert compiled(compilations[generation], name)["kernels"] == 0
