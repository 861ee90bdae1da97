"""`Engine` with weights on several devices: the tokens and the programs of one."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.support.processes import run_on_devices

_PROGRAM = """
import dataclasses
import sys

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from paged_jax import Engine, SamplingParams
from paged_jax.runner.warmup import list_calls

DIVIDED = {"qkv_proj": P(None, None, "x"), "gate_up_proj": P(None, "x"), "o_proj": P(None, "x"),
           "down_proj": P(None, "x")}
SIZES = {"block_size": 4, "max_num_seqs": 4, "max_chunk": 16, "preemption": "recompute",
         "max_model_len": 48}
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=3, ignore_eos=True)
PAIR = SamplingParams(temperature=1, seed=4, n=2, ignore_eos=True)
# So many tokens each that no sample is ever alone, which would need another program: where all
# have room, and where some are preempted.
TOGETHER, IN_TURN = (24, 24, 24), (24, 16, 16)


def mesh(count):
    return jax.make_mesh((count,), ("x",), (AxisType.Auto,), devices=jax.devices()[:count])


def divided(name, shape):
    # More devices than heads of keys: 2.
    return NamedSharding(mesh(4), DIVIDED.get(name.rsplit(".", 1)[-1], P()))


def scattered(name, shape):
    return SingleDeviceSharding(jax.devices()[1]) if "norm" in name else divided(name, shape)


def generate(engine, lengths):
    prompt = {"prompt_token_ids": [0, *range(5, 22)]}
    ids = [
        engine.add_request(prompt, dataclasses.replace(params, max_tokens=length))
        for params, length in zip((GREEDY, SEEDED, PAIR), lengths)
    ]
    tokens = {}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] = [sample.token_ids for sample in output.outputs]
    return [tokens[id] for id in ids]


def num_compiled(engine):
    return sum(program.jitted._cache_size() for program in engine._runner._executor.programs)


def check(engine, lengths):
    expected = [
        [token_ids[:length] for token_ids in samples]
        for samples, length in zip(wanted, lengths)
    ]
    assert generate(engine, lengths) == expected
    assert engine.stats.num_cached_tokens
    assert engine.cache.k.sharding.is_fully_replicated
    before = num_compiled(engine)
    assert generate(engine, lengths) == expected
    assert num_compiled(engine) == before, "a second round compiles nothing"


folder = sys.argv[1]
wanted = generate(Engine(folder, num_blocks=48, **SIZES), TOGETHER)
engine = Engine(folder, num_blocks=16, **SIZES, sharding=NamedSharding(mesh(2), P()))
check(engine, IN_TURN)
assert engine.stats.num_preemptions

# So many blocks that a copy of them would show.
engine = Engine(folder, num_blocks=8000, **SIZES, sharding=divided)
check(engine, TOGETHER)
runner, checked = engine._runner, []
for call in list_calls(runner._executor.programs, runner.sizes, runner.state.cache.pools):
    if call.name in ("decode of 4 samples", "prefill of 1 x 16 tokens"):
        lowered = call.program.lower(runner.weights, runner.state, *call.args, **call.static)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes > engine.cache.nbytes
        assert memory.temp_size_in_bytes < engine.cache.nbytes / 4, call.name
        checked.append(call.name)
assert len(checked) == 2

try:
    Engine(folder, num_blocks=16, **SIZES, sharding=scattered)
except ValueError as error:
    assert "the same devices" in str(error)
else:
    raise AssertionError("weights on different devices are refused")
"""


@pytest.fixture
def one_layer(tiny_folder, tmp_path) -> Path:
    """The first layer of the tiny model: what is divided is the same in all."""
    config = json.loads((tiny_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    weights = load_file(tiny_folder / "model.safetensors")
    kept = {name: x for name, x in weights.items() if ".layers.1." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.mark.slow
def test_sharded_weights_give_the_tokens_of_one_device(one_layer) -> None:
    """In a process of its own: the number of devices is fixed when JAX starts."""
    run_on_devices(_PROGRAM, one_layer)
