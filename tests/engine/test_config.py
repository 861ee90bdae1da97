"""`EngineConfig`: every option is declared once, and the rest is derived from it."""

import dataclasses
import inspect

import jax.numpy as jnp
import pytest

from paged_jax import LLM, Engine
from paged_jax.arguments import ArgumentError
from paged_jax.engine import config as config_module
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.pool_size import resolve_kv_dtype
from paged_jax.options import NOT_NEGATIVE, check_options, option, options_of
from tests.support.compiler import needs_compiler
from tests.support.tiny_model import SIZES

OPTIONS = {each.name: each for each in options_of(EngineConfig)}
WRONG = {
    "kv_dtype": "int4",
    "block_size": 0,
    "dequantise": "yes",
    "download": 1,
    "numerics": "precise",
    "int8_activations": 1,
    "num_blocks": 0,
    "memory_fraction": 1.5,
    "max_num_seqs": True,
    "max_model_len": -1,
    "max_chunk": 2.5,
    "max_num_batched_tokens": 0,
    "steps_per_dispatch": "8",
    "enable_prefix_caching": "no",
    "preemption": "kill",
    "swap_space": float("inf"),
    "num_speculative_tokens": -1,
    "num_snapshots": -1,
    "cascade_attention": 1,
    "seed": 2**63,
    "tensor_parallel_size": 0,
    "show_progress": "yes",
    "check_replicas": None,
    "on_compile": "print",
}


@pytest.mark.parametrize("name", [name for name, each in OPTIONS.items() if each.bounds])
def test_engine_config_names_the_option_that_is_out_of_bounds(name) -> None:
    assert name in WRONG, f"add a value of {name} that is out of bounds to WRONG"
    with pytest.raises(ArgumentError, match=f"^Engine: {name} must be ") as error:
        EngineConfig(**{name: WRONG[name]})
    assert error.value.field == name
    with pytest.raises(ArgumentError, match=f"^plan: {name} must be "):
        check_options("plan", {name: WRONG[name]}, EngineConfig)


def test_engine_config_checks_options_that_depend_on_each_other() -> None:
    with pytest.raises(ArgumentError, match="memory_fraction must be None if num_blocks is given"):
        EngineConfig(memory_fraction=0.5, num_blocks=3)
    with pytest.raises(ArgumentError, match="max_num_batched_tokens must be at least max_num_seqs"):
        EngineConfig(max_num_seqs=9, max_num_batched_tokens=8)


def test_options_without_bounds_are_checked_when_they_are_used() -> None:
    assert EngineConfig(dtype=None).dtype is None  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="^Engine: kv_dtype must be one of auto, .* got None"):
        EngineConfig(kv_dtype=None)  # type: ignore[arg-type]


def test_engine_config_is_frozen_and_accepts_its_defaults() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8  # type: ignore[misc]
    assert {name: getattr(config, name) for name in OPTIONS} == {
        name: each.default for name, each in OPTIONS.items()
    }


@pytest.mark.parametrize("engine", [Engine, LLM])
def test_an_engine_takes_the_fields_of_the_config(engine) -> None:
    parameters = inspect.signature(engine).parameters
    assert list(parameters) == list(OPTIONS)
    assert {name: each.default for name, each in parameters.items()} == {
        name: each.default for name, each in OPTIONS.items()
    }
    with pytest.raises(TypeError, match="gpu_memory_utilization is not an argument. Did you mean"):
        engine(gpu_memory_utilization=0.9)
    with pytest.raises(ArgumentError, match="Engine: max_chunk must be a positive integer"):
        engine(max_chunk=0)


def test_every_option_is_documented() -> None:
    for name, each in OPTIONS.items():
        assert each.help and each.help[-1] not in ".;" and each.default_help
        assert f"  {name}: {each.help}" in (EngineConfig.__doc__ or "")


