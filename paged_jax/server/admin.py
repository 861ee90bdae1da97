"""Routes for the operator: sleep, update of weights, reset of the cache, and profiles.

They have vLLM's names, except ``/update_weights_from_disk``, which is SGLang's, because vLLM has no
such route. They require the admin key as a bearer token: `security` decides which clients have it.
HTTP Basic authentication is not accepted, because browsers send stored passwords also with requests
that other web sites make.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import jax
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paged_jax.engine.engine import Engine
from paged_jax.monitoring import start_profile
from paged_jax.server.api_error import ApiError, bad_request
from paged_jax.server.receiving import receive_body
from paged_jax.server.sampling_body import Body
from paged_jax.server.security import CLIENT
from paged_jax.server.service import Service

_Endpoint = Callable[[Service, Request], Awaitable[dict[str, Any]]]


class WeightsBody(Body):
    """Body of `POST /update_weights_from_disk`: a folder on the server's machine."""

    model_path: str


def routes(service: Service) -> list[Route]:
    """Return the routes of this module. They answer 403 to requests without the admin key."""

    def route(path: str, endpoint: _Endpoint, method: str = "POST") -> Route:
        async def for_admins(request: Request) -> Response:
            if not request.scope[CLIENT].may_change:
                raise _needs_admin_key(service)
            return JSONResponse(await endpoint(service, request))

        return Route(path, for_admins, methods=[method])

    return [
        route("/sleep", _sleep),
        route("/wake_up", _wake_up),
        route("/is_sleeping", _is_sleeping, "GET"),
        route("/reset_prefix_cache", _reset_prefix_cache),
        route("/update_weights_from_disk", _update_weights),
        route("/start_profile", _start_profile),
        route("/stop_profile", _stop_profile),
    ]


def _needs_admin_key(service: Service) -> ApiError:
    if service.settings.admin_key is None:
        message = "This route is disabled, because the server was started without --admin-key."
    else:
        message = "This route needs the admin key. Send it as Authorization: Bearer KEY."
    return ApiError(403, message, code="admin_key_required")


async def _change(service: Service, request: Request, change: Callable[[Engine], Any]) -> None:
    """Call ``change(engine)`` between two steps, then take a snapshot for probes and metrics.

    Raises:
      ApiError: `change` raised ValueError or RuntimeError; or see `Service.call_engine`.
    """

    def change_and_observe(engine: Engine) -> None:
        try:
            change(engine)
        finally:
            service.observe(engine)

    try:
        await service.call_engine(request.receive, change_and_observe)
    except ValueError as error:
        raise bad_request(error) from None
    except RuntimeError as error:
        raise ApiError(409, str(error), code="engine_state") from None


async def _sleep(service: Service, request: Request) -> dict[str, Any]:
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise ApiError(400, f"level must be 1 or 2, got {level[:20]!r}.", param="level")
    await _change(service, request, lambda engine: engine.sleep(int(level)))
    return {"is_sleeping": service.is_sleeping}


async def _wake_up(service: Service, request: Request) -> dict[str, Any]:
    tags = request.query_params.getlist("tags") or None
    await _change(service, request, lambda engine: engine.wake_up(tags))
    return {"is_sleeping": service.is_sleeping}


async def _is_sleeping(service: Service, request: Request) -> dict[str, Any]:
    return {"is_sleeping": service.is_sleeping}


async def _reset_prefix_cache(service: Service, request: Request) -> dict[str, Any]:
    await _change(service, request, lambda engine: engine.reset_prefix_cache())
    return {"success": True}


async def _update_weights(service: Service, request: Request) -> dict[str, Any]:
    body = await receive_body(service, request, WeightsBody)
    try:
        # Load the weights in a thread, because this takes seconds.
        params = await asyncio.to_thread(service.load_params, body.model_path)
    except (ValueError, OSError) as error:
        raise ApiError(400, str(error), param="model_path", code="weights_not_loaded") from None
    await _change(service, request, lambda engine: engine.update_params(params))
    return {"success": True, "message": f"The weights were loaded from {body.model_path}."}


async def _start_profile(service: Service, request: Request) -> dict[str, Any]:
    folder = _profile_folder(service)
    await _profile(lambda: start_profile(folder))
    return {"success": True}


async def _stop_profile(service: Service, request: Request) -> dict[str, Any]:
    folder = _profile_folder(service)
    await _profile(jax.profiler.stop_trace)
    return {"success": True, "message": f"The profile is in {folder}."}


def _profile_folder(service: Service) -> str:
    folder = service.settings.profile_folder
    if folder is None:
        message = "This route is disabled, because the server was started without --profile."
        raise ApiError(404, message, code="no_profiles")
    return folder


async def _profile(change: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(change)  # writing a profile takes seconds
    except RuntimeError as error:
        raise ApiError(409, str(error), code="profile_state") from None
