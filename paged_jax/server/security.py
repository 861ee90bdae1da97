"""`Security`: checks the host and the API key of each request, before any route."""

import base64
import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_jax.server.errors import ApiError
from paged_jax.server.records import RECORD
from paged_jax.server.service import Client, Service, shutting_down

# Keys of the ASGI scope: the `Client`, whether it has a key or needs none, and whether it may read
# the prompts of other clients.
CLIENT = "paged_jax.client"
IS_KNOWN = "paged_jax.is_known"
IS_ADMIN = "paged_jax.is_admin"
# Whether it may change the engine: it names the admin key itself, not a browser for it.
MAY_CHANGE = "paged_jax.may_change"

# Paths that need no key, and are answered while the server drains.
_PROBES = ("/health", "/live", "/ready")


class Security:
    """ASGI middleware that answers an error to requests without permission.

    Each API key has a cache salt of its own. Otherwise the time that an answer takes would show the
    holder of one key what the holders of others have asked, as cached prompts are faster.

    Args:
      app: the application behind the middleware.
      service: the engine and how it is served.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service
        settings = service.settings
        self._keys = [key.encode() for key in settings.api_keys]
        self._admin_key = None if settings.admin_key is None else settings.admin_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            scope[RECORD].note_error(error.code, str(error))
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        authorization = headers.get("authorization", "")
        given = _given_key(authorization)
        is_admin = self._admin_key is not None and hmac.compare_digest(given, self._admin_key)
        # All keys are compared, each in constant time, so that the time reveals nothing.
        is_tenant = any([hmac.compare_digest(given, key) for key in self._keys])
        is_known = is_admin or is_tenant or not self._keys
        scope[IS_KNOWN] = is_known
        scope[MAY_CHANGE] = is_admin and authorization.strip()[:7].lower() == "bearer "
        scope[IS_ADMIN] = is_admin or (not self._keys and self._admin_key is None)
        scope[CLIENT] = _client(scope, given) if self._keys else _client(scope)
        # The part before is the path under which the application is mounted.
        if scope["path"].removeprefix(scope.get("root_path", "")) in _PROBES:
            return
        if self._service.is_draining:
            raise shutting_down()
        if not is_known:
            raise wrong_key()

    def _check_host(self, host: str) -> None:
        # A web page can have its own site's name resolved to 127.0.0.1 and send requests here ("DNS
        # rebinding"), but it cannot choose the Host header.
        allowed = self._service.settings.allowed_hosts
        if allowed is None:
            return
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = None
        if name not in allowed:
            raise ApiError(
                400,
                f"The Host header must be one of {', '.join(allowed)} (--allowed-host).",
                code="host_not_allowed",
            )


def _client(scope: Scope, key: bytes | None = None) -> Client:
    if key is not None:
        salt = hashlib.sha256(b"paged_jax salt " + key).hexdigest()
        return Client(salt, salt)
    address = scope.get("client")
    return Client(address[0] if address else "")


def wrong_key() -> ApiError:
    """The answer to a request without a valid key."""
    return ApiError(
        401,
        "The API key is missing or wrong. Send it as Authorization: Bearer KEY.",
        code="invalid_api_key",
        # A browser asks its user for a name and a password: the password is the key.
        headers={"WWW-Authenticate": 'Basic realm="paged_jax", Bearer'},
    )


def _given_key(authorization: str) -> bytes:
    """The key of ``Bearer KEY``, or the password of ``Basic``, which browsers send."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")  # the encoding in which headers were decoded
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
