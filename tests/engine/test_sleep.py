"""`Engine.sleep` and `wake_up`: memory is freed, no request is lost, and tokens stay correct."""

import dataclasses
import gc

import jax
import numpy as np
import pytest
from flax import nnx

from paged_jax import Engine, Llama, SamplingParams
from paged_jax.engine.sleep import EngineAsleepError
from tests.support.tiny_model import BOS, SIZES
from tests.support.workload import check_empty, finish

PARAMS = SamplingParams(temperature=1, seed=7, max_tokens=24, ignore_eos=True)
PROMPT = {"prompt_token_ids": [BOS, *range(5, 15)]}


@pytest.fixture
def engine(tiny_folder) -> Engine:
    return Engine(tiny_folder, **SIZES)


def run(engine: Engine, params: SamplingParams = PARAMS) -> list[int]:
    request_id = engine.add_request(PROMPT, params)
    return finish(engine)[request_id]


def num_live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sleep_frees_device_memory(engine, level) -> None:
    expected = run(engine)
    held, compiled = num_live_bytes(), engine.stats.compile_seconds
    pools = sum(array.nbytes for array in jax.tree.leaves(engine.cache.group_pools))
    leaves = [np.array(array) for array in engine.weights]
    # On a CPU, host memory is device memory, so level 1 keeps the weights there.
    weights = sum(array.nbytes for array in leaves) if level == 2 else 0
    assert pools > 10_000
    engine.sleep(level)
    assert num_live_bytes() <= held - pools - weights
    if level == 2:
        with pytest.raises(
            RuntimeError, match=r"must have weights, but sleep\(level=2\) or an interrupted"
        ):
            engine.wake_up()
        assert engine.is_sleeping
        engine.update_params(leaves)
    engine.wake_up()
    assert num_live_bytes() <= held
    assert run(engine) == expected
    assert engine.stats.compile_seconds == compiled
    check_empty(engine)


@pytest.mark.slow
def test_sleep_level_2_drops_the_weights_in_host_memory(engine) -> None:
    """At level 2, neither the device nor the host keeps the weights."""
    expected, leaves = run(engine), [np.array(array) for array in engine.weights]
    engine.sleep(1)
    engine.sleep(2)
    with pytest.raises(
        RuntimeError, match=r"must have weights, but sleep\(level=2\) or an interrupted"
    ):
        engine.wake_up()
    engine.wake_up(["weights"])
    assert engine.is_sleeping and not any(np.size(array) for array in engine.weights)
    engine.update_params(leaves)
    engine.wake_up()
    assert run(engine) == expected


def test_wake_up_continues_requests(engine) -> None:
    params = dataclasses.replace(PARAMS, n=2)
    request_id = engine.add_request(PROMPT, params)
    expected = finish(engine)[request_id]
    request_id = engine.add_request(PROMPT, params)
    for _ in range(2):
        [before] = engine.step()
    assert 0 < len(before.outputs[0].token_ids) < 24
    engine.sleep()
    assert engine.has_unfinished and engine.cache_use == 0
    engine.wake_up()
    assert finish(engine)[request_id] == expected
    check_empty(engine)


@pytest.mark.slow
def test_wake_up_brings_weights_and_pool_back_separately(engine, tiny_folder) -> None:
    expected = run(engine)
    other = Llama(engine.config, rngs=nnx.Rngs(5))
    engine.sleep(level=2)
    engine.wake_up(["weights"])  # there are none to bring back
    engine.update_params(other)
    assert engine.is_sleeping
    engine.wake_up(["kv_cache"])
    changed = run(engine)
    assert changed == run(Engine(other, **SIZES)) != expected
    engine.sleep(level=1)
    engine.wake_up(["weights"])
    assert engine.is_sleeping and np.asarray(engine.weights[0]).size
    before = list(engine.weights)
    engine.wake_up(["weights"])  # the host keeps no second copy
    assert all(x is y for x, y in zip(before, engine.weights, strict=True))
    engine.wake_up(["kv_cache"])
    assert run(engine) == changed
    engine.sleep(level=1)
    with pytest.raises(RuntimeError, match="or tags do not include 'weights'"):
        engine.wake_up(["kv_cache"])
    engine.update_params(Llama.from_pretrained(tiny_folder))
    engine.wake_up()
    assert run(engine) == expected  # with the new weights, not the weights from the host


def test_calls_raise_while_the_engine_sleeps(engine) -> None:
    request_id = engine.add_request(PROMPT, PARAMS)
    engine.step()
    engine.sleep()
    for call in (
        lambda: engine.add_request(PROMPT, PARAMS),
        engine.step,
        engine.warmup,
        lambda: engine.cache,
        lambda: engine.model,
        lambda: engine.core.check_idle("beam_search"),
    ):
        with pytest.raises(EngineAsleepError, match="must be awake, but it sleeps"):
            call()
    engine.reset_prefix_cache()
    engine.sleep(2)
    engine.sleep(1)
    assert engine.sleep_level == 2
    assert engine.abort(request_id).finished and not engine.has_unfinished
    for level in (0, 3, True, "1"):
        with pytest.raises(ValueError, match="level must be 1 or 2"):
            engine.sleep(level)
    for tags in ("weights", ["pool"]):
        with pytest.raises(
            ValueError, match="tags must be a list with names from weights and kv_cache"
        ):
            engine.wake_up(tags)
