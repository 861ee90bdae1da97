"""An engine over several processes: process 0 schedules, the others run the same programs.

    process 0     requests -> scheduler -> LeadingExecutor -> programs -> results
                                                  | Channel
    process n                                     v follow -> Executor -> programs

All that a program depends on is the state, which each process has its part of, and the arguments of
the call, which process 0 sends. So clocks, requests and their order matter in process 0 alone.
"""

import atexit
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from paged_jax.runner.bounds import Bounds
from paged_jax.runner.channel import Channel, Message
from paged_jax.runner.decode_state import Assignment
from paged_jax.runner.executor import Executor
from paged_jax.runner.programs import Call
from paged_jax.sampling.params import SamplingParams, TokenBias


class LeadingExecutor(Executor):
    """An `Executor` that has others do what it does, each before it does so itself.

    Args:
      arguments, options: see `Executor`.
      channel: way to the others.
    """

    def __init__(self, *arguments: Any, channel: Channel, **options: Any):
        self._channel: Channel | None = None  # they make their own first state
        super().__init__(*arguments, **options)
        self._channel = channel
        # Once: when nobody has this executor any more or, before JAX shuts down, at exit.
        atexit.register(weakref.finalize(self, channel.send, Message("end", {})))
        self._names = {id(each.jitted): name for name, each in self.programs._asdict().items()}

    def _tell(self, kind: str, numbers: dict[str, Any] | None = None, arrays: tuple = ()) -> None:
        if self._channel is not None:
            self._channel.send(Message(kind, numbers or {}, arrays))

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._settle()
        self._tell("reset")
        super().reset()

    def compile_all(self, report: Callable[[int, int, str], None] | None = None) -> list[Call]:
        """See `Executor.compile_all`. All processes compile at the same time."""
        self._tell("compile_all")
        return super().compile_all(report)

    def _call(self, call: Call) -> Any:
        self._tell("call", {"program": self._names[id(call.program)]} | call.static, call.args)
        return super()._call(call)

    def assign(self, assignments: list[Assignment]) -> None:
        """See `Executor.assign`."""
        self._join()
        numbers = [_numbers(each) for each in assignments]
        token_ids = tuple(np.asarray(each.token_ids, np.int32) for each in assignments)
        self._tell("assign", {"assignments": numbers}, token_ids)
        super().assign(assignments)

    def bind(self, bounds: Bounds) -> None:
        """See `Executor.bind`."""
        self._join()
        self._tell("bind", arrays=tuple(bounds))
        super().bind(bounds)


def _numbers(assignment: Assignment) -> dict[str, Any]:
    """What JSON can hold of an assignment: all but the tokens."""
    numbers = assignment._asdict()
    del numbers["token_ids"]
    params = assignment.params
    fields = dataclasses.asdict(dataclasses.replace(params, structured_outputs=None))
    if params.logit_bias is not None:  # JSON makes strings of the keys
        fields["logit_bias"] = list(params.logit_bias.items())
    return numbers | {"params": fields}


def follow(executor: Executor, channel: Channel) -> None:
    """Do what the executor at the other end of a channel does, until it ends.

    Args:
      executor: made with the same arguments as that one.
      channel: way from there.
    """
    while (message := channel.receive()).kind != "end":
        _ACTIONS[message.kind](executor, message)


def _reset(executor: Executor, message: Message) -> None:
    executor.reset()


def _compile_all(executor: Executor, message: Message) -> None:
    executor.compile_all()


def _call(executor: Executor, message: Message) -> None:
    static = dict(message.numbers)
    program = getattr(executor.programs, static.pop("program"))
    executor.run(program.call(*message.arrays, **static))


def _assign(executor: Executor, message: Message) -> None:
    assignments = []
    for numbers, token_ids in zip(message.numbers["assignments"], message.arrays, strict=True):
        fields = dict(numbers["params"])
        if fields["logit_bias"] is not None:
            fields["logit_bias"] = dict(fields["logit_bias"])
        changes = {"params": SamplingParams(**fields), "token_ids": token_ids}
        changes["token_bias"] = TokenBias(*map(tuple, numbers["token_bias"]))
        assignments.append(Assignment(**(numbers | changes)))
    executor.assign(assignments)


def _bind(executor: Executor, message: Message) -> None:
    executor.bind(Bounds(*message.arrays))


_ACTIONS: dict[str, Callable[[Executor, Message], None]] = {
    "reset": _reset,
    "compile_all": _compile_all,
    "call": _call,
    "assign": _assign,
    "bind": _bind,
}
