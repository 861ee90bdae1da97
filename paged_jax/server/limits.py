"""Limits on requests, and fair quotas of samples and streams for each client.

An error names the limit that was exceeded.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from paged_jax.sampling.params import MAX_LOGPROBS, MAX_N
from paged_jax.server.responses import ApiError

# The body's schema enforces this bound, so that a list of a million prompts is not parsed
# completely.
MAX_PROMPTS = 4096
# Default maximum size of a body: bytes per token of the context, and a minimum. English text has 4
# bytes per token; a character that JSON escapes takes 6 or 12 bytes. Models with a small context
# still need room for schemas and logit biases.
_BYTES_PER_TOKEN, _MIN_BODY_BYTES = 16, 2**20


def _limit(default: Any, help: str) -> Any:
    """Declare a field of `Limits` with the help text of its flag."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on requests, responses and connections, each with a flag of `paged_jax.serve`."""

    max_body_bytes: int | None = _limit(
        None, "bytes of a request body; default: 16 per token of the context, at least 1 MiB"
    )
    max_header_bytes: int = _limit(2**14, "bytes of the request line and the headers")
    header_timeout: float = _limit(1.0, "seconds from the first byte to the end of the headers")
    body_timeout: float = _limit(10.0, "seconds from the end of the headers to the end of the body")
    send_timeout: float = _limit(
        30.0, "seconds after which a client that does not read its response is disconnected"
    )
    max_queue: int = _limit(256, "samples that wait for a slot of the batch")
    max_streams: int = _limit(256, "concurrent streams")
    # Most systems limit a process to 1024 open files.
    max_connections: int = _limit(900, "open connections, including idle connections")
    max_prompts: int = _limit(64, "prompts per request")
    max_prompt_tokens: int = _limit(
        2**20, "tokens per prompt; the model's context limits them as well"
    )
    max_n: int = _limit(16, "samples per prompt")
    max_logprobs: int = _limit(MAX_LOGPROBS, "most probable tokens reported at each position")
    # A log-probability takes up to 100 bytes of a response. Their number is n * (number of tokens,
    # including the prompt's if requested) * (1 + number of most probable tokens). Without
    # `max_tokens` a chat ends before it exceeds this limit.
    max_answer_logprobs: int = _limit(2**17, "log-probabilities in a response")
    max_stop: int = _limit(16, "stop strings per request")
    max_stop_chars: int = _limit(256, "characters per stop string")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None:
                continue
            is_time = name.endswith("_timeout")
            if not (0 < value < math.inf if is_time else value >= 0):
                rule = "be finite seconds > 0" if is_time else "be >= 0"
                raise ValueError(f"Limits: {name} must {rule}, got {value}.")
        highest = {"max_n": MAX_N, "max_logprobs": MAX_LOGPROBS, "max_prompts": MAX_PROMPTS}
        for name, most in highest.items():
            if getattr(self, name) > most:
                raise ValueError(
                    f"Limits: {name} must be at most {most}, got {getattr(self, name)}."
                )

    def for_context(self, num_tokens: int) -> "Limits":
        """Return the limits for a model with a context of `num_tokens` tokens.

        Example:
          >>> Limits().for_context(131_072).max_body_bytes
          2097152
        """
        if self.max_body_bytes is not None:
            return self
        size = max(_MIN_BODY_BYTES, _BYTES_PER_TOKEN * num_tokens)
        return dataclasses.replace(self, max_body_bytes=size)

    def check(
        self,
        name: str,
        value: int | None,
        param: str | None,
        *,
        what: str | None = None,
        status: int = 400,
    ) -> None:
        """Raise an `ApiError` that names the limit if `value` exceeds it.

        Args:
          name: name of the limit.
          value: requested amount; None is within any limit.
          param: name of the request's field; None if no single field is responsible.
          what: description of the value in the message; by default `param`.
          status: HTTP status of the error.
        """
        most = getattr(self, name)
        if value is not None and value > most:
            raise ApiError(
                status,
                f"{what or param} must be at most {most} ({name}), got {value}.",
                param=param,
                code=f"{name}_exceeded",
            )


class FairQuota:
    """Quota that many clients share, and that no client can use up for all others.

    A client may take all free places. When none are free, each client may still take its fair
    share: `most` divided by the number of clients that hold places, including itself. Together, n
    clients hold at most ``1 + 1/2 + ... + 1/n`` times `most` places.

    Args:
      things: plural noun of the counted things, for error messages.
      limit: name of the limit.
      most: number of places, all of which a single client may take.

    Attributes:
      total: number of places taken.

    Example:
      >>> quota = FairQuota("samples", limit="max_queue", most=8)
      >>> with quota.take("a", 8):
      ...     [quota.has_room(client, count) for client, count in (("a", 1), ("b", 4), ("b", 5))]
      [False, True, False]
    """

    def __init__(self, things: str, *, limit: str, most: int):
        self.total = 0
        self._things = things
        self._limit = limit
        self._most = most
        self._taken: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether all places are taken."""
        return self.total >= self._most

    def has_room(self, client: str, count: int) -> bool:
        """Return whether a client may take `count` more places."""
        num_clients = len(self._taken.keys() | {client})
        is_fair = self._taken[client] + count <= self._most // num_clients
        return is_fair or self.total + count <= self._most

    def check(self, client: str, count: int) -> None:
        """Raise an `ApiError` if a client may not take `count` more places."""
        if not self.has_room(client, count):
            raise too_many(
                self._things,
                limit=self._limit,
                most=self._most,
                now=self.total,
                own=self._taken[client],
                count=count,
            )

    @contextlib.contextmanager
    def take(self, client: str, count: int) -> Iterator[None]:
        """Take `count` places for a client while the context is active.

        Raises:
          ApiError: the client may not take `count` more places.
        """
        self.check(client, count)
        self._add(client, count)
        try:
            yield
        finally:
            self._add(client, -count)

    def _add(self, client: str, count: int) -> None:
        self.total += count
        self._taken[client] += count
        if not self._taken[client]:
            del self._taken[client]


def too_many(
    things: str, *, limit: str, most: int, now: int, own: int | None = None, count: int = 1
) -> ApiError:
    """Return the error for requests, streams or connections beyond a limit.

    Args:
      things: plural noun of the counted things.
      limit: name of the limit.
      most: maximum number.
      now: current number.
      own: the client's part of the current number; None leaves it out of the message.
      count: number of further things that the client requested.
    """
    yours = "" if own is None else f", {own} of them yours"
    return ApiError(
        429,
        f"There are {now} {things} already{yours}, and {count} more would exceed the {most} that "
        f"are allowed ({limit}). Try again later.",
        code=f"{limit}_exceeded",
        headers={"Retry-After": "1"},
    )
