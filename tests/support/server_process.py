"""``python -m paged_jax.serve`` in a separate process, which can receive signals."""

import re
import signal
import subprocess
import sys
import threading

import httpx

from tests.support.compiler import check_log
from tests.support.live_server import check_error, wait_until


class ServerProcess:
    """``python -m paged_jax.serve`` on an unused port."""

    def __init__(self, *arguments: str):
        command = [sys.executable, "-m", "paged_jax.serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        wait_until(lambda: "ready: " in self.log or self.process.poll() is not None, 120)
        self.url = re.findall(r"listening on (\S+),", self.log)[0]

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self._log.append(line)

    @property
    def log(self) -> str:
        return "".join(self._log)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the end of the process, and return the exit code."""
        code = self.process.wait(60)
        self._reader.join()
        assert "Traceback" not in self.log
        check_log(self.log)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def is_closed_to(self, client) -> bool:
        """Return whether the server rejects a request, with 503 or because no socket listens."""
        try:
            response = client.get(f"{self.url}/v1/models")
        except httpx.TransportError:
            return True
        if response.status_code == 200:
            return False
        check_error(response.status_code, response.content, {503})
        return True
