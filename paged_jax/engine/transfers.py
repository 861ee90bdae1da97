"""Permission for the transfers between host and device that an engine needs."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def allow_host_transfers() -> Iterator[None]:
    """Return a context manager that allows transfers between host and device.

    Every step of the engine must transfer token ids, slots and flags. A ``jax.transfer_guard`` that
    the caller has set to find accidental transfers must not forbid these necessary transfers. It
    still applies to transfers between devices, because the engine makes none, except when it loads
    weights from other devices.
    """
    with jax.transfer_guard_host_to_device("allow"), jax.transfer_guard_device_to_host("allow"):
        yield
