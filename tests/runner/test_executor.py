"""`Executor`: how much is compiled for an engine that has yet to run anything."""

import jax

from paged_jax import Engine
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
