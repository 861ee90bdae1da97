"""What a client did wrong, or what went wrong here, in the shape of OpenAI's API."""

import itertools
import re
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


# Begins a message of those that refuse: a function's or a class's name, which no client knows.
_WHO = re.compile(r"^(?:request|SamplingParams|encode_chat|apply_chat_template): ")
# Characters of a message: what a client sent may be in it.
_MAX_CHARS = 500
# Mistakes of a body that are looked at one by one.
_MAX_MISTAKES = 100


class ApiError(Exception):
    """An answer other than 200.

    Args:
      status: of HTTP.
      message: one sentence for the client.
      param: the field that is wrong.
      code: a short name that programs can compare.
      headers: of the answer, beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(_shortened(message))
        self.status = status
        self.param = None if param is None else _shortened(param)
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def too_many(things: str, most: int, limit: str) -> ApiError:
    """A limit of what there may be at once is reached."""
    return ApiError(
        429,
        f"There are {most} {things} already ({limit}). Try again later.",
        code=f"{limit}_exceeded",
        headers={"Retry-After": "1"},
    )


def of_validation(error: ValidationError) -> ApiError:
    """The first mistake that pydantic found in a body."""
    if error.error_count() > _MAX_MISTAKES:
        return ApiError(
            400, f"The body has {error.error_count()} mistakes.", code="too_many_mistakes"
        )
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    # A field that may have several forms has a mistake in each.
    same = [each for each in errors if each["loc"][:1] == first["loc"][:1]]
    message = ", or ".join(dict.fromkeys(each["msg"] for each in same))
    places = zip(*(filter(_is_place, each["loc"]) for each in same), strict=False)
    place = [parts[0] for parts in itertools.takewhile(lambda parts: len({*parts}) == 1, places)]
    param = ".".join(map(str, place)) or None
    return ApiError(
        400, f"{param}: {message}." if param else f"{message}.", param=param, code=first["type"]
    )


def bad_request(error: ValueError) -> ApiError:
    """What the engine refuses, or the tokenizer: "WHO: FIELD must ..."."""
    message = _WHO.sub("", str(error))
    param, must, _ = message.partition(" must ")
    return ApiError(400, message, param=param if must and " " not in param else None)


def _is_place(part: int | str) -> bool:
    """False for the names that pydantic gives to the forms of a field, as in "prompt.list[int]"."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
