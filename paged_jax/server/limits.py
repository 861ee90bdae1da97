"""`Limits` on requests, responses and connections, which flags of ``paged_jax.serve`` set.

Error messages name the limit that was exceeded.
"""

import dataclasses
import math
from typing import Any

from paged_jax.sampling.numeric_params import MAX_LOGPROBS, MAX_N
from paged_jax.server.api_error import ApiError

# Upper bound of `Limits.max_prompts`. It is part of the schema of the body, so that parsing stops
# early at a list of a million prompts.
MAX_PROMPTS = 4096
# The default of `max_body_bytes` is `_BYTES_PER_TOKEN` times the length of the context, but at
# least `_MIN_BODY_BYTES`. English text has about 4 bytes per token, and a character that JSON
# escapes takes 6 or 12 bytes. The minimum leaves room for schemas and logit biases.
_BYTES_PER_TOKEN, _MIN_BODY_BYTES = 16, 2**20


def _limit(default: Any, help: str) -> Any:
    """Declare a field of `Limits`, with the help text of its flag in ``paged_jax.serve``."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on requests, responses and connections.

    Each field is a flag of ``paged_jax.serve``. The help texts describe the fields.
    """

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
    # Each connection is an open file, and most systems limit a process to 1024 open files.
    max_connections: int = _limit(900, "open connections, including idle connections")
    max_prompts: int = _limit(64, "prompts per request")
    max_prompt_tokens: int = _limit(
        2**20, "tokens per prompt; the model's context limits them as well"
    )
    max_n: int = _limit(16, "samples per prompt")
    max_logprobs: int = _limit(MAX_LOGPROBS, "most probable tokens reported at each position")
    # A log-probability takes up to 100 bytes of a response. A response has n * (number of tokens,
    # with prompt tokens if requested) * (1 + number of most probable tokens) log-probabilities. If
    # a chat sets no `max_tokens`, its answer ends before it exceeds this limit.
    max_answer_logprobs: int = _limit(2**17, "log-probabilities in a response")
    max_stop: int = _limit(16, "stop strings per request")
    max_stop_chars: int = _limit(256, "characters per stop string")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None:
                continue
            is_time = name.endswith("_timeout")
            if not (0 < value < math.inf if is_time else value >= 0):
                rule = "be a finite number of seconds > 0" if is_time else "be >= 0"
                raise ValueError(f"Limits: {name} must {rule}, got {value}.")
        highest = {"max_n": MAX_N, "max_logprobs": MAX_LOGPROBS, "max_prompts": MAX_PROMPTS}
        for name, most in highest.items():
            if getattr(self, name) > most:
                raise ValueError(
                    f"Limits: {name} must be at most {most}, got {getattr(self, name)}."
                )

    def for_context(self, num_tokens: int) -> "Limits":
        """Return these limits; if `max_body_bytes` is None, derive it from the context length.

        Args:
          num_tokens: length of the model's context in tokens.

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
          name: name of the limit, which is a field of this class.
          value: the requested amount; None never exceeds a limit.
          param: name of the request's field with the value; None if there is no single field.
          what: words for the value in the error message, such as "the number of prompts"; by
            default `param`.
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
