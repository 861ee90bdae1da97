"""The executor: compilation, its call thread, and return of freed memory to the system."""

import ctypes
import gc
import threading
from pathlib import Path

import jax
import pytest

from paged_jax import LLM, Engine, SamplingParams
from paged_jax.models.decoder import Decoder
from paged_jax.runner import executor as executor_module
from paged_jax.runner.executor import CallThread
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


def test_submit_makes_calls_in_order_without_waiting() -> None:
    caller, may_start, order = CallThread(), threading.Event(), []

    def first() -> None:
        assert may_start.wait(10)
        order.append("first")

    futures = [caller.submit(first), caller.submit(lambda: order.append("second"))]
    assert not order and not futures[1].done()
    may_start.set()
    futures[1].result()
    assert order == ["first", "second"]


def test_submit_passes_on_an_exception() -> None:
    with pytest.raises(ZeroDivisionError):
        CallThread().submit(lambda: 1 // 0).result()


def test_submit_uses_the_jax_settings_of_the_calling_thread() -> None:
    traced, caller = [], CallThread()

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        traced.append((jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision))
        return 2 * x

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        double(1)
        caller.submit(lambda: double(2)).result()
        assert traced == [(True, "highest")]
    double(1)
    caller.submit(lambda: double(2)).result()
    assert traced == [(True, "highest"), (jax.config.jax_enable_x64, None)]


@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
def test_submit_uses_the_transfer_guards_of_the_calling_thread(direction) -> None:
    guard = f"jax_transfer_guard_{direction}"
    with getattr(jax, f"transfer_guard_{direction}")("log_explicit"):
        assert CallThread().submit(lambda: getattr(jax.config, guard)).result() == "log_explicit"


PIECE, COUNT = 4000, 20_000  # glibc allocates separate pages only for larger pieces


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(
    executor_module._malloc_trim() is None, reason="the C library has no malloc_trim"
)
def test_give_back_freed_memory_returns_small_pieces_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE) for _ in range(COUNT)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    *others, last = pieces  # prevents the heap from shrinking without malloc_trim
    for piece in others:
        libc.free(piece)
    before = resident_bytes()
    executor_module.give_back_freed_memory()
    assert before - resident_bytes() > PIECE * COUNT // 2
    libc.free(last)


def test_give_back_freed_memory_without_malloc_trim_does_nothing(monkeypatch) -> None:
    monkeypatch.setattr(executor_module, "_malloc_trim", lambda: None)
    executor_module.give_back_freed_memory()