def test_a_new_option_needs_one_field(monkeypatch) -> None:
    """Checks, signature and metadata follow from the field alone."""

    @dataclasses.dataclass(frozen=True)
    class Extended(EngineConfig):
        """With an option more."""

        num_spare_blocks: int = option(3, "blocks kept free", bounds=NOT_NEGATIVE, vllm="spare")

    added = options_of(Extended)[-1]
    assert added.name == "num_spare_blocks" and added.flag == "--num-spare-blocks"
    assert (added.type, added.metavar, added.default_help) == (int, "N", "3")
    with pytest.raises(ArgumentError, match="Engine: num_spare_blocks must be an integer, at lea"):
        Extended(num_spare_blocks=-1)
    seen = []

    class Holder:
        @config_module.takes_options(Extended)
        def __init__(self, config: Extended):
            seen.append(config.num_spare_blocks)

    Holder(num_spare_blocks=5)
    assert seen == [5] and "num_spare_blocks" in inspect.signature(Holder).parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 2}, "at least max_num_seqs = 4.* got 2"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens must be a positive .* got None"),
        (
            {"num_speculative_tokens": None},
            "num_speculative_tokens must be .* at least 0, got None",
        ),
        ({"preemption": "drop"}, "preemption must be one of auto, recompute, swap, got 'drop'"),
        ({"seed": -1}, "seed must be an integer in 0..2\\*\\*63 - 1, got -1"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"swap_space": "4"}, "swap_space must be a finite number of GiB, at least 0, got '4'"),
        ({"swap_space": float("nan")}, "swap_space must be a finite"),
        ({"swap_space": -1}, "swap_space must be .* got -1"),
        ({"on_compile": 3}, "on_compile must be a function or None, got 3"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"cascade_attention": 1}, "cascade_attention must be True or False, got 1"),
        ({"memory_fraction": True}, "memory_fraction must be above 0 and at most 1, got True"),
        ({"memory_fraction": "a"}, "memory_fraction must be above 0 and at most 1, got 'a'"),
    ],
)
def test_engine_rejects_bad_options(tiny_model, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model, **SIZES, **options)


def test_engine_suggests_names_for_unknown_options(tiny_model) -> None:
    guesses = {"gpu_memory_utilization": "memory_fraction", "num_block": "num_blocks"}
    for name, meant in guesses.items():
        with pytest.raises(
            TypeError, match=f"Engine: {name} is not an argument. Did you mean {meant}"
        ):
            Engine(tiny_model, **{name: 1})
    with pytest.raises(TypeError, match="enforce_eager is not an argument. Leave it out: "):
        Engine(tiny_model, **{"enforce_eager": True})


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [
        ("auto", jnp.float32),
        ("float32", jnp.float32),
        ("bfloat16", jnp.bfloat16),
        ("float16", jnp.float16),
        ("int8", jnp.int8),
        ("fp8", jnp.float8_e4m3fn),
    ],
)
def test_kv_dtype_is_the_dtype_of_the_pools(tiny_model, kv_dtype, dtype) -> None:
    cache = Engine(tiny_model, **SIZES, kv_dtype=kv_dtype).cache
    assert cache.k.dtype == cache.v.dtype == dtype


@needs_compiler
def test_automatic_kv_dtype_on_cpus_is_bfloat16_if_a_kernel_writes_it_in_place(monkeypatch) -> None:
    names = ["bfloat16", "float16", "float32"]
    found = [resolve_kv_dtype("auto", name, "cpu").name for name in names]
    assert found == ["bfloat16", "float32", "float32"]
    monkeypatch.setattr("paged_jax.kernels.platforms.sets_rows_in_place", lambda *_: False)
    assert resolve_kv_dtype("auto", "bfloat16", "cpu").name == "float32"
    assert resolve_kv_dtype("auto", "bfloat16", "tpu").name == "bfloat16"


def test_kv_dtype_rejects_unknown_names(tiny_model) -> None:
    with pytest.raises(ValueError, match="kv_dtype must be one of auto, float32.*got 'int4'"):
        Engine(tiny_model, **SIZES, kv_dtype="int4")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
        ({"num_blocks": -1}, "num_blocks must be a positive integer, got -1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer, got 0"),
        ({"max_chunk": 1.5}, "max_chunk must be a positive integer, got 1.5"),
        ({"max_model_len": True}, "max_model_len must be a positive integer, got True"),
        ({"max_model_len": 65}, "context of 64, got 65"),
    ],
)
def test_engine_rejects_bad_sizes(tiny_model, sizes, message) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model, **{**SIZES, **sizes})
