"""`Caller`: in order, in another thread, under the settings of the one that asks."""

import threading

import jax
import pytest

from paged_jax.runner.caller import Caller


def test_submit_calls_one_after_another_without_waiting() -> None:
    caller, may_start, order = Caller(), threading.Event(), []

    def first() -> None:
        assert may_start.wait(10)
        order.append("first")

    futures = [caller.submit(first), caller.submit(lambda: order.append("second"))]
    assert not order and not futures[1].done()
    may_start.set()
    futures[1].result()
    assert order == ["first", "second"]


def test_submit_hands_on_an_exception() -> None:
    with pytest.raises(ZeroDivisionError):
        Caller().submit(lambda: 1 // 0).result()


def test_programs_are_those_of_the_thread_that_asks() -> None:
    traced, caller = [], Caller()

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
def test_transfers_are_guarded_as_in_the_thread_that_asks(direction) -> None:
    guard = f"jax_transfer_guard_{direction}"
    with getattr(jax, f"transfer_guard_{direction}")("log_explicit"):
        assert Caller().submit(lambda: getattr(jax.config, guard)).result() == "log_explicit"
