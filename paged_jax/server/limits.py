"""`Limits`: how much a client may ask for. An error names the limit that was exceeded."""

import dataclasses
import math

from paged_jax.sampling.params import MAX_LOGPROBS, MAX_N
from paged_jax.server.errors import ApiError

# A bound in the schema itself, which refuses a list of a million prompts without reading them all.
MAX_PROMPTS = 4096
# Bytes of a body for each token of the context. English has 4 bytes per token; a character that
# JSON escapes has 6 or 12 bytes. Small contexts need room for schemas and token biases.
_BYTES_PER_TOKEN, _LEAST_BODY = 16, 2**20


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of requests, answers and connections.

    Attributes:
      max_body_bytes: bytes of a request's body; by default 16 for each token of the context, at
        least 1 MiB.
      max_header_bytes: bytes of a request's first line and headers.
      header_timeout: seconds from the first byte of a request to the end of its headers.
      body_timeout: seconds from the end of the headers to the end of the body.
      send_timeout: seconds after which a client that does not read its answer is disconnected.
      max_queue: samples that wait for a place in the batch.
      max_streams: answers streamed at the same time.
      max_connections: open connections, idle ones included.
      max_prompts: prompts in one request.
      max_prompt_tokens: tokens of each prompt, which the model's context limits as well.
      max_n: samples of each prompt.
      max_logprobs: most probable tokens reported at each position.
      max_answer_logprobs: log-probabilities in an answer, each up to a hundred bytes: `n` times the
        number of tokens (of the prompt too, where asked for), times one more than the number of
        most probable tokens. A chat without `max_tokens` ends at this limit.
      max_stop: number of stop strings.
      max_stop_chars: characters of each stop string.
    """

    max_body_bytes: int | None = None
    max_header_bytes: int = 2**14
    header_timeout: float = 1.0
    body_timeout: float = 10.0
    send_timeout: float = 30.0
    max_queue: int = 256
    max_streams: int = 256
    max_connections: int = 900  # most systems let a process open 1024 files
    max_prompts: int = 64
    max_prompt_tokens: int = 2**20
    max_n: int = 16
    max_logprobs: int = MAX_LOGPROBS
    max_answer_logprobs: int = 2**17
    max_stop: int = 16
    max_stop_chars: int = 256

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
        """Return the limits of a server whose model has a context of `num_tokens` tokens.

        Example:
          >>> Limits().for_context(131_072).max_body_bytes
          2097152
        """
        if self.max_body_bytes is not None:
            return self
        size = max(_LEAST_BODY, _BYTES_PER_TOKEN * num_tokens)
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
        """Raise an `ApiError` that names the limit if a value exceeds it.

        Args:
          name: the name of the limit.
          value: what the request asks for; None is within any limit.
          param: the field that is wrong; None if it is no single one.
          what: the name of the value in the message; by default that of the field.
          status: the HTTP status of the error.
        """
        most = getattr(self, name)
        if value is not None and value > most:
            raise ApiError(
                status,
                f"{what or param} must be at most {most} ({name}), got {value}.",
                param=param,
                code=f"{name}_exceeded",
            )
