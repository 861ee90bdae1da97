"""`Executor`: how much is compiled for an engine that has yet to run anything."""

import gc

import jax
import pytest

from paged_jax import LLM, Engine, SamplingParams
from paged_jax.models.llama import Llama


def test_a_new_state_is_one_program_which_engines_of_the_same_sizes_share(
    tiny_model: Llama,
) -> None:
    compiled = []

    def listen(event: str, duration: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details["fun_name"])

    # Sizes that no other test has, so that nothing is compiled yet.
    sizes = {"block_size": 4, "num_blocks": 23, "max_num_seqs": 5, "max_model_len": 61}
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine = Engine(tiny_model, **sizes)
        assert len(compiled) == 1 and "_empty_state" in compiled[0]
        engine.sleep()
        engine.wake_up()
        Engine(tiny_model, **sizes)
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_warmup_compiles_for_gpus_while_the_memory_of_the_pool_is_free(
    tiny_model: Llama, monkeypatch
) -> None:
    """XLA times matmuls on GPUs in the free memory, of which the pool takes 85%."""
    sizes = {"block_size": 4, "num_blocks": 29, "max_num_seqs": 2, "max_model_len": 32}
    llm = LLM(tiny_model, **sizes, max_chunk=16)
    executor = llm.core.runner._executor
    monkeypatch.setattr(executor, "_compiles_without_state", True)
    pool_bytes = executor.state.cache.pools.k.nbytes

    def has_pool() -> bool:
        gc.collect()
        return any(x.nbytes == pool_bytes and not x.is_deleted() for x in jax.live_arrays())

    seen, compiled, prompt = [has_pool()], [], {"prompt_token_ids": [3, 4, 5, 6, 7]}
    llm.warmup(lambda done, total, name: seen.append(has_pool()))
    assert seen[0] and len(seen) > 10 and not any(seen[1:])
    assert has_pool()

    def listen(event: str, duration: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details["fun_name"])

    # Requests use the programs compiled from shapes, and a state in use is kept.
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        before = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3))
        llm.warmup(lambda done, total, name: None)
        after = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert after[0].outputs[0].token_ids == before[0].outputs[0].token_ids
    assert after[0].num_cached_tokens == 4
