# pyright: strict, reportUnknownMemberType=false
"""Engines over several processes, with `jax.distributed`: startup and shutdown.

Process 0 accepts requests. The other processes build the same engine and follow process 0:

    paged_jax.distributed.initialize("10.0.0.1:1234", num_processes=2, process_id=...)
    llm = paged_jax.LLM(model, tensor_parallel_size=16)
    if paged_jax.distributed.is_leader():
        print(llm.generate("It is"))
    else:
        llm.follow()
"""

import atexit
import os
import subprocess
import sys
import threading
import time
from typing import NoReturn, cast

import jax

from paged_jax.arguments import check_positive
from paged_jax.runner.processes import distributed_client

HEARTBEAT_TIMEOUT = 30
_BARRIER = "paged_jax/end"


def is_leader() -> bool:
    """Return whether this process schedules requests: it is process 0, or the only process."""
    return jax.process_index() == 0


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout: int = HEARTBEAT_TIMEOUT,
    initialization_timeout: int = 300,
) -> None:
    """Connect this process to the others. Call it before JAX is used.

    This calls `jax.distributed.initialize` and starts a thread that watches the other processes.
    If another process dies, this process exits with status 1 and one line on stderr, within
    `heartbeat_timeout`. Otherwise it could wait forever for a collective operation.

    Args:
      coordinator_address: ``HOST:PORT`` of process 0. None lets JAX find the processes, on Cloud
        TPU, Slurm, Open MPI and Kubernetes, or with ``JAX_COORDINATOR_ADDRESS``.
      num_processes: number of processes; None as for `coordinator_address`.
      process_id: index of this process, from 0; None as for `coordinator_address`.
      heartbeat_timeout: seconds without a heartbeat after which a process counts as dead.
      initialization_timeout: seconds to wait for all processes.

    Raises:
      ValueError: an argument is out of bounds, or JAX cannot find a missing argument.
      RuntimeError: JAX was used before, or a process did not connect in time.
    """
    check_positive(
        "initialize",
        heartbeat_timeout=heartbeat_timeout,
        initialization_timeout=initialization_timeout,
    )
    # With this option, JAX ends this process from C++, with a long stack trace, only if process 0
    # dies. Without it, JAX would do that if any process dies.
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=heartbeat_timeout,
        shutdown_timeout_seconds=heartbeat_timeout,
        initialization_timeout=initialization_timeout,
    )
    watch = _Watch(heartbeat_timeout)
    if not is_leader():
        watch.reporter = _start_reporter()
    # Handlers run in reverse order, so this runs before JAX stops the coordinator.
    atexit.register(watch.end)


class _Watch:
    """Thread that ends this process if another process dies."""

    def __init__(self, heartbeat_timeout: int):
        self._timeout = heartbeat_timeout
        self._client = distributed_client()
        self._all = list(range(jax.process_count()))
        self._is_ending = threading.Event()
        self.reporter: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="paged_jax watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_ending.wait(self._timeout / 10):
            try:
                # `get_live_nodes` returns when each process has called it or has sent no heartbeat
                # for the timeout.
                alive = self._client.get_live_nodes(self._all)
            except jax.errors.JaxRuntimeError:
                alive = {jax.process_index(): 0}  # the coordinator does not answer
            dead = [f"{process}" for process in self._all if process not in alive]
            if dead and not self._is_ending.is_set():
                self._exit(f"process {', '.join(dead)} of {len(self._all)} is gone")

    def _exit(self, reason: str) -> NoReturn:
        print(f"paged_jax: error: {reason}. Restart all processes.", file=sys.stderr, flush=True)
        self._stop_reporter()
        # `sys.exit` could hang: threads may wait for the device, and JAX for the dead process.
        os._exit(1)

    def _stop_reporter(self) -> None:
        if self.reporter is not None:
            self.reporter.communicate(b"stop\n")

    def end(self) -> None:
        """Leave the group of processes. Process 0 waits for the others: it runs the coordinator."""
        self._is_ending.set()
        try:
            self._client.wait_at_barrier(_BARRIER, 1000 * self._timeout)
            if is_leader():
                self._wait_for_others()
            jax.distributed.shutdown()
        except jax.errors.JaxRuntimeError as error:  # pyright: ignore[reportUnknownVariableType]
            self._exit(
                f"another process did not shut down ({str(cast(Exception, error)).splitlines()[0]})"
            )
        self._stop_reporter()
        # The shutdown has cancelled the call that the thread was waiting for.
        self._thread.join(self._timeout)

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline and len(self._client.get_live_nodes(self._all)) > 1:
            time.sleep(0.05)


def _start_reporter() -> subprocess.Popen[bytes]:
    """Start a shell that prints one line when this process dies, unless it is stopped before.

    If process 0 dies, JAX ends this process from C++, and Python cannot print anything. The output
    of C++ on file descriptor 2 is dropped; `sys.stderr` still writes to the original file.
    """
    stderr = os.dup(2)
    line = (
        f"paged_jax: error: process {jax.process_index()} of {jax.process_count()} has ended: it "
        "was killed, or process 0 is gone. Restart all processes."
    )
    command = ["/bin/sh", "-c", 'read -r word || printf "%s\\n" "$0" >&2', line]
    reporter = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=stderr, start_new_session=True
    )
    sys.stderr = os.fdopen(stderr, "w", buffering=1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    os.close(devnull)
    return reporter
