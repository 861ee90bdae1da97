"""What an engine moves between host and device, whatever guard its caller has set."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def own_transfers() -> Iterator[None]:
    """A context in which an engine may move its own numbers between host and device.

    Token ids, slots and flags cross with every step, as they must, so that a caller's
    ``jax.transfer_guard`` should not stop them: it is there to find transfers that nobody wants.
    Copies from device to device stay under the caller's guard. The engine makes none, unless
    weights come from other devices.
    """
    with jax.transfer_guard_host_to_device("allow"), jax.transfer_guard_device_to_host("allow"):
        yield
