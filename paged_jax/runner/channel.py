"""Messages from the process that schedules to the others, and what a message is made of.

They go through the key-value store of `jax.distributed`, not through devices: a broadcast on the
devices would wait for the programs that are queued there, and the host could no longer work ahead.
"""

import itertools
import json
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import load, save

# Messages of one folder of the store, which is deleted when all have received it: so many are kept
# at most twice over.
_FOLDER = 256
# Between two looks for an interrupt, in ms; a message that comes meanwhile wakes its reader.
_PATIENCE = 1000
_HEADER = "header"


class Message(NamedTuple):
    """What the other processes are to do.

    Attributes:
      kind: name of what is to be done, see `paged_jax.runner.leading.follow`.
      numbers: arguments that JSON can hold.
      arrays: arguments that are numpy arrays, or numpy scalars.
    """

    kind: str
    numbers: dict[str, Any]
    arrays: tuple[Any, ...] = ()

    def encode(self) -> bytes:
        """The message as bytes.

        Example:
          >>> message = Message("call", {"n": 3}, (np.arange(2),))
          >>> decoded = Message.decode(message.encode())
          >>> decoded.kind, decoded.numbers, decoded.arrays
          ('call', {'n': 3}, (array([0, 1]),))
        """
        header = np.frombuffer(json.dumps([self.kind, self.numbers]).encode(), np.uint8)
        arrays = {f"{n}": np.asarray(array) for n, array in enumerate(self.arrays)}
        return save({_HEADER: header} | arrays)

    @classmethod
    def decode(cls, data: bytes) -> "Message":
        """The message that was encoded as these bytes."""
        arrays = load(data)
        kind, numbers = json.loads(arrays.pop(_HEADER).tobytes())
        return cls(kind, numbers, tuple(arrays[f"{n}"] for n in range(len(arrays))))


class Channel(Protocol):
    """From one sender to all receivers, in order, without loss."""

    def send(self, message: Message) -> None:
        """Send a message; does not wait for anybody to receive it."""
        ...

    def receive(self) -> Message:
        """Wait for the next message."""
        ...


class KeyValueChannel:
    """A `Channel` from process 0 to all others of `jax.distributed`.

    Args:
      name: name of the channel, the same in all processes and of no other channel.
    """

    def __init__(self, name: str):
        self._name = name
        self._client = distributed_client()
        self._count = 0

    def send(self, message: Message) -> None:
        """Send a message: about 0.3 ms on one host."""
        self._client.key_value_set_bytes(self._next_key(), message.encode())

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
          JaxRuntimeError: process 0 is gone.
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
        """Delete a folder of the store, if this process is the last to have received it."""
        receivers = self._client.key_value_increment(f"{self._name}/received/{folder}", 1)
        if receivers == jax.process_count() - 1:
            self._client.key_value_delete(f"{self._name}/{folder}/")
            self._client.key_value_delete(f"{self._name}/received/{folder}")


# Engines are made in the same order in all processes, so their numbers agree.
_engine_numbers = itertools.count()


def channel_between(devices: Iterable[Any]) -> Channel | None:
    """A channel between the processes that have these `jax.Device`s; None if this one has all.

    Raises:
      ValueError: some processes have none of them.
    """
    processes = {device.process_index for device in devices}
    if processes == {jax.process_index()}:
        return None
    if len(processes) < jax.process_count():
        raise ValueError(
            f"Engine: the devices must be of all {jax.process_count()} processes, or of this one "
            f"alone, got those of {sorted(processes)}. Give a mesh of all devices."
        )
    return KeyValueChannel(f"paged_jax/{next(_engine_numbers)}")


def least_of_processes(number: int) -> int:
    """The least of the numbers that all processes call this with."""
    return int(np.min(multihost_utils.process_allgather(np.int64(number))))


def distributed_client() -> Any:
    """The client of JAX's coordination service.

    Raises:
      RuntimeError: `jax.distributed` is not initialized.
    """
    # JAX has no public name for it (0.12); Orbax and MaxText take it from here, too.
    from jax._src import distributed

    if distributed.global_state.client is None:
        raise RuntimeError("jax.distributed must be initialized first.")
    return distributed.global_state.client
