"""`ApiError`: errors that clients get, in the formats of OpenAI and Anthropic."""

import re

from starlette.responses import JSONResponse

from paged_jax.arguments import ArgumentError
from paged_jax.server.json_encoding import JsonDict

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# Matches paths of Anthropic's API. They may have a prefix, if the application is mounted.
_ANTHROPIC = re.compile(r"/v1/messages(/|$)")
# Maps invalid fields to the `details` that their errors have in Anthropic's API. A client that
# receives these details for `thread` sends the whole conversation again, without `thread`.
_ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
# Types of errors in Anthropic's API, by HTTP status.
_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Maximum characters of an error message. Messages may quote long texts that the client sent.
_MAX_CHARS = 500


class ApiError(Exception):
    """Exception for an error that is sent to the client as JSON.

    Args:
      status: HTTP status, 400 to 599.
      message: a sentence for the client. It is truncated after 500 characters.
      param: name of the invalid field; None if no single field is invalid.
      code: an identifier of the error for programs, or None.
      headers: additional response headers.
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
        super().__init__(_truncate(message))
        self.status = status
        self.param = None if param is None else _truncate(param)
        self.code = code
        self.headers = headers

    def body(self) -> JsonDict:
        """Return the JSON of the error in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _ERROR_TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str = "", request_id: str | None = None) -> JSONResponse:
        """Return the HTTP response for the error.

        Args:
          path: path of the request. Errors of Anthropic's API have their own format.
          request_id: id of the request, which Anthropic's format contains.
        """
        body = anthropic_error(self, request_id) if is_anthropic(path) else self.body()
        return JSONResponse(body, self.status, self.headers)


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return _ANTHROPIC.search(path) is not None


def anthropic_error(error: ApiError, request_id: str | None) -> JsonDict:
    """Return the JSON of an error in Anthropic's format."""
    kind = _ANTHROPIC_ERRORS.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    message = str(error)
    if error.code == "context_length_exceeded":
        # Agents shorten the chat when they read these words.
        message = f"prompt is too long: {message}"
    detail: JsonDict = {"type": kind, "message": message}
    if error.param in _ANTHROPIC_DETAILS:
        detail["details"] = _ANTHROPIC_DETAILS[error.param]
    return {"type": "error", "error": detail, "request_id": request_id}


def bad_request(error: ValueError) -> ApiError:
    """Convert a `ValueError` of the engine or tokenizer to an error with the status 400.

    The name of the Python function at the start of the message is left out.
    """
    if isinstance(error, ArgumentError):
        return ApiError(400, error.message, param=error.field)
    return ApiError(400, str(error))


def shutting_down() -> ApiError:
    """Return the 503 error for requests that arrive during shutdown or do not finish in time."""
    return ApiError(
        503,
        "The server is shutting down.",
        code="shutting_down",
        headers={"Retry-After": "10", "Connection": "close"},
    )


def sleeping() -> ApiError:
    """Return the 503 error for requests that arrive while the engine sleeps."""
    return ApiError(
        503,
        "The engine sleeps. It accepts requests again after POST /wake_up.",
        code="sleeping",
        headers={"Retry-After": "10"},
    )


def engine_stopped() -> ApiError:
    """Return the 503 error for requests that cannot run because the engine has stopped."""
    return ApiError(503, "The engine has stopped.", code="engine_stopped")


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
