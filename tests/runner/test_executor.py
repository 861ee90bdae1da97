"""The executor: sharing of programs, and compilation before the pool is allocated."""

import gc

import jax
import pytest

from paged_jax import LLM, Engine, SamplingParams
from paged_jax.models.decoder import Decoder
from tests.support.tiny_model import CONFIG, SIZES

L, K, D = CONFIG.num_hidden_layers, CONFIG.num_key_value_heads, CONFIG.head_dim


def test_executors_of_equal_sizes_share_the_program_of_a_new_state(
    tiny_model: Decoder,
) -> None:
    compiled = []

    def listen(event: str, duration: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details["fun_name"])

    # Sizes that no other test uses, so that nothing is compiled yet.
    sizes = {"block_size": 4, "num_blocks": 23, "max_num_seqs": 5, "max_model_len": 61}
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine = Engine(tiny_model, **sizes)
        assert len(compiled) == 1 and "empty_state" in compiled[0]
        engine.sleep()
        engine.wake_up()
        Engine(tiny_model, **sizes)
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_warmup_for_gpus_compiles_while_the_pool_is_freed(tiny_model: Decoder, monkeypatch) -> None:
    """XLA times matmuls on GPUs in the free memory, and the pool takes 85% of the memory."""

    def pools() -> list[int]:
        """Return the sizes of all arrays with the shape of a pool, also of other engines."""
        gc.collect()
        arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
        return [x.nbytes for x in arrays if x.shape == (L, SIZES["num_blocks"], K, 4, D)]

    others = pools()
    llm = LLM(tiny_model, **SIZES)
    executor = llm.core.executor
    monkeypatch.setattr(executor, "_compiles_without_state", True)

    def has_pool() -> bool:
        return len(pools()) > len(others)

    seen, compiled, prompt = [has_pool()], [], {"prompt_token_ids": [3, 4, 5, 6, 7]}
    llm.warmup(lambda done, total, name: seen.append(has_pool()))
    assert seen[0] and len(seen) > 10 and not any(seen[1:])
    assert has_pool()

    def listen(event: str, duration: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details["fun_name"])

    # Requests use the programs that `warmup` compiled, and `warmup` keeps a state that is in use.
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
