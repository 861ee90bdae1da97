"""The thread that makes calls of programs."""

import threading

import jax
import pytest

from paged_jax.runner.call_thread import CallThread


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
