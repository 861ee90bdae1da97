"""Web pages of the server: the state of the cache at ``/cache``, and a chat at ``/``."""

import asyncio
import dataclasses
import importlib.resources
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paged_jax.cache_map import block_text
from paged_jax.server.api_error import ApiError
from paged_jax.server.security import CHAT_FILES, CLIENT, wrong_key
from paged_jax.server.service import Service

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
}
# The pages show prompts. So they must not load anything from other sites, and other sites must not
# show them in a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def routes(service: Service) -> list[Route]:
    """Return the routes of the cache page, of its files, and of its data as JSON."""

    def route(path: str, endpoint: Any, **bound: Any) -> Route:
        async def for_admins(request: Request) -> Response:
            if not request.scope[CLIENT].is_admin:
                raise wrong_key()
            return await endpoint(service, request, **bound)

        return Route(path, for_admins, methods=["GET"])

    return [
        route("/cache", _file, name="cache.html"),
        *(route(f"/cache/{name}", _file, name=name) for name in ("cache.js", "cache.css")),
        route("/cache/state", _state),
        route("/cache/recent", _history),
        route("/cache/blocks/{block}", _block),
    ]


def chat_page_routes() -> list[Route]:
    """Return the routes of the chat page. They need no API key: users type the key there."""

    def route(path: str, name: str) -> Route:
        async def answer(request: Request) -> Response:
            return _page_file(name)

        return Route(path, answer, methods=["GET"])

    files = [route(f"/chat/{name}", name) for name in CHAT_FILES]
    return [route("/", "chat.html"), *files]


async def _file(service: Service, request: Request, *, name: str) -> Response:
    return _page_file(name)


def _page_file(name: str) -> Response:
    content = importlib.resources.files("paged_jax.server").joinpath("static", name).read_bytes()
    return Response(content, media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)


async def _state(service: Service, request: Request) -> Response:
    """Return the `CacheMap`, and the cache events with numbers above the query field `since`."""
    since = request.query_params.get("since", "0")
    if not _is_number(since):
        raise ApiError(400, "since must be the number of an event.", param="since")
    number = int(since)
    with service.cache_recorder.keep_recording():
        cache_map, events = await service.call_engine(
            request.receive, lambda engine: service.cache_recorder.state(engine, number)
        )

    num_generated = service.snapshot.stats.num_generated_tokens

    def render() -> Response:
        state = {
            "model": service.settings.model_name,
            # A new start time tells the page that the server was restarted: the numbers of its
            # events begin at 1 again.
            "started": service.created,
            "num_generated_tokens": num_generated,
            **dataclasses.asdict(cache_map),
            "events": events,
        }
        return JSONResponse(state, headers=_HEADERS)

    # Build the JSON in a thread: for a large cache it has megabytes, which would delay streams.
    return await asyncio.to_thread(render)


async def _history(service: Service, request: Request) -> Response:
    """Return the history of the last two minutes, so that a new page can draw its curves."""
    now = time.perf_counter()
    samples = [
        {
            "age": now - snapshot.time,
            "generated": snapshot.stats.num_generated_tokens,
            "queried": snapshot.stats.num_queried_tokens,
            "cached": snapshot.stats.num_cached_tokens,
            "waiting": snapshot.num_waiting,
            "used": snapshot.num_used_blocks,
        }
        for snapshot in service.history.snapshots(now)
    ]
    return JSONResponse(samples, headers=_HEADERS)


async def _block(service: Service, request: Request) -> Response:
    """Return an entry for each sample that uses a block, with the text in the block."""
    name = request.path_params["block"]
    if not _is_number(name) or int(name) >= service.num_blocks:
        raise ApiError(404, f"The block must be in 0..{service.num_blocks - 1}, got {name[:20]}.")
    holders = await service.call_engine(
        request.receive, lambda engine: block_text(engine, int(name))
    )
    return JSONResponse([dataclasses.asdict(holder) for holder in holders], headers=_HEADERS)


def _is_number(text: str) -> bool:
    # Limit the length, because int() rejects texts with thousands of digits.
    return text.isascii() and text.isdecimal() and len(text) < 16
