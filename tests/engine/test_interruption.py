"""Ctrl-C at any line of a call: no request is lost, no block leaks, and no token is wrong."""

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
# Interrupt at every 43rd line, at every line in the exhaustive tests.
STRIDES = [43, pytest.param(1, marks=pytest.mark.exhaustive)]


class Interrupter:
    """Raises KeyboardInterrupt at the given line of the package that a call runs."""

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
    """Repeat a call, interrupted at a later line each time, until it completes."""
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
    """Run all requests, check that each is returned once as finished, and return their tokens."""
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


@pytest.mark.parametrize("stride", [307, pytest.param(43, marks=pytest.mark.slow), STRIDES[1]])
def test_step_interrupted_at_any_line_loses_no_request(engine, expected, stride) -> None:
    def run(interrupter: Interrupter) -> None:
        add_two(engine)
        ended: dict[str, list[list[int]]] = {}
        with interrupter.armed():
            while engine.has_unfinished:
                # Outputs of a step stay valid if the next step is interrupted.
                for output in engine.step():
                    if output.finished:
                        ended[output.request_id] = [x.token_ids for x in output.outputs]
        # A request that ended at the interrupted line may be returned twice, but is never lost.
        assert ended | finish(engine) == expected

    strike_everywhere(stride, run)


@pytest.mark.parametrize("stride", STRIDES)
def test_add_request_interrupted_at_any_line_adds_all_or_nothing(engine, expected, stride) -> None:
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
def test_abort_interrupted_at_any_line_ends_all_or_nothing(engine, expected, stride) -> None:
    def run(interrupter: Interrupter) -> None:
        add_two(engine)
        engine.step()
        with interrupter.armed():
            engine.abort("second")
        ended = finish(engine)
        assert ended["first"] == expected["first"]
        # The request was aborted with its tokens so far, or not aborted.
        for tokens, whole in zip(ended.get("second", []), expected["second"], strict=False):
            assert tokens == whole[: len(tokens)]

    strike_everywhere(stride, run)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("is_idle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_update_params_interrupted_at_any_line_mixes_no_weights(
    tiny_model, stride, is_idle
) -> None:
    """After the interruption, all tokens must come from the weights that the engine then has.

    It has none if the line is between the deletion of the old weights and the storing of the new.
    """
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
        if engine.is_sleeping:
            assert interrupter.has_struck and not engine.weights
            engine.update_params(weights[1])
            engine.wake_up()
        if is_idle:  # its blocks are in the prefix cache, computed with the earlier weights
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
@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sleep_interrupted_at_any_line_keeps_requests_and_weights(
    tiny_model, expected, stride, level
) -> None:
    """The engine, asleep or awake after the interruption, keeps its requests and weights."""
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
