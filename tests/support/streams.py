"""Client of a streamed answer that may be cut off."""

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.live_server import wait_until


class Stream:
    """A streamed answer, read in a thread. The stream has started, or ended, after construction."""

    def __init__(self, pool: ThreadPoolExecutor, url: str, body: dict):
        self.headers = httpx.Headers()
        self.lines: list[str] = []
        self._done = pool.submit(self._read, url, {**body, "stream": True})
        wait_until(lambda: len(self.lines) > 1 or self.has_ended)

    def _read(self, url: str, body: dict) -> bool:
        try:
            with httpx.stream("POST", url, json=body, timeout=120) as answer:
                assert answer.status_code == 200
                self.headers = answer.headers
                for line in filter(None, answer.iter_lines()):
                    self.lines.append(line)
        except httpx.TransportError:
            return False
        return self.lines[-1] == "data: [DONE]"

    @property
    def has_ended(self) -> bool:
        """Return whether the stream has ended."""
        return self._done.done()

    def is_whole(self) -> bool:
        """Wait for the end, and return whether the answer is complete."""
        return self._done.result(120)
