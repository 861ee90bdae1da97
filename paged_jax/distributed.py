"""Several processes that run one engine, over JAX's own runtime: `initialize`, and its end.

Process 0 is the one that callers talk to. The others make the same engine and follow it:

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
from typing import NoReturn

import jax

from paged_jax.arguments import check_positive
from paged_jax.runner.processes import distributed_client

HEARTBEAT_TIMEOUT = 30
_BARRIER = "paged_jax/end"


def is_leader() -> bool:
    """Whether this process is the one that schedules: process 0, or the only one."""
    return jax.process_index() == 0


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout: int = HEARTBEAT_TIMEOUT,
    initialization_timeout: int = 300,
) -> None:
    """Connect this process to the others, as `jax.distributed.initialize`, before JAX is used.

    When another process is gone, this one ends with one line on stderr and status 1, at the
    latest after `heartbeat_timeout`: what runs on its devices may wait for the other forever.

    Args:
      coordinator_address: ``HOST:PORT`` of process 0; None where JAX finds the others by itself
        (Cloud TPU, Slurm, Open MPI, Kubernetes, ``JAX_COORDINATOR_ADDRESS``).
      num_processes, process_id: number of processes, and of this one from 0; None as above.
      heartbeat_timeout: seconds without a sign of life after which a process counts as gone.
      initialization_timeout: seconds to wait for all processes.

    Raises:
      ValueError: an argument is out of bounds, or missing and not to be found.
      RuntimeError: JAX has been used before, or a process has not come in time.
    """
    check_positive(
        "initialize",
        heartbeat_timeout=heartbeat_timeout,
        initialization_timeout=initialization_timeout,
    )
    # Else JAX's runtime would end this process from C++, with a page of addresses, when any
    # other is gone; so it does that only when process 0 is.
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
        watch.crier = _hire_crier()
    # Registered after JAX's own, so it runs before: while the coordinator is still there.
    atexit.register(watch.end)


class _Watch:
    """A thread that ends this process when another is gone."""

    def __init__(self, heartbeat_timeout: int):
        self._timeout = heartbeat_timeout
        self._client = distributed_client()
        self._all = list(range(jax.process_count()))
        self._is_ending = threading.Event()
        self.crier: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._look, name="paged_jax watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_ending.wait(self._timeout / 10):
            try:
                # Waits for each to ask, or to be without a sign of life for long enough.
                alive = self._client.get_live_nodes(self._all)
            except jax.errors.JaxRuntimeError:
                alive = {jax.process_index(): 0}  # the coordinator does not answer
            gone = [f"{process}" for process in self._all if process not in alive]
            if gone and not self._is_ending.is_set():
                self._give_up(f"process {', '.join(gone)} of {len(self._all)} is gone")

    def _give_up(self, reason: str) -> NoReturn:
        print(f"paged_jax: error: {reason}. Start all of them again.", file=sys.stderr, flush=True)
        self._dismiss_crier()
        # Not `sys.exit`: threads may wait for the device, and what JAX does at exit for the other.
        os._exit(1)

    def _dismiss_crier(self) -> None:
        if self.crier is not None:
            self.crier.communicate(b"all is said\n")

    def end(self) -> None:
        """Leave in good order, process 0 last: with it goes the coordinator."""
        self._is_ending.set()
        try:
            self._client.wait_at_barrier(_BARRIER, 1000 * self._timeout)
            if is_leader():
                self._wait_for_others()
            jax.distributed.shutdown()
        except jax.errors.JaxRuntimeError as error:
            self._give_up(f"another process has not ended in order ({str(error).splitlines()[0]})")
        self._dismiss_crier()
        # The thread is inside of a call that the shutdown has cancelled.
        self._thread.join(self._timeout)

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline and len(self._client.get_live_nodes(self._all)) > 1:
            time.sleep(0.05)


def _hire_crier() -> subprocess.Popen[bytes]:
    """A process that says in one line that this one has ended, unless this one says so itself.

    When process 0 is gone, JAX's runtime ends this process from C++ before Python can speak. What
    it writes meanwhile, to file descriptor 2, is dropped; `sys.stderr` stays what it was.
    """
    stderr = os.dup(2)
    line = (
        f"paged_jax: error: process {jax.process_index()} of {jax.process_count()} has ended: it "
        "was killed, or process 0 is gone. Start all of them again."
    )
    command = ["/bin/sh", "-c", 'read -r word || printf "%s\\n" "$0" >&2', line]
    crier = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, start_new_session=True)
    sys.stderr = os.fdopen(stderr, "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return crier
