# pyright: strict, reportUnknownMemberType=false
"""Startup and shutdown of an engine that spans several processes, with `jax.distributed`.

Process 0 accepts requests. The other processes build the same engine and call `follow`, which runs
the same steps as process 0:

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
    """Return whether this is process 0, which schedules the requests."""
    return jax.process_index() == 0


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout: int = HEARTBEAT_TIMEOUT,
    initialization_timeout: int = 300,
) -> None:
    """Connect this process to the other processes. Call it before any other use of JAX.

    This calls `jax.distributed.initialize` and starts a thread that watches the other processes.
    If another process dies, this process prints one line to stderr and exits with status 1, within
    `heartbeat_timeout` seconds. Otherwise it could wait forever for a collective operation.

    Args:
      coordinator_address: ``HOST:PORT`` of process 0. With None, JAX detects the processes on Cloud
        TPU, Slurm, Open MPI and Kubernetes, or reads ``JAX_COORDINATOR_ADDRESS``.
      num_processes: number of processes. With None, JAX detects it in the same way.
      process_id: index of this process, from 0. With None, JAX detects it in the same way.
      heartbeat_timeout: seconds without a heartbeat after which a process counts as dead.
      initialization_timeout: maximum seconds to wait until all processes are connected.

    Raises:
      ValueError: a timeout is not a positive integer, or JAX cannot detect a missing argument.
      RuntimeError: JAX was used before, or a process did not connect in time.
    """
    check_positive(
        "initialize",
        heartbeat_timeout=heartbeat_timeout,
        initialization_timeout=initialization_timeout,
    )
    # Without this option, the death of any process would make JAX end this process from C++, with a
    # long stack trace. With the option, JAX does so only if process 0 dies.
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
    # `atexit` runs its handlers in reverse order of registration. So `watch.end` runs before the
    # handler of JAX, which stops the coordinator.
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
                # `get_live_nodes` returns when every other process either has called it too, or
                # has stopped sending heartbeats and therefore counts as dead.
                alive = self._client.get_live_nodes(self._all)
            except jax.errors.JaxRuntimeError:
                alive = {jax.process_index(): 0}  # the coordinator does not answer
            dead = [f"{process}" for process in self._all if process not in alive]
            if dead and not self._is_ending.is_set():
                self._exit(f"process {', '.join(dead)} of {len(self._all)} is gone")

    def _exit(self, reason: str) -> NoReturn:
        print(f"paged_jax: error: {reason}. Restart all processes.", file=sys.stderr, flush=True)
        self._stop_reporter()
        # Do not use `sys.exit`: its cleanup could wait forever for the device or the dead process.
        os._exit(1)

    def _stop_reporter(self) -> None:
        if self.reporter is not None:
            self.reporter.communicate(b"stop\n")

    def end(self) -> None:
        """Disconnect from the other processes at exit, and stop the thread.

        Process 0 disconnects last, because it runs the coordinator.
        """
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
        # `shutdown` has cancelled the thread's call of `get_live_nodes`, so the thread ends now.
        self._thread.join(self._timeout)

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline and len(self._client.get_live_nodes(self._all)) > 1:
            time.sleep(0.05)


def _start_reporter() -> subprocess.Popen[bytes]:
    """Start a shell that prints an error message to stderr if this process dies.

    The shell is needed because JAX ends this process from C++ if process 0 dies, and Python then
    cannot print anything. In all other cases, call `_stop_reporter` before this process ends: the
    shell then prints nothing. File descriptor 2 is redirected to /dev/null, to hide the stack trace
    that C++ prints. `sys.stderr` still writes to the original file.
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
