"""`RequestRecord`: what is known of a request to the server, for logs, metrics and traces."""

import dataclasses
import random
import re
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from paged_jax.scheduler.outputs import RequestOutput

# Key of the ASGI scope: the record of the request.
RECORD = "paged_jax.record"

# What a request may be called by its client. It is printed in logs and names its blocks.
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Ids need not be secret: the system's random numbers would cost a call of it for each request.
_NUMBERS = random.Random()
# Bytes of a body in which nothing takes longer than its characters tell.
_FEW_BYTES = 2**12
# Methods that metrics tell apart: a client may send any word.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclasses.dataclass
class RequestRecord:
    """A request from its first line to the end of its answer.

    Attributes:
      request_id: the ``X-Request-ID`` of the client if that is a short word, else a new one.
      is_given: whether it is the client's, which may give the same to several requests.
      method, path: of the request.
      handler: the route's path, the same for all models or blocks; ``"none"`` if there is none.
      start: time of arrival, of ``time.perf_counter()``.
      status: the status of the answer; 0 until it begins.
      is_complete: whether all of the answer was sent.
      seconds: from the arrival to the end of the answer.
      error_code, error: of an answer that is an error.
      num_bytes: bytes of the body.
    """

    request_id: str
    is_given: bool
    method: str
    path: str
    handler: str = "none"
    start: float = dataclasses.field(default_factory=time.perf_counter)
    status: int = 0
    is_complete: bool = False
    seconds: float = 0.0
    error_code: str | None = None
    error: str | None = None
    num_bytes: int = 0
    _outputs: dict[int, RequestOutput] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, scope: Scope) -> "RequestRecord":
        """The record of a request that has just arrived."""
        given = Headers(scope=scope).get("x-request-id", "")
        is_given = _ID.fullmatch(given) is not None
        method = scope["method"] if scope["method"] in _METHODS else "other"
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        name = given if is_given else f"{_NUMBERS.getrandbits(64):016x}"
        return cls(name, is_given, method, path)

    def size(self, num_chars: int) -> int:
        """How much there is to encode: characters, or bytes where there are many of them.

        Of a thousand messages without a character, as well.
        """
        return num_chars if self.num_bytes <= _FEW_BYTES else max(num_chars, self.num_bytes)

    def note_output(self, prompt: int, output: RequestOutput) -> None:
        """Take the newest output of one of the request's prompts."""
        self._outputs[prompt] = output

    def note_error(self, code: str | None, message: str) -> None:
        """Take the error that is answered."""
        self.error_code, self.error = code, message

    def usage(self) -> dict[str, float]:
        """Tokens and seconds of what was generated; empty if nothing was.

        Of several prompts the tokens are added up; ``queued_seconds`` is the longest time from
        arrival to the first step, ``first_token_seconds`` the time to the first token of any.
        """
        outputs = list(self._outputs.values())
        if not outputs:
            return {}
        times = [output.metrics for output in outputs]
        queued = [
            each.first_scheduled_time - each.arrival_time
            for each in times
            if each.first_scheduled_time is not None
        ]
        first = [
            each.first_token_time - each.arrival_time
            for each in times
            if each.first_token_time is not None
        ]
        return {
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
            "generated_tokens": sum(
                len(sample.token_ids) for output in outputs for sample in output.outputs
            ),
            **({"queued_seconds": max(queued)} if queued else {}),
            **({"first_token_seconds": min(first)} if first else {}),
        }

    def fields(self) -> dict[str, Any]:
        """All of it by name, as logs have it; what does not apply is left out."""
        fields = {
            "method": self.method,
            "path": self.path[:200],
            "status": self.status,
            "request_id": self.request_id,
            "seconds": self.seconds,
            **self.usage(),
            "client_gone": None if self.is_complete else True,
            "error_code": self.error_code,
            "error": self.error,
        }
        return {name: value for name, value in fields.items() if value is not None}
