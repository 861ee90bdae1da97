"""Middleware that checks the Host header and the API key of each request."""

import base64
import hashlib
import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_jax.server.api_error import ApiError, shutting_down
from paged_jax.server.request_log import RECORD
from paged_jax.server.service import Client, Service

# Names of the files that the chat page loads.
CHAT_FILES = ("chat.js", "chat.css")
# Key of the ASGI scope under which the request's `Client` is stored.
CLIENT = "paged_jax.client"
# Paths that need no API key, and are also answered while the server drains.
_PROBES = ("/health", "/live", "/ping", "/ready")
# Paths of the chat page. They need no API key, because users type the key into the page. Some
# clients also send `HEAD /` without their key, to check whether a server exists.
_PAGES = ("/", *(f"/chat/{name}" for name in CHAT_FILES))
# Matches a Host header: a name or an address, and an optional port (RFC 9110, 7.2).
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s:@/?#\\\[\]]+))(?::[0-9]*)?")


class Security:
    """ASGI middleware that checks the Host header and the API key of each request.

    Each API key has its own cache salt. Without it, clients could find out which prompts were sent
    with other keys: prompts in the cache are answered faster.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service
        settings = service.settings
        self._keys = [key.encode() for key in settings.api_keys]
        self._admin_key = None if settings.admin_key is None else settings.admin_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            record = scope[RECORD]
            record.note_error(error.code, str(error))
            await error.response(scope["path"], record.request_id)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        client = scope[CLIENT] = self._client(scope, headers)
        # Remove the path under which an outer application may have mounted this application.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in _PROBES:
            return
        if self._service.is_draining:
            raise shutting_down()
        if not client.is_known and path not in _PAGES:
            raise wrong_key()

    def _check_host(self, host: str) -> None:
        # This check prevents DNS rebinding: a web site lets its name resolve to 127.0.0.1, so that
        # its pages can send requests to this server. Their Host header has the name of the site.
        allowed = self._service.settings.allowed_hosts
        if allowed is None:
            return
        match = _HOST.fullmatch(host.lower())
        if match is None or (match["address"] or match["name"]) not in allowed:
            raise ApiError(
                400,
                f"The Host header must be one of {', '.join(allowed)} (--allowed-host).",
                code="host_not_allowed",
            )

    def _client(self, scope: Scope, headers: Headers) -> Client:
        authorization = headers.get("authorization", "")
        key = _client_key(authorization)
        is_admin = self._admin_key is not None and hmac.compare_digest(key, self._admin_key)
        # Anthropic's clients send the key in the header x-api-key. Some clients send both headers.
        # A valid key in one of them is sufficient.
        api_key = headers.get("x-api-key", "").encode("latin-1")
        if api_key and not is_admin and not self._is_tenant(key):
            key = api_key
        is_tenant = self._is_tenant(key)
        address = scope.get("client")
        salt = hashlib.sha256(b"paged_jax salt " + key).hexdigest() if self._keys else ""
        return Client(
            salt or (address[0] if address else ""),
            salt,
            is_known=is_admin or is_tenant or not self._keys,
            is_admin=is_admin or (not self._keys and self._admin_key is None),
            may_change=is_admin and authorization.strip()[:7].lower() == "bearer ",
        )

    def _is_tenant(self, client_key: bytes) -> bool:
        # Compare with all keys, each in constant time. Otherwise, clients could learn something
        # about the keys from the response time.
        return any([hmac.compare_digest(client_key, key) for key in self._keys])


def wrong_key() -> ApiError:
    """Return the 401 error for a request without a valid key."""
    return ApiError(
        401,
        "The API key is missing or wrong. Send it as Authorization: Bearer KEY or X-API-Key: KEY.",
        code="invalid_api_key",
        # This header makes browsers show a dialog for a user name and a password. The password is
        # the key.
        headers={"WWW-Authenticate": 'Basic realm="paged_jax", Bearer'},
    )


def _client_key(authorization: str) -> bytes:
    """Return the key in an Authorization header; b"" if there is none.

    It is the key of ``Bearer KEY``, or the password of ``Basic``, which browsers send.
    """
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")  # ASGI servers decode headers as Latin-1
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
