"""`ApiError`: an error that is answered to a client, as JSON in the format of OpenAI's API."""

from typing import Any

from starlette.responses import JSONResponse

from paged_jax.checks import ArgumentError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

# Characters of a message, which may quote what the client sent.
_MAX_CHARS = 500


class ApiError(Exception):
    """An answer whose status is an error.

    Args:
      status: the HTTP status, 400 to 599.
      message: a sentence for the client; a long one is shortened.
      param: the name of the field that is wrong, if one is.
      code: a short name for programs to compare.
      headers: headers of the answer besides the usual ones.
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
        """The JSON of the answer."""
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
        """The answer as HTTP."""
        return JSONResponse(self.body(), self.status, self.headers)


def too_many(
    things: str, *, limit: str, most: int, now: int, own: int | None = None, asked: int = 1
) -> ApiError:
    """The answer when more requests, streams or connections are asked for than a limit allows.

    Args:
      things: plural noun for what the limit counts.
      limit: the name of the limit.
      most: the greatest number allowed.
      now: their number at present.
      own: how many of these are the client's; None where that does not matter.
      asked: how many more the client asks for.
    """
    yours = "" if own is None else f", {own} of them yours"
    return ApiError(
        429,
        f"There are {now} {things} already{yours}, and {asked} more would exceed the {most} that "
        f"are allowed ({limit}). Try again later.",
        code=f"{limit}_exceeded",
        headers={"Retry-After": "1"},
    )


def bad_request(error: ValueError) -> ApiError:
    """What the engine or the tokenizer refuses, without the name of the function that does."""
    if isinstance(error, ArgumentError):
        return ApiError(400, error.message, param=error.field)
    return ApiError(400, str(error))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
