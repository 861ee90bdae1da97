"""How much a client may ask for. Each limit is named in the answer to who exceeds it."""

import dataclasses
import math

from paged_jax.sampling.params import MAX_LOGPROBS
from paged_jax.server.errors import ApiError

# The schema's own bound: not even to say that they exceed a limit is a million of them looked at.
MAX_PROMPTS = 4096


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of requests.

    Attributes:
      max_body_bytes: of a request's body.
      max_header_bytes: of a request's line and headers.
      header_timeout: seconds from the first byte of a request to the end of its headers.
      body_timeout: seconds for its body.
      send_timeout: seconds for which a client may not read what it is sent.
      max_queue: requests that wait for a place in the batch.
      max_streams: answers that are streamed at once.
      max_connections: that are open at once, idle ones included.
      max_prompts: prompts in one request.
      max_prompt_tokens: of each prompt; the model's context is a limit, too.
      max_n: samples of a prompt.
      max_logprobs: candidates for each token.
      max_answer_logprobs: log-probabilities in an answer: `n` times its tokens, those of prompts
        included where asked for, times the candidates and one. A chat that names no number of
        tokens ends there. One takes up to a hundred bytes.
      max_stop: stop strings.
      max_stop_chars: characters of each.
    """

    max_body_bytes: int = 2**20
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
            is_time = name.endswith("_timeout")
            if not (0 < value < math.inf if is_time else value >= 0):
                rule = "be finite seconds > 0" if is_time else "be >= 0"
                raise ValueError(f"Limits: {name} must {rule}, got {value}.")
        for name, most in (("max_logprobs", MAX_LOGPROBS), ("max_prompts", MAX_PROMPTS)):
            if getattr(self, name) > most:
                raise ValueError(
                    f"Limits: {name} must be at most {most}, got {getattr(self, name)}."
                )

    def check(self, name: str, value: int | None, *, param: str, status: int = 400) -> None:
        """Raise an `ApiError` that names the limit if a value exceeds it."""
        most = getattr(self, name)
        if value is not None and value > most:
            raise ApiError(
                status,
                f"{param} must be at most {most} ({name}), got {value}.",
                param=param,
                code=f"{name}_exceeded",
            )
