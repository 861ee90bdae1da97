"""The OpenAPI document: routes, schemas of bodies and responses, and statuses.

FastAPI would derive it from handlers, but handlers here do more than FastAPI's: they limit bodies
while reading them, parse large bodies in a thread, and report mistakes in OpenAI's format.
"""

from typing import Any

from pydantic.json_schema import models_json_schema

from paged_jax import __version__
from paged_jax.server import bodies, schemas
from paged_jax.server.anthropic_bodies import CountTokensBody, MessagesBody
from paged_jax.server.limits import Limits
from paged_jax.server.response_items import ResponsesBody
from paged_jax.server.responses import is_anthropic

_ERRORS = {
    400: "The request has a mistake, which the message names.",
    401: "The API key is missing or wrong.",
    404: "The model does not exist.",
    408: "The body was not complete in time.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "Too many requests or streams; try again later.",
    500: "Generation failed.",
    503: "The server is shutting down, or its engine has stopped.",
}
# POST routes: operation id, schema of the body, schema of the response, whether it can be a stream.
_POSTS: dict[str, tuple[str, type, type, bool]] = {
    "/generate": ("generate", bodies.GenerateBody, schemas.GenerateResponse, True),
    "/v1/completions": ("complete", bodies.CompletionBody, schemas.CompletionResponse, True),
    "/v1/chat/completions": ("chat", bodies.ChatBody, schemas.ChatCompletionResponse, True),
    "/v1/responses": ("respond", ResponsesBody, schemas.ResponseObject, True),
    "/v1/messages": ("message", MessagesBody, schemas.AnthropicMessage, True),
    "/v1/messages/count_tokens": ("countTokens", CountTokensBody, schemas.TokenCount, False),
    "/tokenize": ("tokenize", bodies.TokenizeBody, schemas.TokenizeResponse, False),
    "/detokenize": ("detokenize", bodies.DetokenizeBody, schemas.DetokenizeResponse, False),
}
# GET routes: operation id, schema of the response, statuses of errors.
_GETS: dict[str, tuple[str, type, tuple[int, ...]]] = {
    "/tokenizer_info": ("tokenizerInfo", schemas.TokenizerInfo, (400, 401, 503)),
    "/v1/models": ("listModels", schemas.ModelList, (400, 401, 503)),
    "/v1/models/{model}": ("getModel", schemas.ModelCard, (400, 401, 404, 503)),
    "/get_model_info": ("getModelInfo", schemas.ModelInfo, (400, 401, 503)),
    "/get_server_info": ("getServerInfo", schemas.ServerInfo, (400, 401, 503)),
    "/version": ("version", schemas.Version, (400, 401, 503)),
    "/live": ("live", schemas.Probe, (400,)),
    "/ping": ("ping", schemas.Probe, (400,)),
    "/ready": ("ready", schemas.Probe, (400,)),
    "/health": ("health", schemas.Health, (400,)),
}
_PROBES = ("/live", "/ping", "/ready", "/health")


def document(limits: Limits, root_path: str = "") -> dict[str, Any]:
    """Return the document, in OpenAPI 3.1.

    Limits are listed in the description and not in the schemas, because the error of an exceeded
    limit names the limit.

    Args:
      limits: limits on requests.
      root_path: path under which a proxy serves this server.
    """
    _, definitions = models_json_schema(
        [
            *((body, "validation") for _, body, _, _ in _POSTS.values()),
            *((model, "serialization") for _, _, model, _ in _POSTS.values()),
            *((model, "serialization") for _, model, _ in _GETS.values()),
            (schemas.ErrorResponse, "serialization"),
            (schemas.AnthropicError, "serialization"),
        ],
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "paged_jax",
            "version": __version__,
            "description": "Text generation through a paged KV cache. Limits: "
            + ", ".join(f"{name} {value}" for name, value in vars(limits).items())
            + ".",
        },
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": {
            **{path: _post(path, *route) for path, route in _POSTS.items()},
            **{path: _get(path, *route) for path, route in _GETS.items()},
            "/metrics": _metrics(),
        },
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(path: str, name: str, body: type, model: type, can_stream: bool) -> dict[str, Any]:
    error = schemas.AnthropicError if is_anthropic(path) else schemas.ErrorResponse
    response = {"description": "The response.", "content": _content(model)}
    if can_stream:
        response["description"] = (
            "The generated text. If a stream was requested, it consists of server-sent events with "
            "JSON as data. Endpoints of OpenAI's older APIs end it with an event of data [DONE]."
        )
        # Without a schema, because OpenAPI cannot describe events before version 3.2.
        response["content"]["text/event-stream"] = {}
    return {
        "post": {
            "operationId": name,
            "requestBody": {"required": True, "content": _content(body)},
            "responses": {"200": response, **_errors(*_ERRORS, model=error)},
        }
    }


def _get(path: str, name: str, model: type, errors: tuple[int, ...]) -> dict[str, Any]:
    responses = {"200": {"description": "The response.", "content": _content(model)}}
    item: dict[str, Any] = {"get": {"operationId": name, "responses": responses}}
    if path in _PROBES:
        item["security"] = []
        responses["503"] = {
            "description": "The server is not able to serve; `status` is the reason.",
            "content": _content(model),
        }
    if path.endswith("{model}"):
        schema = {"type": "string"}
        item["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schema}]
    responses.update(_errors(*errors))
    return item


def _metrics() -> dict[str, Any]:
    text = {
        "description": "Metrics in Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    responses = {"200": text, **_errors(400, 401, 503)}
    return {"get": {"operationId": "metrics", "responses": responses}}


def _errors(*statuses: int, model: type = schemas.ErrorResponse) -> dict[str, Any]:
    return {
        str(status): {"description": _ERRORS[status], "content": _content(model)}
        for status in statuses
    }


def _content(model: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
