"""`Engine` with weights on several devices: the tokens and the programs of one."""

import os
import subprocess
import sys
import textwrap

import pytest

_PROGRAM = """
import sys

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from paged_jax import Engine, SamplingParams
from paged_jax.runner.warmup import list_calls

folder, count = sys.argv[1], int(sys.argv[2])
mesh = jax.make_mesh((count,), ("x",), (AxisType.Auto,), devices=jax.devices()[:count])
DIVIDED = {"qkv_proj": P("x"), "gate_up_proj": P("x"), "o_proj": P(None, "x"),
           "down_proj": P(None, "x")}
SIZES = {"block_size": 4, "num_blocks": 16, "max_num_seqs": 4, "max_chunk": 16,
         "preemption": "recompute", "max_model_len": 48}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=3, n=2, max_tokens=20, ignore_eos=True)


def divided(name, shape):
    return NamedSharding(mesh, DIVIDED.get(name.rsplit(".", 1)[-1], P()))


def generate(engine):
    prompt = {"prompt_token_ids": [0, *range(5, 22)]}
    ids = [engine.add_request(prompt, params) for params in (GREEDY, GREEDY, SEEDED)]
    tokens = {}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] = [sample.token_ids for sample in output.outputs]
    return [tokens[id] for id in ids]


def num_compiled(engine):
    return sum(program.jitted._cache_size() for program in engine._runner._executor.programs)


wanted = generate(Engine(folder, **SIZES))
for sharding in (NamedSharding(mesh, P()), divided):
    engine = Engine(folder, **SIZES, sharding=sharding)
    assert generate(engine) == wanted
    assert engine.stats.num_preemptions and engine.stats.num_cached_tokens
    assert engine.cache.k.sharding.is_fully_replicated
    before = num_compiled(engine)
    assert generate(engine) == wanted
    assert num_compiled(engine) == before, "a second round compiles nothing"

engine = Engine(folder, **{**SIZES, "num_blocks": 8000}, sharding=divided)
runner = engine._runner
for call in list_calls(runner._executor.programs, runner.sizes, runner.state.cache.pools):
    if call.name in ("decode of 4 samples", "prefill of 1 x 16 tokens"):
        lowered = call.program.lower(runner.weights, runner.state, *call.args, **call.static)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes > engine.cache.nbytes
        assert memory.temp_size_in_bytes < engine.cache.nbytes / 4, call.name


def scattered(name, shape):
    return SingleDeviceSharding(jax.devices()[1]) if "norm" in name else divided(name, shape)


try:
    Engine(folder, **SIZES, sharding=scattered)
except ValueError as error:
    assert "the same devices" in str(error)
else:
    raise AssertionError("weights on different devices are refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_sharded_weights_give_the_tokens_of_one_device(tiny_folder, count) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(tiny_folder), str(count)],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        timeout=600,
    )
