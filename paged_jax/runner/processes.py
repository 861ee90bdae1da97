"""Engines over several processes: process 0 schedules, all processes run the programs.

    process 0     requests -> scheduler -> LeadingExecutor -> programs -> results
                                                  | Channel
    process n                                     v follow -> Executor -> programs

The result of a program depends only on the state and on the arguments of the call. Each process has
a part of the state, and process 0 sends the arguments to the others. So only process 0 needs
requests, their order, and clocks.

Messages are sent through the key-value store of `jax.distributed`. A broadcast between devices
would wait for the programs already queued, so the host could not queue programs ahead of the
devices.
"""

import atexit
import dataclasses
import itertools
import json
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import load, save

from paged_jax.runner.decode_state import TokenMasks
from paged_jax.runner.executor import Executor
from paged_jax.runner.programs import Call
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.state import Assignment
from paged_jax.sampling.token_bias import TokenBias

# Number of messages per folder of the key-value store. A folder is deleted when all processes have
# received its messages.
_FOLDER = 256
# Timeout of a read in milliseconds. A read is repeated until a message arrives, because Python can
# handle interrupts only between two reads.
_PATIENCE = 1000
_HEADER = "header"


class Message(NamedTuple):
    """Message from process 0 that tells the other processes what to do.

    Attributes:
      kind: name of the action, a key of `_ACTIONS` or ``"end"``.
      arguments: arguments that JSON can represent, by name.
      arrays: arguments of the action that are NumPy arrays or scalars.
    """

    kind: str
    arguments: dict[str, Any]
    arrays: tuple[Any, ...] = ()

    def encode(self) -> bytes:
        """Return the message as bytes.

        Example:
          >>> message = Message("call", {"n": 3}, (np.arange(2),))
          >>> decoded = Message.decode(message.encode())
          >>> decoded.kind, decoded.arguments, decoded.arrays
          ('call', {'n': 3}, (array([0, 1]),))
        """
        header = np.frombuffer(json.dumps([self.kind, self.arguments]).encode(), np.uint8)
        arrays = {f"{n}": np.asarray(array) for n, array in enumerate(self.arrays)}
        return save({_HEADER: header} | arrays)

    @classmethod
    def decode(cls, data: bytes) -> "Message":
        """Return the message that `data` encodes; this is the inverse of `encode`."""
        arrays = load(data)
        kind, arguments = json.loads(arrays.pop(_HEADER).tobytes())
        return cls(kind, arguments, tuple(arrays[f"{n}"] for n in range(len(arrays))))


