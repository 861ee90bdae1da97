"""Who may come in: hosts, keys, and nobody while the server drains. Pure ASGI, before any route."""

import base64
import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_jax.server.errors import ApiError
from paged_jax.server.service import Service, shutting_down

SALT = "paged_jax.cache_salt"
"""The key of the ASGI scope under which a request's share of the `cache_salt` is found."""


class Security:
    """Middleware that refuses with an `ApiError`'s answer.

    With API keys, each key has a salt of its own, so that who holds one cannot probe, by the time
    that an answer takes, what others have asked.
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
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        if scope["path"] == "/health":
            return
        if self._service.is_draining:
            raise shutting_down()
        is_admin = f"{scope['path']}/".startswith("/cache/")
        scope[SALT] = self._check_key(headers.get("authorization", ""), is_admin=is_admin)

    def _check_host(self, host: str) -> None:
        # A page of any site can have its own name resolved to 127.0.0.1 and call us ("DNS
        # rebinding"), but not choose the Host header.
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

    def _check_key(self, authorization: str, *, is_admin: bool) -> str:
        if not self._keys:
            return ""
        given = _given_key(authorization)
        keys = self._keys
        if is_admin:
            # The page shows what all of them have asked.
            if self._admin_key is None:
                raise ApiError(403, "The cache is shown to an admin key only (--admin-key).")
            keys = [self._admin_key]
        elif self._admin_key is not None:
            keys = [*keys, self._admin_key]
        # All are compared, in constant time, so that the time tells nothing.
        matches = [hmac.compare_digest(given, key) for key in keys]
        if not any(matches):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="paged_jax"' if is_admin else "Bearer"},
            )
        return hashlib.sha256(b"paged_jax salt " + given).hexdigest()


def _given_key(authorization: str) -> bytes:
    """Of ``Bearer KEY``, or the password of ``Basic``, which browsers ask for."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
