"""`Engine` on several devices of a CPU: the tokens of one device, and what each of them holds."""

import pytest

from tests.support.processes import run_on_devices

_SAME_TOKENS = """
from paged_jax import Engine
from tests.support.tensor_parallel import SIZES, generate, make_model

model = make_model()
alone = Engine(model, **SIZES, preemption="recompute")
wanted = generate(alone)
for num_devices in (1, 2, 4, 8):
    mesh = jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])
    engine = Engine(model, **SIZES, preemption="recompute", mesh=mesh)
    assert generate(engine) == wanted, num_devices
    assert engine.stats.num_preemptions and engine.stats.num_cached_tokens
    pool = engine.cache.k
    assert pool.addressable_shards[0].data.shape[2] == max(1, 2 // num_devices)
    assert len(pool.sharding.device_set) == num_devices
    assert generate(engine) == wanted  # with more in the prefix cache, so in other batches
    compiled = num_compiled(engine)
    assert generate(engine) == wanted
    assert num_compiled(engine) == compiled, "a third round compiles nothing"
"""

_PROGRAMS = """
from paged_jax import Engine
from tests.support.tensor_parallel import (
    CONFIG, SIZES, compile_call, count_collectives, make_model)

# So many blocks that a copy of a pool, or of a layer of one, would show.
for options in ({}, {"scan_layers": True}):
    engine = Engine(make_model(**options), **SIZES | {"num_blocks": 64000}, tensor_parallel_size=4)
    held = engine.cache.nbytes // 4
    # Two a layer, of which a scan has one in its text, and one for the embedding. The last layer
    # of a prefill has none: only its keys and values are wanted.
    layers = 2 * (1 if options else CONFIG.num_hidden_layers)
    for name, expected in {
        "decode of 4 samples": {"all-reduce": layers + 1, "all-gather": 1},
        "prefill of 1 x 16 tokens": {"all-reduce": layers + 1 - (0 if options else 2)},
    }.items():
        compiled = compile_call(engine, name)
        memory = compiled.memory_analysis()
        assert count_collectives(compiled) == expected, (name, count_collectives(compiled))
        assert memory.alias_size_in_bytes > held, (name, memory)
        assert memory.temp_size_in_bytes < held / 100, (name, memory)
"""

_HEAD = """
import jax

def num_compiled(engine):
    return sum(program.jitted._cache_size() for program in engine._runner._executor.programs)
"""


@pytest.mark.slow
def test_tokens_are_those_of_one_device() -> None:
    """With forks, prefix hits, preemption, and more devices than KV heads."""
    run_on_devices(_HEAD + _SAME_TOKENS, num_devices=8)


@pytest.mark.slow
@pytest.mark.optimised
def test_steps_send_two_sums_a_layer_and_copy_no_pool() -> None:
    run_on_devices(_PROGRAMS, num_devices=4)