class Channel:
    """Channel for messages from process 0 to all other processes of `jax.distributed`.

    Every process receives all messages, in the same order.

    Args:
      name: name of the channel. It is the same in all processes, and no other channel has it.
    """

    def __init__(self, name: str):
        self._name = name
        self._client = distributed_client()
        self._count = 0

    def send(self, message: Message) -> None:
        """Send a message without waiting for the receivers; this takes about 0.3 ms on one host."""
        self._client.key_value_set_bytes(self._next_key(), message.encode())

    def receive(self) -> Message:
        """Wait for the next message and return it.

        Raises:
          JaxRuntimeError: the connection to process 0 is lost.
        """
        key = self._next_key()
        while True:
            try:
                data = self._client.blocking_key_value_get_bytes(key, _PATIENCE)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        if self._count % _FOLDER == 0:
            self._note_received(self._count // _FOLDER - 1)
        return Message.decode(data)

    def _next_key(self) -> str:
        folder, number = divmod(self._count, _FOLDER)
        self._count += 1
        return f"{self._name}/{folder}/{number}"

    def _note_received(self, folder: int) -> None:
        """Record that this process has received a folder. The last receiver deletes the folder."""
        receivers = self._client.key_value_increment(f"{self._name}/received/{folder}", 1)
        if receivers == jax.process_count() - 1:
            self._client.key_value_delete(f"{self._name}/{folder}/")
            self._client.key_value_delete(f"{self._name}/received/{folder}")


# Counter of the engines; the name of a channel contains the number of its engine. All processes
# create their engines in the same order, so an engine gets the same number in all processes.
_engine_numbers = itertools.count()


def channel_between(devices: Iterable[Any]) -> Channel | None:
    """Return a channel between the processes that own `devices`.

    The result is None if this process owns all of them.

    Args:
      devices: `jax.Device`s.

    Raises:
      ValueError: some processes own none of the devices.
    """
    processes = {device.process_index for device in devices}
    if processes == {jax.process_index()}:
        return None
    if len(processes) < jax.process_count():
        raise ValueError(
            f"Engine: the devices must belong to all {jax.process_count()} processes or only to "
            f"this process, got devices of {sorted(processes)}. Pass a mesh of all devices."
        )
    return Channel(f"paged_jax/{next(_engine_numbers)}")


def minimum_of_processes(number: int) -> int:
    """Return the minimum of `number` over all processes. Each process must call this."""
    return int(np.min(multihost_utils.process_allgather(np.int64(number))))


def distributed_client() -> Any:
    """Return the client of JAX's coordination service.

    Raises:
      RuntimeError: `jax.distributed` is not initialized.
    """
    # JAX 0.12 has no public name for the client of the key-value store. Orbax and MaxText also
    # import the client from `jax._src`.
    from jax._src import distributed

    if distributed.global_state.client is None:
        raise RuntimeError(
            "jax.distributed must be initialized first. Call jax.distributed.initialize."
        )
    return distributed.global_state.client


class LeadingExecutor(Executor):
    """`Executor` of process 0, which makes the executors of other processes do the same.

    It sends a message to the other processes before each action.

    Args:
      arguments: positional arguments of `Executor`.
      channel: channel to the other processes.
      options: keyword arguments of `Executor`.
    """

    def __init__(self, *arguments: Any, channel: Channel, **options: Any):
        # Set the channel after the constructor, which calls `reset`. `reset` must not send a
        # message yet, because the other processes create their first state themselves.
        self._channel: Channel | None = None
        super().__init__(*arguments, **options)
        self._channel = channel
        # Send "end" once, when this executor is deleted, or before JAX shuts down if that happens
        # first.
        atexit.register(weakref.finalize(self, channel.send, Message("end", {})))
        self._names = {
            id(program.jitted): name for name, program in self.programs._asdict().items()
        }

    def _tell(self, kind: str, arguments: dict[str, Any] | None = None, arrays: tuple = ()) -> None:
        if self._channel is not None:
            self._channel.send(Message(kind, arguments or {}, arrays))

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._settle()
        self._tell("reset")
        super().reset()

    def compile_all(self, report: Callable[[int, int, str], None] | None = None) -> list[Call]:
        """See `Executor.compile_all`; all processes compile at the same time."""
        self._tell("compile_all")
        return super().compile_all(report)

    def _call(self, call: Call) -> Any:
        self._tell("call", {"program": self._names[id(call.program)]} | call.static, call.args)
        return super()._call(call)

    def assign(self, assignments: list[Assignment]) -> None:
        """See `Executor.assign`."""
        self._join()
        records = [_assignment_fields(assignment) for assignment in assignments]
        token_ids = tuple(np.asarray(assignment.token_ids, np.int32) for assignment in assignments)
        self._tell("assign", {"assignments": records}, token_ids)
        super().assign(assignments)

    def _write_token_masks(self, masks: TokenMasks) -> None:
        self._tell("write_token_masks", arrays=tuple(masks))
        super()._write_token_masks(masks)


def _assignment_fields(assignment: Assignment) -> dict[str, Any]:
    """Return all fields of an assignment except its tokens, as values for JSON."""
    record = assignment._asdict()
    del record["token_ids"]
    params = assignment.params
    fields = dataclasses.asdict(dataclasses.replace(params, structured_outputs=None))
    if params.logit_bias is not None:  # JSON converts keys to strings
        fields["logit_bias"] = list(params.logit_bias.items())
    return record | {"params": fields}


def follow(executor: Executor, channel: Channel) -> None:
    """Receive messages from process 0 and execute their actions, until "end" is received.

    Args:
      executor: an executor that was created with the same arguments as in process 0.
      channel: the channel on which process 0 sends.
    """
    while (message := channel.receive()).kind != "end":
        _ACTIONS[message.kind](executor, message)


def _call(executor: Executor, message: Message) -> None:
    static = dict(message.arguments)
    program = getattr(executor.programs, static.pop("program"))
    executor.run(program.call(*message.arrays, **static))


def _assign(executor: Executor, message: Message) -> None:
    assignments = []
    for record, token_ids in zip(message.arguments["assignments"], message.arrays, strict=True):
        fields = dict(record["params"])
        if fields["logit_bias"] is not None:
            fields["logit_bias"] = dict(fields["logit_bias"])
        changes = {"params": SamplingParams(**fields), "token_ids": token_ids}
        changes["token_bias"] = TokenBias(*map(tuple, record["token_bias"]))
        assignments.append(Assignment(**(record | changes)))
    executor.assign(assignments)


_ACTIONS: dict[str, Callable[[Executor, Message], Any]] = {
    "reset": lambda executor, _: executor.reset(),
    "compile_all": lambda executor, _: executor.compile_all(),
    "call": _call,
    "assign": _assign,
    "write_token_masks": lambda executor, message: executor.write_token_masks(
        TokenMasks(*message.arrays)
    ),
}
