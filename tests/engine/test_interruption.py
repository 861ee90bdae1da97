"""Ctrl-C at any line of a call: no request is lost or left behind, and no token is wrong."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import paged_jax
from paged_jax import Engine, Llama, SamplingParams
from tests.support.tiny_model import BOS, SIZES
from tests.support.workload import check_empty

PACKAGE = str(Path(paged_jax.__file__).parent)
PARAMS = SamplingParams(temperature=1, seed=7, max_tokens=3, ignore_eos=True)
FIRST = {"prompt_token_ids": [BOS, *range(5, 15)]}
SECOND = {"prompt_token_ids": [BOS, *range(25, 32)]}
# Every so many lines in the quick tests; all of them in the exhaustive ones.
STRIDES = [43, pytest.param(1, marks=pytest.mark.exhaustive)]


class Interrupter:
    """Raises KeyboardInterrupt at one of the lines of the package that a call runs."""

    def __init__(self, line: int):
        self._num_left = line

    @property
    def has_struck(self) -> bool:
        return self._num_left <= 0

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        except KeyboardInterrupt:
            assert self.has_struck
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, arg) -> Any:
        return self._count if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _count(self, frame, event, arg) -> Any:
        if event == "line":
            self._num_left -= 1
            if self._num_left == 0:
                raise KeyboardInterrupt
        return self._count


def strike_everywhere(stride: int, call: Callable[[Interrupter], None]) -> None:
    """Make a call again and again, each time cut short at a later line, until none is left."""
    line, has_struck = 1, True
    while has_struck:
        interrupter = Interrupter(line)
        call(interrupter)
        line, has_struck = line + stride, interrupter.has_struck
    assert line > 2 * stride


@pytest.fixture(scope="module")
def engine(tiny_model) -> Engine:
    return Engine(tiny_model, **SIZES, steps_per_dispatch=2)


def add_two(engine: Engine) -> None:
    engine.add_request(FIRST, PARAMS, request_id="first")
    params = dataclasses.replace(PARAMS, n=2, max_tokens=6)
    engine.add_request(SECOND, params, request_id="second")


def finish(engine: Engine) -> dict[str, list[list[int]]]:
    """The tokens of all requests that end from now on, each of which is returned as ended once."""
    ended: dict[str, list[list[int]]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                assert output.request_id not in ended
                ended[output.request_id] = [sample.token_ids for sample in output.outputs]
    check_empty(engine)
    return ended


@pytest.fixture(scope="module")
def expected(engine) -> dict[str, list[list[int]]]:
    add_two(engine)
    return finish(engine)


@pytest.mark.parametrize("stride", STRIDES)
def test_steps(engine, expected, stride) -> None:
    def run(interrupter: Interrupter) -> None:
        add_two(engine)
        ended: dict[str, list[list[int]]] = {}
        with interrupter.armed():
            while engine.has_unfinished:
                # What a step has returned is the caller's, whatever happens to the next one.
                for output in engine.step():
                    if output.finished:
                        ended[output.request_id] = [x.token_ids for x in output.outputs]
        # One that ended in the last moment may be returned again, but never not at all.
        assert ended | finish(engine) == expected

    strike_everywhere(stride, run)


@pytest.mark.parametrize("stride", STRIDES)
def test_add_request(engine, expected, stride) -> None:
    def run(interrupter: Interrupter) -> None:
        engine.add_request(FIRST, PARAMS, request_id="first")
        engine.step()
        params = dataclasses.replace(PARAMS, n=2, max_tokens=6)
        with interrupter.armed():
            engine.add_request(SECOND, params, request_id="second")
        ended = finish(engine)
        if "second" not in ended:
            assert interrupter.has_struck
            engine.add_request(SECOND, params, request_id="second")
            ended |= finish(engine)
        assert ended == expected

    strike_everywhere(stride, run)


@pytest.mark.parametrize("stride", STRIDES)
def test_abort(engine, expected, stride) -> None:
    def run(interrupter: Interrupter) -> None:
        add_two(engine)
        engine.step()
        with interrupter.armed():
            engine.abort("second")
        ended = finish(engine)
        assert ended["first"] == expected["first"]
        # Aborted, as it stood then, or not at all.
        for tokens, whole in zip(ended.get("second", []), expected["second"], strict=False):
            assert tokens == whole[: len(tokens)]

    strike_everywhere(stride, run)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("is_idle", [True, False])
def test_update_params(tiny_model, stride, is_idle) -> None:
    """Whichever weights it has then: no token comes from K and V of the others."""
    engine = Engine(tiny_model, **SIZES, steps_per_dispatch=2)
    weights = [engine.model, Llama(engine.config, rngs=nnx.Rngs(5))]
    probes = [np.asarray(model.embed_tokens[...])[0] for model in weights]
    params = dataclasses.replace(PARAMS, max_tokens=6)

    def run(interrupter: Interrupter, *, is_updated: bool = True) -> tuple[int, Any]:
        engine.update_params(weights[0])
        engine.add_request(FIRST, params, request_id="first")
        engine.step()
        before = finish(engine) if is_idle else {}
        with interrupter.armed():
            if is_updated:
                engine.update_params(weights[1])
        if is_idle:  # its blocks are still in the prefix cache, under the weights of then
            engine.add_request(FIRST, params, request_id="first")
        now = np.asarray(engine.model.embed_tokens[...])[0]
        which = next(i for i, probe in enumerate(probes) if np.array_equal(probe, now))
        return which, (before, finish(engine))

    never = Interrupter(10**9)
    expected = dict([run(never, is_updated=False), run(never)])
    assert expected[0] != expected[1]

    def check(interrupter: Interrupter) -> None:
        which, tokens = run(interrupter)
        assert tokens == expected[which]

    strike_everywhere(stride, check)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(tiny_model, expected, stride, level) -> None:
    """Asleep or awake: whoever wakes it then finds its requests and its weights."""
    engine = Engine(tiny_model, **SIZES, steps_per_dispatch=2)
    leaves = list(engine.weights)

    def run(interrupter: Interrupter) -> None:
        add_two(engine)
        engine.step()
        with interrupter.armed():
            engine.sleep(level)
            if level == 2:
                engine.update_params(leaves)
            engine.wake_up()
        if level == 2:
            engine.update_params(leaves)
        engine.wake_up()
        assert finish(engine) == expected

    strike_everywhere(stride, run)
