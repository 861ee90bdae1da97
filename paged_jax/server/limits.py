"""`Limits` on requests, responses and connections, which flags of ``paged_jax.serve`` set.

Error messages name the limit that was exceeded.
"""

import dataclasses

from paged_jax.options import (
    NOT_NEGATIVE,
    Bounds,
    check_options,
    documented,
    integer,
    number,
    option,
)
from paged_jax.sampling.params import MAX_LOGPROBS, MAX_N
from paged_jax.server.api_error import ApiError

# Upper bound of `Limits.max_prompts`. It is part of the schema of the body, so that parsing stops
# early at a list of a million prompts.
MAX_PROMPTS = 4096
# The default of `max_body_bytes` is `_BYTES_PER_TOKEN` times the length of the context, but at
# least `_MIN_BODY_BYTES`. English text has about 4 bytes per token, and a character that JSON
# escapes takes 6 or 12 bytes. The minimum leaves room for schemas and logit biases.
_BYTES_PER_TOKEN, _MIN_BODY_BYTES = 16, 2**20


_TIME = number("a finite number of seconds > 0", gt=0)


def _at_most(limit: int) -> Bounds:
    return integer(f"an integer in 0..{limit}", ge=0, le=limit)


@documented
@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on requests, responses and connections. Each field is a flag of ``paged_jax.serve``.

    Raises:
      ValueError: a limit is out of bounds.
    """

    max_body_bytes: int | None = option(
        None,
        "bytes of a request body",
        default_help="16 per token of the context, at least 1 MiB",
        bounds=NOT_NEGATIVE,
    )
    max_header_bytes: int = option(
        2**14, "bytes of the request line and the headers", bounds=NOT_NEGATIVE
    )
    header_timeout: float = option(
        1.0, "seconds from the first byte to the end of the headers", bounds=_TIME
    )
    body_timeout: float = option(
        10.0, "seconds from the end of the headers to the end of the body", bounds=_TIME
    )
    send_timeout: float = option(
        30.0,
        "seconds after which a client that does not read its response is disconnected",
        bounds=_TIME,
    )
    max_queue: int = option(256, "samples that wait for a slot of the batch", bounds=NOT_NEGATIVE)
    max_streams: int = option(256, "concurrent streams", bounds=NOT_NEGATIVE)
    # Each connection is an open file, and most systems limit a process to 1024 open files.
    max_connections: int = option(
        900, "open connections, including idle connections", bounds=NOT_NEGATIVE
    )
    max_prompts: int = option(64, "prompts per request", bounds=_at_most(MAX_PROMPTS))
    max_prompt_tokens: int = option(
        2**20, "tokens per prompt; the model's context limits them as well", bounds=NOT_NEGATIVE
    )
    max_n: int = option(16, "samples per prompt", bounds=_at_most(MAX_N))
    max_logprobs: int = option(
        MAX_LOGPROBS,
        "most probable tokens reported at each position",
        bounds=_at_most(MAX_LOGPROBS),
    )
    # A log-probability takes up to 100 bytes of a response. A response has n * (number of tokens,
    # with prompt tokens if requested) * (1 + number of most probable tokens) log-probabilities. If
    # a chat sets no `max_tokens`, its answer ends before it exceeds this limit.
    max_answer_logprobs: int = option(2**17, "log-probabilities in a response", bounds=NOT_NEGATIVE)
    max_stop: int = option(16, "stop strings per request", bounds=NOT_NEGATIVE)
    max_stop_chars: int = option(256, "characters per stop string", bounds=NOT_NEGATIVE)

    def __post_init__(self) -> None:
        check_options("Limits", vars(self), Limits)

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
        description: str | None = None,
        status: int = 400,
    ) -> None:
        """Raise an `ApiError` that names the limit if `value` exceeds it.

        Args:
          name: name of the limit, which is a field of this class.
          value: the requested amount; None never exceeds a limit.
          param: name of the request's field with the value; None if there is no single field.
          description: words for the value in the error message, such as "the number of prompts"; by
            default `param`.
          status: HTTP status of the error.
        """
        limit = getattr(self, name)
        if value is not None and value > limit:
            raise ApiError(
                status,
                f"{description or param} must be at most {limit} ({name}), got {value}.",
                param=param,
                code=f"{name}_exceeded",
            )
